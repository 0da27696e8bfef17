package qp

// Answers to the peer, in the order of PSNs (IBA 9.7.5.1.1): READ responses and
// atomic results first in, first out, then one acknowledgement or NAK for
// everything since. A READ response acknowledges what came before it, so an
// acknowledgement is due only while no later answer is.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

type answers struct {
	resources [MaxRDAtomic]resource
	head, n   uint8

	ack struct {
		pending  bool
		psn      wire.PSN
		syndrome wire.Syndrome
	}

	// yielded: the acknowledgement has let a request go first.
	yielded bool

	serials uint32 // how many responder resources there were

	// saved are the results of the last atomics, for repetitions.
	saved     [MaxRDAtomic]savedAtomic
	nextSaved uint8

	// scratch for building lists without allocating
	from mem.List
	raw  [1][]byte
	word [8]byte
	grh  []byte
}

// resource is a responder resource: a READ, atomic, ATOMIC WRITE or FLUSH to answer.
type resource struct {
	atomic  bool
	flush   bool     // a FLUSH
	serial  uint32   // its number, which loads name it by
	loading bool     // its bytes are being loaded (loads.go)
	loaded  bool     // some of them were, or are
	absent  bool     // a READ whose bytes have to be fetched first: the peer is to ask again
	waiting bool     // not ready (flush, loading, absent, held): nothing is answered before it
	held    bool     // its bytes are out of reach for a moment (hold.go)
	cont    bool     // the packets before it have left: it does not begin the answer
	part    bool     // the packets behind it are another resource's: it does not end the answer
	tell    bool     // it is waiting, and the peer is to get an RNR NAK
	again   bool     // it was answered before
	psn     wire.PSN // of the first response
	n       int      // response packets
	done    int      // packets already made
	msn     uint32
	pd      uint32 // domain of its memory: the queue pair's, or for XRC that of the queue it names
	reth    wire.RETH
	orig    uint64
}

func (j *resource) end() wire.PSN { return j.psn.Add(j.n) }

type savedAtomic struct {
	valid bool
	psn   wire.PSN
	orig  uint64
}

func (a *answers) at(i uint8) *resource { return &a.resources[(a.head+i)%MaxRDAtomic] }

// due reports whether an answer can be made now. While the oldest resource waits, that
// can only be an RNR NAK.
func (r *responder) due() bool {
	if r.n == 0 && r.moves == nil {
		return r.ack.pending || r.partly
	}
	return r.dueAmong()
}

// dueAmong is due where there are answers to READs or atomics, or requests wait for engines.
func (r *responder) dueAmong() bool {
	if r.n > 0 && r.at(0).waiting {
		return r.at(0).tell
	}
	return r.n > 0 || r.partly || r.tellMoves || r.ack.pending && !r.early()
}

// early reports whether the acknowledgement that is to be sent is of packets that may not be
// acknowledged yet.
func (r *responder) early() bool { return len(r.moves) > 0 && !r.ack.psn.Less(r.front()) }

// asked returns how many READs and atomics are to be answered. FLUSHes do not
// count here: there are peers that do not count them either (Linux rxe).
func (a *answers) asked() (n uint8) {
	for i := range a.n {
		if !a.at(i).flush {
			n++
		}
	}
	return n
}

// full reports whether the peer has as many READs and atomics outstanding as the queue
// pair permits (limit), or all places are taken. If so, it first drops one that was
// answered before, to make room: networks repeat packets, and the peer may not have
// asked again at all.
func (a *answers) full(limit uint8) bool {
	if a.n < min(limit, MaxRDAtomic) || a.n < MaxRDAtomic && a.asked() < limit {
		return false
	}
	for i := range a.n {
		if a.at(i).again {
			for a.n--; i < a.n; i++ {
				*a.at(i) = *a.at(i + 1)
			}
			return false
		}
	}
	return true
}

func (a *answers) push(j resource) {
	a.serials++
	j.serial = a.serials
	*a.at(a.n) = j
	a.n++
	a.ack.pending = false
}

func (a *answers) answerRead(psn wire.PSN, n int, h wire.RETH, pd, msn uint32) {
	a.push(resource{psn: psn, n: n, reth: h, pd: pd, msn: msn})
}

