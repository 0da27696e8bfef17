package device

// Many goroutines, queue pairs and devices at once, on shared queues.

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// hall is one side of the torture: queue pairs that share a completion queue, a
// shared receive queue, a region and a word that the other side adds to.
type hall struct {
	t     testing.TB
	dev   *Device
	pd    provider.PD
	cq    provider.CQ
	srq   provider.SRQ
	mr    provider.MR
	buf   []byte
	conns []*trafficConn
	byQPN sync.Map // QPN → *trafficConn

	// polling is locked from a poll until its completions are checked: otherwise
	// two pollers could each hold one of two, and check them in the wrong order
	polling sync.Mutex

	added    atomic.Uint64 // to the other side's word
	sent     atomic.Int64
	received atomic.Int64
}

// trafficConn is one queue pair of a hall, driven by one goroutine.
type trafficConn struct {
	*end
	index   int
	out     atomic.Int64  // requests outstanding
	done    atomic.Uint64 // the ID that must complete next
	next    uint64        // the ID of the next request; the driver's own
	heard   atomic.Uint64 // the number of the message that must arrive next
	message uint64        // the number of the next message; the driver's own
}

const (
	tortureConns = 8
	connBytes    = 48 << 10
	connDeep     = 16
	letterBytes  = 64
	srqDeep      = 256
)

func newHall(t testing.TB, dev *Device) *hall {
	t.Helper()
	h := &hall{t: t, dev: dev, buf: make([]byte, tortureConns*connBytes+srqDeep*letterBytes+8)}
	h.pd = must[provider.PD](t)(dev.AllocPD())
	h.cq = must[provider.CQ](t)(dev.CreateCQ(4096, nil))
	h.mr = must[provider.MR](t)(h.pd.RegMR(h.buf, allRemote))
	h.srq = must[provider.SRQ](t)(h.pd.CreateSRQ(provider.SRQConfig{MaxWR: srqDeep, MaxSGE: 1}))
	t.Cleanup(func() { closeAll(t, h.srq, h.mr, h.cq, h.pd) })
	for i := range tortureConns {
		e := &end{t: t, dev: dev, pd: h.pd, cq: h.cq, mr: h.mr, buf: h.buf, psn: uint32(i) << 20, mtu: ib.MTU4096,
			timeout: 17, retries: 7, rnrRetries: 7, rd: 8}
		e.qp = must[provider.QP](t)(h.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: h.cq, RecvCQ: h.cq, SRQ: h.srq,
			Cap: ib.QPCap{MaxSendWR: connDeep, MaxSendSGE: 1, MaxInlineData: letterBytes}}))
		t.Cleanup(func() { closeAll(t, e.qp) })
		l := &trafficConn{end: e, index: i}
		h.conns = append(h.conns, l)
		h.byQPN.Store(e.qp.Number(), l)
	}
	for i := range srqDeep {
		h.repost(uint64(i))
	}
	return h
}

func (h *hall) letterAt(i uint64) int { return tortureConns*connBytes + int(i)*letterBytes }
func (h *hall) wordAt() int           { return len(h.buf) - 8 }

func (h *hall) repost(i uint64) {
	l := h.conns[0]
	if _, err := h.srq.PostRecv([]ib.RecvWR{{ID: recvID + i, SGL: l.sge(h.letterAt(i), letterBytes)}}); err != nil {
		h.t.Errorf("receive %d: %v", i, err)
	}
}

// drive posts requests on a connection and takes completions, of any connection, until stop is
// set and its own are done.
func (h *hall) drive(l *trafficConn, peer *hall, seed uint64, stop *atomic.Bool) {
	rng := rand.New(rand.NewPCG(seed, uint64(l.index)))
	var deadline time.Time // for what is outstanding when stop is set
	for !h.t.Failed() {
		if stop.Load() && l.out.Load() == 0 {
			return
		}
		if stop.Load() && deadline.IsZero() {
			deadline = time.Now().Add(2 * time.Minute)
		}
		if !deadline.IsZero() && time.Now().After(deadline) {
			h.t.Errorf("connection %d: %d requests outstanding", l.index, l.out.Load())
			return
		}
		for !stop.Load() && l.out.Load() < connDeep/2 {
			var wrs [4]ib.SendWR
			n := 1 + rng.IntN(len(wrs))
			for i := range n {
				wrs[i] = h.draw(l, peer, rng)
			}
			l.out.Add(int64(n))
			if _, err := l.qp.PostSend(wrs[:n]); err != nil {
				h.t.Error(err)
				return
			}
		}
		if h.poll() == 0 {
			runtime.Gosched()
		}
	}
}

// draw makes the next request of a connection.
func (h *hall) draw(l *trafficConn, peer *hall, rng *rand.Rand) ib.SendWR {
	size := 1 << rng.IntN(15)
	at := l.index * connBytes
	wr := ib.SendWR{ID: l.next, Flags: ib.SendSignaled, SGL: l.sge(at, size), RKey: peer.mr.RKey(),
		RemoteAddr: peer.mr.Addr() + uint64(at+rng.IntN(connBytes-size+1))}
	l.next++
	switch rng.IntN(5) {
	case 0:
		wr.Op = ib.OpRDMAWrite
	case 1:
		wr.Op, wr.SGL = ib.OpRDMARead, l.sge(at+connBytes/2, size)
	case 2:
		wr.Op, wr.SGL = ib.OpAtomicFetchAdd, l.sge(at, 8)
		wr.CompareAdd, wr.RemoteAddr = uint64(1+rng.IntN(9)), peer.mr.Addr()+uint64(peer.wordAt())
		h.added.Add(wr.CompareAdd)
	default:
		letter := binary.LittleEndian.AppendUint64(nil, l.message)
		wr.Op, wr.SGL, wr.Imm = ib.OpSendImm, nil, uint32(l.index)
		wr.Inline = binary.LittleEndian.AppendUint64(letter, ^l.message)
		l.message++
	}
	return wr
}

