package device

// Completion queues: overflow, resizing under load, events.

import (
	"context"
	"errors"
	"fmt"
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

// More completions than the queue holds: the queue is lost, with an event; its
// queue pair goes to the error state, with another; those completions that had
// their place can still be polled, then polling fails.
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
		})
	}
}

// A queue that two queue pairs share and one floods takes both with it.
func TestCQOverflowTakesAll(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	a, b := connected(t, d, openDevice(t, provider.Config{Link: linkLoop}), ib.RC, 64, func(e *end) {
		if e.dev == d {
			e.withQueue(2, nil)
		}
	})
	cap := must[ib.QPAttr](t)(a.qp.Query()).Cap
	other := must[provider.QP](t)(a.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: a.cq, RecvCQ: a.cq, Cap: cap}))
	a2 := *a
	a2.qp = other
	defer closeAll(t, other)
	b2 := newEnd(t, b.dev, ib.RC, 64)
	t.Cleanup(b2.close)
	a2.connect(b2)
	b2.connect(&a2)
	for range 3 {
		a.post(a.write(b, 0, 8))
	}
	eventually(t, "the first queue pair fails", func() bool { return a.state() == ib.QPErr })
	a2.post(a2.write(b2, 0, 8))
	eventually(t, "the second queue pair fails", func() bool { return a2.state() == ib.QPErr })
	wantEvent(t, d, ib.AsyncEvent{Type: ib.EventQPFatal, QPN: other.Number()})
}

// Completions neither get lost nor out of order while the queue is resized, up
// and down, by a goroutine that is not in step with the traffic.
func TestCQResizeUnderLoad(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			a, b := pair(t, mode, ib.RC, 4096)
			var stop atomic.Bool
			var wg sync.WaitGroup
			var resized, refused int
			wg.Go(func() {
				for i := 0; !stop.Load(); i++ {
					switch err := a.cq.Resize(4 + i%11*50); {
					case err == nil:
						resized++
					case isErrno(err, syscall.EINVAL):
						refused++ // more are waiting just now
					default:
						t.Error(err)
					}
				}
			})
			// Never more outstanding than the smallest size.
			var next uint64
			for end := time.Now().Add(lasting(300*time.Millisecond, 5*time.Second)); time.Now().Before(end); {
				for range 4 {
					a.post(ib.SendWR{ID: next, Op: ib.OpRDMAWrite, SGL: a.sge(0, 64), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
					next++
				}
				for i := range uint64(4) {
					if wc := a.ok(); wc.ID != next-4+i {
						t.Fatalf("completion of %d, want %d", wc.ID, next-4+i)
					}
				}
			}
			stop.Store(true)
			wg.Wait()
			if t.Logf("%d requests, %d times resized, %d times refused", next, resized, refused); resized == 0 {
				t.Error("never resized")
			}
		})
	}
}

// Resizing keeps what waits: to just as much, never to less.
func TestCQResizeKeeps(t *testing.T) {
	a, b := pair(t, linkLoop, ib.RC, 4096)
	for i := range 40 {
		a.post(ib.SendWR{ID: uint64(i), Op: ib.OpRDMAWrite, SGL: a.sge(0, 8), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
	}
	for i := range 7 { // so that the ring does not begin at its start
		if wc := a.ok(); wc.ID != uint64(i) {
			t.Fatal(wc.ID)
		}
	}
	wantErrno(t, "resize below what waits", a.cq.Resize(32), syscall.EINVAL)
	for _, n := range []int{33, 500, 40, 33} {
		if err := a.cq.Resize(n); err != nil || a.cq.Cap() < n {
			t.Fatalf("resize to %d: %v, capacity %d", n, err, a.cq.Cap())
		}
	}
	for i := 7; i < 40; i++ {
		if wc := a.ok(); wc.ID != uint64(i) {
			t.Fatalf("completion %d has ID %d", i, wc.ID)
		}
	}
}

// eventPair connects two ends whose completion queues raise events.
func eventPair(t testing.TB, mode string) (a, b *end) {
	t.Helper()
	x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
	return connected(t, x, y, ib.RC, 64<<10, func(e *end) { withChannel(t, e) })
}

// next waits for an event of the end's queue, and acknowledges it.
func (e *end) next(d time.Duration) error {
	ctx, cancel := context.WithTimeout(e.t.Context(), d)
	defer cancel()
	cq, err := e.channel.Next(ctx)
	if err != nil {
		return err
	}
	if cq != e.cq {
		e.t.Error("the event is of another queue")
	}
	cq.Ack(1)
	return nil
}

const (
	soon  = 10 * time.Second      // an event that must come
	never = 20 * time.Millisecond // an event that must not
)

// An event comes for the next completion, once for each arming, and not for
// completions that wait already.
func TestEventNext(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			a, b := eventPair(t, mode)
			a.post(a.write(b, 0, 8))
			eventually(t, "the completion waits", func() bool { return a.cq.(*CQ).Len() > 0 })
			if err := a.next(never); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("a queue that was not armed raised an event: %v", err)
			}
			must0(t, a.cq.RequestNotify(false))
			if err := a.next(never); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("a completion from before raised an event: %v", err)
			}
			a.post(a.write(b, 0, 8))
			a.post(a.write(b, 0, 8))
			if err := a.next(soon); err != nil {
				t.Errorf("armed queue: %v", err)
			}
			eventually(t, "all completions wait", func() bool { return a.cq.(*CQ).Len() == 3 })
			if err := a.next(never); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("one arming raised two events: %v", err)
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
			if err := b.next(never); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("an unsolicited message raised an event: %v", err)
			}
			send(ib.SendSolicited)
			if err := b.next(soon); err != nil {
				t.Errorf("a solicited message: %v", err)
			}
			must0(t, b.cq.RequestNotify(false))
			must0(t, b.cq.RequestNotify(true))
			send(0)
			if err := b.next(soon); err != nil {
				t.Errorf("armed for any, then for solicited: %v", err)
			}
			must0(t, b.cq.RequestNotify(true))
			b.modify(ib.QPAttr{State: ib.QPErr}, 0)
			if err := b.next(soon); err != nil {
				t.Errorf("flushed receives: %v", err)
			}
		})
	}
}

// Several wait on one channel with several queues: each event goes to one of
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
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	done := make(chan struct{})
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
				if taken.Add(1) == queues*rounds {
					close(done)
				}
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
	<-done
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
	cq, err := e.channel.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	closeAll(t, e.qp)
	var closed atomic.Bool
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		closeAll(t, cq)
		closed.Store(true)
	}()
	time.Sleep(never)
	if closed.Load() {
		t.Error("Close did not wait for the event that was taken")
	}
	wantErrno(t, "closing the channel meanwhile", e.channel.Close(), syscall.EBUSY)
	cq.Ack(1)
	<-finished
	ctx, cancel := context.WithTimeout(t.Context(), never)
	defer cancel()
	if cq, err := e.channel.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an event of a closed queue: %v, %v", cq, err)
	}
	closeAll(t, e.channel, e.mr, e.pd)
}

// The rule "arm, poll until empty, wait" loses nothing, however the completions
// fall, with the peer's traffic as the only one that makes progress.
func TestEventNoneLost(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			a, b := eventPair(t, mode)
			n := lastingOps(2000, 15000)
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
					if err := b.next(soon); err != nil {
						t.Fatal(fmt.Errorf("after %d of %d: %w", got, n, err))
					}
				}
			}
			wg.Wait()
		})
	}
}