func (a *answers) answerAtomic(psn wire.PSN, orig uint64, msn uint32) {
	for i := range a.saved { // one with the same PSN is 2^24 packets old
		a.saved[i].valid = a.saved[i].valid && a.saved[i].psn != psn
	}
	a.saved[a.nextSaved] = savedAtomic{true, psn, orig}
	a.nextSaved = (a.nextSaved + 1) % MaxRDAtomic
	a.push(resource{atomic: true, psn: psn, n: 1, orig: orig, msn: msn})
}

// acknowledge notes that everything up to psn is done.
func (a *answers) acknowledge(psn wire.PSN) {
	a.ack.pending, a.ack.psn, a.ack.syndrome = true, psn, wire.AckNoCredits
}

// Unread counts the expected request as lost: its payload could not be fetched from its
// sender, which must send it again.
func (q *QP) Unread() {
	if !q.executes() || q.Type == ib.UC || q.Type == ib.UD {
		return
	}
	q.nak(wire.NakPSNSequence, q.resp.epsn)
}

// nak notes a NAK for request psn, which is the expected one.
func (q *QP) nak(s wire.Syndrome, psn wire.PSN) {
	r := &q.resp
	r.nakSent, r.notReady = true, s != wire.NakPSNSequence
	r.ack.pending, r.ack.psn, r.ack.syndrome = true, psn, s
}

// rnr notes an RNR NAK for the expected request.
func (q *QP) rnr() { q.nak(wire.RNRNak(q.attr.MinRNRTimer), q.resp.epsn) }

// repeat answers a request that was executed before (IBA 9.7.4.3): a READ is
// checked and executed again; an atomic's result is replayed; the others are
// acknowledged again, ATOMIC WRITE and FLUSH by their response. A READ that reaches
// past the expected PSN is no repetition, and is dropped.
func (q *QP) repeat(t *train.Train) {
	r := &q.resp
	r.wentBack(t)
	if t.Hints&wire.HintProbe != 0 {
		q.answerProbe()
		return
	}
	if len(r.moves) > 0 && r.front().Less(t.PSN.Add(t.N)) { // it may not be acknowledged yet
		r.tellMoves = r.tellMoves || t.AckReq
		return
	}
	switch t.Kind {
	case wire.KindReadRequest:
		if t.RETH.Len > MaxMsgSize {
			return
		}
		n := q.packets(int(t.RETH.Len))
		if t.PSN.Add(n).Sub(r.epsn) > 0 {
			return // a repetition must be a part of the original (IBA 9.4.4)
		}
		who := q.actorOf(t)
		if q.attr.Access&ib.AccessRemoteRead == 0 || !q.checkRemote(ib.AccessRemoteRead, t.RETH, who).OK() {
			q.nakAnswer(accessError, t.PSN)
			return
		}
		if r.isLoading(t.PSN, &t.RETH, who.PD) {
			return
		}
		r.answerAgain(t, resource{again: true, psn: t.PSN, n: n, reth: t.RETH, pd: who.PD, msn: r.msn}, q.attr.MaxDestRDAtomic)
	case wire.KindAtomicWrite:
		r.answerAgain(t, resource{again: true, psn: t.PSN, n: 1, msn: r.msn}, q.attr.MaxDestRDAtomic)
	case wire.KindFlush:
		if !q.notYet(t.PSN) {
			r.answerAgain(t, resource{again: true, flush: true, psn: t.PSN, n: 1, msn: r.msn}, MaxRDAtomic)
		}
	case wire.KindCmpSwap, wire.KindFetchAdd:
		for i := range r.saved {
			if s := &r.saved[i]; s.valid && s.psn == t.PSN {
				r.answerAgain(t, resource{again: true, atomic: true, psn: s.psn, n: 1, orig: s.orig, msn: r.msn}, q.attr.MaxDestRDAtomic)
				return
			}
		}
		// It is older than all saved results: the peer has had its answer.
	default:
		q.acknowledgeAgain(t)
	}
}

// answerProbe has everything acknowledged that was executed: the peer asks what has come. Nothing is
// answered again, but for an RNR NAK that it may not have got.
func (q *QP) answerProbe() {
	r := &q.resp
	r.probed = true
	if !r.ack.pending || r.ack.syndrome.IsAck() {
		r.acknowledge(r.epsn.Add(-1))
	}
	r.tellAgain()
}

// ackUpTo returns the PSN that an acknowledgement of psn may name: the last one before front; but
// psn itself if READs or atomics follow, since the peer would conclude that their answers were lost.
func (r *responder) ackUpTo(psn wire.PSN) wire.PSN {
	if r.rdAny && psn.Add(1).Less(r.rdEnd) {
		return psn
	}
	return r.front().Add(-1)
}

