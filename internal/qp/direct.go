package qp

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
)

// DestQPN returns the number of the peer's queue pair.
func (q *QP) DestQPN() uint32 { return q.attr.DestQPN }

// Joined tells whether two queue pairs are connected with each other: what one
// sends, the other takes and answers.
func (q *QP) Joined(p *QP) bool {
	return q.Type == p.Type && q.attr.DestQPN == p.Number && p.attr.DestQPN == q.Number &&
		q.path.Flow != nil && p.path.Flow != nil && q.peer == p.path.Flow.Src && p.peer == q.path.Flow.Src
}

// AckedBy takes the acknowledgement of everything sent so far straight from its
// peer, which has just executed it: what the peer's train would say, without one. It
// reports false, and has done nothing, if the peer has anything else to say; or has
// said it, and the answer to a READ is on its way.
func (q *QP) AckedBy(p *QP, now Time) bool {
	r, a := &q.req, &p.resp
	if a.n > 0 || a.quiet || a.busy() || r.rd.len() > 0 || p.state == ib.QPErr || a.ack.pending && !a.ack.syndrome.IsAck() ||
		a.epsn != r.nxt || r.nxt != r.max || q.state != ib.QPRTS && q.state != ib.QPSQD {
		return false
	}
	if a.ack.pending {
		a.ack.pending, a.yielded = false, false
		p.Counters.add(CntAcksSent, 1)
		p.Counters.add(CntTxPackets, 1)
		q.Counters.add(CntRxPackets, 1)
	}
	r.unacked = 0
	q.advance(r.nxt, now)
	return true
}

// MayWrite tells whether WriteTo could execute a request, as far as this side knows.
func (q *QP) MayWrite(wr *ib.SendWR) bool { return q.shortWrite(wr) > 0 && q.atRest() }

// WriteTo executes a WRITE of one train at the peer, if neither side has anything else
// under way: all that the train and the acknowledgement would change, without them. It
// returns its bytes; or 0, and has changed nothing, if the request has to go by trains, or
// is to be refused. (It may have written bytes, which will be written again.)
func (q *QP) WriteTo(p *QP, wr *ib.SendWR) int {
	n := q.shortWrite(wr)
	packets := q.packets(n)
	if n == 0 || n > train.MaxBytes || q.mtu != p.mtu || packets > q.path.Window || !q.atRest() || !p.expects(q) {
		return 0
	}
	src := q.source(wr)
	dst := p.remoteList(ib.AccessRemoteWrite, p.Actor(), wr.RKey, wr.RemoteAddr, n)
	if !mem.CopyWhole(dst, src, uint64(n), true) {
		if f, _ := mem.CopyPieces(dst, src, uint64(n), true); !f.OK() {
			return 0
		}
	}
	q.written(p, wr, n, packets)
	return n
}

// shortRead is shortWrite for READs.
func (q *QP) shortRead(wr *ib.SendWR) int {
	if wr.Op != ib.OpRDMARead || !q.plain(wr) || wr.Inline != nil || len(wr.SGL) != 1 || q.sq.maxSGE < 1 {
		return 0
	}
	return int(wr.SGL[0].Length)
}

// plain tells whether a request asks for nothing but to be done and completed, and has a
// place in the queue.
func (q *QP) plain(wr *ib.SendWR) bool {
	return wr.Flags&^ib.SendSignaled == 0 && q.sq.tail-q.sq.freed.Load() < q.sq.max
}

// shortWrite returns how many bytes a request has that may go without a train; 0 if it
// may not.
func (q *QP) shortWrite(wr *ib.SendWR) int {
	s := &q.sq
	if wr.Op != ib.OpRDMAWrite || !q.plain(wr) {
		return 0
	}
	switch {
	case wr.Inline != nil && len(wr.SGL) == 0 && len(wr.Inline) <= s.maxInline:
		return len(wr.Inline)
	case wr.Inline == nil && len(wr.SGL) == 1 && s.maxSGE > 0:
		return int(wr.SGL[0].Length)
	}
	return 0
}

