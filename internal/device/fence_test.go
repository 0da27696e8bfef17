package device

// Requests that wait for fences, and that signal them.

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// fenceWays are the links that fences are tried on.
func fenceWays(t *testing.T, run func(t *testing.T, a, b *end)) {
	for _, way := range []string{linkLoop, "rings", linkUDP} {
		t.Run(way, func(t *testing.T) {
			if way == "rings" {
				a, b := byRings(t, ib.RC, 4096)
				run(t, a, b)
				return
			}
			a, b := pair(t, way, ib.RC, 4096)
			run(t, a, b)
		})
	}
}

func waitFor(f ib.Fence) ib.SendWR { return ib.SendWR{ID: 7, Op: ib.OpWaitFence, Fence: f} }

// What is behind a WAIT_FENCE begins when the fence is signalled. A SIGNAL_FENCE signals its fence
// when the bytes of the requests before it are placed.
func TestFences(t *testing.T) {
	fenceWays(t, func(t *testing.T, a, b *end) {
		begin, end := dmabuf.NewFence(), dmabuf.NewFence()
		copy(a.buf, "after the fence")
		a.post(waitFor(begin))
		a.post(a.write(b, 0, 15))
		a.post(ib.SendWR{ID: 9, Op: ib.OpSignalFence, Fence: end})
		time.Sleep(5 * time.Millisecond)
		if end.Signaled() || string(b.buf[:15]) == "after the fence" {
			t.Fatal("the requests do not wait")
		}
		var wc [1]ib.WC
		if n := must[int](t)(a.cq.Poll(wc[:])); n != 0 {
			t.Fatalf("a completion before the fence: %+v", wc[0])
		}
		begin.Signal(nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		must0(t, end.Wait(ctx))
		if string(b.buf[:15]) != "after the fence" {
			t.Error("the fence is signalled before the bytes are placed")
		}
		if w := a.ok(); w.ID != 7 || w.Op != ib.WCWaitFence {
			t.Errorf("%+v", w)
		}
		a.ok()
		if w := a.ok(); w.ID != 9 || w.Op != ib.WCSignalFence {
			t.Errorf("%+v", w)
		}
		// A fence that is signalled already delays nothing.
		a.post(waitFor(begin))
		a.ok()
	})
}

// Work that a fence calls may post to the queue pair that signals it.
func TestFenceCallsBack(t *testing.T) {
	fenceWays(t, func(t *testing.T, a, b *end) {
		f := dmabuf.NewFence()
		posted := make(chan struct{})
		f.OnSignal(func(error) {
			a.post(a.write(b, 64, 8))
			close(posted)
		})
		a.post(a.write(b, 0, 8))
		a.post(ib.SendWR{Op: ib.OpSignalFence, Fence: f})
		<-posted
		for range 3 {
			a.ok()
		}
	})
}

// A fence that is not signalled in time fails its request, and all behind it are flushed.
func TestFenceTimeout(t *testing.T) {
	fenceWays(t, func(t *testing.T, a, b *end) {
		f, after := dmabuf.NewFence(), dmabuf.NewFence()
		wr := waitFor(f)
		wr.Timeout = 20 * time.Millisecond
		a.post(wr)
		a.post(a.write(b, 0, 8))
		a.post(ib.SendWR{Op: ib.OpSignalFence, Fence: after})
		a.status(ib.WCRespTimeoutErr)
		a.status(ib.WCWRFlushErr)
		a.status(ib.WCWRFlushErr)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := after.Wait(ctx); !errors.Is(err, ib.ErrFenceFlushed) {
			t.Errorf("the fence of a request that was flushed: %v", err)
		}
	})
}

// A queue pair that is closed, or reset, gives its fences up.
func TestFenceGivenUp(t *testing.T) {
	fenceWays(t, func(t *testing.T, a, b *end) {
		for _, closes := range []bool{false, true} {
			f, after := dmabuf.NewFence(), dmabuf.NewFence()
			if closes {
				a, b = connected(t, a.dev, b.dev, ib.RC, 4096, nil)
			}
			a.post(waitFor(f))
			a.post(ib.SendWR{Op: ib.OpSignalFence, Fence: after})
			if closes {
				closeAll(t, a.qp)
			} else {
				must0(t, a.qp.Modify(&ib.QPAttr{State: ib.QPReset}, ib.QPMaskState))
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := after.Wait(ctx); !errors.Is(err, ib.ErrFenceFlushed) {
				t.Errorf("closed %v: %v", closes, err)
			}
			f.Signal(nil)
		}
	})
}

// Requests that cannot be are refused when they are posted.
func TestFenceRefused(t *testing.T) {
	a, _ := pair(t, linkLoop, ib.RC, 4096)
	for _, wr := range []ib.SendWR{
		{Op: ib.OpWaitFence}, {Op: ib.OpSignalFence},
		{Op: ib.OpWaitFence, Fence: dmabuf.NewFence(), Timeout: -1},
		{Op: ib.OpWaitFence, Fence: dmabuf.NewFence(), SGL: a.sge(0, 8)},
	} {
		if _, err := a.qp.PostSend([]ib.SendWR{wr}); err == nil {
			t.Errorf("%+v was posted", wr)
		}
	}
}

// Pending fences cost no goroutine each: a queue pair that waits has one, however many of its
// requests wait.
func TestFencesAreCheap(t *testing.T) {
	const pairs, each = 20, 50
	x := openDevice(t, provider.Config{Link: linkLoop})
	var left atomic.Int32
	before := runtime.NumGoroutine()
	all := make([]*dmabuf.Fence, 0, pairs*each)
	var ends []*end
	for range pairs {
		a, _ := connected(t, x, x, ib.RC, 64, nil)
		ends = append(ends, a)
		for range each {
			f := dmabuf.NewFence()
			all = append(all, f)
			left.Add(1)
			f.OnSignal(func(error) { left.Add(-1) })
			a.post(waitFor(f))
		}
	}
	if n := runtime.NumGoroutine() - before; n > 2*pairs {
		t.Errorf("%d goroutines for %d fences", n, len(all))
	}
	for i := len(all) - 1; i >= 0; i-- { // those in front are signalled last
		all[i].Signal(nil)
	}
	for _, a := range ends {
		for range each {
			a.ok()
		}
	}
	if n := left.Load(); n != 0 {
		t.Errorf("%d fences were not signalled", n)
	}
}

// A request waits for the fence of a descriptor, and signals one. The counter of fences counts, that of
// page faults does not.
func TestFencesOfDescriptors(t *testing.T) {
	fenceWays(t, func(t *testing.T, a, b *end) {
		begin := must[*sys.Event](t)(sys.NewEvent())
		after := dmabuf.NewFence()
		fd := must[int](t)(after.FD())
		copy(a.buf, "after the fence")
		a.post(waitFor(must[*dmabuf.Fence](t)(dmabuf.FenceFromFD(begin.FD()))))
		a.post(a.write(b, 0, 15))
		same, _, err := dmabuf.FenceToSignal(fd)
		must0(t, err)
		a.post(ib.SendWR{ID: 9, Op: ib.OpSignalFence, Fence: same})
		for a.counted()[qp.CntFenceWaits] == 0 {
			runtime.Gosched()
		}
		if signaled, _, _ := dmabuf.FenceStatus(fd); signaled || string(b.buf[:15]) == "after the fence" {
			t.Fatal("the requests do not wait")
		}
		begin.Signal()
		for range 3 {
			a.ok()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		must0(t, after.Wait(ctx))
		eventually(t, "the descriptor follows the fence", func() bool {
			signaled, failure, err := dmabuf.FenceStatus(fd)
			must0(t, failure)
			must0(t, err)
			return signaled
		})
		if got := string(b.buf[:15]); got != "after the fence" {
			t.Errorf("the peer has %q", got)
		}
		if c := a.counted(); c[qp.CntFenceWaits] != 1 || c[qp.CntFaultWaits] != 0 {
			t.Errorf("%d waits for fences, %d for pages; should be 1 and 0", c[qp.CntFenceWaits], c[qp.CntFaultWaits])
		}
		must0(t, sys.CloseFD(fd))
		must0(t, begin.Close())
	})
}

// told is a fence that wants to know that it is not waited for.
type told struct {
	*dmabuf.Fence
	abandoned atomic.Int32
}

func (f *told) Abandoned() { f.abandoned.Add(1) }

// A fence is told that a request waits for it no more, once, if it was pending then.
func TestAbandonedFences(t *testing.T) {
	fenceWays(t, func(t *testing.T, a, b *end) {
		done, late, flushed := &told{Fence: dmabuf.NewFence()}, &told{Fence: dmabuf.NewFence()}, &told{Fence: dmabuf.NewFence()}
		done.Signal(nil)
		a.post(waitFor(done))
		a.ok()
		wr := waitFor(late)
		wr.Timeout = time.Millisecond
		a.post(wr)
		a.post(waitFor(flushed))
		a.status(ib.WCRespTimeoutErr)
		a.status(ib.WCWRFlushErr)
		for late.abandoned.Load() == 0 || flushed.abandoned.Load() == 0 {
			runtime.Gosched()
		}
		if done.abandoned.Load() != 0 || late.abandoned.Load() != 1 || flushed.abandoned.Load() != 1 {
			t.Errorf("%d, %d, %d", done.abandoned.Load(), late.abandoned.Load(), flushed.abandoned.Load())
		}
	})
}