// poll takes completions of any connection.
func (h *hall) poll() int {
	h.polling.Lock()
	defer h.polling.Unlock()
	var wcs [16]ib.WC
	n, err := h.cq.Poll(wcs[:])
	if err != nil {
		h.t.Error(err)
	}
	for i := range n {
		h.take(&wcs[i])
	}
	return n
}

func (h *hall) take(wc *ib.WC) {
	v, ok := h.byQPN.Load(wc.QPN)
	if !ok || wc.Status != ib.WCSuccess {
		h.t.Errorf("completion %+v: %v", *wc, wc.Err())
		return
	}
	l := v.(*trafficConn)
	if wc.ID < recvID {
		if want := l.done.Add(1) - 1; wc.ID != want {
			h.t.Errorf("connection %d: completion of %d, want %d", l.index, wc.ID, want)
		}
		l.out.Add(-1)
		h.sent.Add(1)
		return
	}
	slot := wc.ID - recvID
	b := h.buf[h.letterAt(slot):]
	number, check := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
	if want := l.heard.Add(1) - 1; number != want || check != ^want || wc.ByteLen != 16 || int(wc.Imm) != l.index {
		h.t.Errorf("connection %d: message %d (%#x), %d bytes from connection %d, want %d", l.index, number, check, wc.ByteLen, wc.Imm, want)
	}
	h.received.Add(1)
	h.repost(slot)
}

// Eight goroutines on each side, each with a queue pair of its own, on one
// completion queue and one shared receive queue, everything at once in both
// directions: each request completes once and in order, each message arrives
// once and in order, and the words count each addition.
func TestTorture(t *testing.T) {
	torture(t, func(a, b *hall) {
		enough := int64(lastingOps(1500, 100000))
		for (a.sent.Load() < enough || b.sent.Load() < enough) && !t.Failed() {
			runtime.Gosched()
		}
	})
}

// TestSoak is the same for the duration in VERBENA_SOAK.
func TestSoak(t *testing.T) {
	d, err := time.ParseDuration(os.Getenv("VERBENA_SOAK"))
	if err != nil {
		t.Skip("full: soaks run with make soak, which sets VERBENA_SOAK to a duration")
	}
	torture(t, func(_, _ *hall) { time.Sleep(d / time.Duration(len(allLinks))) })
}

// torture runs until enough returns, on each link.
func torture(t *testing.T, enough func(a, b *hall)) {
	onAllLinks(t, func(t *testing.T, mode string) {
		seed := testSeed(t)
		a, b := newHall(t, openFor(t, mode)), newHall(t, openFor(t, mode))
		for i := range tortureConns {
			a.conns[i].connect(b.conns[i].end)
			b.conns[i].connect(a.conns[i].end)
		}
		var stop atomic.Bool
		var wg sync.WaitGroup
		for i := range tortureConns {
			wg.Go(func() { a.drive(a.conns[i], b, seed, &stop) })
			wg.Go(func() { b.drive(b.conns[i], a, seed+1, &stop) })
		}
		enough(a, b)
		stop.Store(true)
		wg.Wait()
		for _, h := range []*hall{a, b} {
			for h.poll() > 0 {
			}
		}
		for _, two := range [][2]*hall{{a, b}, {b, a}} {
			h, o := two[0], two[1]
			messages := uint64(0)
			for i, l := range h.conns {
				messages += l.message
				if got := o.conns[i].heard.Load(); got != l.message {
					t.Errorf("connection %d: %d messages arrived of %d", i, got, l.message)
				}
			}
			if got := wordOf(o.buf[o.wordAt():]); got != h.added.Load() {
				t.Errorf("the word counts %d, want %d", got, h.added.Load())
			}
			t.Logf("%d requests, %d messages", h.sent.Load(), messages)
		}
	})
}

// Objects come and go, by many goroutines at once, while others use the device:
// numbers and keys are reused, and no one meets another's.
func TestObjectsComeAndGo(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
			var wg sync.WaitGroup
			for w := range 6 {
				wg.Go(func() {
					for i := range lastingOps(20, 500) {
						if err := churn(x, y, byte(w*50+i)); err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// churn makes a connection, uses it and closes everything.
func churn(x, y *Device, mark byte) (err error) {
	rec := &recorder{}
	a, b := newEnd(rec, x, ib.RC, 2048), newEnd(rec, y, ib.RC, 2048)
	a.connect(b)
	b.connect(a)
	fill(a.buf, mark)
	a.post(a.write(b, 0, 2048))
	a.ok()
	if k := firstDifference(a.buf, b.buf); k >= 0 {
		rec.Errorf("wrong from byte %d on", k)
	}
	b.close()
	a.close()
	return rec.err
}

// recorder is a testing.TB for helpers that run in other goroutines: it keeps
// the first failure.
type recorder struct {
	testing.TB
	err error
}

func (r *recorder) Helper() {}
func (r *recorder) Errorf(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
}
func (r *recorder) Error(args ...any)                 { r.Errorf("%s", fmt.Sprint(args...)) }
func (r *recorder) Fatal(args ...any)                 { r.Error(args...); panic(r.err) }
func (r *recorder) Fatalf(format string, args ...any) { r.Errorf(format, args...); panic(r.err) }
