package device

// Sending. A queue pair's trains must leave in order, so one goroutine at a
// time sends for it: the one that holds the transmit token. Handing a train to
// a link may take long (a system call may fault on memory), so the queue pair's
// lock is not held meanwhile, and no sender waits for the token: one that finds it
// taken leaves a note, and the holder looks again. Close alone waits, asleep, and is
// woken by the holder; from then on nobody gets the token any more.
//
// A link may be busy (link.ErrBusy). Then the trains that it did not take stay with
// the queue pair, which is stalled until the link has room, and go before all
// others. A link tells when that is (link.Freer); one that does not is tried again
// every busyRetry. A datagram waits like this for datagramPatience at most: those behind
// it are for other peers, perhaps.

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// States of the token.
const (
	txIdle    = iota
	txBusy    // somebody sends
	txAgain   // somebody sends, and must look again before leaving
	txClosing // Close has the token, or waits for its holder to leave; it stays so
)

// txQuantum is how many bytes one call moves; the rest is left to whoever makes
// progress next, so that a post does not take a second.
const txQuantum = 1 << 20

// datagramPatience is how long a datagram waits for room in a ring; then it is lost. A
// peer that shares its processor with a few busy ones reads again within that time, and
// a peer that is stopped holds up those to others only once: see link.Shared.
const datagramPatience = 50 * time.Millisecond

// busyRetry is how long trains wait that a link was too busy for, if the link does not tell
// when it is free again.
const busyRetry = time.Millisecond

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
	more := d.drain(q, now)
	for !q.tx.CompareAndSwap(txBusy, txIdle) {
		if !q.tx.CompareAndSwap(txAgain, txBusy) {
			close(q.tokenFree) // txClosing
			return
		}
		more = d.drain(q, d.now())
	}
	if more {
		d.later(q)
	}
}

// leaveToken gives the token back, and reports whether somebody has left a note.
func (q *QP) leaveToken() bool {
	if q.tx.CompareAndSwap(txBusy, txIdle) {
		return false
	}
	if q.tx.CompareAndSwap(txAgain, txIdle) {
		return true
	}
	close(q.tokenFree) // txClosing
	return false
}

// takeToken takes the token for good: it waits until whoever hands the last trains to a
// link has left. It is called once, by Close.
func (q *QP) takeToken() {
	q.tokenFree = make(chan struct{})
	if q.tx.Swap(txClosing) != txIdle {
		<-q.tokenFree
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
		default: // txAgain, or there is nothing to send any more
			return false
		}
	}
}

