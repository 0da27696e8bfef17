package qp

import "github.com/verbena-rdma/verbena/ib"

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
