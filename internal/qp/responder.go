package qp

// The responder: requests of the peer → memory, receives, answers.
//
//  1. receiveRequest: is it the expected PSN, a repetition, a gap?
//  2. sequence: does the packet fit the message that is under way?
//  3. executeSend, executeWrite, executeRead, executeAtomic, executeAtomicWrite,
//     executeFlush (flush.go).
//  4. accept: PSN and message numbers move on, the answer is noted.
//     Or refuse, notReady, or notPresent (pending.go), which may keep the request
//     for a moment (hold.go).
//
// Requests whose bytes an engine has to move are accepted, and come into effect
// later (staged.go).
//
// What is answered, and when, is in responses.go.

import (
	"encoding/binary"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

type responder struct {
	epsn     wire.PSN // the next request
	msn      uint32   // messages completed, 24 bits
	nakSent  bool     // a NAK is out: a gap raises no other until the expected request comes
	notReady bool     // and it was no NAK for a gap: nothing is kept until then
	ahead    aheads   // requests that came too early (ahead.go)
	probed   bool     // the next acknowledgement answers a probe
	rdEnd    wire.PSN // the PSN after the last READ or atomic
	rdAny    bool     // rdEnd is valid

	// The message under way: 0 if none.
	kind wire.Kind
	skip bool   // UC: the rest of the last message is dropped
	off  uint64 // bytes received of it
	reth wire.RETH

	srq uint32 // XRC: the queue that it names

	// The receive that the message under way has taken, or that a broken UC
	// message has left for the next.
	taken queue.Taken
	have  bool
	owed  []queue.Taken // receives of messages behind it that come again, oldest first

	answers
	loads loads   // of answers
	moves []*Move // requests that wait for engines, oldest first (staged.go)
	// tellMoves: the peer asks again for a request that waits for an engine, and is to get
	// an RNR NAK.
	tellMoves bool
	// partly: of those, requests that asked for an acknowledgement have come into effect, or may be
	// acknowledged early.
	partly   bool
	acked    wire.PSN // the last packet that was acknowledged
	ackedAny bool     // acked is valid
	// held are requests and answers that wait for memory that is out of reach for a moment
	// (hold.go), or requests that wait for the moves before them; nil until there are some.
	held *heldRequests
}

// receiveRequest checks the PSN of a request (IBA 9.7.4.1.2) and executes it.
func (q *QP) receiveRequest(t *train.Train) mem.Fault {
	r := &q.resp
	if r.held != nil && len(r.held.requests) > 0 {
		if taken, f := q.keepBehind(t); taken {
			return f
		}
	}
	d := t.PSN.Sub(r.epsn)
	switch {
	case q.Type == ib.UC:
		if !q.follow(t) {
			return mem.Fault{}
		}
	case d > 0:
		q.receiveEarly(t)
		return mem.Fault{}
	case d < 0 && d+t.N <= 0:
		q.Counters.add(CntDuplicates, t.N)
		q.repeat(t)
		return mem.Fault{}
	case d < 0:
		q.Counters.add(CntDuplicates, -d)
		r.wentBack(t)
		t.TrimFront(-d)
	}
	r.nakSent, r.notReady = false, false
	r.probed = r.probed || t.Hints&wire.HintProbe != 0
	if len(r.moves) > 0 && !(q.half == target && !q.bind(t)) && !q.follows(t) {
		return q.keepInOrder(t)
	}
	if q.half == target && !q.bind(t) {
		return q.refuse(invalidRequest, vendorSRQ)
	}
	if !q.sequence(t) {
		return q.refuse(invalidRequest, 0)
	}
	switch t.Kind {
	case wire.KindSend:
		return q.executeSend(t)
	case wire.KindWrite:
		return q.executeWrite(t)
	case wire.KindReadRequest:
		return q.executeRead(t)
	case wire.KindCmpSwap, wire.KindFetchAdd:
		return q.executeAtomic(t)
	case wire.KindAtomicWrite:
		return q.executeAtomicWrite(t)
	case wire.KindFlush:
		return q.executeFlush(t)
	}
	return q.refuse(invalidRequest, 0)
}

// follow follows a UC stream, and reports whether a train is to be executed. A message
// that misses a packet is dropped whole, and the stream goes on with the start of the
// next one, whatever its PSN (IBA 9.8.2.2).
func (q *QP) follow(t *train.Train) bool {
	r := &q.resp
	broken := r.kind != 0 && (t.Start || t.PSN != r.epsn) || // the one under way
		r.kind == 0 && !t.Start && !r.skip // the first packet is missing
	if broken {
		q.Counters.add(CntDropBroken, 1)
		r.kind, r.skip = 0, true
	}
	if t.Start {
		r.skip = false
	}
	r.epsn = t.PSN
	return t.Start || r.kind != 0
}

// sequence checks that a packet fits what came before it and that its size is
// that of its place (IBA 9.7.4.1.1 and 9.7.4.1.6).
func (q *QP) sequence(t *train.Train) bool {
	r := &q.resp
	if t.Start == (r.kind != 0) || !t.Start && t.Kind != r.kind {
		return false
	}
	switch t.Kind {
	case wire.KindSend, wire.KindWrite:
	case wire.KindAtomicWrite:
		return t.N == 1 && t.Len == 8
	default:
		return t.N == 1 && t.Len == 0
	}
	if t.N > 1 && t.MTU != q.mtu {
		return false
	}
	last := t.Len - (t.N-1)*q.mtu
	if !t.End {
		return last == q.mtu
	}
	return last <= q.mtu && (last > 0 || last == 0 && t.Start && t.N == 1)
}

// takeReceive takes a receive for a message. A message that comes again gets the one that it
// had taken before.
func (q *QP) takeReceive() bool {
	r := &q.resp
	if len(r.owed) == 0 {
		return q.Recv.Take(&r.taken)
	}
	r.taken = r.owed[0]
	if r.owed = r.owed[1:]; len(r.owed) == 0 {
		r.owed = nil
	}
	return true
}

// executeSend puts a SEND into the receive that it takes at its start.
func (q *QP) executeSend(t *train.Train) mem.Fault {
	r := &q.resp
	kind, off := r.kind, r.off
	if t.Start {
		if !r.have && !q.takeReceive() {
			return q.notReady()
		}
		r.have, r.off = true, 0
	}
	if uint64(t.Len) > min(r.taken.Len, MaxMsgSize)-r.off {
		return q.refuse(tooLong, vendorTooLong)
	}
	waits, f, side := q.deliver(q.receiveList(r.off), t, t.End, t.Start && t.End, false)
	var m *Move
	switch {
	case f.OK():
	case f.Staged():
		if m, f = q.take(t, q.receiveList(r.off)); m == nil {
			return f
		}
		m.before = responderState{kind, off, r.msn}
	case side == mem.Src:
		return f
	default:
		return q.refuseFault(receiveError, t, f, r.taken.SGEs)
	}
	r.kind = wire.KindSend
	r.off += uint64(t.Len)
	if !t.End {
		return q.accept(t, t.N)
	}
	wc := ib.WC{ID: r.taken.ID, Op: ib.WCRecv, ByteLen: uint32(r.off)}
	switch t.Extra {
	case wire.WithImm:
		wc.Imm, wc.Flags = t.Imm, ib.WCWithImm
	case wire.WithInv:
		if m != nil {
			m.invalidate = true
		} else if f := q.Table.Invalidate(t.Imm, q.Actor()); !f.OK() {
			r.kind, r.off = kind, off // executed again, if another process has to leave the memory first
			return q.refuseFault(accessError, t, f, nil)
		}
		wc.InvalidatedKey, wc.Flags = t.Imm, ib.WCWithInv
	}
	q.accept(t, t.N)
	if waits {
		r.have = false
		wc.QPN = q.Number
		q.pushed(q.RecvCQ.PushInline(&wc, t.Solicited, &q.inlineData.InlineData))
		return mem.Fault{}
	}
	q.completeBehind(m, &wc, t.Solicited)
	return mem.Fault{}
}

// executeWrite puts a WRITE into memory. The whole range is checked at the
// message's start, so that a refused WRITE has not begun.
func (q *QP) executeWrite(t *train.Train) mem.Fault {
	r := &q.resp
	// The right is looked at for every train: once Modify has taken it away, the memory
	// stays as it is, also in the middle of a message.
	if q.attr.Access&ib.AccessRemoteWrite == 0 {
		return q.refuse(invalidRequest, 0)
	}
	if t.Start {
		if t.RETH.Len > MaxMsgSize {
			return q.refuse(invalidRequest, 0)
		}
		r.reth, r.off = t.RETH, 0
		// A WRITE that is whole, without immediate data, is checked by Copy, before
		// the first byte.
		if whole := t.End && t.Extra == wire.NoExtra && int(t.RETH.Len) == t.Len; !whole {
			if f := q.checkRemote(ib.AccessRemoteWrite, t.RETH, q.Actor()); !f.OK() {
				return q.refuseWrite(t, f)
			}
		}
	}
	left := uint64(r.reth.Len) - r.off
	if uint64(t.Len) > left || t.End && uint64(t.Len) != left {
		return q.refuse(invalidRequest, 0) // IBA 9.7.4.1.6: the length in the RETH binds
	}
	notReady := false
	if t.End && t.Extra == wire.WithImm && !r.have {
		if r.have = q.takeReceive(); !r.have {
			if q.Type == ib.UC || t.N == 1 {
				return q.notReady()
			}
			t.TrimLast() // the packets before the last need no receive
			notReady = true
		}
	}
	dst := q.remoteList(ib.AccessRemoteWrite, q.Actor(), r.reth.RKey, r.reth.VA+r.off, t.Len)
	f, side := mem.Copy(dst, &t.Payload, uint64(t.Len), t.End)
	var m *Move
	switch {
	case f.OK():
	case f.Staged():
		if m, f = q.take(t, dst); m == nil {
			return f
		}
	case side == mem.Src:
		return f
	default:
		f = q.refuseWrite(t, f)
		if notReady && r.holding() {
			r.held.lost = true // the last packet was trimmed, and must come again
		}
		return f
	}
	r.kind = wire.KindWrite
	r.off += uint64(t.Len)
	q.accept(t, t.N)
	if notReady {
		q.rnr()
	}
	if t.End && t.Extra == wire.WithImm {
		q.completeBehind(m, &ib.WC{ID: r.taken.ID, Op: ib.WCRecvRDMAWithImm, ByteLen: r.reth.Len,
			Imm: t.Imm, Flags: ib.WCWithImm}, t.Solicited)
	}
	return mem.Fault{}
}

// refuseWrite refuses a WRITE for its memory. With immediate data it would have
// taken a receive, which then completes with the error.
func (q *QP) refuseWrite(t *train.Train, f mem.Fault) mem.Fault {
	r := &q.resp
	if f.Kind == mem.FaultPending {
		q.named.sge[0].Length = uint32(uint64(r.reth.Len) - r.off) // all that is to come
		return q.notPresent(t, f, q.named.sge[:])
	}
	if t.End && t.Extra == wire.WithImm && !r.have {
		r.have = q.takeReceive()
	}
	return q.refuse(accessError, vendorFault(f))
}

// executeRead checks a READ and makes it a responder resource: its bytes are read when it
// is answered (responses.go).
func (q *QP) executeRead(t *train.Train) mem.Fault {
	if !q.reliable || q.attr.Access&ib.AccessRemoteRead == 0 || t.RETH.Len > MaxMsgSize {
		return q.refuse(invalidRequest, 0)
	}
	if ok, f := q.admit(); !ok {
		return f
	}
	if f := q.checkRemote(ib.AccessRemoteRead, t.RETH, q.Actor()); !f.OK() {
		return q.refuse(accessError, vendorFault(f))
	}
	r, psn := &q.resp, t.PSN
	n := q.packets(int(t.RETH.Len))
	q.accept(t, n)
	r.rdEnd, r.rdAny = r.epsn, true
	r.answerRead(psn, n, t.RETH, q.PD, r.msn)
	return mem.Fault{}
}

// executeAtomic does an atomic and saves its result, in case the answer is lost
// (IBA 9.7.5.1.5).
func (q *QP) executeAtomic(t *train.Train) mem.Fault {
	r := &q.resp
	if !q.reliable || q.attr.Access&ib.AccessRemoteAtomic == 0 {
		return q.refuse(invalidRequest, 0)
	}
	if ok, f := q.admit(); !ok {
		return f
	}
	if t.Atomic.VA%8 != 0 {
		return q.refuse(invalidRequest, vendorFault(mem.Fault{Kind: mem.FaultAlign})) // IBA 9.4.5
	}
	op := mem.FetchAdd
	if t.Kind == wire.KindCmpSwap {
		op = mem.CmpSwap
	}
	orig, f := mem.Atomic(q.Table, q.Actor(), t.Atomic.RKey, t.Atomic.VA, op, t.Atomic.Compare, t.Atomic.SwapAdd)
	if !f.OK() {
		if f.Staged() {
			return q.takeAtomic(t, &atomicMove{key: t.Atomic.RKey, addr: t.Atomic.VA, op: op, compare: t.Atomic.Compare, swapAdd: t.Atomic.SwapAdd})
		}
		return q.refuseFault(accessError, t, f, nil)
	}
	psn := t.PSN
	q.accept(t, 1)
	r.rdEnd, r.rdAny = r.epsn, true
	r.answerAtomic(psn, orig, r.msn)
	return mem.Fault{}
}

// executeAtomicWrite stores 8 bytes in one step (IBA annex A19). It is ordered
// behind everything that came before, FLUSHes too: with it a program publishes
// what it has made persistent. One that comes while a FLUSH waits for storage is
// therefore treated as lost on the way: a NAK follows the answer to the FLUSH.
func (q *QP) executeAtomicWrite(t *train.Train) mem.Fault {
	r := &q.resp
	if !q.reliable || q.attr.Access&ib.AccessRemoteWrite == 0 || t.RETH.Len != 8 {
		return q.refuse(invalidRequest, 0)
	}
	if ok, f := q.admit(); !ok {
		return f
	}
	if t.RETH.VA%8 != 0 {
		return q.refuse(invalidRequest, vendorFault(mem.Fault{Kind: mem.FaultAlign}))
	}
	if r.flushing() {
		q.nak(wire.NakPSNSequence, r.epsn)
		return mem.Fault{}
	}
	r.raw[0] = r.word[:]
	r.from = mem.List{Raw: r.raw[:]}
	if f, _ := mem.Copy(&r.from, &t.Payload, 8, false); !f.OK() {
		return f // its sender loads it first, as always with 8 bytes
	}
	value := binary.NativeEndian.Uint64(r.word[:]) // the bytes keep their order in memory
	_, f := mem.Atomic(q.Table, q.Actor(), t.RETH.RKey, t.RETH.VA, mem.Store, 0, value)
	if f.Staged() {
		return q.takeAtomic(t, &atomicMove{key: t.RETH.RKey, addr: t.RETH.VA, op: mem.Store, swapAdd: value})
	}
	if !f.OK() {
		return q.refuseFault(accessError, t, f, nil)
	}
	psn := t.PSN
	q.accept(t, 1)
	r.rdEnd, r.rdAny = r.epsn, true
	r.answerRead(psn, 1, wire.RETH{}, q.PD, r.msn)
	return mem.Fault{}
}

// admit reports whether there is room for the answer to a READ or atomic. It refuses the
// request of a peer that exceeds MaxDestRDAtomic. If FLUSHes have taken the places, it
// sends an RNR NAK.
func (q *QP) admit() (bool, mem.Fault) {
	switch r := &q.resp; {
	case !r.full(q.attr.MaxDestRDAtomic):
		return true, mem.Fault{}
	case r.asked() < q.attr.MaxDestRDAtomic:
		return false, q.notReady()
	}
	return false, q.refuse(invalidRequest, 0)
}

// executes reports whether the state is one in which requests are executed.
func (q *QP) executes() bool {
	switch q.state {
	case ib.QPRTR, ib.QPRTS, ib.QPSQD:
		return true
	}
	return false
}

// accept moves on past a request that was executed, which took n PSNs.
func (q *QP) accept(t *train.Train, n int) mem.Fault {
	r := &q.resp
	r.epsn = r.epsn.Add(n)
	if t.End {
		r.kind = 0
		r.msn = (r.msn + 1) & (1<<24 - 1)
	}
	if t.AckReq && q.reliable {
		r.acknowledge(r.epsn.Add(-1))
	}
	return mem.Fault{}
}

// completeReceive completes the receive that a message has taken.
func (q *QP) completeReceive(wc *ib.WC, solicited bool) {
	q.resp.have = false
	q.complete(wc, solicited)
}

// notReady: no receive is posted, or no place is free (admit). RC sends an RNR NAK
// (IBA 9.7.5.2.8), UC loses the message.
func (q *QP) notReady() mem.Fault {
	if q.reliable {
		q.rnr()
		return mem.Fault{}
	}
	q.Counters.add(CntDropNoReceive, 1)
	q.resp.kind, q.resp.skip = 0, true
	return mem.Fault{}
}

// refuse ends a request with an error. The receive that it had taken completes
// with it; without one, it raises an event. An RC queue pair
// answers with a NAK and goes to the error state; a UC one drops the message
// and goes on, unless its own memory failed (IBA 9.9.3, classes C to E).
func (q *QP) refuse(why refusal, vendor uint16) mem.Fault {
	r := &q.resp
	q.Counters.add(why.count, 1)
	if q.Type == ib.UC && why.nak != wire.NakRemoteOpError {
		q.Counters.add(CntDropMalformed, 1)
		r.kind, r.skip = 0, true
		return mem.Fault{}
	}
	if q.reliable {
		q.nak(why.nak, r.epsn)
	}
	if r.have {
		r.have = false
		q.complete(&ib.WC{ID: r.taken.ID, Status: why.status, Op: ib.WCRecv, VendorErr: vendor}, false)
	} else {
		q.Event(why.event)
	}
	q.enterErrorAnswering()
	return mem.Fault{}
}

// receiveList is the current receive's memory from off on.
func (q *QP) receiveList(off uint64) *mem.List {
	r := &q.resp
	l := &q.taken.list
	l.Actor, l.Access, l.SGEs, l.Off = mem.Actor{PD: q.RecvPD, QPN: q.Number}, ib.AccessLocalWrite, r.taken.SGEs, off
	return l
}

// remoteList is a range that the peer named.
func (q *QP) remoteList(acc ib.Access, who mem.Actor, key uint32, va uint64, n int) *mem.List {
	l, e := &q.named.list, &q.named.sge[0]
	l.Actor, l.Access = who, acc
	e.Addr, e.Length, e.LKey = va, uint32(n), key
	return l
}

// checkRemote checks a range that the peer named. An empty one names nothing
// (IBA 9.7.4.1.5: the R_Key of a zero-length request is not checked).
func (q *QP) checkRemote(acc ib.Access, h wire.RETH, who mem.Actor) mem.Fault {
	if h.Len == 0 {
		return mem.Fault{}
	}
	return mem.Check(q.remoteList(acc, who, h.RKey, h.VA, int(h.Len)), uint64(h.Len))
}
