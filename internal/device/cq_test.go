package device

// Completion queues: overflow, resizing, events.

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// withQueue replaces an end's completion queue, before it is connected.
func (e *end) withQueue(entries int, ch provider.Channel) {
	e.t.Helper()
	cap := must[ib.QPAttr](e.t)(e.qp.Query()).Cap
	typ := e.qp.Type()
	closeAll(e.t, e.qp, e.cq)
	e.cq = must[provider.CQ](e.t)(e.dev.CreateCQ(entries, ch))
	e.qp = must[provider.QP](e.t)(e.pd.CreateQP(provider.QPConfig{Type: typ, SendCQ: e.cq, RecvCQ: e.cq, Cap: cap}))
}

// More completions than the queue holds: the queue is lost, with an event; its queue pair goes
// to the error state, with another; those completions that had their place can still be
// polled, then polling fails. Another queue pair on the same queue fails when it is used.
func TestCQOverflow(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			const entries = 4
			x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
			a, b := connected(t, x, y, ib.RC, 4096, func(e *end) {
				if e.dev == y {
					e.withQueue(entries, nil)
				}
			})
			b2 := *b // on the queue of b
			b2.qp = must[provider.QP](t)(b.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: b.cq, RecvCQ: b.cq,
				Cap: ib.QPCap{MaxSendWR: 4, MaxSendSGE: 1}}))
			defer closeAll(t, b2.qp)
			a2 := newEnd(t, x, ib.RC, 64)
			t.Cleanup(a2.close)
			a2.connect(&b2)
			b2.connect(a2)
			for i := range entries + 2 {
				b.recv(ib.RecvWR{ID: uint64(i), SGL: b.sge(0, 8)})
			}
			for i := range entries + 1 {
				a.post(ib.SendWR{ID: uint64(i), Op: ib.OpSend, SGL: a.sge(0, 8)})
			}
			wantEvent(t, y, ib.AsyncEvent{Type: ib.EventCQErr, CQ: b.cq.Number()})
			wantEvent(t, y, ib.AsyncEvent{Type: ib.EventQPFatal, QPN: b.qp.Number()})
			eventually(t, "the queue pair fails", func() bool { return b.state() == ib.QPErr })
			for i := range entries {
				if wc := b.ok(); wc.ID != uint64(i) {
					t.Errorf("completion %d has ID %d", i, wc.ID)
				}
			}
			for range 2 {
				_, err := b.cq.Poll(make([]ib.WC, 1))
				wantErrno(t, "poll of a lost queue", err, syscall.EOVERFLOW)
			}
			noEvent(t, y)
			noEvent(t, x)
			b2.post(b2.write(a2, 0, 8))
			wantEvent(t, y, ib.AsyncEvent{Type: ib.EventQPFatal, QPN: b2.qp.Number()})
			eventually(t, "the other queue pair fails", func() bool { return b2.state() == ib.QPErr })
		})
	}
}

// A queue is not made smaller than what waits in it. Completions neither get lost nor out of
// order while it is resized, up and down, by a goroutine that is not in step with the traffic.
func TestCQResize(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			a, b := pair(t, mode, ib.RC, 4096)
			var next, taken uint64
			post := func(n int) {
				for range n {
					a.post(ib.SendWR{ID: next, Op: ib.OpRDMAWrite, SGL: a.sge(0, 64), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
					next++
				}
			}
			take := func(n int) {
				t.Helper()
				for range n {
					a.completed(int(taken))
					taken++
				}
			}
			post(40)
			take(7) // the ring does not begin at its start
			eventually(t, "all completions wait", func() bool { return a.cq.(*CQ).Len() == 33 })
			wantErrno(t, "resize below what waits", a.cq.Resize(32), syscall.EINVAL)
			for _, n := range []int{33, 500, 40, 33} {
				if err := a.cq.Resize(n); err != nil || a.cq.Cap() < n {
					t.Fatalf("resize to %d: %v, capacity %d", n, err, a.cq.Cap())
				}
			}
			take(33)

			var stop atomic.Bool
			var resized atomic.Int64
			var wg sync.WaitGroup
			wg.Go(func() {
				for i := 0; !stop.Load(); i++ {
					switch err := a.cq.Resize(4 + i%11*50); {
					case err == nil:
						resized.Add(1)
					case !isErrno(err, syscall.EINVAL): // EINVAL: more are waiting just now
						t.Error(err)
					}
					runtime.Gosched()
				}
			})
			enough := int64(lastingOps(50, 5000))
			for round := 0; (round < 50 || resized.Load() < enough) && !t.Failed(); round++ {
				post(4) // never more outstanding than the smallest size
				take(4)
			}
			stop.Store(true)
			wg.Wait()
		})
	}
}

// eventPair connects two ends whose completion queues raise events.
func eventPair(t testing.TB, mode string) (a, b *end) {
	t.Helper()
	x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
	return connected(t, x, y, ib.RC, 64<<10, func(e *end) { withChannel(t, e) })
}

// event waits for an event of the end's queue, and acknowledges it.
func (e *end) event() {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), soon)
	defer cancel()
	cq, err := e.channel.Next(ctx)
	if err != nil {
		e.t.Fatalf("no event: %v", err)
	}
	if cq != e.cq {
		e.t.Error("the event is of another queue")
	}
	cq.Ack(1)
}

const soon = 10 * time.Second // within which an event must come

// noCQEvent checks that no event waits in the end's channel.
func (e *end) noCQEvent(what string) {
	e.t.Helper()
	ctx, cancel := context.WithCancel(e.t.Context())
	cancel()
	if _, err := e.channel.Next(ctx); !errors.Is(err, context.Canceled) {
		e.t.Errorf("%s: there is an event (%v)", what, err)
	}
}

