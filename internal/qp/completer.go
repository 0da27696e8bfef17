package qp

// The completer: answers, and silence → completions.
//
//  1. receiveResponse: acknowledgements, NAKs, READ and atomic responses (those
//     to an ATOMIC WRITE and a FLUSH are READ responses without data).
//  2. advance: everything before a PSN is acknowledged; requests complete in
//     order. A READ or atomic is never passed without its response.
//  3. lost, rnr, retry: go back and send again, or give up.
//  4. fail: the oldest request failed; the queue goes to error.

import (
	"encoding/binary"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// receiveResponse takes an answer of the peer's responder (IBA 9.7.5).
func (q *QP) receiveResponse(t *train.Train, now Time) mem.Fault {
	r := &q.req
	if !q.reliable || q.half == target || q.state != ib.QPRTS && q.state != ib.QPSQD {
		q.Counters.add(CntDropState, t.N)
		return mem.Fault{}
	}
	if !t.PSN.Less(r.max) {
		q.Counters.add(CntGhostAcks, t.N)
		return mem.Fault{}
	}
	if t.Kind != wire.KindAck && t.Kind != wire.KindGaps {
		return q.receiveData(t, now)
	}
	if r.waits() {
		r.keepAck(t)
		end := t.PSN // a NAK acknowledges what is before it
		if t.AETH.Syndrome.IsAck() {
			end = end.Add(1)
		}
		r.arrived(end)
		return mem.Fault{}
	}
	q.receiveAnswer(t, now)
	return mem.Fault{}
}

// receiveAnswer takes an acknowledgement or a NAK.
func (q *QP) receiveAnswer(t *train.Train, now Time) {
	switch s := t.AETH.Syndrome; {
	case t.Kind == wire.KindGaps && q.selective():
		q.receiveGaps(t, now)
	case s.IsAck():
		q.receiveAck(t, now)
	case s.IsRNR():
		q.Counters.add(CntRNRNaksReceived, 1)
		q.receiveRNR(t, s.Value(), now)
	case s.IsNak():
		q.Counters.add(CntNaksReceived, 1)
		q.receiveNak(t, s, now)
	default:
		q.Counters.add(CntGhostAcks, 1) // the reserved type
	}
}

// receiveAck: all requests up to psn are done (acknowledgements are coalesced,
// IBA 9.7.5.1.2).
func (q *QP) receiveAck(t *train.Train, now Time) {
	if t.PSN.Less(q.req.una) {
		q.Counters.add(CntGhostAcks, 1)
		return
	}
	q.done(t, t.PSN.Add(1), now)
}

// done: an answer shows that all requests before psn are done. It reports whether the answers to
// those of them that are READs or atomics have come.
func (q *QP) done(t *train.Train, psn wire.PSN, now Time) bool {
	if q.selective() {
		e := q.evidenceOf(t)
		q.acknowledged(psn, &e, now)
		return true
	}
	if !q.advance(psn, now) {
		q.lost(now)
		return false
	}
	return true
}

// receiveNak (IBA 9.7.5.2): everything before psn is done, psn itself is not.
func (q *QP) receiveNak(t *train.Train, s wire.Syndrome, now Time) {
	r, psn := &q.req, t.PSN
	if psn.Less(r.una) {
		q.Counters.add(CntGhostAcks, 1)
		return
	}
	if s == wire.NakPSNSequence {
		// If the answer to a READ before it is missing, that is asked for first.
		if q.done(t, psn, now) && psn.Less(r.nxt) {
			q.retry(psn, now)
		}
		return
	}
	q.advance(psn, now)
	// The peer has failed, and answers no more. If the answer to a READ is missing, be it to
	// this one or to one before it, that READ fails as the peer did: to ask for it again would
	// be in vain.
	status, ok := nakStatus[s]
	if !ok {
		status = ib.WCBadRespErr
	}
	q.fail(status, uint16(s), now)
}

// receiveRNR (IBA 9.7.5.2.8): the peer is not ready for request psn: it has no receive, or
// fetches memory first. The requester waits as long as the peer asks for, and sends the request
// again.
func (q *QP) receiveRNR(t *train.Train, code uint8, now Time) {
	r, psn := &q.req, t.PSN
	if psn.Less(r.una) {
		q.Counters.add(CntGhostAcks, 1)
		if q.selective() {
			q.loseOldest()
		}
		return
	}
	if !q.done(t, psn, now) {
		return
	}
	if q.sq.head == q.sq.tail || q.state == ib.QPErr || r.congestion.waits() && r.nxt == psn {
		return // the last is a copy: nothing has been sent since
	}
	if q.attr.RNRRetry != 7 {
		if r.rnrTries >= int(q.attr.RNRRetry) {
			q.fail(ib.WCRNRRetryExcErr, vendorRNR, now)
			return
		}
		r.rnrTries++
	}
	q.rewind(psn)
	r.releaseUpTo(psn)
	r.congestion.notReady(wire.RNRDelay(code), now)
	r.sampleAt = 0
}

// receiveData takes a READ response or an atomic acknowledge. Its payload goes to the
// request's memory; the response also acknowledges all that came before.
func (q *QP) receiveData(t *train.Train, now Time) mem.Fault {
	r := &q.req
	next, at := r.una, q.sq.head
	if r.waits() {
		next, at = r.next, r.nextAt
	}
	if d := next.Sub(t.PSN); d > 0 {
		if d >= t.N {
			q.Counters.add(CntGhostAcks, t.N)
			if r.started != 0 { // the peer is answering what was asked for twice: do not ask again
				r.started, r.progAt = now, now
			}
			return mem.Fault{}
		}
		t.TrimFront(d) // the front of the train has been taken before
	}
	if next.Less(t.PSN) {
		var ok bool
		if at, ok = q.reached(t.PSN, now); !ok {
			if q.selective() {
				return q.answerAhead(t, now)
			}
			q.lost(now)
			return mem.Fault{}
		}
	}
	if at == q.sq.tail || q.state == ib.QPErr {
		return mem.Fault{}
	}
	w := q.sq.at(at)
	done := t.PSN.Sub(w.first)
	if vendor := q.checkAnswer(t, w, done); vendor != 0 {
		if !r.waits() {
			q.fail(ib.WCBadRespErr, vendor, now)
		} // else the answers before it may still succeed: it is asked for again, and fails then
		return mem.Fault{}
	}
	if w.facts().atomic {
		setOrig(t)
	} else if t.Len > 0 {
		r.named = t.Lease != nil
	}
	f := q.land(t, at, done, now)
	if len(r.runs) > 0 {
		q.takeLanded(now)
	}
	return f
}

// checkAnswer checks a READ response or atomic acknowledge against the request that it is to
// answer, from a packet on. It returns 0, or what is wrong.
func (q *QP) checkAnswer(t *train.Train, w *wqe, done int) (vendor uint16) {
	f := w.facts()
	if !w.started || !f.rd || f.atomic != (t.Kind == wire.KindAtomicAck) || t.N > int(w.n)-done || t.N > q.req.max.Sub(t.PSN) || !t.AETH.Syndrome.IsAck() {
		return vendorResponseKind
	}
	if f.atomic {
		return 0
	}
	end := q.req.rd.at(0).end()
	if !t.PSN.Less(end) { // the answers before it are missing, or wait for engines
		end = q.req.rd.endOf(t.PSN)
	}
	if t.End != (t.PSN.Add(t.N) == end) && !(q.ours && t.End) { // a part of it may have been asked for again
		return vendorResponseKind // the last packet, and no other, ends what was asked for (IBA 9.7.5.1.8)
	}
	if want := q.answerLen(w, done, t.N); t.Len != want || t.N > 1 && t.MTU != q.mtu {
		return vendorResponseSize
	}
	return 0
}

// land writes the payload of an answer to the memory of its request, which has number at.
func (q *QP) land(t *train.Train, at uint32, done int, now Time) mem.Fault {
	r, w := &q.req, q.sq.at(at)
	list := q.localList(at, uint64(done)*uint64(q.mtu))
	last := done+t.N == int(w.n)
	waits, fault, side := q.deliver(list, t, last, last && done == 0 && w.flags&ib.SendSignaled != 0 && !r.waits(), true)
	switch {
	case fault.OK() && !r.waits():
		r.una = r.una.Add(t.N)
		r.resultWaits = waits
		q.progressed(t.N, now)
		q.advance(r.una, now)
		r.resultWaits = false
	case fault.Staged():
		m, f := q.stage(moveAnswer, t, list, last)
		if m == nil {
			if f.OK() {
				q.lost(now) // there is no room: it is asked for again
			}
			return f
		}
		q.landed(m, at, now)
	case !fault.OK() && side == mem.Src:
		return fault
	case fault.Kind == mem.FaultPending:
		if !r.waits() {
			q.targetAbsent(fault)
		} else {
			q.lost(now)
		}
	case !fault.OK() && !r.waits():
		q.fail(ib.WCLocProtErr, vendorFault(fault), now)
	default: // written or failed: it comes into effect behind the answers that wait for engines
		q.landed(&Move{kind: moveAnswer, over: true, fault: fault, side: mem.Dst, psn: t.PSN, n: t.N}, at, now)
	}
	return mem.Fault{}
}

// answerLen returns how many bytes n packets of a READ response have, if done packets
// come before them.
func (q *QP) answerLen(w *wqe, done, n int) int {
	if !w.facts().data.in() {
		return 0 // IBA A19: to an ATOMIC WRITE and to a FLUSH
	}
	return min(n*q.mtu, int(w.len)-done*q.mtu)
}

// setOrig makes the value that an atomic returns the train's payload, in the
// byte order of the host.
func setOrig(t *train.Train) {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], t.Orig)
	t.SetInline(b[:])
}

