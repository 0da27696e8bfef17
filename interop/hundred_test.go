package interop

// A hundred processes on one address. Each has a connection to two others, and one to a
// guest at another address, which sends packets, also after the first process was killed.

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

const (
	crowd     = 100
	areaBytes = 100 << 10 // what a process writes into the memory of another
	noteBytes = 5000      // what it sends
	guestAt   = 4 * areaBytes
	countAt   = 5 * areaBytes
)

// ways has the distances to the two processes that a process writes to, by their numbers.
var ways = [...]int{1, 37}

// card is what a process tells the test about itself.
type card struct {
	Out, In [len(ways)]verbs.Endpoint
	Guest   verbs.Endpoint
	Addr    uint64
	RKey    uint32
}

// round tells a process its number and its peers.
type round struct {
	Number int
	To     [len(ways)]card // the processes that it writes to
	From   [len(ways)]card // the processes that write to it
	Guest  verbs.Endpoint
}

// token is the number of the pattern that a process writes into the memory of another.
func token(number, way int) uint64 { return uint64(number*len(ways) + way) }

// citizen is one of the hundred processes.
type citizen struct {
	*player
	pd      *verbs.PD
	cq      *verbs.CQ
	buf     []byte
	mr      *verbs.MR
	out, in [len(ways)]*verbs.QP
	guest   *verbs.QP
	notes   map[uint32]verbs.WC // receives that have completed, by queue pair
}

// live is the main program of one of the hundred.
func (p *player) live() error {
	c := &citizen{player: p, buf: make([]byte, 6*areaBytes), notes: map[uint32]verbs.WC{}}
	mine, err := c.settle()
	if err != nil {
		return err
	}
	c.say(mine)
	var r round
	if err := p.hear(&r); err != nil {
		return err
	}
	if err := c.connect(&r); err != nil {
		return err
	}
	c.say("connected")
	var word string
	if err := p.hear(&word); err != nil {
		return err
	}
	for way := range ways {
		if err := c.visit(&r, way); err != nil {
			return fmt.Errorf("process %d, way %d: %w", r.Number, way, err)
		}
	}
	if err := c.readNotes(&r); err != nil {
		return err
	}
	c.say("done")
	if err := p.hear(&word); err != nil {
		return err
	}
	for way := range ways {
		if err := matches(c.buf[way*areaBytes:][:areaBytes], token((r.Number+crowd-ways[way])%crowd, way)); err != nil {
			p.fail("what was written to process %d: %v", r.Number, err)
		}
	}
	if n := binary.NativeEndian.Uint64(c.buf[countAt:]); n != uint64(len(ways)) {
		p.fail("process %d has counted %d", r.Number, n)
	}
	p.result.Counters = map[string]uint64{}
	for _, n := range p.dev.Counters() {
		p.result.Counters[n.Name] = n.Value
	}
	return nil
}

func (p *player) say(v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	p.write(envelope{To: "test", Body: b})
}

// settle makes the objects.
func (c *citizen) settle() (mine card, err error) {
	if c.dev, err = verbs.Open(c.script.Mine, nil); err != nil {
		return mine, err
	}
	if c.pd, err = c.dev.AllocPD(); err != nil {
		return mine, err
	}
	if c.cq, err = c.dev.CreateCQ(64, nil); err != nil {
		return mine, err
	}
	if c.mr, err = c.pd.RegMR(c.buf, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessRemoteRead|verbs.AccessRemoteAtomic); err != nil {
		return mine, err
	}
	mine.Addr, mine.RKey = c.mr.Addr(), c.mr.RKey()
	newQP := func(e *verbs.Endpoint) *verbs.QP {
		q, bad := c.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: c.cq, RecvCQ: c.cq,
			Cap: verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1}})
		if bad != nil {
			err = bad
			return nil
		}
		*e = q.Endpoint()
		return q
	}
	for way := range ways {
		c.out[way], c.in[way] = newQP(&mine.Out[way]), newQP(&mine.In[way])
	}
	c.guest = newQP(&mine.Guest)
	return mine, err
}

