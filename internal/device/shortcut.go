package device

// What a poster itself executes at the peer. PostSend tries both ways before it leaves the
// requests to the token's holder:
//
//  1. byShortcut: the poster copies, by a grant or at the neighbour, and the requests never
//     enter the send queue (qp.Shortcut).
//  2. exchange: trains and answers go under the locks of both queue pairs of one process.
//
// The neighbour of a queue pair is the peer's queue pair, if it is in this process.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
)

// byShortcut executes the first of the requests that are being posted, as many as can take a
// shortcut, and returns how many. The shortcut is a grant of the peer's if there is one, and
// otherwise the neighbour.
//
// The caller holds q's lock. The token must be free: then no goroutine has pulled trains of
// q's that have yet to leave, nor can one pull any without the lock. The neighbour's lock is
// only tried: a poster there may hold it and want q's.
func (q *QP) byShortcut(wrs []ib.SendWR) (n int) {
	if len(wrs) == 0 || q.tx.Load() != txIdle {
		return 0
	}
	if q.core.Shortcut != nil {
		return q.core.PostShortcut(q.core.Shortcut, wrs)
	}
	if !q.core.MayWrite(&wrs[0]) {
		return 0
	}
	peer, _ := q.neighbour()
	if peer == nil || !peer.mu.TryLock() {
		return 0
	}
	if q.joined(peer) {
		n = q.core.PostShortcut(peer.core.Neighbour(), wrs)
	}
	peer.mu.Unlock()
	return n
}

// exchange executes posted requests at the neighbour, and takes its answers, under the
// locks of both. This is how most requests of the loop link that take no shortcut are
// executed, instead of going there and back by two transmit tokens.
//
// The caller holds q's lock, and the neighbour's is only tried. exchange returns what the
// neighbour still owes, and whether the caller must call transmit for q.
func (q *QP) exchange(now qp.Time) (owed debt, rest bool) {
	peer, shift := q.neighbour()
	if peer == nil || !q.tx.CompareAndSwap(txIdle, txBusy) {
		return owed, true
	}
	if q.held == nil && peer.mu.TryLock() {
		if q.joined(peer) {
			note := q.exchangeLocked(peer, now, now+shift)
			peer.executedLocked()
			if note || peer.core.Pending() {
				owed = debt{peer, now + shift}
			}
		}
		peer.mu.Unlock()
	}
	rest = q.core.Pending()
	return owed, q.leaveToken() || rest
}

// neighbour returns the peer's queue pair if it is in this process and reached by the loop
// link, or nil; and what to add to this device's time for that of the peer's device.
func (q *QP) neighbour() (peer *QP, shift qp.Time) {
	to := q.looped()
	if to == nil || q.core.Type != ib.RC {
		return nil, 0
	}
	if peer = q.near; peer == nil || peer.number != q.core.DestQPN() || peer.dev != to.dev {
		peer = to.dev.findQP(q.core.DestQPN())
		q.near, q.nearAt = peer, 0
	}
	if peer == q {
		return nil, 0
	}
	return peer, to.shift
}

// joined reports whether a queue pair that neighbour has returned is connected with this one
// by the loop link, too. Both are locked. A closed one is not, and is forgotten: there may be
// another with its number.
//
// The result holds until one of the two is modified. Neither count of modifications ever
// falls, so their sum is the same only if both are.
func (q *QP) joined(peer *QP) bool {
	at := q.core.Modified() + peer.core.Modified()
	if q.nearAt == at && !q.dev.stopped.Load() {
		return true
	}
	back := peer.looped()
	if back != nil && back.dev == q.dev && q.core.Joined(peer.core) {
		q.nearAt = at
		return true
	}
	q.near, q.nearAt = nil, 0
	return false
}

// looped returns where the loop link leads. It returns nil if the queue pair does not use it,
// or if either device captures packets, which only deliver can show to the capture. The queue
// pair is locked.
func (q *QP) looped() *loopTarget {
	flow := q.core.Flow()
	if flow == nil || q.dev.capture != nil {
		return nil
	}
	p, ok := flow.Link.(*loopPeer)
	if !ok {
		return nil
	}
	to := p.target.Load()
	if to.dev.stopped.Load() || to.dev.capture != nil {
		return nil
	}
	return to
}

// exchangeQuantum is how many bytes one exchange moves, as both locks are held meanwhile:
// no more than one long train. A train counts for exchangeLeast at least, which takes
// about as long to copy as a short train to execute.
const (
	exchangeQuantum = train.MaxBytes
	exchangeLeast   = 2 << 10
)

// exchangeLocked gives requests to the peer and takes its answers, as many as one call may
// move. It reports whether a sender has left a note for the holder of the peer's token, which
// exchangeLocked was for a moment. Both queue pairs are locked.
func (q *QP) exchangeLocked(peer *QP, now, there qp.Time) (note bool) {
	if q.train == nil {
		q.train = new(train.Train)
	}
	t := q.train
	q.core.AllLeft()
	for left := exchangeQuantum; left > 0 && !note && !peer.core.Full() && hand(t, q, peer, now, there); {
		left -= t.Moved(exchangeLeast)
		if q.core.AckedBy(peer.core, now) {
			continue
		}
		if !peer.core.Answering() || !peer.tx.CompareAndSwap(txIdle, txBusy) {
			break
		}
		stuck := peer.held != nil // trains that wait for the link: they go before the answers
		for !stuck && left > 0 && peer.core.Answering() && hand(t, peer, q, there, now) {
			left -= t.Moved(exchangeLeast)
		}
		note = peer.leaveToken()
		if stuck {
			break
		}
	}
	q.executedLocked()
	return note
}

// hand pulls a train from one queue pair and gives it to the other, and reports
// whether there was one and it arrived.
func hand(t *train.Train, from, to *QP, now, there qp.Time) bool {
	if !from.core.Pull(t, now) {
		return false
	}
	t.From, t.To = t.Flow.Src, t.Flow.Dst
	f := to.core.Receive(t, there)
	if !f.OK() {
		from.core.SendFailed(t, f, now)
	}
	return f.OK()
}
