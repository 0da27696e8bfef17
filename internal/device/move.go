package device

// Moves of a queue pair's bytes by engines, to, from and between memory that the CPU does
// not address (qp/staged.go). The queue pair has a goroutine of its own, its mover, as long as
// there are moves. The mover begins them in order, some at a time, and waits for them: it
// holds no lock and takes no worker meanwhile, and only this queue pair waits.

import (
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
)

// moveDepth is how many moves of a queue pair are under way at most.
const moveDepth = 16

// moveLocked has the queue pair's mover do its moves; it starts one if there is none.
func (d *Device) moveLocked(q *QP) {
	q.full.Store(q.core.Full())
	if q.mover {
		q.more.Store(q.core.Moving())
		return
	}
	s := &d.work
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		q.mover = true
		s.workers.Go(func() { d.move(q) })
	}
}

// underWay is a move that the mover has taken; gaveUp is closed when its queue pair gives it
// up.
type underWay struct {
	*qp.Move
	gaveUp <-chan struct{}
}

// move is a mover: it does moves while there are some.
func (d *Device) move(q *QP) {
	var under []underWay // oldest first
	begun := 0           // how many of them were begun
	idle := false        // there was nothing to do for a while
	for {
		q.lockSoon()
		gaveUp := q.gaveUpLocked()
		for len(under) < moveDepth {
			m := q.core.NextMove()
			if m == nil {
				break
			}
			under = append(under, underWay{m, gaveUp})
		}
		if len(under) == 0 && !idle && q.moverGone == nil {
			q.more.Store(false)
			q.mu.Unlock()
			idle = !q.moreSoon()
			continue
		}
		if len(under) == 0 {
			q.mover = false
			if q.moverGone != nil {
				close(q.moverGone)
				q.moverGone = nil
			}
			q.mu.Unlock()
			return
		}
		q.mu.Unlock()
		idle = false
		for begun < len(under) && (begun == 0 || !under[begun-1].Failed()) { // nothing is begun behind one that has failed
			if d.begin(under[begun], begun > 0); under[begun].Short() {
				break // those before it give staging bytes back
			}
			begun++
		}
		n := 0
		for n == 0 || n < begun && under[n].Over() {
			m := under[n]
			d.reach(m, func() mem.Fault { return m.Wait(q.core.Stream()) })
			n++
		}
		d.moved(q, under[:n])
		under = append(under[:0], under[n:]...)
		begun -= n
	}
}

// moreSoon reports whether there are moves again within the time that it would take to start
// another mover: to wake a processor takes longer than most engines need for a message.
func (q *QP) moreSoon() bool {
	for range moverLooks {
		if q.more.Load() {
			return true
		}
		runtime.Gosched()
	}
	return false
}

const moverLooks = 256 // some 50 µs

// stillFull brings full up to date, and returns it: the queue pair may have got room while it
// had no mover.
func (q *QP) stillFull() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	full := q.core.Full()
	q.full.Store(full)
	return full
}

// begin begins a move; one that the queue pair has given up moves nothing. ahead: moves before it are under way.
func (d *Device) begin(m underWay, ahead bool) {
	select {
	case <-m.gaveUp:
		m.GiveUp()
	default:
	}
	d.reach(m, func() mem.Fault { return m.Begin(ahead) })
}

// lockSoon locks the queue pair. The lock's holder is mostly a post, which unlocks within a
// microsecond or two. So lockSoon tries a few times before it sleeps: to be woken would take
// longer.
func (q *QP) lockSoon() {
	for range lockTries {
		if q.mu.TryLock() {
			return
		}
		runtime.Gosched()
	}
	q.mu.Lock()
}

const lockTries = 64

// awaitMoves waits until no engine accesses memory for the queue pair any more. The queue pair
// has been reset, so the program may use that memory for something else afterwards.
func (q *QP) awaitMoves() {
	q.mu.Lock()
	if !q.mover {
		q.mu.Unlock()
		return
	}
	if q.moverGone == nil {
		q.moverGone = make(chan struct{})
	}
	gone := q.moverGone
	q.mu.Unlock()
	<-gone
}

// gaveUpLocked returns a channel that is closed when the queue pair gives its requests up.
func (q *QP) gaveUpLocked() <-chan struct{} {
	if q.gaveUp == nil {
		q.gaveUp = make(chan struct{})
	}
	return q.gaveUp
}

// reach does a step of a move, as soon as the memory that it needs is there. It gives the move
// up if the queue pair does, or if the device closes.
func (d *Device) reach(m underWay, step func() mem.Fault) {
	for {
		f := step()
		if f.OK() {
			return
		}
		if c := f.Suspended(); c != nil {
			select {
			case <-c:
			case <-m.gaveUp:
				m.GiveUp()
			case <-d.work.closing:
				m.GiveUp()
			}
			continue
		}
		select {
		case <-m.gaveUp:
			m.GiveUp()
		default:
			if left := f.Await(); left.Kind == mem.FaultPending {
				time.Sleep(retryPause)
			}
		}
	}
}

// moved lets the queue pair go on after moves.
func (d *Device) moved(q *QP, moves []underWay) {
	now := d.now()
	var unread *train.Train
	var why mem.Fault
	q.lockSoon()
	wasFull := q.full.Load()
	for _, m := range moves {
		if t, f := q.core.Moved(m.Move, now); t != nil {
			unread, why = t, f
		}
	}
	peer, shift := q.unreadLocked(unread, now)
	q.executedLocked()
	full := q.core.Full()
	q.full.Store(full)
	q.mu.Unlock()
	peer.sendFailed(unread, why, now+shift)
	d.answer(q, now)
	if wasFull && !full && peer != nil {
		peer.later()
	}
}

// unreadLocked asks for a train again whose payload an engine could not read, if there is one
// and it is of another process. It returns the queue pair's neighbour, and how much later its
// time is; that one is told of its train by sendFailed.
func (q *QP) unreadLocked(unread *train.Train, now qp.Time) (peer *QP, shift qp.Time) {
	peer, shift = q.neighbour()
	switch {
	case unread == nil || peer != nil:
	case unread.IsAnswer():
		q.core.AnswerUnread(now)
	default:
		q.core.Unread()
	}
	return peer, shift
}

// sendFailed tells a queue pair, if there is one, that a train of it could not be read, if
// there is one. The caller holds no lock.
func (q *QP) sendFailed(unread *train.Train, why mem.Fault, now qp.Time) {
	if q == nil || unread == nil {
		return
	}
	q.mu.Lock()
	if q.core.Lends(unread) { // the train is of this queue pair, and not from before a reset
		q.core.SendFailed(unread, why, now)
		q.executedLocked()
	}
	q.mu.Unlock()
	q.dev.answer(q, now)
}