// atRest tells whether a queue pair has sent all that it has to send, and heard of all.
func (q *QP) atRest() bool {
	r := &q.req
	return q.free() && r.cur == q.sq.tail && q.sq.head == q.sq.tail && r.cwnd >= q.path.Window &&
		q.path.Credits == nil && !q.Answering()
}

// expects tells whether a queue pair would execute a WRITE of its peer's at once, and
// has nothing to say before it acknowledges it.
func (q *QP) expects(from *QP) bool {
	r := &q.resp
	return q.state == ib.QPRTS && q.established && q.attr.Access&ib.AccessRemoteWrite != 0 &&
		r.kind == 0 && r.n == 0 && !r.ack.pending && !r.quiet && r.epsn == from.req.nxt && !r.busy()
}

// written moves both sides on past a WRITE of n bytes.
func (q *QP) written(p *QP, wr *ib.SendWR, n, packets int) {
	p.Absorb(1, uint64(packets), uint64(n), false)
	q.passed(n, packets)
	q.sq.tail++
	q.sq.head, q.req.cur = q.sq.tail, q.sq.tail
	if wr.Flags&ib.SendSignaled == 0 && !q.SignalAll {
		return
	}
	p.Counters.add(CntAcksSent, 1)
	p.Counters.add(CntTxPackets, 1)
	q.Counters.add(CntRxPackets, 1)
	wc := ib.WC{ID: wr.ID, Op: ib.WCRDMAWrite, QPN: q.Number}
	q.pushed(q.SendCQ.PushSend(&wc, q.sq.freed, q.sq.head))
}

// passed moves the requester on past a WRITE of n bytes that is done, and the only one
// under way.
func (q *QP) passed(n, packets int) {
	q.Counters.add(CntTxPackets, packets)
	q.Counters.add(CntTxBytes, n)
	q.moved(packets)
}

// moved moves the PSNs on.
func (q *QP) moved(packets int) {
	r := &q.req
	r.max = r.max.Add(packets)
	r.una, r.nxt, r.unacked = r.max, r.max, 0
}

// Absorb moves the responder on past requests that were executed without it: so many, of
// so many packets and bytes.
func (q *QP) Absorb(messages, packets, bytes uint64, read bool) {
	r, c := &q.resp, &q.Counters
	if read {
		c[CntRxPackets] += messages
		c[CntTxPackets] += packets
		c[CntTxBytes] += bytes
	} else {
		c[CntRxPackets] += packets
		c[CntRxBytes] += bytes
	}
	r.epsn = r.epsn.Add(int(packets & (1<<24 - 1)))
	r.msn = (r.msn + uint32(messages)) & (1<<24 - 1)
}

// Direct is a way by which WRITEs and READs are done at once, at the peer, who is told
// only that they were (Absorb).
type Direct interface {
	// Covers tells whether a range of the peer's memory can be reached that way, to be
	// written to or read from.
	Covers(rkey uint32, va uint64, n int, read bool) bool
	// Copy does a WRITE or a READ of what Covers was asked for. If it returns false the
	// request must go by trains; some bytes may have been copied.
	Copy(va uint64, own *mem.List, n, packets int, read bool) bool
}

// PostDirect executes a request by the direct way, if it can go that way and nothing
// is before it. It returns its bytes; or 0, and has changed nothing.
func (q *QP) PostDirect(wr *ib.SendWR) int {
	n, read := q.shortWrite(wr), false
	if n == 0 {
		n, read = q.shortRead(wr), true
	}
	if n == 0 || n > train.MaxBytes || q.sq.head != q.sq.tail || !q.free() || !q.Direct.Covers(wr.RKey, wr.RemoteAddr, n, read) {
		return 0
	}
	own, packets := q.source(wr), q.packets(n)
	if read {
		own.Access = ib.AccessLocalWrite
	}
	if read && !q.mayRead() || !q.Direct.Copy(wr.RemoteAddr, own, n, packets, read) {
		return 0
	}
	q.passedDirect(n, packets, read)
	q.sq.tail++
	q.sq.head, q.req.cur = q.sq.tail, q.sq.tail
	if wr.Flags&ib.SendSignaled != 0 || q.SignalAll {
		wc := ib.WC{ID: wr.ID, Op: opTable[wr.Op].wc, QPN: q.Number}
		if read {
			wc.ByteLen = uint32(n)
		}
		q.pushed(q.SendCQ.PushSend(&wc, q.sq.freed, q.sq.head))
	}
	return n
}

