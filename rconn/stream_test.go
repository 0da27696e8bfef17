package rconn

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

// pair is two connected ends, over a link and with rings of a size; zero: the default. Nothing is asked now and then, which
// would hide a call that nobody wakes.
func pair(t testing.TB, link verbs.LinkMode, ring int) (a, b *Conn) {
	t.Helper()
	here, there := open(t, "127.0.91.1", link), open(t, "127.0.91.2", link)
	return connect(t, &Config{Ring: ring, KeepAlive: -1, Config: cm.Config{Device: here}}, &Config{Ring: ring, KeepAlive: -1, Config: cm.Config{Device: there}})
}

func connect(t testing.TB, dial, listen *Config) (a, b *Conn) {
	t.Helper()
	l, err := Listen(t.Context(), "127.0.91.2:0", listen)
	if err != nil {
		t.Fatal(err)
	}
	if a, err = Dial(t.Context(), l.Addr().String(), dial); err != nil {
		t.Fatal(err)
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	b = c.(*Conn)
	t.Cleanup(func() {
		if err := errors.Join(a.Close(), b.Close(), l.Close()); err != nil {
			t.Error(err)
		}
	})
	return a, b
}

func seeded(t testing.TB) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// Bytes arrive in order, both ways at a time, in writes and reads of random sizes, through rings that are small and of different
// sizes; then each side's end.
func TestStream(t *testing.T) {
	const total = 1 << 20
	for name, link := range links {
		for _, rings := range [][2]int{{0, 0}, {MinRing, MinRing}, {MinRing, 1 << 20}, {64 << 10, MinRing}} {
			t.Run(name, func(t *testing.T) {
				here, there := open(t, "127.0.91.1", link), open(t, "127.0.91.2", link)
				a, b := connect(t, &Config{Ring: rings[0], KeepAlive: -1, Config: cm.Config{Device: here}}, &Config{Ring: rings[1], KeepAlive: -1, Config: cm.Config{Device: there}})
				r := seeded(t)
				var all sync.WaitGroup
				for _, way := range [][2]*Conn{{a, b}, {b, a}} {
					data := make([]byte, total)
					for i := range data {
						data[i] = byte(r.Uint32())
					}
					wr, rr := rand.New(rand.NewPCG(r.Uint64(), 1)), rand.New(rand.NewPCG(r.Uint64(), 2))
					all.Go(func() {
						for rest := data; len(rest) > 0; {
							n := min(len(rest), 1+wr.IntN(1<<wr.IntN(18)))
							k, err := way[0].Write(rest[:n])
							if err != nil || k != n {
								t.Errorf("write: %d of %d, %v", k, n, err)
								return
							}
							rest = rest[n:]
						}
						if err := way[0].CloseWrite(); err != nil {
							t.Error(err)
						}
						if _, err := way[0].Write([]byte{1}); !errors.Is(err, syscall.EPIPE) {
							t.Errorf("write after the end: %v", err)
						}
					})
					all.Go(func() {
						h, n, buf := sha256.New(), 0, make([]byte, 1<<17)
						for {
							k, err := way[1].Read(buf[:1+rr.IntN(1<<rr.IntN(18))])
							h.Write(buf[:k])
							n += k
							if err == io.EOF {
								break
							}
							if err != nil {
								t.Error(err)
								break
							}
						}
						if want := sha256.Sum256(data); n != total || !bytes.Equal(h.Sum(nil), want[:]) {
							t.Errorf("%d bytes came, and equal is %t", n, bytes.Equal(h.Sum(nil), want[:]))
						}
					})
				}
				all.Wait()
			})
		}
	}
}

// What was written before Close arrives, though nobody has read it yet; then comes the end, and a write fails.
func TestCloseDelivers(t *testing.T) {
	for name, link := range links {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t, link, 0)
			want := bytes.Repeat([]byte("verbena "), 4096)
			if _, err := a.Write(want); err != nil {
				t.Fatal(err)
			}
			if err := a.Close(); err != nil {
				t.Fatal(err)
			}
			<-b.cm.Done() // the peer's end is known here
			got, err := io.ReadAll(b)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			if _, err := b.Write(want); !errors.Is(err, syscall.EPIPE) {
				t.Errorf("write: %v", err)
			}
			for _, err := range []error{readErr(a), writeErr(a), a.SetDeadline(time.Now()), a.CloseWrite()} {
				if !errors.Is(err, net.ErrClosed) {
					t.Errorf("after Close: %v", err)
				}
			}
			if err := a.Close(); err != nil {
				t.Errorf("again: %v", err)
			}
		})
	}
}

func readErr(c *Conn) error  { _, err := c.Read(make([]byte, 1)); return err }
func writeErr(c *Conn) error { _, err := c.Write(make([]byte, 1)); return err }

