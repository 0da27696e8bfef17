package qp

// Memory that is out of reach for a moment (mem.Fault.Brief): it is being moved, or its
// mappings are changing. An RNR NAK would cost the peer its whole timer, which may be 655
// ms, and one of few retries, where the memory is back after microseconds. So the
// responder of an RC queue pair waits a little before it sends one:
//
//  1. hold keeps a request whose memory is out of reach, with its payload, and keepBehind
//     those that come after it. holdAnswer keeps the answer to a READ whose memory is out
//     of reach, and unsent those behind it.
//  2. The memory is back (Finished): letGo executes the requests as if they had just come,
//     and lets the answers go.
//  3. HoldTime has passed (Tick), or there is no room for more: giveUp sends the RNR NAK
//     that the first of them is due, and forgets the rest. The peer sends them again. If the
//     memory then comes back soon, the queue pair waits longer the next time (cameBack).
//
// Requests that wait for the moves before them (keepInOrder) are kept here too, without a
// limit of time, also those of UC.

import (
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// HoldTime is how long requests and answers wait for memory that is out of reach, at first. Where
// memory has come back a little later, they wait up to maxHoldTime: an RNR NAK costs the peer its
// timer, and all that is under way is sent again. maxHoldTime is less than a peer takes to give
// up, with seven retries and the usual timeouts.
const (
	HoldTime    = time.Millisecond
	maxHoldTime = 4 * time.Millisecond
)

// How many bytes of requests are kept.
const (
	maxHeld    = 4 << 20  // for one queue pair
	maxHeldAll = 64 << 20 // for all queue pairs of the process
	heldCost   = 2 << 10  // what a request counts for besides its payload
)

var heldAll atomic.Int64 // bytes of requests that all queue pairs keep

// heldRequests is what a responder keeps: requests, and whether answers wait too.
type heldRequests struct {
	requests []*train.Train // in the order of their PSNs
	bytes    int
	again    *train.Train // the one that letGo is executing
	inOrder  bool         // they wait until the moves before them are over, without a limit of time
	lost     bool         // requests behind them came and were not kept
	answers  bool         // answers were put back
	until    Time         // when they are given up; 0 before HoldFrom has set it
	began    Time         // when HoldFrom set until; 0: the memory has come back since
	patience Time         // how long they are kept; 0: HoldTime
}

// cameBack learns from how long the memory was out of reach how long to wait the next time.
func (q *QP) cameBack(now Time) {
	h := q.resp.held
	if h == nil || h.began == 0 {
		return
	}
	took := now - h.began
	h.began = 0
	// The peer's timeout is most likely what ours is. If it is shorter, the peer would send again
	// what is kept.
	most := maxHoldTime
	if t := q.req.timeout; t != 0 {
		most = min(most, t/2)
	}
	switch held := max(h.patience, HoldTime); {
	case took > most: // a longer wait would have been in vain
		h.patience = 0
	case 2*took > held:
		h.patience = min(2*took, most)
	case 8*took < held:
		h.patience = held / 2
	}
}

// holding reports whether requests or answers are kept.
func (r *responder) holding() bool {
	return r.held != nil && (len(r.held.requests) > 0 || r.held.answers)
}

// busy reports whether a request or an answer is kept, or a request waits for an engine.
func (r *responder) busy() bool { return r.holding() || len(r.moves) > 0 }

// HoldFrom starts the HoldTime of what the queue pair keeps, unless it runs already.
func (q *QP) HoldFrom(now Time) {
	if h := q.resp.held; h != nil && h.until == 0 && !h.inOrder && q.resp.holding() {
		h.until, h.began = now+max(h.patience, HoldTime), now
	}
}

// Holding reports whether the queue pair keeps something whose HoldTime has not been
// started (HoldFrom).
func (q *QP) Holding() bool {
	h := q.resp.held
	return h != nil && h.until == 0 && !h.inOrder && q.resp.holding()
}

// mayHold reports whether the responder waits for memory with such a fault, and if so makes
// sure that there is a heldRequests.
func (q *QP) mayHold(f mem.Fault) bool {
	if q.Type != ib.RC || !f.Brief() {
		return false
	}
	if q.resp.held == nil {
		q.resp.held = new(heldRequests)
	}
	return true
}

// hold keeps a request whose memory is out of reach. It reports whether it did; a fault is
// that of the request's payload.
func (q *QP) hold(t *train.Train, f mem.Fault) (kept bool, _ mem.Fault) {
	if t == nil || !q.mayHold(f) {
		return false, mem.Fault{}
	}
	h := q.resp.held
	if t == h.again {
		h.push(t)
		return true, mem.Fault{}
	}
	q.Counters.add(CntHeld, 1)
	return h.keep(t)
}

// push appends a request whose train is the queue pair's own, not the link's.
func (h *heldRequests) push(t *train.Train) {
	h.requests = append(h.requests, t)
	n := heldBytes(t) + heldCost
	h.bytes += n
	heldAll.Add(int64(n))
}

// heldBytes returns how many bytes of payload a request that is kept has copied: none of a
// payload that stays where it lies (train.Lease).
func heldBytes(t *train.Train) int {
	if t.Payload.Table != nil {
		return 0
	}
	return t.Len
}

// keep keeps a request, with its payload (train.Keep), if there is room.
func (h *heldRequests) keep(t *train.Train) (kept bool, _ mem.Fault) {
	if h.bytes > maxHeld || t.Lease == nil && h.bytes+t.Len > maxHeld || heldAll.Load() > maxHeldAll {
		return false, mem.Fault{}
	}
	c, f := t.Keep()
	if !f.OK() {
		return false, f
	}
	if h.bytes+heldBytes(c) > maxHeld {
		return false, mem.Fault{}
	}
	h.push(c)
	return true, mem.Fault{}
}

// keepBehind takes a request that comes while others are kept. It reports false for a
// repetition of a request that was executed, which is answered as ever.
func (q *QP) keepBehind(t *train.Train) (taken bool, _ mem.Fault) {
	r := &q.resp
	h := r.held
	if len(h.requests) == 0 {
		return false, mem.Fault{} // only answers are kept
	}
	last := h.requests[len(h.requests)-1]
	if q.Type == ib.UC { // which has no order but that of arrival
		kept, f := h.keep(t)
		if !kept && f.OK() {
			q.pushBack()
		}
		return true, f
	}
	switch next := last.PSN.Add(q.takes(last)); {
	case t.PSN == next:
		kept, f := h.keep(t)
		if !kept && f.OK() {
			q.giveUp()
		}
		return true, f
	case !t.PSN.Less(next):
		h.lost = !q.keepAhead(t) || h.lost
		return true, mem.Fault{}
	}
	return !t.PSN.Less(r.epsn), mem.Fault{} // true: it is kept already
}

// takes returns how many PSNs a request takes.
func (q *QP) takes(t *train.Train) int {
	if t.Kind == wire.KindReadRequest {
		return q.packets(int(min(t.RETH.Len, MaxMsgSize)))
	}
	return t.N
}

// letGo goes on with the requests and answers that were kept: the memory may be back.
func (q *QP) letGo() {
	r := &q.resp
	h := r.held
	if h == nil {
		return
	}
	if h.answers {
		h.answers = false
		for i := range r.n {
			if j := r.at(i); j.held {
				j.held, j.waiting = false, false
			}
		}
	}
	requests := h.drop()
	for i, t := range requests {
		if !q.executes() {
			return
		}
		if !t.Leased() {
			continue // its sender has given it up
		}
		h.again = t
		q.receiveRequest(t) // its payload is here: it has no fault of its own
		h.again = nil
		if len(h.requests) > 0 { // kept again, for what is left of HoldTime
			for _, behind := range requests[i+1:] {
				h.push(behind)
			}
			q.takeAhead()
			return
		}
		t.Free() // it is executed
	}
	if len(requests) > 0 {
		q.takeAhead()
		if (h.lost || len(r.ahead.trains) > 0) && !r.nakSent && q.executes() {
			q.nak(wire.NakPSNSequence, r.epsn)
		}
		h.lost = false
	}
	if !r.holding() {
		h.until = 0
	}
}

// drop forgets the requests and returns them.
func (h *heldRequests) drop() []*train.Train {
	requests := h.requests
	heldAll.Add(-int64(h.bytes))
	h.requests, h.bytes = nil, 0
	return requests
}

// free gives back the staging bytes of requests that are forgotten.
func free(requests []*train.Train) {
	for _, t := range requests {
		t.Free()
	}
}

// giveUp ends the wait: it sends an RNR NAK for the first of what was kept, and forgets the
// requests.
func (q *QP) giveUp() {
	r := &q.resp
	h := r.held
	requests := h.drop()
	free(requests)
	h.lost, h.inOrder, h.until = false, false, 0
	if h.answers {
		h.answers = false
		for i := range r.n {
			if j := r.at(i); j.held {
				q.absent(j.psn.Add(j.done))
				break
			}
		}
	}
	if len(requests) > 0 {
		q.Counters.add(CntFaultRNR, 1)
		q.rnr()
	}
}

// forgetHeld forgets all that is kept: the queue pair is reset, or has failed.
func (q *QP) forgetHeld() {
	r := &q.resp
	r.dropAhead()
	if r.held == nil {
		return
	}
	free(r.held.drop())
	r.held = nil
	for i := range r.n {
		if j := r.at(i); j.held {
			j.held, j.waiting = false, false // the answers behind it are still due
		}
	}
}

// holdTick gives up what was kept for HoldTime.
func (q *QP) holdTick(now Time) {
	if h := q.resp.held; h != nil && h.until != 0 && h.until <= now {
		if q.resp.holding() {
			q.giveUp()
		}
		h.until = 0
	}
}

// holdDeadline returns when holdTick is due, 0 for never.
func (q *QP) holdDeadline() Time {
	if h := q.resp.held; h != nil {
		return h.until
	}
	return 0
}

// holdAnswer keeps the answer to a READ whose memory is out of reach, from the train t on,
// which has not left. It reports whether it did.
func (q *QP) holdAnswer(t *train.Train, f mem.Fault) bool {
	if !q.mayHold(f) || !q.resp.putBack(t) {
		return false
	}
	q.Counters.add(CntHeld, 1)
	q.resp.held.answers = true
	q.fetch(WorkReceive, f, nil)
	if j := q.resp.at(0); !j.waiting { // else the answer is made when the oldest no longer waits
		j.held, j.waiting = true, true
	}
	return true
}

// putBack makes a responder resource of an answer that has not left, in its place among the
// others. It reports false if there is no room for it.
func (a *answers) putBack(t *train.Train) bool {
	for i := range a.n {
		switch j := a.at(i); {
		case t.PSN.Less(j.psn):
		case t.PSN.Less(j.end()): // of one that is not all made yet
			j.done = min(j.done, t.PSN.Sub(j.psn))
			return true
		case j.part && j.end() == t.PSN && t.Kind == wire.KindReadResponse: // of one that was put back before
			j.n += t.N
			j.reth.Len += uint32(t.Len)
			j.part = !t.End
			return true
		}
	}
	if a.n == MaxRDAtomic {
		return false
	}
	j := resource{psn: t.PSN, n: t.N, msn: t.AETH.MSN, again: t.Again}
	if t.Kind == wire.KindAtomicAck {
		j.atomic, j.orig = true, t.Orig
	} else {
		j.cont, j.part = !t.Start, !t.End
		if t.Len > 0 && t.Payload.Table == nil { // it was loaded
			j.reth, j.pd = t.RETH, t.DETH.SrcQP
		} else if t.Len > 0 {
			e := &t.Payload.SGEs[0]
			j.reth = wire.RETH{VA: e.Addr + t.Payload.Off, RKey: e.LKey, Len: uint32(t.Len)}
			j.pd = t.Payload.Actor.PD
		}
	}
	a.insert(j)
	return true
}

// unsent takes back an answer that has not left, behind one that is kept.
func (q *QP) unsent(t *train.Train) {
	r := &q.resp
	switch t.Kind {
	case wire.KindReadResponse, wire.KindAtomicAck:
		if !r.putBack(t) {
			q.giveUp() // the peer asks for all of it again
		}
	case wire.KindAck, wire.KindGaps:
		if !r.ack.pending {
			r.ack.pending, r.ack.psn, r.ack.syndrome = true, t.PSN, t.AETH.Syndrome
		}
	}
}
