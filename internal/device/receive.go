package device

import (
	"runtime"

	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// receiver is the sink of a shard's sockets. It executes trains as they come and lists the
// queue pairs that have something to answer, so that one acknowledgement covers a whole
// batch. shard.rx's lock guards it.
type receiver struct {
	dev     *Device
	now     qp.Time // 0: not known yet; flush needs it
	touched []*QP
	urgent  bool // an answer is due, and the program is not likely to post something soon that it can go with
	mads    int  // datagrams for queue pair 1 that nobody was told of
}

// Deliver executes a train.
func (r *receiver) Deliver(t *train.Train) {
	q := r.dev.findQP(t.DestQP)
	if q == nil && t.DestQP == wire.MulticastQP {
		if r.now == 0 {
			r.now = r.dev.now()
		}
		_ = r.dev.deliverGroup(t, r.now) // the bytes are here
		return
	}
	if q == nil && sys.IsManagement(t.DestQP) {
		r.dev.management.take(t)
		r.mads++
		return
	}
	if q == nil {
		r.dev.noQP.Add(uint64(t.N))
		return
	}
	if r.now == 0 && (t.IsAnswer() || q.target != nil || t.Marked > 0 || t.Kind == wire.KindCNP) {
		r.now = r.dev.now() // requests are executed whatever the time
	}
	fault, due, patient := q.receive(t, r.now)
	if !fault.OK() { // the payload, by reference, could not be read: the peer must send it again
		q.mu.Lock()
		if t.IsAnswer() {
			q.core.AnswerUnread(r.now)
		} else {
			q.core.Unread()
		}
		q.rearmLocked()
		q.mu.Unlock()
		due, patient = true, false
	}
	if due && !patient {
		r.urgent = true
	}
	if n := len(r.touched); due && (n == 0 || r.touched[n-1] != q) {
		r.touched = append(r.touched, q)
	}
}

// Drop counts a packet that the link refused.
func (r *receiver) Drop(why link.Reason) { r.dev.drops[why].Add(1) }

// flush lets the queue pairs answer.
func (r *receiver) flush() {
	for i, q := range r.touched {
		r.dev.answer(q, r.now)
		r.touched[i] = nil
	}
	r.touched = r.touched[:0]
}

// receive executes a train on a queue pair. It reports in due whether there is something to
// send: an answer, requests of the queue pair that had to wait, or requests of others that
// wait for the peer's credits. It reports in patient that the answer may wait: the program is
// likely to post something soon, with which the answer can go.
func (q *QP) receive(t *train.Train, now qp.Time) (f mem.Fault, due, patient bool) {
	if q.target != nil {
		if passed, f, due := q.forward(t, now); passed {
			return f, due, false
		}
	}
	q.mu.Lock()
	if len(q.grants) > 0 {
		q.absorbLocked()
	}
	f = q.core.Receive(t, now)
	patient = q.conversesLocked(t)
	q.executedLocked()
	due = q.core.Pending()
	q.mu.Unlock()
	if p := q.peer.Load(); p != nil && p.starved.Load() {
		due, patient = true, false
	}
	return f, due, patient
}

// executedLocked follows up on what the core was just given to do: it sets the timer, and
// starts deferred work and moves.
func (q *QP) executedLocked() {
	if q.core.Holding() {
		q.core.HoldFrom(q.dev.now())
	}
	q.rearmLocked()
	q.wantsWorkLocked()
	if q.mover || q.core.Moving() {
		q.dev.moveLocked(q)
	}
}

// wantsWorkLocked starts deferred work.
func (q *QP) wantsWorkLocked() {
	if kinds := q.core.WantsWork(); kinds != 0 {
		q.dev.deferWork(q, kinds)
	}
}

// conversation is after how many messages in a row, each followed by a post, the program is
// expected to follow the next one with a post, too.
const conversation = 3

// conversesLocked counts a message, and reports whether the program has followed each of the
// last ones before it with a post.
func (q *QP) conversesLocked(t *train.Train) bool {
	if t.Kind != wire.KindSend && t.Kind != wire.KindWrite || !t.End {
		return false
	}
	switch {
	case !q.posted:
		q.answered = 0
	case q.answered < conversation:
		q.answered++
	}
	q.posted = false
	return q.answered == conversation
}

// finishAnswers sends the answers that a poll may have left, before the queue pair is reset,
// fails or is closed: its peer must hear of the requests that it has executed.
func (d *Device) finishAnswers(q *QP) {
	for range 1000 { // the token's holder may be about to send them
		q.mu.Lock()
		due := q.core.Answering() || q.heldAnswers.Load()
		q.mu.Unlock()
		if !due {
			return
		}
		d.transmit(q, d.now())
		runtime.Gosched()
	}
}

// answer sends what a queue pair has to send after it received something, and lets other
// queue pairs go on that wait for credits of the same peer. A proxy offers its target back.
func (d *Device) answer(q *QP, now qp.Time) {
	d.transmit(q, now)
	if p := q.peer.Load(); p != nil {
		d.runWaiting(p, now)
	}
	if q.proxy != nil {
		q.offerHandoff()
	}
}
