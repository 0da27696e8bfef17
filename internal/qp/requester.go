package qp

// The requester: send queue → request trains.
//
//  1. nextRequest: the request at the front that goes by train. Those before it that
//     concern this device alone (local.go), or take a shortcut (shortcut.go), are done.
//  2. begin: a request that comes to the front is checked and gets its PSNs.
//  3. room: how many packets may go now (window, credits).
//  4. pullMessage, pullRead, pullSingle: the train.
//
// PSNs, oldest first:  una ≤ nxt ≤ max. Everything before una is acknowledged;
// nxt is sent next; nxt < max while sending again (go-back-N).

import (
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

type requester struct {
	cur uint32 // number of the request that nxt belongs to

	fenceLimit Time // when the wait for the fence at the front ends; 0: none waits

	una, nxt, max wire.PSN

	rd               rdRing // READs, atomics and FLUSHes under way
	unacked          int    // packets since the last one that asked for an acknowledgement
	askNow           bool   // the next message that ends asks for one
	asking           bool   // the next packet is sent again only to ask for one
	heldCredits      int    // credits held
	stalledOnCredits bool   // waits for credits
	draining         bool   // SQD: the requests that have begun are not all done
	fetching         bool   // stopped until its own memory is there (standStill)
	named            bool   // the last answer with data had a lease: its payload came by name, or from this process
	resultWaits      bool   // the result of the request at the head is inline data (inline.go)
	copied           int    // bytes that took the shortcut in this call
	other            uint32 // number of the last request that came to the front and cannot take the shortcut
	hasOther         bool   // there was one

	// failing is the status of request failAt, which failed locally: it is
	// completed when the ones before it are (IBA 10.8.5: completions keep the
	// order of posting).
	failing ib.WCStatus
	failAt  uint32
	vendor  uint16

	congestion congestion
	timers
	repairs

	landing           // answers that wait for engines
	loads   loads     // of what is to be sent
	carried []carried // payloads by name under way (Carrier), oldest first
}

// rdRing holds the READs, atomics, ATOMIC WRITEs and FLUSHes that are not answered yet,
// oldest first, as the PSN ranges of their responses. It keeps them while they are sent
// again: a READ that is repeated must be a part of one original (IBA 9.4.4).
type rdRing struct {
	e       [MaxRDAtomic]rdRange
	head, n uint8
	sent    uint8 // how many of them are under way; all, unless going back
}

type rdRange struct {
	first wire.PSN
	n     uint32
}

func (e *rdRange) end() wire.PSN { return e.first.Add(int(e.n)) }

func (r *rdRing) len() int            { return int(r.n) }
func (r *rdRing) at(i uint8) *rdRange { return &r.e[(r.head+i)%MaxRDAtomic] }
func (r *rdRing) push(first wire.PSN, n int) {
	*r.at(r.n) = rdRange{first, uint32(n)}
	r.n++
	r.sent++
}

// endOf returns the end of the range that psn lies in, or psn itself if it lies in none.
func (r *rdRing) endOf(psn wire.PSN) wire.PSN {
	for i := range r.n {
		if e := r.at(i); !psn.Less(e.first) && psn.Less(e.end()) {
			return e.end()
		}
	}
	return psn
}

// left returns how many PSNs, from psn on, are left of the range that is sent again next.
func (r *rdRing) left(psn wire.PSN) int { return r.at(r.sent).end().Sub(psn) }

// popBefore forgets ranges that end at or before psn.
func (r *rdRing) popBefore(psn wire.PSN) {
	for r.n > 0 && !psn.Less(r.at(0).end()) {
		r.head = (r.head + 1) % MaxRDAtomic
		r.n--
		r.sent -= min(r.sent, 1)
	}
}

// rewind notes that the ranges that reach beyond psn are to be sent again.
func (r *rdRing) rewind(psn wire.PSN) {
	for r.sent > 0 && psn.Less(r.at(r.sent-1).end()) {
		r.sent--
	}
}

// pullRequest makes the next request train.
func (q *QP) pullRequest(t *train.Train, now Time) bool {
	r := &q.req
	r.stalledOnCredits = false
	if (r.tell || r.missing > 0) && (q.state == ib.QPRTS || q.state == ib.QPSQD) && (q.pullProbe(t, now) || q.pullRepair(t, now)) {
		return true
	}
	w := q.nextRequest(now)
	if w == nil {
		return false
	}
	failing, failAt := r.failing, r.failAt
	if !w.started && !q.begin(w, now) {
		// If the request has failed locally, and those before it are not done, askAgain may have
		// gone back to one of their packets, which asks for their acknowledgement: pull that.
		return r.failing != 0 && r.cur != r.failAt && q.pullRequest(t, now)
	}
	n := q.makeRequest(t, w, now)
	if n == 0 {
		t.Reset() // an answer may go instead
		failed := r.failing != 0 && (failing == 0 || r.failAt != failAt)
		return failed && r.cur != r.failAt && q.pullRequest(t, now) // as above: the packet that askAgain has gone back to
	}
	if r.nxt != r.max {
		// Bounce: a write to the source meanwhile may have broken the checksum of the first copy.
		t.Again, t.Bounce = true, true
		if !r.asking {
			q.Counters.add(CntRetransmits, t.N)
		}
	}
	r.asking = false
	r.nxt = r.nxt.Add(n)
	if r.max.Less(r.nxt) {
		r.max = r.nxt
	}
	if r.nxt == w.end() {
		r.cur++
	}
	if q.reliable {
		r.sent(t, now)
	}
	return true
}

// nextRequest returns the request at the front that goes by train; nil if none may be sent
// now. Requests before it that need no train are executed.
func (q *QP) nextRequest(now Time) *wqe {
	for q.maySend(now) {
		w := q.sq.at(q.req.cur)
		if w.facts().local {
			if !q.passLocal(now) {
				return nil
			}
			continue
		}
		if q.Shortcut == nil || w.started {
			return w
		}
		switch q.pullShortcut(w) {
		case byTrain:
			return w
		case waits:
			return nil
		}
	}
	return nil
}

// maySend reports whether there is a request at the front, and nothing keeps the requester
// from looking at it.
func (q *QP) maySend(now Time) bool {
	r := &q.req
	return (q.state == ib.QPRTS || q.state == ib.QPSQD) && r.cur != q.sq.tail && !r.fetching &&
		(r.failing == 0 || r.cur != r.failAt) && !r.rnrWait(now)
}

// makeRequest makes the next train of a request that has begun, and returns how many PSNs
// it takes; 0 if it must wait.
func (q *QP) makeRequest(t *train.Train, w *wqe, now Time) int {
	f := w.facts()
	t.Kind, t.Extra, t.PSN, t.MTU, t.DestQP = f.kind, f.extra, q.req.nxt, q.mtu, q.attr.DestQPN
	if q.half == initiator {
		t.SRQ = w.qpn
	}
	switch {
	case q.Type == ib.UD:
		return q.pullDatagram(t, w, now)
	case f.single:
		return q.pullSingle(t, w, now)
	case f.rd:
		return q.pullRead(t, w)
	default:
		return q.pullMessage(t, w, now)
	}
}

// begin starts a request, or returns false if it must wait or has failed.
func (q *QP) begin(w *wqe, now Time) bool {
	r, f := &q.req, w.facts()
	if q.state == ib.QPSQD {
		return false // IBA 10.3.1.5: nothing new is started while draining
	}
	if w.flags&ib.SendFence != 0 && (r.rd.len() > 0 || !q.writtenBack()) {
		return false
	}
	if f.rd && q.attr.MaxRDAtomic == 0 {
		q.failLocal(ib.WCLocQPOpErr, vendorNoRDAtomic, now)
		return false
	}
	if q.Type == ib.UD && int(w.len) > q.mtu {
		q.failLocal(ib.WCLocLenErr, vendorDatagramSize, now)
		return false
	}
	if q.Type == ib.UD && q.sq.addrPD[q.sq.slot(r.cur)] != q.PD {
		q.failLocal(ib.WCLocQPOpErr, vendorAddressPD, now)
		return false
	}
	fault, staged := q.checkLocal(r.cur)
	if !fault.OK() {
		q.failLocal(ib.WCLocProtErr, vendorFault(fault), now)
		return false
	}
	w.started, w.first, w.n = true, r.max, uint32(q.packets(int(w.len)))
	w.staged = staged && !f.data.in()
	return true
}

// packets returns how many packets n bytes take: an empty message takes one.
func (q *QP) packets(n int) int {
	if n <= q.mtu {
		return 1 // to divide takes as long as all other checks of a short WRITE
	}
	return (n + q.mtu - 1) / q.mtu
}

// room returns how many PSNs may be taken now, at most want: bounded by the window and, with
// credits, by what the other queue pairs to the same peer leave. The requester keeps the
// credits until the packets are acknowledged.
//
// A payload by name (named is set: it is Carried, or the last answer was) takes no room on the
// link but for its record, and needs no credits.
func (q *QP) room(want int, named bool) int {
	r := &q.req
	if !q.reliable {
		return want
	}
	window, out := q.window(named), r.flight()
	if !named && len(r.carried) > 0 {
		out -= min(out, r.carriedPackets())
	}
	n := min(want, window-out)
	switch {
	case r.making > 0:
		n = min(n, r.making)
		if r.oldest {
			n = max(n, 1)
		}
	case len(r.runs) > 0: // the peer keeps so much
		n = min(n, min(maxAheadPSNs, maxAheadWindows*window)-r.nxt.Sub(r.una))
	}
	if q.path.Lossless && out > 0 && n < min(want, window/4) {
		return 0 // not a short train: an acknowledgement that was asked for (askAck) makes room
	}
	if n <= 0 || q.path.Credits == nil || named {
		return max(n, 0)
	}
	if q.path.Credits.pool.control != nil && !q.sq.at(r.cur).facts().rd { // long trains would fill short queues
		all, _ := q.path.Credits.packets()
		n = min(n, max(1, all/trainShare))
	}
	n = q.path.Credits.acquire(n, r.heldCredits)
	r.heldCredits += n
	if n == 0 && r.making > 0 && r.oldest {
		return 1
	}
	if r.stalledOnCredits = n == 0; r.stalledOnCredits && r.nxt == r.una {
		r.started = 0 // nothing is under way: the peer is not to blame for the wait
	}
	return n
}

// Parts of the window, as divisors: the most that one train may have, and the least that a READ asks
// for while others are under way.
const (
	trainShare = 4
	readShare  = 8
)

// maxAheadWindows is how many windows of packets may be between the oldest that is missing and the
// next that is sent.
const maxAheadWindows = 4

// window returns how many packets may be under way when one of the request at the front is
// sent.
func (q *QP) window(named bool) int {
	n := int(q.sq.at(q.req.cur).len)
	if named {
		return q.req.congestion.allowanceNamed(n, q.packets(n))
	}
	return q.req.congestion.allowance(n)
}

// pullMessage makes a train of a SEND or WRITE.
func (q *QP) pullMessage(t *train.Train, w *wqe, now Time) int {
	done := q.req.nxt.Sub(w.first)
	most := min(int(w.n)-done, train.MaxBytes/q.mtu)
	var b []byte
	var hold mem.SharedHold
	if w.staged {
		var load, ok bool
		if hold, load = q.needsLoad(t, w, done); load {
			if b, ok = q.loadRequest(done, now); !ok {
				return 0
			}
			most = min(most, q.packets(len(b)))
		} else if t.Carried {
			most = q.packets(int(hold.Len))
		} else { // the receiver is in this process, and leaves the payload where it is
			most = min(int(w.n)-done, q.perCarried()/q.mtu)
		}
	}
	n := q.room(most, t.Carried)
	if n == 0 {
		hold.Release()
		return 0
	}
	t.N, t.Start, t.End = n, done == 0, done+n == int(w.n)
	off := done * q.mtu
	if size := min(n*q.mtu, int(w.len)-off); b != nil {
		t.SetRaw(b[:size])
	} else {
		q.setPayload(t, q.req.cur, uint64(off), size)
	}
	if t.Carried {
		q.req.carry(hold, q.req.nxt, n)
	}
	if t.Kind == wire.KindWrite {
		t.RETH = wire.RETH{VA: w.remote, RKey: w.rkey, Len: w.len}
	}
	if t.End {
		t.Imm = w.imm
		t.Solicited = w.flags&ib.SendSolicited != 0
	}
	if q.reliable {
		q.askAck(t, w)
	} else if t.End {
		t.Cookie = uint64(q.req.cur) + 1
	}
	return n
}

// askAck decides whether a train asks for an acknowledgement: at the end of a signaled
// message, and often enough to keep the window open and the credits in motion. A few
// unsignaled packets at the end of the queue do not ask: a later message asks for all of
// them, or probe does. A train with its payload by name (Carried) asks, since the requester
// holds the payload's memory until the train is acknowledged.
func (q *QP) askAck(t *train.Train, w *wqe) {
	r := &q.req
	r.unacked += t.N
	ask := w.flags&ib.SendSignaled != 0 || q.state == ib.QPSQD || r.failing != 0 || r.askNow ||
		r.cur+1 == q.sq.tail && r.unacked >= maxUnasked ||
		r.cur+1 != q.sq.tail && q.sq.at(r.cur+1).facts().local // which will not ask itself
	if t.End && ask || t.Carried || r.unacked >= r.congestion.allowance(0)/4 || q.path.Credits != nil && q.path.Credits.scarce() {
		t.AckReq, r.unacked, r.askNow = true, 0, false
	}
}

// maxUnasked is how many packets at the end of the queue may be under way while no
// acknowledgement was asked for; probeAfter is for how long.
const (
	maxUnasked = 8
	probeAfter = time.Millisecond
)

// unasked reports whether packets are under way, and none of them has asked for an
// acknowledgement.
func (r *requester) unasked() bool { return r.unacked > 0 && r.nxt.Sub(r.una) <= r.unacked }

// probe asks for the acknowledgement of packets that have been under way for too long
// without asking for one.
func (q *QP) probe(now Time) {
	if q.path.Selective { // also in the middle of a message that waits for credits
		q.req.tell, q.req.unacked = true, 0
	} else {
		q.Counters.add(CntProbes, 1)
		q.askAgain()
	}
	q.req.restart(now)
	q.req.progAt = now // the peer had nothing to answer before
}

// askAgain has the last packet sent again, to ask for an acknowledgement, if it did not
// ask: the requester now waits for one, and no request follows that would ask. It reports
// whether there is a packet to send again.
func (q *QP) askAgain() bool {
	r := &q.req
	if !q.reliable || r.unacked == 0 || r.cur == q.sq.head {
		return false
	}
	q.rewind(q.sq.at(r.cur - 1).end().Add(-1))
	r.askNow, r.asking = true, true
	return true
}

// pullRead asks for as much of a READ as the window has room for. To the peer such
// a piece is like a whole READ; its responses take the PSNs that the
// whole READ's would (IBA 9.7.4.1.4: a READ takes as many PSNs as it has
// response packets).
func (q *QP) pullRead(t *train.Train, w *wqe) int {
	r := &q.req
	done := r.nxt.Sub(w.first)
	var n int
	if r.making > 0 {
		n = q.readPart()
	} else if r.nxt != r.max {
		n = q.readAgain()
	} else {
		n = q.readMore(int(w.n) - done)
	}
	if n == 0 {
		return 0
	}
	off := done * q.mtu
	t.N, t.Start, t.End = 1, true, true
	t.RETH = wire.RETH{VA: w.remote + uint64(off), RKey: w.rkey, Len: uint32(min(n*q.mtu, int(w.len)-off))}
	t.AckReq, r.unacked = true, 0
	return n
}

// readMore returns how many of the packets that are left of a READ can be asked
// for now.
func (q *QP) readMore(left int) int {
	r := &q.req
	if r.rd.len() >= int(q.attr.MaxRDAtomic) {
		return 0
	}
	// No small piece is asked for while others are under way: each costs a request.
	share := readShare
	if q.path.Lossless {
		share = 2
	}
	if all, open := q.openReads(); open < min(left, all/share) && r.rd.len() > 0 {
		return 0
	}
	n := q.room(left, r.named)
	if n > 0 {
		r.rd.push(r.nxt, n)
	}
	return n
}

// readPart returns how many packets of a READ, of those that are missing, to ask for again. A
// request that may never have come is not cut into several, which the peer would count.
func (q *QP) readPart() int {
	r := &q.req
	if all, open := q.openReads(); !r.oldest && open < min(r.making, all/2) {
		return 0
	}
	if q.path.Credits != nil {
		r.heldCredits += q.path.Credits.acquire(r.making, r.heldCredits)
	}
	return r.making
}

// openReads returns how many packets of READs may be under way, and how many more now.
func (q *QP) openReads() (all, more int) {
	all = q.window(q.req.named)
	more = all - q.req.flight()
	if c := q.path.Credits; c != nil && !q.path.Lossless {
		most, free := c.packets()
		all, more = min(all, most), min(more, free)
	}
	return all, more
}

// readAgain returns how many packets to ask for again: up to the end of the
// original piece, also if the window has become smaller since (IBA 9.4.4).
func (q *QP) readAgain() int {
	r := &q.req
	n := r.rd.left(r.nxt)
	if q.room(n, r.named) == 0 {
		return 0
	}
	r.rd.sent++
	return n
}

// pullSingle makes a request that is always one packet, and one PSN, and counts
// as a READ does: an atomic, an ATOMIC WRITE or a FLUSH.
func (q *QP) pullSingle(t *train.Train, w *wqe, now Time) int {
	r := &q.req
	again := r.nxt != r.max || r.making > 0
	var b []byte
	if w.staged { // 8 bytes are always loaded, on every path
		var ok bool
		if b, ok = q.loadRequest(0, now); !ok {
			return 0
		}
	}
	if !again && r.rd.len() >= int(q.attr.MaxRDAtomic) || q.room(1, false) == 0 {
		return 0
	}
	t.N, t.Start, t.End, t.AckReq, r.unacked = 1, true, true, true, 0
	switch t.Kind {
	case wire.KindCmpSwap:
		t.Atomic = wire.AtomicETH{VA: w.remote, RKey: w.rkey, SwapAdd: w.swap, Compare: w.compareAdd}
	case wire.KindFetchAdd:
		t.Atomic = wire.AtomicETH{VA: w.remote, RKey: w.rkey, SwapAdd: w.compareAdd}
	case wire.KindAtomicWrite:
		t.RETH = wire.RETH{VA: w.remote, RKey: w.rkey, Len: w.len}
		if b != nil {
			t.SetInline(b)
		} else {
			q.setPayload(t, r.cur, 0, int(w.len))
		}
	case wire.KindFlush:
		t.RETH = wire.RETH{VA: w.remote, RKey: w.rkey, Len: w.remoteLen, Flush: w.flush}
	}
	switch {
	case r.making > 0:
	case again:
		r.rd.sent++
	default:
		r.rd.push(r.nxt, 1)
	}
	return 1
}

// requestFailed deals with a request whose payload could not be read when it was sent. If
// the memory has to be fetched or loaded first, the request waits for that. Otherwise it
// fails, as if the check before it began had found the fault; a later request may be
// failing already.
func (q *QP) requestFailed(t *train.Train, f mem.Fault, now Time) {
	r := &q.req
	if q.state != ib.QPRTS && q.state != ib.QPSQD {
		return
	}
	if q.reliable {
		if t.PSN.Less(r.una) || !t.PSN.Less(r.max) {
			return // answered meanwhile: it was a repetition
		}
	} else if w := q.sq.at(q.sq.head); q.sq.head == q.sq.tail || !w.started || t.PSN.Less(w.first) || !t.PSN.Less(w.end()) {
		return // from before a reset, or flushed meanwhile
	}
	switch {
	case f.Staged():
		q.sourceStaged(t)
		return
	case f.Kind == mem.FaultPending:
		q.sourceAbsent(t, f)
		return
	case q.reliable:
		q.rewind(t.PSN)
		r.unacked = 1 // perhaps no packet before it has asked for an acknowledgement
	default:
		r.cur = q.sq.head
	}
	q.failLocal(ib.WCLocProtErr, vendorFault(f), now)
}

// failLocal makes request cur fail when those before it are done.
func (q *QP) failLocal(status ib.WCStatus, vendor uint16, now Time) {
	r := &q.req
	r.failing, r.failAt, r.vendor = status, r.cur, vendor
	q.advance(r.una, now)
	if r.failing != 0 {
		q.askAgain()
	}
}

// rewind makes psn the next to send: go-back-N.
func (q *QP) rewind(psn wire.PSN) {
	r := &q.req
	r.nxt, r.unacked = psn, 0
	r.dropRuns(psn)
	q.settle()
	r.rd.rewind(psn)
	for r.cur = q.sq.head; r.cur != q.sq.tail; r.cur++ {
		w := q.sq.at(r.cur)
		if !w.started || psn.Less(w.end()) {
			return
		}
	}
}

// sentUnreliable completes request i of a UC or UD queue: it has left.
func (q *QP) sentUnreliable(i uint32, now Time) {
	r := &q.req
	if i-q.sq.head >= r.cur-q.sq.head {
		return // from before a reset, or flushed meanwhile
	}
	for q.sq.head != i+1 {
		w := q.sq.at(q.sq.head)
		r.una = w.end()
		q.sq.head++
		q.completeSend(w)
	}
	q.completeLocal()
	q.resumeWaiting(now)
}