// advance moves una to target, completing requests on the way. It returns false
// if a READ or atomic stands in between whose response has not come.
func (q *QP) advance(target wire.PSN, now Time) bool {
	r := &q.req
	start := r.una
	ok := true
	for q.sq.head != q.sq.tail && q.state != ib.QPErr {
		w := q.sq.at(q.sq.head)
		if !w.started || target.Less(w.first) {
			break
		}
		if w.facts().rd && r.una.Less(w.end()) {
			if r.una.Less(w.first) {
				r.una = w.first
			}
			ok = !r.una.Less(target)
			break
		}
		if target.Less(w.end()) {
			if r.una.Less(target) {
				r.una = target
			}
			break
		}
		if r.una.Less(w.end()) {
			r.una = w.end()
		}
		q.sq.head++
		q.completeSend(w)
	}
	if n := r.una.Sub(start); n > 0 {
		q.progressed(n, now)
	}
	if len(r.carried) > 0 {
		r.arrived(r.una)
	}
	if r.nxt.Less(r.una) { // answered before it was sent again
		r.nxt, r.cur = r.una, q.sq.head
	}
	q.resumeWaiting(now)
	return ok
}

// resumeWaiting does what waits for earlier requests to be done: a local failure, and
// the end of draining.
func (q *QP) resumeWaiting(now Time) {
	r := &q.req
	if r.failing != 0 && q.sq.head == r.failAt {
		q.fail(r.failing, r.vendor, now)
	}
	if r.draining && (q.sq.head == q.sq.tail || !q.sq.at(q.sq.head).started) {
		r.draining = false
		if q.attr.SQDAsyncNotify {
			q.Event(ib.EventSQDrained)
		}
	}
}

