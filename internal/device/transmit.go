package device

// Sending. A queue pair's trains must leave in order, so one goroutine at a
// time sends for it: the one that holds the transmit token. Handing a train to
// a link may take long (a system call may fault on memory), so the queue pair's
// lock is not held meanwhile, and nobody waits for the token: who finds it
// taken leaves a note, and the holder looks again.

import (
	"errors"
	"sync"

	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// States of the token.
const (
	txIdle  = iota
	txBusy  // somebody sends
	txAgain // somebody sends, and must look again before leaving
)

// txQuantum is how many bytes one call moves; the rest is left to whoever makes
// progress next, so that a post does not take a second.
const txQuantum = 1 << 20

// batch is the trains that are pulled and sent together.
type batch struct {
	trains [16]train.Train
	ptrs   [16]*train.Train
}

var batches = sync.Pool{New: func() any {
	b := new(batch)
	for i := range b.trains {
		b.ptrs[i] = &b.trains[i]
	}
	return b
}}

// transmit sends what the queue pair has to send.
func (d *Device) transmit(q *QP, now qp.Time) {
	if !q.claimToken() {
		return
	}
	b := batches.Get().(*batch)
	more := d.drain(q, b, now)
	for !q.tx.CompareAndSwap(txBusy, txIdle) {
		q.tx.Store(txBusy)
		more = d.drain(q, b, d.now())
	}
	batches.Put(b)
	if more {
		d.later(q)
	}
}

// claimToken takes the token, or leaves a note for its holder.
func (q *QP) claimToken() bool {
	for {
		switch q.tx.Load() {
		case txIdle:
			if q.tx.CompareAndSwap(txIdle, txBusy) {
				return true
			}
		case txBusy:
			if q.tx.CompareAndSwap(txBusy, txAgain) {
				return false
			}
		case txAgain:
			return false
		}
	}
}

// drain pulls and sends until there is nothing more, or the quantum is used up
// and it returns true.
func (d *Device) drain(q *QP, b *batch, now qp.Time) bool {
	for bytes := 0; bytes < txQuantum; {
		n := 0
		q.mu.Lock()
		ticket := d.ticket()
		for n < len(b.trains) && bytes < txQuantum && q.core.Pull(&b.trains[n], now) {
			b.trains[n].Ticket = ticket
			bytes += b.trains[n].Len
			n++
		}
		stalled := q.core.Stalled()
		d.rearmLocked(q)
		q.mu.Unlock()
		if stalled {
			d.await(q)
		}
		if n == 0 {
			return false
		}
		if d.send(q, b.ptrs[:n], now) && n < len(b.trains) && bytes < txQuantum {
			return false // the last Pull has found nothing
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.core.Pending()
}

// send hands trains to their links, in order. It returns false if one could not
// be read, which the queue pair may have something to say about. What follows it
// is pulled again, or flushed. If its memory only has to be fetched first, then
// only what is of its kind stays behind: answers, which the peer asks for again,
// do not wait for requests, nor requests for answers.
func (d *Device) send(q *QP, ts []*train.Train, now qp.Time) bool {
	var owed debt
	defer owed.settle()
	var stays [2]bool // requests, answers
	all := true
	for len(ts) > 0 {
		n, fault, run := 0, mem.Fault{}, ts
		if !all { // one by one
			if run = ts[:1]; stays[kindOf(ts[0])] {
				q.notSent(run)
				ts = ts[1:]
				continue
			}
		}
		if p, ok := ts[0].Flow.Link.(*loopPeer); ok {
			if fault = p.deliver(d, ts[0], now, &owed); fault.OK() {
				n = 1
			}
		} else {
			n, fault = d.sendLink(run)
		}
		q.sent(ts[:n], now)
		ts = ts[n:]
		if fault.OK() {
			continue
		}
		all = false
		d.sendFailed(q, ts[0], fault, now)
		if fault.Kind != mem.FaultPending {
			q.notSent(ts[1:])
			break
		}
		stays[kindOf(ts[0])] = true
		ts = ts[1:]
	}
	return all
}

// kindOf is 0 for a request and 1 for an answer.
func kindOf(t *train.Train) int {
	if t.Kind == wire.KindAck || t.Kind == wire.KindReadResponse || t.Kind == wire.KindAtomicAck {
		return 1
	}
	return 0
}

// sendFailed tells the core of a train that could not be read.
func (d *Device) sendFailed(q *QP, t *train.Train, f mem.Fault, now qp.Time) {
	q.mu.Lock()
	q.core.SendFailed(t, f, now)
	slow := q.core.WantsWork()
	q.mu.Unlock()
	if slow != 0 {
		d.slowly(q, slow)
	}
}

// notSent tells the core of trains that have not left.
func (q *QP) notSent(ts []*train.Train) {
	if len(ts) == 0 {
		return
	}
	q.mu.Lock()
	for _, t := range ts {
		q.core.NotSent(t)
	}
	q.mu.Unlock()
}

// sendLink hands the trains up to the next one for the loop link to the
// device's link.
func (d *Device) sendLink(ts []*train.Train) (int, mem.Fault) {
	k := 1
	for k < len(ts) {
		if _, loop := ts[k].Flow.Link.(*loopPeer); loop {
			break
		}
		k++
	}
	n, err := d.link.Send(ts[:k])
	if err == nil {
		return k, mem.Fault{} // what the link could not send is lost, as on any network
	}
	var pe *link.PayloadError
	if errors.As(err, &pe) {
		if pe.Packet > 0 {
			ts[n].TrimFront(pe.Packet) // what failed begins there
		}
		return n, pe.Fault
	}
	return k, mem.Fault{}
}

// sent tells the core which trains left, if it wants to know.
func (q *QP) sent(ts []*train.Train, now qp.Time) {
	locked := false
	for _, t := range ts {
		if t.Cookie == 0 {
			continue
		}
		if !locked {
			q.mu.Lock()
			locked = true
		}
		q.core.Sent(t, now)
	}
	if locked {
		q.mu.Unlock()
	}
}
