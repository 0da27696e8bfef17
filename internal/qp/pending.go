package qp

// Deferred work. A queue pair never waits: not for bytes that have to be fetched
// from a disk before they can be read or written (mem.FaultPending), nor for
// storage that a FLUSH is to reach. It notes the work for its owner, the device, and
// goes on when a worker of the device has done it:
//
//  1. An access finds that its bytes have to be fetched.
//     The responder sends an RNR NAK and stays as if the request had not come:
//     notPresent, and readAbsent for a READ whose answer was under way. UC and
//     UD drop the message.
//     The requester and the completer stop: sourceAbsent for what is to be sent,
//     targetAbsent for an answer, which counts as lost.
//  2. The owner asks for the work (WantsWork, NextWork), does it while it holds
//     no lock (Work.Do), and hands it back (Finished).
//  3. The access is tried again: by the peer when its RNR timer has run down, or
//     by the requester at once. If the fetch has failed, the access meets the
//     cause itself.
//
// Each side of a queue pair has one fetch under way at a time.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// WorkKind is a kind of deferred work. Work of one kind is done piece by piece, in
// order; kinds do not wait for each other.
type WorkKind uint8

const (
	WorkSync    WorkKind = iota // FLUSHes: bytes to storage
	WorkSend                    // bytes of the queue pair's own requests
	WorkReceive                 // bytes that the peer's requests are about
	WorkSignal                  // fences to signal
	NumWorkKinds
)

func (l WorkKind) bit() uint8 { return 1 << l }

// deferredWork is the deferred work of a queue pair, one bit for each kind.
type deferredWork struct {
	want  uint8 // there may be work
	busy  uint8 // the owner is at it
	fault [NumWorkKinds]mem.Fault
}

// Work is one piece of deferred work.
type Work struct {
	kind  WorkKind
	reset uint32    // the queue pair's count of resets when the work was made
	sync  flushSync // WorkSync: what to bring to storage
	fault mem.Fault // otherwise: what to fetch; of WorkSync, what Do has met
	left  mem.Fault // the result of Do

	signals []signal // WorkSignal: what to signal
	limit   Time     // of a wait for a fence: when it ends; 0: never
}

// WantsWork returns the kinds, one bit each, of which there may be work that the owner is
// not at.
func (q *QP) WantsWork() uint8 { return q.deferred.want &^ q.deferred.busy }

// NextWork sets w to the next work of a kind, if there is some and the owner is not at work
// of that kind yet. The owner then calls Do, and then Finished.
func (q *QP) NextWork(l WorkKind, w *Work) bool {
	s := &q.deferred
	if s.busy&l.bit() != 0 || s.want&l.bit() == 0 {
		return false
	}
	*w = Work{kind: l, reset: q.resets}
	if l == WorkSignal {
		s.want &^= l.bit()
		if w.signals, q.signals = q.signals, nil; len(w.signals) == 0 {
			return false
		}
	} else if l == WorkSync {
		if !q.nextSync(&w.sync) {
			s.want &^= l.bit()
			return false
		}
	} else {
		w.fault, s.fault[l] = s.fault[l], mem.Fault{}
		if l == WorkSend {
			w.limit, q.req.fenceLimit = q.req.fenceLimit, 0
		}
		s.want &^= l.bit()
		if q.state < ib.QPRTR || q.state == ib.QPErr {
			return false
		}
	}
	s.busy |= l.bit()
	return true
}

// Suspended returns a channel that is closed when the work can be done, if the work waits
// for memory that is suspended; nil if not.
func (w *Work) Suspended() <-chan struct{} { return w.fault.Suspended() }

// Owner returns what Do waits for, to be compared: see mem.Fault.Owner. It is nil if that is not
// known.
func (w *Work) Owner() (owner any, owned bool) { return w.fault.Owner() }

// Limit returns when the wait for the channel of Suspended is to end, also if the channel is not
// closed by then; 0: never.
func (w *Work) Limit() Time { return w.limit }