// connect connects the queue pairs, and posts the receives.
func (c *citizen) connect(r *round) error {
	patient := &verbs.ConnectConfig{Timeout: 20, RetryCnt: 7, RNRRetry: 7}
	for way := range ways {
		recv := verbs.RecvWR{SGL: []verbs.SGE{c.mr.SGE((2+way)*areaBytes, noteBytes)}}
		if err := c.in[way].Connect(r.From[way].Out[way], patient); err != nil {
			return err
		}
		if _, err := c.in[way].PostRecv([]verbs.RecvWR{recv}); err != nil {
			return err
		}
		if err := c.out[way].Connect(r.To[way].In[way], patient); err != nil {
			return err
		}
	}
	return c.guest.Connect(r.Guest, patient)
}

// visit writes to another process, reads that back, adds 1 to a counter there and sends a
// note.
func (c *citizen) visit(r *round, way int) error {
	to, src := &r.To[way], make([]byte, areaBytes)
	pattern(src, token(r.Number, way))
	own, err := c.pd.RegMR(src, verbs.AccessLocalWrite)
	if err != nil {
		return err
	}
	at := to.Addr + uint64(way*areaBytes)
	for _, wr := range []verbs.SendWR{
		{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{own.SGE(0, areaBytes)}, RemoteAddr: at},
		{Op: verbs.OpSend, SGL: []verbs.SGE{own.SGE(0, noteBytes)}},
		{Op: verbs.OpRDMARead, SGL: []verbs.SGE{own.SGE(0, areaBytes)}, RemoteAddr: at},
		{Op: verbs.OpAtomicFetchAdd, SGL: []verbs.SGE{own.SGE(0, 8)}, RemoteAddr: to.Addr + countAt, CompareAdd: 1},
	} {
		if wr.Op == verbs.OpRDMARead {
			clear(src)
		}
		wr.RKey, wr.Flags = to.RKey, verbs.SendSignaled
		if _, err := c.out[way].PostSend([]verbs.SendWR{wr}); err != nil {
			return err
		}
		if err := c.await(func(wc *verbs.WC) bool { return wc.QPN == c.out[way].Number() }); err != nil {
			return fmt.Errorf("%v: %w", wr.Op, err)
		}
		if wr.Op == verbs.OpRDMARead {
			if err := matches(src, token(r.Number, way)); err != nil {
				return fmt.Errorf("READ: %w", err)
			}
		}
	}
	return own.Close()
}

// readNotes waits for the notes of the others, and compares them.
func (c *citizen) readNotes(r *round) error {
	for way := range ways {
		number := c.in[way].Number()
		if _, here := c.notes[number]; !here {
			if err := c.await(func(wc *verbs.WC) bool { return wc.QPN == number }); err != nil {
				return err
			}
		}
		from := (r.Number + crowd - ways[way]) % crowd
		want := make([]byte, areaBytes)
		pattern(want, token(from, way))
		got := c.buf[(2+way)*areaBytes:][:c.notes[number].ByteLen]
		if string(got) != string(want[:noteBytes]) {
			c.fail("process %d: the note of %d is wrong, %d bytes", r.Number, from, len(got))
		}
	}
	return nil
}

// await waits for a certain completion, and keeps those of receives. It sleeps between polls:
// there are more processes than cores.
func (c *citizen) await(is func(wc *verbs.WC) bool) error {
	var wc [1]verbs.WC
	for deadline := time.Now().Add(2 * patience); time.Now().Before(deadline); {
		n, err := c.cq.Poll(wc[:])
		if err != nil {
			return err
		}
		if n == 0 {
			time.Sleep(200 * time.Microsecond)
			continue
		}
		if err := wc[0].Err(); err != nil {
			return err
		}
		if wc[0].Op == verbs.WCRecv {
			c.notes[wc[0].QPN] = wc[0]
		}
		if is(&wc[0]) {
			return nil
		}
	}
	return fmt.Errorf("no completion")
}

