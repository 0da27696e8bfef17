package device

// Slow work of queue pairs: memory that has to be fetched before a request can go
// on, FLUSHes to persistence. Storage may take milliseconds, or hang. So the work
// is done by goroutines of its own, which hold no lock and no read section over
// it; nobody waits but the queue pair, or the half of it, whose work it is.
//
//  1. receive (receive.go) and send (transmit.go) find that a queue pair has slow
//     work, and slowly puts it on the list, by lanes.
//  2. A worker does the work, piece by piece, and lets the queue pair go on after
//     each.

import (
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/qp"
)

const (
	// maxWorkers is how many lanes of queue pairs are served at a time. Each
	// costs a thread, while it waits.
	maxWorkers = 32
	// retryPause is how long a worker waits when bytes that it has fetched are
	// gone again at once: there is more in use than memory holds.
	retryPause = time.Millisecond
)

// deferredItem is one kind of slow work of a queue pair.
type deferredItem struct {
	q    *QP
	kind qp.WorkKind
}

type deferredWork struct {
	mu      sync.Mutex         // guards what follows
	list    ring[deferredItem] // wait for a worker
	running int
	closed  bool

	closing chan struct{}  // closed by close
	workers sync.WaitGroup // all end when the list is empty; close waits
}

// close waits until storage has done what it is at. Nothing is begun any more:
// all queue pairs are closed.
func (s *deferredWork) close() {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.closing)
	}
	s.mu.Unlock()
	s.workers.Wait()
}

// slowly has slow work of a queue pair done, in the lanes of the set.
func (d *Device) deferWork(q *QP, lanes uint8) {
	for l := range qp.NumWorkKinds {
		if lanes&(1<<l) == 0 || !q.working[l].CompareAndSwap(false, true) {
			continue // none, or whoever is at it looks again before leaving
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

// deferredWorker serves queue pairs while there are any.
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

// carryOut does the work of one lane, oldest first.
func (d *Device) carryOut(q *QP, l qp.WorkKind) {
	var w qp.Work
	for {
		q.mu.Lock()
		more := q.core.NextWork(l, &w)
		if !more {
			q.working[l].Store(false) // under the lock: what comes later finds it so
		}
		q.mu.Unlock()
		if !more {
			return
		}
		d.runWaiting(q.peer.Load(), d.now()) // it stands still, and others have its credits
		c := w.Suspended()
		if c == nil && !w.Do(d.table) {
			if c = w.Suspended(); c == nil {
				time.Sleep(retryPause)
			}
		}
		if c != nil {
			d.carryOutWhen(q, w, l, c)
			return
		}
		d.carriedOut(q, &w)
	}
}

// carriedOut lets a queue pair go on after its work was done.
func (d *Device) carriedOut(q *QP, w *qp.Work) {
	now := d.now()
	q.mu.Lock()
	q.core.Finished(w, now)
	q.executedLocked()
	q.mu.Unlock()
	d.answer(q, now)
}

// carryOutWhen goes on with work when its memory is suspended no more, which may take
// long: no worker waits for it, but a goroutine, which costs no thread. It ends early if
// the queue pair gives its requests up, or the device closes.
func (d *Device) carryOutWhen(q *QP, w qp.Work, l qp.WorkKind, reopened <-chan struct{}) {
	q.mu.Lock()
	if q.gaveUp == nil {
		q.gaveUp = make(chan struct{})
	}
	gaveUp := q.gaveUp
	q.mu.Unlock()
	s := &d.work
	s.workers.Go(func() {
		select {
		case <-reopened:
		case <-gaveUp:
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