// Do does the work. It may block for as long as storage takes: the caller holds
// no lock. It reports whether the work is done; if not, the caller pauses before
// it tries again.
func (w *Work) Do(t *mem.Table) bool {
	if w.kind == WorkSignal {
		for _, s := range w.signals {
			s.fence.Signal(s.err)
		}
		return true
	}
	if w.kind == WorkSync {
		w.left = t.Persist(w.sync.rng, w.sync.actor)
		w.fault = w.left
		return w.left.Kind != mem.FaultPending
	}
	w.left = w.fault.Await()
	return w.left.Kind != mem.FaultPending
}

// Finished takes work back from the owner, after Do, and lets the side that it was for go on. It
// returns what Moved returns.
func (q *QP) Finished(w *Work, now Time) (unread *train.Train, why mem.Fault) {
	if w.reset != q.resets {
		return nil, mem.Fault{}
	}
	q.deferred.busy &^= w.kind.bit()
	switch w.kind {
	case WorkSync:
		if w.left.Kind == mem.FaultPending { // it is to be done again
			q.deferred.want |= WorkSync.bit()
			return nil, mem.Fault{}
		}
		q.synced(&w.sync, w.left)
	case WorkSend:
		q.req.goOn(now)
	case WorkReceive:
		q.cameBack(now)
		unread, why = q.finishRequests(now) // a SEND with invalidate may have waited, and moves behind it
		q.letGo()
	}
	return unread, why
}

// fetchAhead is the most that is fetched at once. A packet is about as long as a
// page: if each fetched its own bytes only, each would wait.
const fetchAhead = 1 << 20

// fetch notes that bytes have to be fetched for one side, unless other bytes are being fetched
// for it: the access to these is tried again, and notes them then. What follows them in their
// piece of the list is fetched too.
func (q *QP) fetch(l WorkKind, f mem.Fault, list []ib.SGE) {
	s := &q.deferred
	if (s.want|s.busy)&l.bit() != 0 {
		return
	}
	for i := range list {
		e := &list[i]
		if at := f.Addr - e.Addr; e.LKey == f.Key && at < uint64(e.Length) {
			f = f.Ahead(min(fetchAhead, uint64(e.Length)-at))
			break
		}
	}
	s.fault[l] = f
	s.want |= l.bit()
}

// refuseFault ends a request whose memory cannot be accessed, unless its bytes
// only have to be fetched first.
func (q *QP) refuseFault(why refusal, t *train.Train, f mem.Fault, list []ib.SGE) mem.Fault {
	if f.Kind == mem.FaultPending {
		return q.notPresent(t, f, list)
	}
	return q.refuse(why, vendorFault(f))
}

// notPresent: a request's bytes have to be fetched first. If that takes a moment only, RC
// keeps the request (hold.go); otherwise it sends an RNR NAK (IBA 9.7.5.2.8). The responder
// has not moved past the request, though some of its bytes may have been written: they are
// written again. A receive that the message has taken stays taken. UC loses the message, and
// the next one takes its receive.
func (q *QP) notPresent(t *train.Train, f mem.Fault, list []ib.SGE) mem.Fault {
	q.fetch(WorkReceive, f, list)
	kept, unread := q.hold(t, f)
	if kept || !unread.OK() {
		return unread
	}
	if q.reliable {
		q.Counters.add(CntFaultRNR, 1)
		q.rnr()
		return mem.Fault{}
	}
	q.Counters.add(CntDropFault, 1)
	q.resp.kind, q.resp.skip = 0, true
	return mem.Fault{}
}

// readAbsent: the answer to a READ cannot be made from the train's PSN on. The peer is to
// ask again from there. Until it does, nothing is answered: from an acknowledgement of later
// requests the peer would conclude that the answer was lost.
func (q *QP) readAbsent(t *train.Train, f mem.Fault) {
	r, list, again := &q.resp, t.Payload.SGEs, false
	for i := range r.n {
		if j := r.at(i); !t.PSN.Less(j.psn) && t.PSN.Less(j.end()) {
			q.named.sge[0] = ib.SGE{Addr: j.reth.VA, Length: j.reth.Len, LKey: j.reth.RKey} // all of the READ
			list, again = q.named.sge[:], !t.PSN.Less(j.psn.Add(j.done))
		}
	}
	q.fetch(WorkReceive, f, list)
	if !again { // else the peer has asked again meanwhile, and the answer is not made yet
		q.absent(t.PSN)
	}
}