// A peer that reads nothing stops the writer, and closing ends both: nothing is lost that was said to be written.
func TestFull(t *testing.T) {
	a, b := pair(t, verbs.LinkAny, MinRing)
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(i * 7)
	}
	if n, err := a.Write(data[:MinRing]); n != MinRing || err != nil {
		t.Fatalf("%d bytes, %v", n, err)
	}
	if err := a.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	n, err := a.Write(data[MinRing:])
	if !errors.Is(err, os.ErrDeadlineExceeded) || n != 0 {
		t.Fatalf("%d bytes into a full ring, %v", n, err)
	}
	n += MinRing
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(b)
	if err != nil || !bytes.Equal(got, data[:n]) {
		t.Errorf("%d bytes of %d, %v", len(got), n, err)
	}
}

// The queue pair of a peer fails, without a word: both sides hear of it, the one that waits by asking whether the peer is there.
func TestVanished(t *testing.T) {
	here, there := open(t, "127.0.91.1", verbs.LinkUDP), open(t, "127.0.91.2", verbs.LinkUDP)
	quick := cm.Config{Device: here, AckTimeout: 14, RetryCount: 1}
	a, b := connect(t, &Config{KeepAlive: 20 * time.Millisecond, Config: quick}, &Config{KeepAlive: -1, Config: cm.Config{Device: there}})
	if _, err := b.Write([]byte("last words")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(a, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	if err := b.cm.QP().Modify(&verbs.QPAttr{State: verbs.QPErr}, verbs.QPMaskState); err != nil {
		t.Fatal(err)
	}
	if err := readErr(a); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("the other side: %v", err)
	}
	if err := readErr(b); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the side that failed: %v", err)
	}
}

// Of a connection on which nothing moves, both devices are asked again and again, and it stays.
func TestKeepAlive(t *testing.T) {
	here, there := open(t, "127.0.91.1", verbs.LinkUDP), open(t, "127.0.91.2", verbs.LinkUDP)
	a, b := connect(t, &Config{KeepAlive: time.Millisecond, Config: cm.Config{Device: here}}, &Config{KeepAlive: time.Millisecond, Config: cm.Config{Device: there}})
	for {
		a.mu.Lock()
		n := a.out.completed
		a.mu.Unlock()
		if n >= 2*sends { // more than the queue holds
			break
		}
		time.Sleep(time.Millisecond)
	}
	if _, err := a.Write([]byte("still there")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(b, make([]byte, 11)); err != nil {
		t.Fatal(err)
	}
}

// liar connects as a peer that may say anything, and returns the ring of the other side.
func liar(t *testing.T, l *Listener, dev *verbs.Device, private []byte) (*cm.Conn, hello, error) {
	t.Helper()
	c, err := cm.Dial(t.Context(), l.Addr().String(), &cm.Config{Device: dev, Private: private})
	if err != nil {
		return nil, hello{}, err
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	h, err := parseHello(c.Private())
	return c, h, err
}

// A peer that does not keep to the protocol is refused, or loses its connection.
func TestLies(t *testing.T) {
	here, there := open(t, "127.0.91.1", verbs.LinkAny), open(t, "127.0.91.2", verbs.LinkAny)
	l, err := Listen(t.Context(), "127.0.91.2:0", &Config{Config: cm.Config{Device: there}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	good := hello{addr: 1 << 40, rkey: 1, size: 1 << 16, messages: messages}
	for _, bad := range []hello{
		{addr: 1 << 40, rkey: 1, size: 1<<16 + 1, messages: messages},
		{addr: 1 << 40, rkey: 1, size: 0, messages: messages},
		{addr: 1 << 40, rkey: 1, size: 1 << 31, messages: messages},
		{addr: ^uint64(0) - 100, rkey: 1, size: 1 << 16, messages: messages},
		{addr: 1 << 40, rkey: 1, size: 1 << 16},
		{addr: 1 << 40, rkey: 1, size: 1 << 16, messages: 0xffff},
	} {
		if _, _, err := liar(t, l, here, bad.pack()); !errors.Is(err, cm.ErrRefused) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if _, _, err := liar(t, l, here, []byte("GET / HTTP/1.0")); !errors.Is(err, cm.ErrRefused) {
		t.Errorf("another protocol: %v", err)
	}
	word := func(c control, n int) []byte {
		var b [controlBytes]byte
		c.put(&b)
		return b[:n]
	}
	for name, w := range map[string]verbs.SendWR{
		"more than is written": {Op: verbs.OpRDMAWriteImm, Imm: 5, Inline: []byte("abc")},
		"nothing":              {Op: verbs.OpRDMAWriteImm},
		"read too much":        {Op: verbs.OpSend, Inline: word(control{bytes: 1}, controlBytes)},
		"taken too much":       {Op: verbs.OpSend, Inline: word(control{messages: 1}, controlBytes)},
		"short":                {Op: verbs.OpSend, Inline: word(control{}, 5)},
		"long":                 {Op: verbs.OpSend, Inline: bytes.Repeat([]byte{0}, controlBytes+1)},
		"a flag":               {Op: verbs.OpSend, Inline: bytes.Repeat([]byte{2}, controlBytes)},
	} {
		t.Run(name, func(t *testing.T) {
			c, h, err := liar(t, l, here, good.pack())
			if err != nil {
				t.Fatal(err)
			}
			s, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			w.RemoteAddr, w.RKey = h.addr, h.rkey
			if _, err := c.QP().PostSend([]verbs.SendWR{w}); err != nil {
				t.Fatal(err)
			}
			want := syscall.EPROTO
			if name == "long" { // for the receive: the device refuses it
				want = syscall.ECONNRESET
			}
			if _, err := s.Read(make([]byte, 8)); !errors.Is(err, want) {
				t.Errorf("read: %v, should be %v", err, want)
			}
		})
	}
	t.Run("data after the end", func(t *testing.T) {
		c, h, err := liar(t, l, here, good.pack())
		if err != nil {
			t.Fatal(err)
		}
		s, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if _, err := c.QP().PostSend([]verbs.SendWR{
			{Op: verbs.OpSend, Inline: word(control{end: true}, controlBytes)},
			{Op: verbs.OpRDMAWriteImm, Imm: 3, Inline: []byte("abc"), RemoteAddr: h.addr, RKey: h.rkey},
		}); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(s)
		if len(got) != 0 || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	})
}

// A server and a client of net/http, over a listener and a dialer of this package.
func TestHTTP(t *testing.T) {
	here, there := open(t, "127.0.91.1", verbs.LinkAny), open(t, "127.0.91.2", verbs.LinkAny)
	l, err := Listen(t.Context(), "127.0.91.2:0", &Config{KeepAlive: -1, Config: cm.Config{Device: there}})
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body) // before the answer: net/http has one after the other
		if err != nil {
			t.Error(err)
		}
		_, _ = w.Write(body)
	})}}
	server.Start()
	defer server.Close()
	client := http.Client{Transport: &http.Transport{DialContext: (&Dialer{Config{KeepAlive: -1, Config: cm.Config{Device: here}}}).DialContext}}
	defer client.CloseIdleConnections()
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			body := bytes.Repeat([]byte{byte(i)}, 20_000*i+1)
			for range 3 {
				resp, err := client.Post("http://"+l.Addr().String()+"/", "text/plain", bytes.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				got, err := io.ReadAll(resp.Body)
				if err != nil || !bytes.Equal(got, body) {
					t.Errorf("%d bytes of %d, %v", len(got), len(body), err)
				}
				_ = resp.Body.Close()
			}
		})
	}
	all.Wait()
}

