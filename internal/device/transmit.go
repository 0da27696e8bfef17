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
// be read, which the queue pair may have something to say about.
func (d *Device) send(q *QP, ts []*train.Train, now qp.Time) bool {
	var owed debt
	defer owed.settle()
	for len(ts) > 0 {
		n, fault := 0, mem.Fault{}
		switch p := ts[0].Flow.Link.(type) {
		case *loopPeer:
			if fault = p.deliver(d, ts[0], now, &owed); fault.OK() {
				n = 1
			}
		case *groupPeer:
			if fault = p.send(d, ts[:1], now); fault.OK() {
				n = 1
			}
		default:
			n, fault = d.sendLink(ts)
		}
		q.sent(ts[:n], now)
		if !fault.OK() {
			q.mu.Lock()
			q.core.SendFailed(ts[n], fault, now)
			q.mu.Unlock()
			return false // what follows is pulled again, or flushed
		}
		ts = ts[n:]
	}
	return true
}

// isOwn tells whether a flow is the device's own affair, not the link's.
func isOwn(f *train.Flow) bool {
	switch f.Link.(type) {
	case *loopPeer, *groupPeer:
		return true
	}
	return false
}

// sendLink hands the trains up to the next one that is the device's own affair to
// the device's link.
func (d *Device) sendLink(ts []*train.Train) (int, mem.Fault) {
	k := 1
	for k < len(ts) {
		if isOwn(ts[k].Flow) {
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