// progressed notes that n packets were acknowledged: retries start anew, the
// window opens.
func (q *QP) progressed(n int, now Time) {
	r := &q.req
	if r.executed.Less(r.una) {
		r.executed = r.una
	}
	settled := r.settled
	r.dropRuns(r.nxt)
	q.settle()
	r.rd.popBefore(r.una)
	rtt := r.progress(r.una, now)
	r.congestion.acked(n)
	q.control(rtt, n-min(n, settled-r.settled), now)
}

// lost: an answer shows that the response to the oldest READ or atomic is missing
// (IBA 9.7.5.1.3, implied NAK). The answers behind it show the same: only the first
// counts.
func (q *QP) lost(now Time) {
	r := &q.req
	from := q.expected()
	if q.state == ib.QPErr || r.lostAt == from && r.lostValid || r.nxt == from {
		return
	}
	r.lostAt, r.lostValid = from, true
	q.Counters.add(CntResponseLost, 1)
	q.retry(from, now)
}

// AnswerUnread counts an answer as lost whose payload could not be fetched from the peer,
// and asks for it again.
func (q *QP) AnswerUnread(now Time) {
	if q.state == ib.QPRTS || q.state == ib.QPSQD {
		q.lost(now)
	}
}

// retry goes back to a packet, or gives up.
func (q *QP) retry(from wire.PSN, now Time) {
	r := &q.req
	if r.tries >= int(q.attr.RetryCnt) {
		q.fail(ib.WCRetryExcErr, vendorRetry, now)
		return
	}
	r.tries++
	q.sawLoss(1, now)
	q.goBack(from, now)
}

func (q *QP) goBack(from wire.PSN, now Time) {
	q.rewind(from)
	q.req.askNow = true
	q.req.restart(now)
}

// Tick lets time act: call it at Deadline.
func (q *QP) Tick(now Time) {
	q.holdTick(now)
	r := &q.req
	if q.state != ib.QPRTS && q.state != ib.QPSQD || r.rnrWait(now) {
		return
	}
	d, probes := q.sendDeadline()
	if d == 0 || now < d {
		return
	}
	if probes {
		r.tell, r.probeAt = true, now
		r.probes++
		return
	}
	r.progAt += now - d // the delay of this call is not the peer's
	if r.unasked() {
		q.probe(now)
		return
	}
	if r.timeout == 0 {
		q.giveBack(r.heldCredits)
		return
	}
	q.Counters.add(CntTimeouts, 1)
	if r.expired(now) && r.tries > int(q.attr.RetryCnt) {
		q.fail(ib.WCRetryExcErr, vendorRetry, now)
		return
	}
	if q.selective() {
		q.loseAll(now)
		return
	}
	if c := q.controller(); c != nil {
		c.timedOut(r.started, now)
	} else {
		r.congestion.lost()
	}
	q.goBack(q.expected(), now)
}