// An event comes for the next completion, once for each arming, and not for completions that
// wait already. In all there are as many events as armings.
func TestEventOncePerArming(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			a, b := eventPair(t, mode)
			waiting := 0
			post := func(n int) {
				for range n {
					a.post(a.write(b, 0, 8))
				}
				waiting += n
			}
			allWait := func() {
				t.Helper()
				eventually(t, "all completions wait", func() bool { return a.cq.(*CQ).Len() == waiting })
			}
			post(1)
			allWait()
			a.noCQEvent("the queue was not armed")
			for range 2 {
				must0(t, a.cq.RequestNotify(false))
				a.noCQEvent("the completions are from before")
				post(2)
				a.event()
				allWait()
				a.noCQEvent("one arming has had its event")
			}
		})
	}
}

func must0(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Armed for solicited completions, a queue raises an event for those and for
// failures alone; arming for any completion is stronger and stays.
func TestEventSolicited(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			a, b := eventPair(t, mode)
			for i := range 6 {
				b.recv(ib.RecvWR{ID: uint64(i)})
			}
			send := func(flags ib.SendFlags) { a.post(ib.SendWR{Op: ib.OpSend, Flags: flags}); a.ok(); b.ok() }
			must0(t, b.cq.RequestNotify(true))
			send(0)
			b.noCQEvent("an unsolicited message")
			send(ib.SendSolicited)
			b.event()
			must0(t, b.cq.RequestNotify(false))
			must0(t, b.cq.RequestNotify(true))
			send(0)
			b.event() // armed for any, then for solicited
			must0(t, b.cq.RequestNotify(true))
			b.modify(ib.QPAttr{State: ib.QPErr}, 0)
			b.event() // flushed receives
			b.noCQEvent("three armings have had their events")
		})
	}
}

// Several goroutines wait on one channel with several queues: each event goes to one of
// them, none is lost.
func TestEventManyWaiters(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkLoop})
	ch := must[provider.Channel](t)(x.CreateChannel())
	const queues, rounds = 5, 40
	ends, peers := map[provider.CQ]*end{}, map[*end]*end{}
	for range queues {
		a, b := connected(t, x, y, ib.RC, 64, func(e *end) {
			if e.dev == x {
				e.withQueue(16, ch)
			}
		})
		ends[a.cq], peers[a] = a, b
	}
	t.Cleanup(func() {
		for _, e := range ends {
			e.close()
		}
		closeAll(t, ch)
	})
	var taken atomic.Int64
	var perQueue sync.Map
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				cq, err := ch.Next(ctx)
				if err != nil {
					return
				}
				n, _ := perQueue.LoadOrStore(cq, new(atomic.Int64))
				n.(*atomic.Int64).Add(1)
				var wc [4]ib.WC
				k, _ := cq.Poll(wc[:])
				cq.Ack(1)
				if k != 1 || wc[0].Status != ib.WCSuccess {
					t.Errorf("an event without its completion: %d, %+v", k, wc[0])
				}
				taken.Add(1)
			}
		})
	}
	for r := range rounds {
		for _, a := range ends {
			must0(t, a.cq.RequestNotify(false))
			a.post(a.write(peers[a], 0, 8))
		}
		eventually(t, "all events of the round are taken", func() bool { return taken.Load() == int64((r+1)*queues) })
	}
	cancel()
	wg.Wait()
	for cq := range ends {
		if n, _ := perQueue.Load(cq); n == nil || n.(*atomic.Int64).Load() != rounds {
			t.Errorf("queue %d: not %d events", cq.Number(), rounds)
		}
	}
}

// Close of a queue waits until the events that were taken are acknowledged, and
// drops those that were not taken.
func TestEventCloseWaitsForAcks(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	e := newEnd(t, d, ib.RC, 64)
	withChannel(t, e)
	e.connect(e)
	for range 2 {
		must0(t, e.cq.RequestNotify(false))
		e.post(e.write(e, 0, 8))
		e.ok()
	}
	cq := must[provider.CQ](t)(e.channel.Next(t.Context()))
	closeAll(t, e.qp)
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		closeAll(t, cq)
	}()
	stillWaits(t, closed)
	wantErrno(t, "closing the channel meanwhile", e.channel.Close(), syscall.EBUSY)
	cq.Ack(1)
	<-closed
	e.noCQEvent("the queue is closed")
	closeAll(t, e.channel, e.mr, e.pd)
}

// The rule "arm, poll until empty, wait" loses nothing, however the completions
// fall, with the peer's traffic as the only one that makes progress.
func TestEventNoneLost(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			a, b := eventPair(t, mode)
			n := lastingOps(300, 15000)
			var wg sync.WaitGroup
			wg.Go(func() {
				for i := range n {
					a.post(ib.SendWR{ID: uint64(i), Op: ib.OpSend, SGL: a.sge(0, 32)})
					a.ok()
				}
			})
			for i := range 100 {
				b.recv(ib.RecvWR{ID: uint64(i), SGL: b.sge(0, 64)})
			}
			var wcs [8]ib.WC
			for got := 0; got < n; {
				must0(t, b.cq.RequestNotify(false))
				for {
					k, err := b.cq.Poll(wcs[:])
					must0(t, err)
					if k == 0 {
						break
					}
					for i := range k {
						if err := wcs[i].Err(); err != nil {
							t.Fatal(err)
						}
						b.recv(ib.RecvWR{SGL: b.sge(0, 64)})
					}
					got += k
				}
				if got < n {
					b.event()
				}
			}
			wg.Wait()
		})
	}
}