// mayRead tells whether the result of a READ can be written now: it does not overtake an
// earlier one.
func (q *QP) mayRead() bool {
	if q.attr.MaxRDAtomic == 0 {
		return false
	}
	f := q.writeResults()
	return f.OK()
}

// passedDirect moves the requester on past a request that was done by the direct way.
func (q *QP) passedDirect(n, packets int, read bool) {
	q.Counters.add(CntDirect, 1)
	if !read {
		q.passed(n, packets)
		return
	}
	q.Counters.add(CntTxPackets, 1)
	q.Counters.add(CntRxPackets, packets)
	q.Counters.add(CntRxBytes, n)
	q.moved(packets)
}

// free tells whether a new request could be executed now: nothing is under way.
func (q *QP) free() bool {
	r := &q.req
	return q.state == ib.QPRTS && r.una == r.max && r.nxt == r.max && r.failing == 0 && r.rnrUntil == 0 && !r.fetching && !r.draining
}

// source is the list of what a request writes.
func (q *QP) source(wr *ib.SendWR) *mem.List {
	if wr.Inline != nil {
		q.resp.raw[0] = wr.Inline
		q.req.list = mem.List{Raw: q.resp.raw[:]}
		return &q.req.list
	}
	q.mine.sge[0] = wr.SGL[0]
	q.mine.list.Access = 0
	return &q.mine.list
}

// directly is what became of a request that Direct might do.
type directly uint8

const (
	byTrain directly = iota // it goes the usual way
	waits                   // until what is before it is done
	done
)

// direct executes the request that is to be started, if it can go by the direct way.
func (q *QP) direct(w *wqe) directly {
	r, n, read := &q.req, int(w.len), w.op == ib.OpRDMARead
	if w.op != ib.OpRDMAWrite && !read || w.flags&ib.SendFence != 0 || n == 0 || n > train.MaxBytes ||
		!q.Direct.Covers(w.rkey, w.remote, n, read) {
		r.other, r.hasOther = r.cur, true
		return byTrain
	}
	if !q.free() {
		if r.nxt == r.max && r.unacked == 0 && q.state == ib.QPRTS && r.failing == 0 && !q.mixed() {
			return waits // for acknowledgements that were asked for
		}
		return byTrain
	}
	if r.direct >= train.MaxBytes {
		return waits // so much in one call; the owner calls again
	}
	own, packets := &r.list, q.packets(n)
	if w.inline {
		q.resp.raw[0] = q.sq.inlineData(r.cur)
		*own = mem.List{Raw: q.resp.raw[:]}
	} else {
		own = q.localList(r.cur, 0)
	}
	if read && !q.mayRead() || !q.Direct.Copy(w.remote, own, n, packets, read) {
		return byTrain
	}
	q.passedDirect(n, packets, read)
	r.direct += max(n, directLeast)
	r.cur++
	q.sq.head = r.cur
	q.completeSend(w)
	q.settle(0)
	return done
}

// mixed tells whether something is under way that could not go by the direct way. More of
// it will come, and to wait for it each time would take longer than trains do.
func (q *QP) mixed() bool {
	r := &q.req
	return r.hasOther && r.other-q.sq.head < r.cur-q.sq.head
}

// directLeast is what a short WRITE counts for: what is copied in the time that the rest
// of it takes.
const directLeast = 2 << 10

// TakeDirect returns about how many bytes Pull has written by the direct way since it was last
// asked. If there are some, there may be more to Pull.
func (q *QP) TakeDirect() (n int) {
	n, q.req.direct = q.req.direct, 0
	return n
}
