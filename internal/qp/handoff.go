package qp

// The hand-off of an XRC target. The peer's requests may name shared receive queues of
// several processes, and the process that has the queue executes the request. So the
// responder moves from one process's queue pair to another's, between messages, and a
// Handoff is the state that moves with it.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// Handoff is the state of a target's responder between two messages.
type Handoff struct {
	Expected wire.PSN // the next request
	Messages uint32   // completed: the MSN of acknowledgements
	ReadEnd  wire.PSN // the PSN after the last READ or atomic
	AnyRead  bool     // ReadEnd is valid
	Owes     bool     // an acknowledgement of everything before Expected is due
	NakSent  bool     // a NAK for Expected is out
}

// Expected returns the PSN of the next request.
func (q *QP) Expected() wire.PSN { return q.resp.epsn }

// Between reports whether no message is under way, and no answer is due but an
// acknowledgement.
func (q *QP) Between() bool {
	r := &q.resp
	return r.kind == 0 && !r.have && r.n == 0 && !r.busy() && len(r.ahead.trains) == 0 && (!r.ack.pending || r.ack.syndrome.IsAck())
}

// Quiescent reports whether no message is under way, and no answer is due.
func (q *QP) Quiescent() bool { return q.Between() && !q.resp.ack.pending }

// HandOff returns the state of the target, between messages, for another process's queue
// pair to take over. Until TakeOver is called here again, only repetitions may be received.
func (q *QP) HandOff() Handoff {
	r := &q.resp
	t := Handoff{Expected: r.epsn, Messages: r.msn, ReadEnd: r.rdEnd, AnyRead: r.rdAny, Owes: r.ack.pending, NakSent: r.nakSent}
	r.ack.pending = false
	return t
}

// TakeOver makes the target go on where another process's queue pair has handed off.
func (q *QP) TakeOver(t Handoff) {
	if q.state != ib.QPRTR && q.state != ib.QPRTS {
		return
	}
	r := &q.resp
	r.epsn, r.msn, r.rdEnd, r.rdAny, r.nakSent = t.Expected, t.Messages&(1<<24-1), t.ReadEnd, t.AnyRead, t.NakSent
	if t.Owes {
		r.acknowledge(r.epsn.Add(-1))
	}
}

// SetDomain puts the target into an XRC domain; 0 is none.
func (q *QP) SetDomain(id uint32) { q.XRC.Domain = id }
