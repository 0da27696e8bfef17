package qp

// Fences: requests that wait for one before anything behind them begins, and requests that signal
// one when everything before them is done. Both are local requests (local.go).
//
//  1. A fence that is pending when its WAIT_FENCE comes to the front makes the requester stand
//     still, as memory that is suspended does. The owner waits for it, until its time is over.
//  2. A SIGNAL_FENCE is executed when all requests before it are done: of RC, when the peer has
//     acknowledged them, so their bytes are placed. What a fence calls when it is signalled may
//     post requests, so the owner signals it while it holds no lock (WorkSignal).
//  3. The fence of a SIGNAL_FENCE that is flushed or forgotten is signalled with an error: work
//     that waits for it does not wait for ever.
//  4. The fence of a WAIT_FENCE that ends while the fence is pending is told so, if it wants to
//     know (abandoner): in the same way as fences are signalled.

import (
	"fmt"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// signal is a fence that is to be signalled.
type signal struct {
	fence ib.Fence
	err   error
}

// abandoner is a fence that wants to know that a request waits for it no more: its time is over, or the
// request is flushed or forgotten.
type abandoner interface{ Abandoned() }

// abandonment makes of Abandoned something that is signalled.
type abandonment struct {
	ib.Fence
	to abandoner
}

// Signal tells the fence.
func (a abandonment) Signal(error) bool {
	a.to.Abandoned()
	return true
}

// abandonFence has the owner tell a fence that it is not waited for.
func (q *QP) abandonFence(f ib.Fence) {
	if a, ok := f.(abandoner); ok {
		q.signalFence(abandonment{f, a}, nil)
	}
}

// queuedFence is the fence of a request.
type queuedFence struct {
	fence   ib.Fence
	signals bool // of a SIGNAL_FENCE
}

// fenceQueue holds the fences of requests that are not executed yet, in the order of the requests.
type fenceQueue struct{ list []queuedFence }

func (f *fenceQueue) add(wr *ib.SendWR) {
	f.list = append(f.list, queuedFence{wr.Fence, wr.Op == ib.OpSignalFence})
}

func (f *fenceQueue) take() ib.Fence {
	first := f.list[0].fence
	f.list[0] = queuedFence{} // it may be collected
	if f.list = f.list[1:]; len(f.list) == 0 {
		f.list = nil // most queues never see a fence again
	}
	return first
}

func checkFence(wr *ib.SendWR) error {
	switch {
	case wr.Fence == nil:
		return ib.Errorf("post_send", syscall.EINVAL, "a %v needs a fence", wr.Op)
	case wr.Timeout < 0:
		return ib.Errorf("post_send", syscall.EINVAL, "a timeout of %v", wr.Timeout)
	}
	return nil
}

// announceFence tells a fence that asks for it of a request that is about to be queued.
func (q *QP) announceFence(wr *ib.SendWR) error {
	f, ok := wr.Fence.(ib.QueuedFence)
	if !ok {
		return nil
	}
	limit := wr.Timeout
	if limit == 0 {
		limit = ib.DefaultFenceTimeout
	}
	return f.Queued(q, fmt.Sprintf("QP %#x", q.Number), wr.Op == ib.OpSignalFence, limit)
}

// setFence keeps the parameters of the request: in compareAdd how long it waits, in swap when
// that is over, once it has begun to wait.
func (w *wqe) setFence(wr *ib.SendWR) {
	timeout := wr.Timeout
	if timeout == 0 {
		timeout = ib.DefaultFenceTimeout
	}
	w.compareAdd, w.swap = uint64(timeout), 0
	if wr.Op == ib.OpSignalFence {
		w.flags |= ib.SendFence // it waits for all before it
	}
}

// waitFence reports in a fault whether the fence at the front is pending: FaultPending if it is,
// FaultTimeout if it was for too long.
func (q *QP) waitFence(w *wqe, now Time) mem.Fault {
	done := q.sq.fences.list[0].fence.Done()
	select {
	case <-done:
		q.sq.fences.take()
		return mem.Fault{}
	default:
	}
	if w.swap == 0 {
		w.swap = uint64(now) + w.compareAdd
	}
	if uint64(now) >= w.swap {
		q.abandonFence(q.sq.fences.take())
		return mem.Fault{Kind: mem.FaultTimeout}
	}
	q.req.fenceLimit = Time(w.swap)
	return mem.WaitFault(done)
}

// localFailure returns how a local request fails.
func localFailure(op ib.Opcode) ib.WCStatus {
	if op == ib.OpWaitFence {
		return ib.WCRespTimeoutErr
	}
	return ib.WCMWBindErr
}

// signalFence has the owner signal a fence.
func (q *QP) signalFence(f ib.Fence, err error) {
	q.signals = append(q.signals, signal{f, err})
	q.deferred.want |= WorkSignal.bit()
}

// giveUpFences has the fences signalled whose requests will not be executed.
func (q *QP) giveUpFences() {
	for _, f := range q.sq.fences.list {
		if f.signals {
			q.signalFence(f.fence, ib.ErrFenceFlushed)
		} else {
			q.abandonFence(f.fence)
		}
	}
	q.sq.fences.list = nil
}