// drain pulls and sends until there is nothing more, or the quantum is used up
// and it returns true.
func (d *Device) drain(q *QP, now qp.Time) bool {
	if q.held != nil && !d.sendHeld(q, now) {
		return false
	}
	b := batches.Get().(*batch)
	defer func() {
		if q.held != b {
			batches.Put(b)
		}
	}()
	for bytes := 0; bytes < txQuantum; {
		n := 0
		q.lockSoon()
		ticket := d.ticket()
		q.heldAt, q.heldResets = d.frees(), q.core.Resets()
		q.core.AllLeft()
		for n < len(b.trains) && bytes < txQuantum && q.core.Pull(&b.trains[n], now) {
			b.trains[n].Ticket = ticket
			bytes += b.trains[n].Len
			n++
		}
		copied := q.core.TakeShortcut()
		bytes += copied
		stalled, use := q.core.StalledOnCredits(), q.peer.Load()
		q.executedLocked()
		q.mu.Unlock()
		if stalled {
			d.await(use)
		}
		if n == 0 && copied > 0 {
			continue
		}
		if n == 0 {
			return false
		}
		all := n < len(b.trains) && bytes < txQuantum // the last Pull has found nothing
		left, ok := d.send(q, b.ptrs[:n], now)
		for i := range n {
			if t := &b.trains[i]; t.Kept {
				bytes -= max(t.Len-exchangeLeast, 0)
			}
		}
		if len(left) > 0 {
			d.hold(q, b, left, 0)
			return false
		}
		if ok && all && copied == 0 {
			return false
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.core.Pending()
}

// send hands trains to their links, in order. It returns those that the link is too
// busy for; and false if one could not be read, which the queue pair may have
// something to say about.
func (d *Device) send(q *QP, ts []*train.Train, now qp.Time) (left []*train.Train, ok bool) {
	n, fault, busy := d.sendLink(ts)
	q.sent(ts[:n], now)
	if n == len(ts) {
		return nil, true
	}
	return d.sendRest(q, ts[n:], fault, busy, now)
}

// sendRest goes on with trains of which the first is the device's own affair, or could
// not be read, or found the link busy. What follows one that could not be read is pulled
// again, or flushed. If its memory only has to be fetched first, then only what is of its
// kind stays behind: answers, which the peer asks for again, do not wait for requests,
// nor requests for answers.
func (d *Device) sendRest(q *QP, ts []*train.Train, fault mem.Fault, busy bool, now qp.Time) (left []*train.Train, ok bool) {
	var owed debt
	defer owed.pay()
	var stays [2]bool // requests, answers
	ok = true
	for len(ts) > 0 {
		switch {
		case busy:
			return q.withoutKinds(ts, stays), ok
		case !fault.OK():
			ok = false
			ts = d.unreadable(q, ts, fault, &stays, now)
			fault = mem.Fault{}
		case stays[kindOf(ts[0])]:
			q.notSent(ts[:1])
			ts = ts[1:]
		default:
			run := ts
			if !ok {
				run = ts[:1] // one by one: of those behind it some may stay
			}
			var n int
			n, fault, busy = d.sendRun(run, now, &owed)
			q.sent(ts[:n], now)
			ts = ts[n:]
		}
	}
	return nil, ok
}

// unreadable tells the core that the first of some trains could not be read, and returns those
// that may still be sent. If its memory only has to be fetched, what is of its kind stays.
func (d *Device) unreadable(q *QP, ts []*train.Train, f mem.Fault, stays *[2]bool, now qp.Time) []*train.Train {
	d.sendFailed(q, ts[0], f, now)
	if f.Kind != mem.FaultPending {
		q.notSent(ts[1:])
		return nil
	}
	stays[kindOf(ts[0])] = true
	return ts[1:]
}

// sendRun sends the first of some trains, and others behind it that go to the same link. It
// returns how many have left; a fault or busy is that of the next.
func (d *Device) sendRun(ts []*train.Train, now qp.Time, owed *debt) (n int, fault mem.Fault, busy bool) {
	switch p := ts[0].Flow.Link.(type) {
	case *loopPeer:
		fault, busy = p.deliver(d, ts[:1], now, owed)
	case *groupPeer:
		fault = p.send(d, ts[:1], now)
	default:
		return d.sendLink(ts)
	}
	if fault.OK() && !busy {
		n = 1
	}
	return n, fault, busy
}

// kindOf is 0 for a request and 1 for an answer.
func kindOf(t *train.Train) int {
	if t.IsAnswer() {
		return 1
	}
	return 0
}

// withoutKinds returns the trains but for those of a kind that stays behind.
func (q *QP) withoutKinds(ts []*train.Train, stays [2]bool) []*train.Train {
	if !stays[0] && !stays[1] {
		return ts
	}
	left := ts[:0]
	for i, t := range ts {
		if stays[kindOf(t)] {
			q.notSent(ts[i : i+1])
		} else {
			left = append(left, t)
		}
	}
	return left
}

// sendFailed tells the core of a train that could not be read, unless it is one
// from before a reset: the queue pair has another peer now, which is not to suffer
// for it.
func (d *Device) sendFailed(q *QP, t *train.Train, f mem.Fault, now qp.Time) {
	q.mu.Lock()
	if q.core.Resets() == q.heldResets {
		q.core.SendFailed(t, f, now)
	}
	q.executedLocked()
	q.mu.Unlock()
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

// hold keeps trains that the link is too busy for. If the link tells when it is free
// again: whoever frees it after this finds the queue pair in the list, and whoever did so
// before, since the link refused the trains, is seen here. If it does not, a timer has them
// sent again. If the first one is a datagram, it waits until a time; 0 if it begins to
// wait now.
func (d *Device) hold(q *QP, b *batch, left []*train.Train, until qp.Time) {
	q.held, q.heldLeft = b, left
	q.heldAnswers.Store(slices.ContainsFunc(left, (*train.Train).IsAnswer))
	own := isOwn(left[0].Flow) // who takes those may not be able to tell
	if datagram := left[0].Transport == wire.UD; datagram || d.freer == nil || own {
		now := d.now()
		q.mu.Lock()
		if datagram && until == 0 {
			until = now + d.patience
		}
		if datagram {
			q.heldUntil = until
		}
		if d.freer == nil || own {
			q.heldRetry = now + busyRetry
		}
		d.rearmLocked(q)
		q.mu.Unlock()
	}
	if d.freer == nil {
		return
	}
	d.heldQPs.Lock()
	if !q.listed {
		q.listed = true
		d.heldQPs.list = append(d.heldQPs.list, q)
	}
	d.heldQPs.Unlock()
	if q.heldAt != d.freer.Frees() {
		d.later(q)
	}
}

// sendHeld sends the trains that were held, and reports whether none are left. What
// the queue pair has given up meanwhile is not sent any more: its memory may be in
// use for something else.
func (d *Device) sendHeld(q *QP, now qp.Time) bool {
	b, ts := q.held, q.heldLeft
	q.held, q.heldLeft = nil, nil
	q.heldAnswers.Store(false)
	q.mu.Lock()
	state, resets := q.core.State(), q.core.Resets()
	until, late := q.heldUntil, q.heldExpired
	q.heldUntil, q.heldExpired, q.heldRetry = 0, false, 0
	q.mu.Unlock()
	live := ts[:0]
	for _, t := range ts {
		if resets == q.heldResets && (state != ib.QPErr && state != ib.QPSQE || t.IsAnswer()) {
			live = append(live, t)
		}
	}
	if late && len(live) > 0 {
		live[0].Expired = true
	}
	q.heldAt = d.frees()
	left, _ := d.send(q, live, now)       // if one could not be read, the queue pair has heard of it
	if len(left) > 0 && left[0].Expired { // the link has not dropped it, as it might have
		q.sent(left[:1], now)
		if left = left[1:]; len(left) > 0 {
			left, _ = d.send(q, left, now)
		}
	}
	if len(left) > 0 {
		if len(left) < len(live) {
			until = 0
		}
		d.hold(q, b, left, until)
		return false
	}
	b.release()
	return true
}

// release puts a batch back whose list was changed.
func (b *batch) release() {
	for i := range b.trains {
		b.ptrs[i] = &b.trains[i]
	}
	batches.Put(b)
}

// frees counts how often the link may have become less busy.
func (d *Device) frees() uint64 {
	if d.freer == nil {
		return 0
	}
	return d.freer.Frees()
}

// resume lets the queue pairs go on that were stalled.
func (d *Device) resume() {
	d.heldQPs.Lock()
	list := d.heldQPs.list
	d.heldQPs.list = nil
	for _, q := range list {
		q.listed = false
	}
	d.heldQPs.Unlock()
	for _, q := range list {
		d.later(q)
	}
}

// isOwn tells whether a flow is the device's own affair, not the link's.
func isOwn(f *train.Flow) bool {
	switch f.Link.(type) {
	case *loopPeer, *groupPeer:
		return true
	}
	return false
}

// sendLink hands the trains up to the first one that is the device's own affair to
// the device's link.
func (d *Device) sendLink(ts []*train.Train) (n int, fault mem.Fault, busy bool) {
	k := 0
	for k < len(ts) && !isOwn(ts[k].Flow) {
		k++
	}
	if k == 0 {
		return 0, mem.Fault{}, false
	}
	n, err := d.link.Send(ts[:k])
	if err == nil {
		return k, mem.Fault{}, false // what the link could not send is lost, as on any network
	}
	if err == link.ErrBusy {
		return n, mem.Fault{}, true
	}
	var pe *link.PayloadError
	if errors.As(err, &pe) {
		if pe.Packet > 0 {
			ts[n].TrimFront(pe.Packet) // what failed begins there
		}
		return n, pe.Fault, false
	}
	return k, mem.Fault{}, false
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
