package device

// Deferred work of queue pairs: memory that has to be fetched before a request can go
// on, FLUSHes to persistence. Storage may take milliseconds, or hang. So workers,
// goroutines of their own, do this work, and hold no lock and no read section meanwhile;
// only the queue pair whose work it is, or the half of it, waits.
//
//  1. executedLocked (receive.go) finds that a queue pair has deferred work, and
//     deferWork lists it, each kind by itself.
//  2. A worker does the work of one kind, piece by piece, and lets the queue pair go on
//     after each.

import (
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/qp"
)

const (
	// maxWorkers is how many workers there are at most. Each takes a thread while it
	// waits for storage.
	maxWorkers = 32
	// maxOwnerWorkers is how many of them may wait for one owner of memory, such as the exporter of
	// a dma-buf, who brings all of it at once; maxRegionWorkers is how many for one region. The
	// rest is for others, if what these wait for hangs.
	maxOwnerWorkers  = 4
	maxRegionWorkers = maxWorkers - 8
	// retryPause is how long a worker waits when bytes that it has fetched are
	// gone again at once: there is more in use than memory holds.
	retryPause = time.Millisecond
)

// deferredItem is one kind of deferred work of a queue pair.
type deferredItem struct {
	q    *QP
	kind qp.WorkKind
}

type deferredWork struct {
	mu      sync.Mutex         // guards what follows
	list    ring[deferredItem] // wait for a worker
	running int                // workers
	waits   map[any]*ownerWait // by owner of memory, or region
	closed  bool

	closing chan struct{}  // closed by close
	workers sync.WaitGroup // workers, and goroutines that wait for memory; close waits for all
}

// ownerWait is the workers that wait for one owner of memory, or one region.
type ownerWait struct {
	workers int
	freed   chan struct{} // closed when there is one fewer; nil: nothing waits for that
}

// enter counts a worker that is about to wait for an owner, or returns a channel that is closed when
// there is one fewer: there are most already.
func (s *deferredWork) enter(owner any, most int) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.waits[owner]
	if w == nil {
		if s.waits == nil {
			s.waits = make(map[any]*ownerWait)
		}
		w = new(ownerWait)
		s.waits[owner] = w
	}
	if w.workers < most {
		w.workers++
		return nil
	}
	if w.freed == nil {
		w.freed = make(chan struct{})
	}
	return w.freed
}

// leave ends what enter began.
func (s *deferredWork) leave(owner any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.waits[owner]
	if w.freed != nil {
		close(w.freed)
		w.freed = nil
	}
	if w.workers--; w.workers == 0 {
		delete(s.waits, owner)
	}
}

// close waits until storage has done what was asked of it. No new work comes: all queue
// pairs are closed.
func (s *deferredWork) close() {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.closing)
	}
	s.mu.Unlock()
	s.workers.Wait()
}

// deferWork has the deferred work of a queue pair done, of the kinds whose bits are set.
func (d *Device) deferWork(q *QP, kinds uint8) {
	for l := range qp.NumWorkKinds {
		if kinds&(1<<l) == 0 || !q.working[l].CompareAndSwap(false, true) {
			continue // no work of this kind, or its worker will look again before it leaves
		}
		s := &d.work
		s.mu.Lock()
		if !s.closed {
			s.list.push(deferredItem{q, l})
			d.startWorkerLocked()
		}
		s.mu.Unlock()
	}
}

// deferredWorker does listed work until the list is empty.
func (d *Device) deferredWorker() {
	s := &d.work
	defer s.workers.Done()
	for {
		s.mu.Lock()
		if s.list.len() == 0 {
			s.running--
			s.mu.Unlock()
			return
		}
		w := s.list.pop()
		s.mu.Unlock()
		d.carryOut(w.q, w.kind)
	}
}

// carryOut does the work of one kind for a queue pair, oldest first. If the memory is suspended, or
// enough workers wait for its owner, it leaves the rest to carryOutWhen.
func (d *Device) carryOut(q *QP, l qp.WorkKind) {
	var w qp.Work
	for {
		q.mu.Lock()
		more := q.core.NextWork(l, &w)
		if !more {
			q.working[l].Store(false) // under the lock: work that comes later finds it false
		}
		q.mu.Unlock()
		if !more {
			return
		}
		d.runWaiting(q.peer.Load(), d.now()) // q stands still: others may use its credits
		c := w.Suspended()
		if c == nil {
			c = d.do(&w)
		}
		if c != nil {
			d.carryOutWhen(q, w, l, c)
			return
		}
		d.carriedOut(q, &w)
	}
}

// do does a piece of work. It returns a channel if the work has to be tried again when that is
// closed: the memory is suspended, or enough workers wait for its owner already.
func (d *Device) do(w *qp.Work) <-chan struct{} {
	if owner, owned := w.Owner(); owner != nil {
		most := maxRegionWorkers
		if owned {
			most = maxOwnerWorkers
		}
		if c := d.work.enter(owner, most); c != nil {
			return c
		}
		defer d.work.leave(owner)
	}
	if w.Do(d.table) {
		return nil
	}
	c := w.Suspended()
	if c == nil {
		time.Sleep(retryPause)
	}
	return c
}

// carriedOut lets a queue pair go on after a piece of its work was done.
func (d *Device) carriedOut(q *QP, w *qp.Work) {
	now := d.now()
	q.mu.Lock()
	unread, why := q.core.Finished(w, now)
	peer, shift := q.unreadLocked(unread, now)
	q.executedLocked()
	q.mu.Unlock()
	peer.sendFailed(unread, why, now+shift)
	d.answer(q, now)
}

// carryOutWhen goes on with work when a channel is closed: its memory is not suspended any more, or
// a worker does not wait for its owner any more. That may take
// long, so a goroutine of its own waits, which takes no thread, and not a worker. The wait
// ends early if the queue pair gives its requests up, the device closes, or the time of the
// work is over.
func (d *Device) carryOutWhen(q *QP, w qp.Work, l qp.WorkKind, reopened <-chan struct{}) {
	q.mu.Lock()
	if q.gaveUp == nil {
		q.gaveUp = make(chan struct{})
	}
	gaveUp := q.gaveUp
	q.mu.Unlock()
	s := &d.work
	s.workers.Go(func() {
		var late <-chan time.Time // nil: the work may wait for ever
		if limit := w.Limit(); limit != 0 {
			timer := time.NewTimer(limit - d.now())
			defer timer.Stop()
			late = timer.C
		}
		select {
		case <-reopened:
		case <-gaveUp:
		case <-late:
		case <-s.closing:
		}
		d.carriedOut(q, &w)
		s.mu.Lock()
		s.list.push(deferredItem{q, l}) // there may be more work
		d.startWorkerLocked()
		s.mu.Unlock()
	})
}

// startWorkerLocked starts a worker, if there may be one more.
func (d *Device) startWorkerLocked() {
	s := &d.work
	if s.running < maxWorkers {
		s.running++
		s.workers.Add(1)
		go d.deferredWorker()
	}
}