// absent makes the peer ask again for the answer from psn on.
func (q *QP) absent(psn wire.PSN) {
	r := &q.resp
	r.forget(psn)
	if r.n == MaxRDAtomic {
		return // FLUSHes have all places: from their answers the peer sees what is missing
	}
	q.Counters.add(CntFaultRNR, 1)
	// again: this one makes room for others (full). A peer that asks for as much as is
	// permitted behind it has had this answer.
	r.insert(resource{absent: true, again: true, waiting: true, tell: true, psn: psn, n: 1})
}

// wentBack notes that the peer sends again from a request on, which shows that it has had the
// answers before. A READ before it whose bytes are absent was a repetition, and is dropped. A
// request that is sent again alone shows that only if it says so.
func (a *answers) wentBack(t *train.Train) {
	if t.Hints&(wire.HintAlone|wire.HintFirst) == wire.HintAlone {
		return
	}
	psn := t.PSN
	if a.n > 0 && a.at(0).absent && a.at(0).psn.Less(psn) {
		a.head = (a.head + 1) % MaxRDAtomic
		a.n--
	}
}

// tellAgain sends the RNR NAK of an absent READ again, to a peer that asks for the
// acknowledgement of an earlier request: the NAK acknowledges what came before it.
func (a *answers) tellAgain() {
	for i := range a.n {
		if j := a.at(i); j.absent {
			j.tell = true
		}
	}
}

// sourceAbsent: the bytes of a request have to be fetched before they can be
// sent. Those from the train's PSN on have not left.
func (q *QP) sourceAbsent(t *train.Train, f mem.Fault) {
	r := &q.req
	if t.Bounce || q.state == ib.QPSQD { // a repetition; or begun, and so to be finished
		if t.PSN.Less(r.nxt) {
			q.rewind(t.PSN)
		}
	} else {
		q.unsend(t.PSN)
	}
	r.unacked = 1 // perhaps no packet before these has asked for an acknowledgement
	q.standStill(f, t.Payload.SGEs, CntFaultWaits)
}

// unsend takes back all packets from psn on: none of them has ever left.
func (q *QP) unsend(psn wire.PSN) {
	r := &q.req
	if psn.Less(r.nxt) {
		q.rewind(psn)
	}
	for i := r.cur; i != q.sq.tail; i++ {
		w := q.sq.at(i)
		if !w.started {
			break
		}
		if w.facts().local {
			continue // a local request is done, and must not be done twice
		}
		w.started = w.first.Less(psn)
	}
	r.rd.truncate(psn)
	r.max = psn
	if psn.Less(r.executed) {
		r.executed = psn
	}
}

// truncate forgets the ranges from psn on.
func (r *rdRing) truncate(psn wire.PSN) {
	for r.n > 0 && !r.at(r.n-1).first.Less(psn) {
		r.n--
	}
	r.sent = min(r.sent, r.n)
}

// targetAbsent: an answer came, and the bytes that it is to go to have to be
// fetched first. It counts as lost, but not as the peer's fault.
func (q *QP) targetAbsent(f mem.Fault) {
	q.rewind(q.req.una)
	q.standStill(f, q.sq.list(q.sq.head), CntFaultWaits)
}

// standStill keeps the requester from sending until its own memory is there. No timeout
// runs meanwhile, since the peer is not to blame. The requester gives back its credits,
// which other queue pairs can use. why counts it.
func (q *QP) standStill(f mem.Fault, list []ib.SGE, why Counter) {
	r := &q.req
	if !r.fetching {
		q.Counters.add(why, 1)
	}
	r.fetching, r.sampleAt = true, 0
	q.recall()
	q.giveBack(r.heldCredits)
	q.fetch(WorkSend, f, list)
}

// goOn ends what standStill has begun.
func (r *requester) goOn(now Time) {
	r.fetching = false
	if r.started != 0 {
		r.restart(now)
		r.progAt = now
	}
}
