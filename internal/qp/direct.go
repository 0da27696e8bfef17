package qp

import "github.com/verbena-rdma/verbena/ib"

// DestQPN returns the number of the peer's queue pair.
func (q *QP) DestQPN() uint32 { return q.attr.DestQPN }

// AckedBy takes the acknowledgement of everything sent so far straight from its
// peer, which has just executed it: what the peer's train would say, without one. It
// reports false, and has done nothing, if the peer has anything else to say.
func (q *QP) AckedBy(p *QP, now Time) bool {
	r, a := &q.req, &p.resp
	if a.n > 0 || a.quiet || a.ack.pending && !a.ack.syndrome.IsAck() ||
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
