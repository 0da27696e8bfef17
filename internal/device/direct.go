package device

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
)

// direct is the short way between two queue pairs of one process, which most
// requests of the loop link take: they are executed and answered at once, under the
// locks of both, instead of going there and back by two transmit tokens. What finds
// the other side in use takes the long way.
//
// The caller holds q's lock. The peer's is only tried: the peer may be trying ours.
// It returns what the peer still owes, and whether the long way has something to do.
func (q *QP) direct(now qp.Time) (owed debt, rest bool) {
	peer, shift := q.neighbour()
	if peer == nil || !q.tx.CompareAndSwap(txIdle, txBusy) {
		return owed, true
	}
	if q.held == nil && peer.mu.TryLock() {
		if q.joined(peer) {
			note := q.exchange(peer, now, now+shift)
			if due := peer.executedLocked(); due || note {
				owed = debt{peer, now + shift}
			}
		}
		peer.mu.Unlock()
	}
	rest = q.core.Pending()
	return owed, q.leaveToken() || rest
}

// writeNext executes the first requests of a list at the other end, if they are WRITEs of
// a train each and there is nothing before them: the shortest way of all. It returns how
// many.
//
// The caller holds q's lock. While the token is free nobody has trains of q's in hand, nor
// gets any without the lock.
func (q *QP) writeNext(wrs []ib.SendWR) (done int) {
	if len(wrs) == 0 || !q.core.MayWrite(&wrs[0]) {
		return 0
	}
	peer, _ := q.neighbour()
	if peer == nil || q.tx.Load() != txIdle || !peer.mu.TryLock() {
		return 0
	}
	if q.joined(peer) {
		for left := directQuantum; done < len(wrs) && left > 0; done++ {
			n := q.core.WriteTo(peer.core, &wrs[done])
			if n == 0 {
				break
			}
			left -= max(n, directTrain)
		}
	}
	peer.mu.Unlock()
	return done
}

// neighbour returns the queue pair at the other end if it is one of this process to
// which there is a short way; and the difference of its device's time.
func (q *QP) neighbour() (peer *QP, shift qp.Time) {
	to := q.looped()
	if to == nil || q.core.Type != ib.RC {
		return nil, 0
	}
	if peer = q.near; peer == nil || peer.number != q.core.DestQPN() || peer.dev != to.dev {
		peer = to.dev.qps.Get(q.core.DestQPN())
		q.near = peer
	}
	if peer == q {
		return nil, 0
	}
	return peer, to.shift
}

// joined tells whether the queue pairs are connected with each other by the short way.
// Both are locked. One that is closed is connected with nobody, and is forgotten: there
// may be another with its number.
func (q *QP) joined(peer *QP) bool {
	back := peer.looped()
	if back != nil && back.dev == q.dev && q.core.Joined(peer.core) {
		return true
	}
	q.near = nil
	return false
}

// looped returns where the loop link leads, nil if the queue pair does not use it, or
// if somebody wants to see the packets. The queue pair is locked.
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

// directQuantum is how much goes the short way in one call, as both locks are held
// meanwhile: no more than one long train. A train counts for directTrain at least,
// which takes about as long to copy as a short one to execute.
const (
	directQuantum = train.MaxBytes
	directTrain   = 2 << 10
)

// exchange lets requests go to the peer and its answers come back, as many as one
// call may move. It returns whether somebody has left the peer a note. Both are
// locked.
func (q *QP) exchange(peer *QP, now, there qp.Time) (note bool) {
	if q.train == nil {
		q.train = new(train.Train)
	}
	t := q.train
	q.core.AllLeft()
	for left := directQuantum; left > 0 && !note && !peer.core.Full() && hand(t, q, peer, now, there); {
		left -= max(t.Len, directTrain)
		if q.core.AckedBy(peer.core, now) {
			continue
		}
		if !peer.core.Answering() || !peer.tx.CompareAndSwap(txIdle, txBusy) {
			break
		}
		stuck := peer.held != nil // what goes before all others
		for !stuck && left > 0 && peer.core.Answering() && hand(t, peer, q, there, now) {
			left -= max(t.Len, directTrain)
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
