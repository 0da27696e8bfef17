package qp

// A target's requests may name shared receive queues of several processes, and each
// is executed by the process that has the queue. So the responder goes from one to
// the other, between messages: this is what it takes with it.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// Handoff is where a target stands between two messages.
type Handoff struct {
	Expected wire.PSN // the next request
	Messages uint32   // completed, as acknowledgements tell
	ReadEnd  wire.PSN // the PSN after the last READ or atomic
	AnyRead  bool     // there was one
	Owes     bool     // an acknowledgement of everything before Expected
	NakSent  bool     // the peer was told that Expected is missing, or must wait
}

// Expected returns the PSN of the next request.
func (q *QP) Expected() wire.PSN { return q.resp.epsn }

// Between reports whether no message is under way, and nothing is to be answered
// that more than an acknowledgement would do for.
func (q *QP) Between() bool {
	r := &q.resp
	return r.kind == 0 && !r.have && r.n == 0 && !r.busy() && (!r.ack.pending || r.ack.syndrome.IsAck())
}

// Quiescent is Between with nothing to be answered at all.
func (q *QP) Quiescent() bool { return q.Between() && !q.resp.ack.pending }

// HandOff returns where the target stands, between messages, for another one to go
// on there. Until TakeOver only repetitions may be received.
func (q *QP) HandOff() Handoff {
	r := &q.resp
	t := Handoff{Expected: r.epsn, Messages: r.msn, ReadEnd: r.rdEnd, AnyRead: r.rdAny, Owes: r.ack.pending, NakSent: r.nakSent}
	r.ack.pending = false
	return t
}

// TakeOver goes on where another one has stopped.
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

// SetDomain makes the target one of an XRC domain; 0 is none.
func (q *QP) SetDomain(id uint32) { q.XRC.Domain = id }