func TestHundred(t *testing.T) {
	at := loopbacks()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	all := make([]*resident, crowd)
	cards := make([]card, crowd)
	for i := range all {
		r := &resident{actor: start(ctx, t, "citizen", script{}, at[0])}
		t.Cleanup(func() { _ = r.stdin.Close(); _ = r.cmd.Wait() })
		r.lines = newLines(r.stdout)
		all[i] = r
		if i == 0 {
			r.hears(t, &cards[0]) // it is the first
		}
	}
	for i, r := range all[1:] {
		r.hears(t, &cards[i+1])
	}

	g := newCaller(t, verbs.LinkUDP, at[1].addr)
	guests := make([]*verbs.QP, crowd)
	for i, r := range all {
		var err error
		if guests[i], err = g.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: g.cq, RecvCQ: g.cq, Cap: verbs.QPCap{MaxSendWR: 4, MaxSendSGE: 1}}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = guests[i].Close() })
		info := round{Number: i, Guest: guests[i].Endpoint()}
		for way, d := range ways {
			info.To[way], info.From[way] = cards[(i+d)%crowd], cards[(i+crowd-d)%crowd]
		}
		r.tells(t, info)
	}
	for i, r := range all {
		r.expects(t, "connected")
		if err := guests[i].Connect(cards[i].Guest, &verbs.ConnectConfig{Timeout: 18, RetryCnt: 7}); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range all {
		r.tells(t, "go")
	}
	g.visitAll(guests, cards, 1)
	for _, r := range all {
		r.expects(t, "done")
	}
	all[0].kill(t)
	g.visitAll(guests[1:], cards[1:], 2)

	for _, r := range all[1:] {
		r.tells(t, "check")
	}
	sums := map[string]uint64{}
	for i, r := range all[1:] {
		r.read(t)
		for _, e := range r.result.Errors {
			t.Errorf("process %d: %s", i+1, e)
		}
		for name, n := range r.result.Counters {
			sums[name] += n
		}
	}
	wantSound(t, &result{Counters: sums})
	t.Logf("%d packets in, %d bytes, %d trains fetched, %d undelivered, %d again", sums["rx_packets"], sums["rx_bytes"],
		sums["local_fetched_trains"], sums["local_undelivered"], sums["retransmitted_packets"])
}

// visitAll writes something to every process by packets, and reads it back.
func (c *caller) visitAll(qps []*verbs.QP, to []card, n uint64) {
	c.t.Helper()
	const size, back = 20000, 1 << 19
	for i, q := range qps {
		c.qp = q
		pattern(c.buf[:size], n<<32|uint64(i))
		clear(c.buf[back:][:size])
		c.post(verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{c.mr.SGE(0, size)}, RemoteAddr: to[i].Addr + guestAt, RKey: to[i].RKey})
		c.post(verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{c.mr.SGE(back, size)}, RemoteAddr: to[i].Addr + guestAt, RKey: to[i].RKey})
		for range 2 {
			if wc := c.wait(); wc.Err() != nil {
				c.t.Fatalf("process %d, time %d: %v", i, n, wc.Err())
			}
		}
		if err := matches(c.buf[back:][:size], n<<32|uint64(i)); err != nil {
			c.t.Errorf("what the guest has read from process %d: %v", i, err)
		}
	}
}

// hears reads a message of a process; tells sends it one.
func (r *resident) hears(t testing.TB, v any) {
	t.Helper()
	if !r.lines.Scan() {
		t.Fatalf("%s has ended: %s", r.role, r.stderr)
	}
	var e envelope
	if err := json.Unmarshal(r.lines.Bytes(), &e); err != nil || e.Result != nil {
		t.Fatalf("%s: %v", r.lines.Bytes(), err)
	}
	if err := json.Unmarshal(e.Body, v); err != nil {
		t.Fatal(err)
	}
}

func (r *resident) expects(t testing.TB, want string) {
	t.Helper()
	var got string
	if r.hears(t, &got); got != want {
		t.Fatalf("%q, want %q", got, want)
	}
}

func (r *resident) tells(t testing.TB, v any) {
	t.Helper()
	b, err := json.Marshal(v)
	if err == nil {
		_, err = fmt.Fprintf(r.stdin, "%s\n", b)
	}
	if err != nil {
		t.Fatalf("%s: %v: %s", r.role, err, r.stderr)
	}
}