// acknowledgeAgain acknowledges a SEND or WRITE that was executed before.
func (q *QP) acknowledgeAgain(t *train.Train) {
	r := &q.resp
	end := t.PSN.Add(t.N)
	psn := r.ackUpTo(end.Add(-1))
	answered := r.n > 0 && end.Less(r.at(r.n-1).end()) || // by the answer to a later READ
		r.ack.pending && (!r.ack.syndrome.IsAck() || !r.ack.psn.Less(psn))
	switch {
	case t.AckReq && !answered:
		r.acknowledge(psn)
	case t.AckReq:
		r.tellAgain()
	}
}

// answerAgain replaces the answers from j.psn on by j: the peer has gone back, or asks for this
// answer alone. A peer that exceeds the limit gets no answer.
func (a *answers) answerAgain(t *train.Train, j resource, limit uint8) {
	if t.Hints&wire.HintAlone != 0 {
		a.answerAlone(j, limit)
		return
	}
	a.forget(j.psn)
	if a.full(limit) {
		return
	}
	a.insert(j)
	a.ack.pending = false
}

// answerAlone makes an answer again, and leaves those behind it. It replaces answers to the same
// packets that were asked for again before, or are absent.
func (a *answers) answerAlone(j resource, limit uint8) {
	kept := uint8(0)
	for i := range a.n {
		o := a.at(i)
		if (o.again || o.absent) && o.psn.Less(j.end()) && j.psn.Less(o.end()) && o.done == 0 && !(o.waiting && o.flush) {
			continue
		}
		*a.at(kept) = *o
		kept++
	}
	a.n = kept
	if !a.full(limit) {
		a.insert(j)
	}
}

// insert puts an answer before those of later PSNs: FLUSHes that forget has left.
func (a *answers) insert(j resource) {
	a.serials++
	j.serial = a.serials
	i := a.n
	for a.n++; i > 0 && j.psn.Less(a.at(i-1).psn); i-- {
		*a.at(i) = *a.at(i - 1)
	}
	*a.at(i) = j
}

// nakAnswer refuses a request that was accepted and is not answered yet: its access
// is not permitted any more, or has failed.
func (q *QP) nakAnswer(why refusal, psn wire.PSN) {
	r := &q.resp
	r.drop(psn)
	q.Counters.add(why.count, 1)
	q.nak(why.nak, psn)
	q.Event(why.event)
	q.enterErrorAnswering()
}

// drop drops the answers from psn on.
func (a *answers) drop(psn wire.PSN) {
	for a.n > 0 && psn.Less(a.at(a.n-1).end()) {
		a.n--
	}
}

// dropLoading drops the answers from the first on that waits for its bytes to be loaded: the queue
// pair has failed, and they will not be. The NAK tells the peer.
func (a *answers) dropLoading() {
	for i := range a.n {
		if a.at(i).loading {
			a.n = i
			return
		}
	}
}

// forget drops the answers from psn on, since the peer has gone back and asks again. It
// keeps those to FLUSHes that are not done, so that nothing is acknowledged beyond them.
func (a *answers) forget(psn wire.PSN) {
	kept := uint8(0)
	for i := range a.n {
		if j := a.at(i); j.waiting && j.flush || !psn.Less(j.end()) {
			*a.at(kept) = *j
			kept++
		}
	}
	a.n = kept
}

// ackYields lets one short request go before an acknowledgement: a packet that
// is shorter than the one before it can ride in the same system call.
func (q *QP) ackYields() bool {
	r := &q.resp
	if q.AckFirst || r.n > 0 || !r.ack.pending || r.yielded || !r.ack.syndrome.IsAck() || q.req.cur == q.sq.tail {
		return false
	}
	r.yielded = int(q.sq.at(q.req.cur).len) <= q.mtu
	return r.yielded
}

