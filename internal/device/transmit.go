package device

// Sending. A queue pair's trains must leave in order, so one goroutine at a
// time sends for it: the one that holds the transmit token. Handing a train to
// a link may take long (a system call may fault on memory), so the queue pair's
// lock is not held meanwhile, and no sender waits for the token: one that finds it
// taken leaves a note (txAgain), and the holder looks again. Close alone waits, asleep, until
// the holder wakes it; it keeps the token for good.
//
// A link may be busy (link.ErrBusy). Then the trains that it did not take wait with the queue
// pair, and go before all others when the link has room. A link.Freer reports when that is;
// any other link is tried again every busyRetry. A datagram waits for datagramPatience at
// most: the trains behind it may be for other peers.

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
	txBusy    // the token has a holder
	txAgain   // the token has a holder, which must look again before it leaves
	txClosing // Close has the token, or waits for its holder to leave; it stays so
)

// txQuantum is how many bytes one call moves; the rest is left to the next poll or the
// background goroutine (later), so that a post does not take a second.
const txQuantum = 1 << 20

// datagramPatience is how long a datagram waits for room in a ring; then it is lost. A peer
// process that shares its processor with a few busy ones reads again within that time, and
// one that is stopped delays the datagrams to other peers only once: see link.Shared.
const datagramPatience = 50 * time.Millisecond

// busyRetry is after how long trains that a link was too busy for are sent again, if the link
// does not report when it is free.
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
		q.later()
	}
}

// leaveToken gives the token back, and reports whether a sender has left a note: then the
// caller must see to it that transmit is called.
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

// takeToken takes the token for good: it waits until the holder, which may be handing the
// last trains to a link, has left. It is called once, by Close.
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
		default: // txAgain: there is a note already; txClosing: there is nothing to send any more
			return false
		}
	}
}

// drain pulls and sends until there is nothing more, the link is busy, or the quantum is used
// up. It reports whether it has left something that later must go on with.
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

// send hands trains to their links, in order. It returns those that the link is too busy for,
// and false if one could not be read: the core may have something else to send then.
func (d *Device) send(q *QP, ts []*train.Train, now qp.Time) (left []*train.Train, ok bool) {
	n, fault, busy := d.sendLink(ts)
	q.sent(ts[:n], now)
	if n == len(ts) {
		return nil, true
	}
	return d.sendRest(q, ts[n:], fault, busy, now)
}

// sendRest goes on with trains of which the first goes by the loop link or to a group, could
// not be read, or found the link busy. The trains behind one that could not be read are
// pulled again, or flushed. If its memory only has to be fetched, then only those of its kind
// stay behind: answers, which the peer asks for again, do not wait for requests, nor requests
// for answers.
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

// unreadable reports to the core that the first of some trains could not be read, and returns
// those that may still be sent. If its memory only has to be fetched, it marks the kind of
// that train in stays, else it returns none.
func (d *Device) unreadable(q *QP, ts []*train.Train, f mem.Fault, stays *[2]bool, now qp.Time) []*train.Train {
	d.sendFailed(q, ts[0], f, now)
	if f.Kind != mem.FaultPending {
		q.notSent(ts[1:])
		return nil
	}
	stays[kindOf(ts[0])] = true
	return ts[1:]
}

// sendRun sends the first of some trains, and those behind it that go by the device's link as
// well. It returns how many have left; a fault or busy is that of the next.
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

// withoutKinds returns the trains but for those of a kind that stays behind, which it reports
// to the core.
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

// sendFailed reports a train that could not be read to the core, unless the train is from
// before a reset: the queue pair may be connected with another peer now.
func (d *Device) sendFailed(q *QP, t *train.Train, f mem.Fault, now qp.Time) {
	q.mu.Lock()
	if q.core.Resets() == q.heldResets {
		q.core.SendFailed(t, f, now)
	}
	q.executedLocked()
	q.mu.Unlock()
}

// notSent reports trains that have not left to the core, unless they are from before a reset.
func (q *QP) notSent(ts []*train.Train) {
	if len(ts) == 0 {
		return
	}
	q.mu.Lock()
	if q.core.Resets() == q.heldResets {
		for _, t := range ts {
			q.core.NotSent(t)
		}
	}
	q.mu.Unlock()
}

// hold keeps trains that the link is too busy for. If the link is a link.Freer, none is
// forgotten: if it becomes free after the queue pair is listed, resume finds it in the list;
// if it did before, since heldAt was read, hold sees that. Otherwise a timer has the trains
// sent again. A datagram that is the first one waits until the given time; 0: it begins to
// wait now.
func (d *Device) hold(q *QP, b *batch, left []*train.Train, until qp.Time) {
	q.held, q.heldLeft = b, left
	q.heldAnswers.Store(slices.ContainsFunc(left, (*train.Train).IsAnswer))
	own := isOwn(left[0].Flow) // the loop link may not report when it is free
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
		q.rearmLocked()
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
		q.later()
	}
}

// sendHeld sends the trains that waited until the link is less busy, and reports whether none
// are left. What the queue pair has given up meanwhile is not sent any more: its memory may be
// in use for something else.
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
	left, _ := d.send(q, live, now)       // if one could not be read, that was reported to the core
	if len(left) > 0 && left[0].Expired { // the link could have dropped it, and has not
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

// release puts a batch back into the pool, with all its pointers: ptrs may have been changed.
func (b *batch) release() {
	for i := range b.trains {
		b.ptrs[i] = &b.trains[i]
	}
	batches.Put(b)
}

// frees returns how often the link may have become less busy; 0 if it does not count that.
func (d *Device) frees() uint64 {
	if d.freer == nil {
		return 0
	}
	return d.freer.Frees()
}

// resume lets the queue pairs go on whose trains wait until the link is less busy. The link
// calls it when it may be.
func (d *Device) resume() {
	d.heldQPs.Lock()
	list := d.heldQPs.list
	d.heldQPs.list = nil
	for _, q := range list {
		q.listed = false
	}
	d.heldQPs.Unlock()
	for _, q := range list {
		q.later()
	}
}

// isOwn reports whether the device itself delivers the trains of a flow, by the loop link or
// to a multicast group, and not its link.
func isOwn(f *train.Flow) bool {
	switch f.Link.(type) {
	case *loopPeer, *groupPeer:
		return true
	}
	return false
}

// sendLink hands the trains up to the first one that the device itself delivers (isOwn) to
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
			ts[n].TrimFront(pe.Packet) // the packets before it have left
		}
		return n, pe.Fault, false
	}
	return k, mem.Fault{}, false
}

// sent reports the trains that have left to the core: those with a cookie.
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
