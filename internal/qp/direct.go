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
	if a.n > 0 || a.quiet || r.rd.len() > 0 || p.state == ib.QPErr || a.ack.pending && !a.ack.syndrome.IsAck() ||
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
	src := &q.req.list
	if wr.Inline != nil {
		q.resp.raw[0] = wr.Inline
		*src = mem.List{Raw: q.resp.raw[:]}
	} else {
		*src = mem.List{Table: q.Table, Actor: q.actor(), SGEs: wr.SGL}
	}
	dst := p.remoteList(ib.AccessRemoteWrite, p.actor(), wr.RKey, wr.RemoteAddr, n)
	if f, _ := mem.Copy(dst, src, uint64(n), true); !f.OK() {
		return 0
	}
	q.written(p, wr, n, packets)
	return n
}

// shortWrite returns how many bytes a request has that may go without a train; 0 if it
// may not.
func (q *QP) shortWrite(wr *ib.SendWR) int {
	s := &q.sq
	if wr.Op != ib.OpRDMAWrite || wr.Flags&^ib.SendSignaled != 0 || s.tail-s.freed.Load() >= s.max {
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
	return q.state == ib.QPRTS && r.cur == q.sq.tail && q.sq.head == q.sq.tail && r.una == r.max && r.nxt == r.max &&
		r.failing == 0 && r.rnrUntil == 0 && !r.fetching && !r.draining && r.cwnd >= q.path.Window &&
		q.path.Credits == nil && !q.Answering()
}

// expects tells whether a queue pair would execute a WRITE of its peer's at once, and
// has nothing to say before it acknowledges it.
func (q *QP) expects(from *QP) bool {
	r := &q.resp
	return q.state == ib.QPRTS && q.established && q.attr.Access&ib.AccessRemoteWrite != 0 &&
		r.kind == 0 && r.n == 0 && !r.ack.pending && !r.quiet && r.epsn == from.req.nxt
}

// written moves both sides on past a WRITE of n bytes.
func (q *QP) written(p *QP, wr *ib.SendWR, n, packets int) {
	r, a := &q.req, &p.resp
	q.Counters.add(CntTxPackets, packets)
	q.Counters.add(CntTxBytes, n)
	p.Counters.add(CntRxPackets, packets)
	p.Counters.add(CntRxBytes, n)
	a.epsn = a.epsn.Add(packets)
	a.msn = (a.msn + 1) & (1<<24 - 1)
	r.una, r.nxt, r.max, r.unacked = a.epsn, a.epsn, a.epsn, 0
	q.sq.tail++
	q.sq.head, r.cur = q.sq.tail, q.sq.tail
	if wr.Flags&ib.SendSignaled == 0 && !q.SignalAll {
		return
	}
	p.Counters.add(CntAcksSent, 1)
	p.Counters.add(CntTxPackets, 1)
	q.Counters.add(CntRxPackets, 1)
	wc := ib.WC{ID: wr.ID, Op: ib.WCRDMAWrite, QPN: q.Number}
	q.pushed(q.SendCQ.PushSend(&wc, q.sq.freed, q.sq.head))
}
