package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

func TestMain(m *testing.M) {
	if os.Getenv(childVar) != "" {
		os.Exit(child())
	}
	goleak.VerifyTestMain(m)
}

// limit is how long a test waits for something that comes at once on a quiet machine.
const limit = time.Minute

func background(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// links are the ways that bytes go: the best that there is, and packets.
var links = map[string]verbs.LinkMode{"any": verbs.LinkAny, "packets": verbs.LinkUDP}

func open(t testing.TB, link verbs.LinkMode) *verbs.Device {
	t.Helper()
	d := must(verbs.Open("", &verbs.Config{Link: link}))(t)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// serve serves a table on a device of its own.
func serve(t testing.TB, table *Table, link verbs.LinkMode) *Server {
	t.Helper()
	dev := open(t, link)
	s := must(Listen(background(t), dev.Addr().String()+":0", table, dev))(t)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func dial(t testing.TB, address string, dev *verbs.Device) *Client {
	t.Helper()
	c := must(Dial(background(t), address, dev))(t)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// pair is a client and its server.
func pair(t testing.TB, buckets int) (*Client, *Server) {
	t.Helper()
	s := serve(t, must(NewTable(buckets))(t), verbs.LinkAny)
	return dial(t, s.Addr(), open(t, verbs.LinkAny)), s
}

func expect(t testing.TB, c *Client, key, want string, version uint64) {
	t.Helper()
	got, v, err := c.Get(background(t), key)
	if err != nil || string(got) != want || v != version {
		t.Errorf("GET %.50q: %q, version %d, %v; want %q, version %d", key, got, v, err, want, version)
	}
}

// What each operation does, and that the server's program hears of no GET.
func TestOperations(t *testing.T) {
	c, s := pair(t, 16)
	ctx := background(t)
	if _, _, err := c.Get(ctx, "colour"); err != ErrNotFound {
		t.Errorf("GET of what is not there: %v", err)
	}
	for i, value := range []string{"green", "", strings.Repeat("x", MaxValue), "blue"} {
		if v, err := c.Put(ctx, "colour", []byte(value)); err != nil || v != uint64(i)+1 {
			t.Errorf("PUT %d: version %d, %v", i, v, err)
		}
		expect(t, c, "colour", value, uint64(i)+1)
	}
	if v, err := c.Delete(ctx, "colour"); err != nil || v != 5 {
		t.Errorf("DELETE: version %d, %v", v, err)
	}
	if _, err := c.Delete(ctx, "colour"); err != ErrNotFound {
		t.Errorf("DELETE of what is not there: %v", err)
	}
	if _, _, err := c.Get(ctx, "colour"); err != ErrNotFound {
		t.Errorf("GET after DELETE: %v", err)
	}
	before := s.Requests()
	for range 100 {
		if _, _, err := c.Get(ctx, "colour"); err != ErrNotFound {
			t.Fatal(err)
		}
	}
	if n := s.Requests() - before; before != 6 || n != 0 {
		t.Errorf("the server has had %d requests, and %d of GETs; want 6 and 0", before, n)
	}
}

// Keys that share a bucket do not disturb each other. A bucket that is full refuses another key, takes changes of the ones that
// it has, and takes a new one when one of those is deleted.
func TestCollisionsAndFull(t *testing.T) {
	c, _ := pair(t, 1)
	ctx := background(t)
	for i := range slots {
		if _, err := c.Put(ctx, fmt.Sprint(i), []byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Put(ctx, "one more", nil); err != ErrFull {
		t.Errorf("PUT into a full bucket: %v", err)
	}
	expect(t, c, "3", "\x03", 4)
	if _, err := c.Put(ctx, "3", []byte("three")); err != nil {
		t.Error(err)
	}
	if _, err := c.Delete(ctx, "1"); err != nil {
		t.Error(err)
	}
	if _, err := c.Put(ctx, "one more", []byte("here")); err != nil {
		t.Error(err)
	}
	expect(t, c, "0", "\x00", 1)
	expect(t, c, "2", "\x02", 3)
	expect(t, c, "3", "three", 5)
	expect(t, c, "one more", "here", 7)
}

// Keys and values that do not fit are refused before anything is sent.
func TestTooLong(t *testing.T) {
	c, s := pair(t, 1)
	ctx := background(t)
	long, longest := strings.Repeat("k", MaxKey+1), strings.Repeat("k", MaxKey)
	for _, bad := range []struct{ key, value string }{{long, ""}, {"", "v"}, {"k", strings.Repeat("v", MaxValue+1)}} {
		if _, err := c.Put(ctx, bad.key, []byte(bad.value)); err != ErrTooLong {
			t.Errorf("PUT of %d and %d bytes: %v", len(bad.key), len(bad.value), err)
		}
	}
	if _, _, err := c.Get(ctx, long); err != ErrTooLong {
		t.Errorf("GET: %v", err)
	}
	if _, err := c.Delete(ctx, ""); err != ErrTooLong {
		t.Errorf("DELETE: %v", err)
	}
	if n := s.Requests(); n != 0 {
		t.Errorf("the server has had %d requests", n)
	}
	if _, err := c.Put(ctx, longest, []byte(strings.Repeat("v", MaxValue))); err != nil {
		t.Error(err)
	}
}

// Clients that lie about lengths, and other nonsense: the server says what is wrong, and goes on.
func TestLies(t *testing.T) {
	c, s := pair(t, 1)
	ctx := background(t)
	if _, err := c.Put(ctx, "k", []byte("good")); err != nil {
		t.Fatal(err)
	}
	head := func(op byte, k, v int, rest string) []byte {
		b := binary.BigEndian.AppendUint16([]byte{op, 0}, uint16(k))
		return append(binary.BigEndian.AppendUint16(b, uint16(v)), rest...)
	}
	for _, lie := range []struct {
		what    string
		message []byte
		want    error
	}{
		{"nothing", nil, ErrMalformed},
		{"half a head", []byte{opPut, 0, 0}, ErrMalformed},
		{"an unknown operation", head('X', 1, 1, "kv"), ErrMalformed},
		{"a key that ends behind the message", head(opPut, 40, 0, "k"), ErrMalformed},
		{"a value that ends behind the message", head(opPut, 1, 192, "kv"), ErrMalformed},
		{"the longest lengths", head(opPut, 65535, 65535, "kv"), ErrMalformed},
		{"lengths that leave a rest", head(opPut, 1, 1, "kv and more"), ErrMalformed},
		{"a DELETE with a value", head(opDelete, 1, 1, "kv"), ErrMalformed},
		{"a PUT without a key", head(opPut, 0, 2, "kv"), ErrTooLong},
		{"a key that is too long", head(opPut, 41, 0, strings.Repeat("k", 41)), ErrTooLong},
		{"a value that is too long", head(opPut, 1, 193, "k"+strings.Repeat("v", 193)), ErrTooLong},
	} {
		got, err := c.s.call(ctx, append(c.s.buf[requestAt:requestAt], lie.message...))
		if err != nil {
			t.Fatalf("%s: %v", lie.what, err)
		}
		if _, err := parseAnswer(got); err != lie.want {
			t.Errorf("%s: %v, want %v", lie.what, err, lie.want)
		}
	}
	expect(t, c, "k", "good", 1)

	// A message for which no receive has room ends the connection of the client that sends it, and no other.
	other := dial(t, s.Addr(), open(t, verbs.LinkAny))
	huge := make([]byte, requestMax+1)
	mr := must(c.s.conn.RegMR(huge, 0))(t)
	if err := c.s.send(verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{mr.SGE(0, len(huge))}}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.s.next(ctx, 0); err == nil {
		t.Error("a message that is too long was taken")
	}
	expect(t, other, "k", "good", 1)
	expect(t, c, "k", "good", 1) // by another connection
	if n := c.Connections(); n != 2 {
		t.Errorf("the client has made %d connections, want 2", n)
	}
}

// A client may READ the table. It may not write there, and may not read behind it.
func TestRights(t *testing.T) {
	c, s := pair(t, 1)
	ctx := background(t)
	for what, wr := range map[string]verbs.SendWR{
		"WRITE":             {Op: verbs.OpRDMAWrite},
		"FETCH_ADD":         {Op: verbs.OpAtomicFetchAdd},
		"READ behind it":    {Op: verbs.OpRDMARead, RemoteAddr: bucketSize},
		"READ over the end": {Op: verbs.OpRDMARead, RemoteAddr: bucketSize - 4},
	} {
		if c.s == nil {
			expectNone(t, c)
		}
		wr.RemoteAddr += c.s.table.addr
		wr.RKey, wr.SGL = c.s.table.rkey, []verbs.SGE{c.s.mr.SGE(0, 8)}
		if err := c.s.send(wr); err != nil {
			t.Fatal(err)
		}
		var failed *verbs.StatusError
		if wc, err := c.s.next(ctx, 0); !errors.As(err, &failed) || wc.Status != verbs.WCRemAccessErr && wc.Status != verbs.WCRemInvReqErr {
			t.Errorf("%s: %v, %v", what, wc.Status, err)
		}
		c.giveUp()
	}
	expectNone(t, c)
	for i := range slots {
		if e, whole := decode(s.table.memory[i*slotSize:][:slotSize]); !whole || e.version != 0 {
			t.Errorf("slot %d has changed", i)
		}
	}
}

func expectNone(t testing.TB, c *Client) {
	t.Helper()
	if _, _, err := c.Get(background(t), "k"); err != ErrNotFound {
		t.Fatal(err)
	}
}

// A program that dials and is no client is refused with the reason, and so is a client at what is no server.
func TestStrangers(t *testing.T) {
	_, s := pair(t, 1)
	ctx := background(t)
	dev := open(t, verbs.LinkAny)
	_, err := cm.Dial(ctx, s.Addr(), &cm.Config{Device: dev, Private: []byte("GET / HTTP/1.1")})
	var refused *cm.RejectError
	if !errors.As(err, &refused) || !strings.HasPrefix(string(refused.Private), errProtocol.Error()) {
		t.Errorf("a stranger was answered %v", err)
	}

	there := open(t, verbs.LinkAny)
	l := must(cm.Listen(ctx, there.Addr().String()+":0", &cm.Config{Device: there, Private: []byte("hello")}))(t)
	taken := make(chan error, 1)
	go func() {
		conn, err := l.Accept(ctx)
		if err == nil {
			<-conn.Done()
			err = conn.Close()
		}
		taken <- err
	}()
	if _, err := Dial(ctx, l.Addr().String(), dev); !errors.Is(err, errProtocol) {
		t.Errorf("a client of something else: %v", err)
	}
	if err := errors.Join(<-taken, l.Close()); err != nil {
		t.Error(err)
	}
}

// A slot of which one part is new and another old is not taken for whole, wherever the boundary is, nor when it is in the
// middle of a copy that goes backwards. A client that sees nothing else gives up.
func TestTorn(t *testing.T) {
	c, s := pair(t, 1)
	ctx := background(t)
	before, after := entry{7, []byte("key"), []byte("the old value")}, entry{8, []byte("key"), []byte("a new one, which is longer")}
	a, b := before.encode(), after.encode()
	for at := range slotSize {
		for _, mix := range [][]byte{append(a[:at:at], b[at:]...), append(b[:at:at], a[at:]...)} {
			e, whole := decode(mix)
			if whole && string(e.value) != string(before.value) && string(e.value) != string(after.value) {
				t.Fatalf("cut at %d: %q, version %d", at, e.value, e.version)
			}
			if whole && string(mix[:slotHead+3+len(e.value)]) != string(a[:slotHead+3+len(e.value)]) && string(mix[:slotHead+3+len(e.value)]) != string(b[:slotHead+3+len(e.value)]) {
				t.Fatalf("cut at %d: a mixture is whole", at)
			}
		}
	}
	if _, err := c.Put(ctx, "key", []byte("value")); err != nil {
		t.Fatal(err)
	}
	s.table.memory[slotHead]++ // of the key: nobody writes meanwhile
	if _, _, err := c.Get(ctx, "key"); err != ErrTorn || c.Torn() != tornLimit {
		t.Errorf("GET of a slot that is never whole: %v after %d READs", err, c.Torn())
	}
	s.table.memory[slotHead]--
	expect(t, c, "key", "value", 1)
}

// A table comes back from its file, with its versions. Files that are not one, or are damaged, are refused.
func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "table")
	table := must(OpenTable(path, 4))(t)
	for i := range 5 {
		must(table.Put(fmt.Sprint(i), []byte("value")))(t)
	}
	must(table.Delete("3"))(t)
	if err := table.Close(); err != nil {
		t.Fatal(err)
	}
	again := must(OpenTable(path, 4))(t)
	if string(again.memory) != string(table.memory) || again.version != 6 {
		t.Errorf("the table has not come back, or not its version: %d", again.version)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}

	whole := must(os.ReadFile(path))(t)
	for what, b := range map[string][]byte{"shorter": whole[:len(whole)-1], "longer": append(whole, 0), "damaged": append([]byte{whole[0] + 1}, whole[1:]...)} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenTable(path, 4); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("a file that is %s: %v", what, err)
		}
	}
	empty := must(NewTable(4))(t)
	if err := os.WriteFile(path, empty.memory[:1000], 0o600); err != nil { // its maker was killed
		t.Fatal(err)
	}
	again = must(OpenTable(path, 4))(t)
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if got := must(os.ReadFile(path))(t); string(got) != string(empty.memory) {
		t.Error("a file that was begun is not filled")
	}
}

// A PUT is refused if the file cannot be written, and nobody sees it.
func TestFileFails(t *testing.T) {
	table := must(OpenTable(filepath.Join(t.TempDir(), "table"), 1))(t)
	s := serve(t, table, verbs.LinkAny)
	c := dial(t, s.Addr(), open(t, verbs.LinkAny))
	ctx := background(t)
	if _, err := c.Put(ctx, "k", []byte("v")); err != nil {
		t.Fatal(err)
	}
	if err := table.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Put(ctx, "k", []byte("w")); err != ErrStorage {
		t.Errorf("PUT without a file: %v", err)
	}
	expect(t, c, "k", "v", 1)
}

// A request of an earlier connection of a client is not executed when the client has another one.
func TestEarlierConnection(t *testing.T) {
	c, s := pair(t, 1)
	ctx := background(t)
	old := c.s
	c.s = nil
	if _, err := c.Put(ctx, "k", []byte("new")); err != nil {
		t.Fatal(err)
	}
	r := request{opPut, "k", []byte("old")}
	got, err := old.call(ctx, r.appendTo(old.buf[requestAt:requestAt]))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parseAnswer(got); err == nil {
		t.Error("a request of an earlier connection was executed")
	}
	expect(t, c, "k", "new", 1)
	if err := old.conn.Close(); err != nil {
		t.Error(err)
	}
	if n := s.Requests(); n != 2 {
		t.Errorf("%d requests", n)
	}
}

// A client that is waiting for a server ends with its context, and says why there is none.
func TestNoServer(t *testing.T) {
	dev := open(t, verbs.LinkAny)
	if _, err := Dial(background(t), dev.Addr().String()+":9", dev); !errors.Is(err, cm.ErrRefused) {
		t.Errorf("nobody listens: %v", err)
	}
	c, s := pair(t, 1)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(background(t), 100*time.Millisecond)
	defer cancel()
	if _, _, err := c.Get(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("GET without a server: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := c.Put(background(t), "k", nil); err != ErrClosed {
		t.Errorf("PUT on a closed client: %v", err)
	}
}