// sendDeadline returns when something is due for the requester, 0 for never, and whether that is
// a probe.
func (q *QP) sendDeadline() (d Time, probes bool) {
	r := &q.req
	d = r.deadline(q.leastRTO())
	if r.started == 0 || r.una == r.nxt || r.fetching || r.congestion.waits() || r.unasked() {
		return d, false
	}
	if p := q.probeDeadline(); p != 0 && (d == 0 || p < d) {
		return p, true
	}
	return d, false
}

// Deadline returns when Tick should be called next, 0 for never.
func (q *QP) Deadline() Time {
	at := q.holdDeadline()
	if q.state != ib.QPRTS && q.state != ib.QPSQD {
		return at
	}
	if d, _ := q.sendDeadline(); at == 0 || d != 0 && d < at {
		return d
	}
	return at
}

// fail ends the oldest request with an error. RC and UC queue pairs with a
// responder half go to the error state as a whole; UC and UD only stop sending
// (IBA 10.3.1.7 and 10.3.1.6).
func (q *QP) fail(status ib.WCStatus, vendor uint16, _ Time) {
	q.stopped()
	q.req.failing = 0
	if q.reliable && q.moves.begun > 0 {
		q.moves.status, q.moves.vendor = status, vendor
		q.enterError()
		return
	}
	q.failOldest(status, vendor)
	if q.state == ib.QPErr { // the completion itself did not fit
		return
	}
	if q.reliable {
		q.enterError()
		return
	}
	q.state = ib.QPSQE
	q.flushSend()
}

// failOldest completes the oldest request, which has failed.
func (q *QP) failOldest(status ib.WCStatus, vendor uint16) {
	if q.sq.head != q.sq.tail {
		w := q.sq.at(q.sq.head)
		q.sq.head++
		q.completeFailed(w, status, vendor)
	}
}

// stopped ends all use of the memory of requests that are given up: what receivers in this
// process read where it lies, what the owner ends in Stopped (payload by reference, and by name,
// in other processes), and the requester's own holds.
func (q *QP) stopped() {
	q.lease.End()
	if q.Stopped != nil {
		q.Stopped()
	}
	q.req.dropCarried()
}

// completeSend completes the request before head, which succeeded, if it is signaled.
func (q *QP) completeSend(w *wqe) {
	if w.flags&ib.SendSignaled == 0 {
		return
	}
	f := w.facts()
	wc := ib.WC{ID: w.id, Op: f.wc, QPN: q.Number}
	if f.data.in() {
		wc.ByteLen = w.len
	}
	if q.req.resultWaits { // the first that completes now is the one whose result is inline data
		q.req.resultWaits = false
		q.pushed(q.SendCQ.PushInlineSend(&wc, q.sq.freed, q.sq.head, &q.inlineData.InlineData))
		return
	}
	q.pushed(q.SendCQ.PushSend(&wc, q.sq.freed, q.sq.head))
}

// completeFailed completes the request before head, which failed, signaled or not.
func (q *QP) completeFailed(w *wqe, status ib.WCStatus, vendor uint16) {
	wc := ib.WC{ID: w.id, Status: status, Op: w.facts().wc, VendorErr: vendor, QPN: q.Number}
	q.pushed(q.SendCQ.PushSend(&wc, q.sq.freed, q.sq.head))
}

// stopSending gives up what is under way.
func (q *QP) stopSending() {
	q.stopped()
	q.giveBack(q.req.heldCredits)
	q.req.timers.stop()
	q.req.congestion.stop()
	q.req.forgetRepairs()
	q.req.rd = rdRing{}
	q.req.failing, q.req.stalledOnCredits, q.req.draining, q.req.fetching = 0, false, false, false
}

// flushSend completes all requests as flushed.
func (q *QP) flushSend() {
	q.stopSending()
	for q.sq.head != q.sq.tail {
		w := q.sq.at(q.sq.head)
		q.sq.head++
		q.completeFailed(w, ib.WCWRFlushErr, 0)
	}
	q.sq.pieces.clear()
	q.giveUpFences()
	q.req.cur = q.sq.tail
}