// pullResponse makes the next answer.
func (q *QP) pullResponse(t *train.Train) bool {
	r := &q.resp
	if !r.due() {
		return false
	}
	t.DestQP, t.MTU = q.attr.DestQPN, q.mtu
	if r.n > 0 && !r.at(0).waiting {
		return q.pullResource(t, r.at(0))
	}
	s, psn := r.ack.syndrome, r.ack.psn
	switch {
	case r.n > 0:
		j := r.at(0)
		s, psn, j.tell = wire.RNRNak(q.attr.MinRNRTimer), j.psn, false
	case r.tellMoves && len(r.moves) > 0:
		s, psn, r.tellMoves = wire.RNRNak(q.attr.MinRNRTimer), r.front(), false
	case !r.ack.pending || r.early():
		s, psn = wire.AckNoCredits, r.front().Add(-1)
	default:
		r.ack.pending, r.yielded = false, false
	}
	r.partly = false
	gaps := q.ours && len(r.ahead.trains) > 0 && (s.IsAck() || s == wire.NakPSNSequence)
	if s == wire.NakPSNSequence && (gaps || psn != r.epsn) { // a report says more; or what was missing has come since
		s, psn = wire.AckNoCredits, r.front().Add(-1)
	}
	t.Kind, t.PSN, t.N, t.Start, t.End = wire.KindAck, psn, 1, true, true
	t.AETH = wire.AETH{Syndrome: s, MSN: r.done()}
	if s.IsAck() {
		t.PSN = r.ackUpTo(psn) // more may have come since it was asked for
		r.acked, r.ackedAny = t.PSN, true
	}
	if gaps {
		q.report(t)
	}
	if r.probed {
		t.Hints |= wire.HintProbe
		r.probed = false
	}
	q.Counters.add(ackCounter(s), 1)
	return true
}

// ackCounter returns the counter of acknowledgements with such a syndrome.
func ackCounter(s wire.Syndrome) Counter {
	switch {
	case s.IsAck():
		return CntAcksSent
	case s.IsRNR():
		return CntRNRNaksSent
	}
	return CntNaksSent
}

// pullResource makes the next train of the answer to a responder resource.
func (q *QP) pullResource(t *train.Train, j *resource) bool {
	r := &q.resp
	var b []byte
	most := q.perLoad()
	if !j.atomic && j.reth.Len > 0 && q.Table.Staged(j.reth.RKey) {
		if q.path.ByReference {
			most = q.perCarried() / q.mtu
		} else if n := q.carriesAnswer(t, j); n > 0 {
			most = q.packets(n)
		} else {
			var ok bool
			if b, ok = q.loadAnswer(j); !ok {
				return r.due() && q.pullResponse(t) // the resource waits, or was refused
			}
		}
	}
	t.AETH = wire.AETH{Syndrome: wire.AckNoCredits, MSN: j.msn}
	t.PSN = j.psn.Add(j.done)
	if j.atomic {
		t.Kind, t.N, t.Start, t.End, t.Orig = wire.KindAtomicAck, 1, true, true, j.orig
	} else {
		t.Kind = wire.KindReadResponse
		t.N = min(j.n-j.done, most)
		t.Start, t.End = j.done == 0 && !j.cont, j.done+t.N == j.n && !j.part
		off := j.done * q.mtu
		t.SetNone()
		n := min(t.N*q.mtu, int(j.reth.Len)-off)
		if b != nil {
			t.SetRaw(b)
			t.Lent = true
			t.RETH = wire.RETH{VA: j.reth.VA + uint64(off), RKey: j.reth.RKey, Len: uint32(n)} // if it does not leave
			t.DETH.SrcQP = j.pd
		} else if n > 0 {
			t.SetRange(q.Table, mem.Actor{PD: j.pd, QPN: q.Number}, ib.AccessRemoteRead, j.reth.RKey, j.reth.VA+uint64(off), n)
		}
		t.Bounce = true // the CPU may write what is being read
		t.Again = j.again
	}
	j.done += t.N
	if j.done == j.n {
		r.head = (r.head + 1) % MaxRDAtomic
		r.n--
	}
	return true
}

// readFailed: the payload of a READ response could not be read. Its memory is out of reach
// for now, or has gone since it was checked, or has to be loaded (loads.go).
func (q *QP) readFailed(t *train.Train, f mem.Fault) {
	switch q.state {
	case ib.QPRTR, ib.QPRTS, ib.QPSQD:
		if f.Staged() { // as with sourceStaged
			q.path.ByReference, q.path.Carrier = false, nil
			if !q.resp.putBack(t) {
				q.absent(t.PSN)
			}
			return
		}
		if q.holdAnswer(t, f) {
			return
		}
		if f.Kind == mem.FaultPending {
			q.readAbsent(t, f)
			return
		}
		q.nakAnswer(accessError, t.PSN)
	}
}