// A listener that is closed ends those who wait; a peer of which nobody has heard yet is let go.
func TestListenerCloses(t *testing.T) {
	here, there := open(t, "127.0.91.1", verbs.LinkAny), open(t, "127.0.91.2", verbs.LinkAny)
	l, err := Listen(t.Context(), "127.0.91.2:0", &Config{Config: cm.Config{Device: there}})
	if err != nil {
		t.Fatal(err)
	}
	c, err := Dial(t.Context(), l.Addr().String(), &Config{Config: cm.Config{Device: here}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := errors.Join(l.Close(), l.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept: %v", err)
	}
	if err := readErr(c); err != io.EOF && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := Dial(ctx, l.Addr().String(), &Config{Config: cm.Config{Device: here}}); !errors.Is(err, cm.ErrRefused) {
		t.Errorf("dial: %v", err)
	}
}

// Configurations that cannot be.
func TestConfigs(t *testing.T) {
	for _, cfg := range []Config{{Ring: 100}, {Ring: 3 << 12}, {Ring: 2 * MaxRing}, {Config: cm.Config{Private: []byte("x")}}, {Config: cm.Config{Cap: verbs.QPCap{MaxSendWR: 1}}}} {
		if _, err := Dial(t.Context(), "127.0.91.2:1", &cfg); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: dial: %v", cfg, err)
		}
		if _, err := Listen(t.Context(), "127.0.91.2:1", &cfg); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: listen: %v", cfg, err)
		}
	}
}

// A request that asks for the peer is answered though others were posted after it: the next one is still sent.
func TestKeepAliveBesideTraffic(t *testing.T) {
	a, _ := pair(t, verbs.LinkAny, 0)
	a.every, a.alive = time.Hour, time.NewTimer(time.Hour)
	probes := func() uint64 {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.probe
	}
	a.keepAlive()
	first := probes()
	a.tell(false) // without a completion of its own
	for a.mu.Lock(); a.out.completed < first; a.mu.Lock() {
		a.mu.Unlock()
		a.poll()
	}
	a.mu.Unlock()
	a.keepAlive()
	if second := probes(); second <= first {
		t.Errorf("the first was request %d, the next %d", first, second)
	}
}
