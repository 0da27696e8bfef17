package device

// FLUSH to persistence: storage may take milliseconds, or hang. So the work is
// done by goroutines of its own, which hold no lock and no read section over it;
// nobody waits but the queue pair whose FLUSH it is.
//
//  1. receive (receive.go) finds that a queue pair has a FLUSH to carry out, and
//     persist puts it on the list.
//  2. A worker brings the bytes to storage, one FLUSH of the queue pair after
//     the other, and lets it answer each.

import (
	"sync"

	"github.com/verbena-rdma/verbena/internal/qp"
)

// persistWorkers is how many queue pairs are served at a time.
const persistWorkers = 8

type persister struct {
	mu      sync.Mutex // guards what follows
	list    ring[*QP]  // wait for a worker
	running int
	closed  bool

	workers sync.WaitGroup // all end when the list is empty; close waits
}

// close waits until storage has done what it is at. Nothing is begun any more:
// all queue pairs are closed.
func (p *persister) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.workers.Wait()
}

// persist has the FLUSHes of a queue pair carried out.
func (d *Device) persist(q *QP) {
	if !q.persisting.CompareAndSwap(false, true) {
		return // whoever is at it looks again before leaving
	}
	p := &d.persister
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.list.push(q)
	if p.running < persistWorkers {
		p.running++
		p.workers.Add(1)
		go d.persistWorker()
	}
}

// persistWorker serves queue pairs while there are any.
func (d *Device) persistWorker() {
	p := &d.persister
	defer p.workers.Done()
	for {
		p.mu.Lock()
		if p.list.len() == 0 {
			p.running--
			p.mu.Unlock()
			return
		}
		q := p.list.pop()
		p.mu.Unlock()
		d.carryOut(q)
	}
}

// carryOut carries out the FLUSHes of a queue pair, oldest first.
func (d *Device) carryOut(q *QP) {
	var s qp.Sync
	for {
		q.mu.Lock()
		more := q.core.NextSync(&s)
		if !more {
			q.persisting.Store(false) // under the lock: what comes later finds it so
		}
		q.mu.Unlock()
		if !more {
			return
		}
		fault := d.table.Persist(s.Range, s.Actor)
		q.mu.Lock()
		q.core.Synced(&s, fault)
		q.mu.Unlock()
		d.transmit(q, d.now())
	}
}
