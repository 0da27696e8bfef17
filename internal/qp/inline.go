package qp

// Inline receive ("scatter to CQE"): the bytes of a short message, or the result of
// a short READ or an atomic, wait beside the completion as inline data, and are
// written back to where they belong when the completion is polled (queue.InlineData).
// The program sees no difference: the bytes are there when it has the completion, and
// it must not look before.
//
// Hardware does so because it then need not read the scatter list. Here it costs a
// second copy where the memory is at hand. But memory that has to be fetched first
// does not keep the peer waiting: the message is taken, and the poller waits for the
// page.
//
// Inline data that other work of the queue pair depends on does not wait for a poll.
// Earlier results are written back before a fenced request starts and before a later
// result is written to memory; earlier messages before a later message is, since
// their receives may share a buffer.
//
// There is no inline data for indirect keys and device memory, nor for a message that
// does not fit the first piece of its list, nor for requests that make no completion,
// nor for the targets of XRC, whose messages go to many completion queues.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
)

// mayWait reports whether a message of n bytes that goes to a list may be inline data.
func (q *QP) mayWait(list *mem.List, n int) bool {
	return n > 0 && n <= queue.MaxInlineData && list.Off == 0 && len(list.SGEs) > 0 && uint64(n) <= uint64(list.SGEs[0].Length) &&
		q.Table.IsHost(list.SGEs[0].LKey, list.SGEs[0].Addr, uint64(n), list.Access, list.Actor)
}

// keep makes the payload of a train the inline data of its completion, which the caller
// pushes. It returns a fault if the payload cannot be read.
func (q *QP) keep(list *mem.List, t *train.Train, result bool) mem.Fault {
	l := q.inlineData
	if l == nil {
		l = &inlineData{InlineData: queue.InlineData{Failed: q.ScatterFailed, Table: q.Table}}
		q.inlineData = l
	}
	l.Waiting = &l.receives
	if result {
		l.Waiting = &l.results
	}
	l.Actor, l.SGE, l.N = list.Actor, list.SGEs[0], uint8(t.Len)
	l.raw[0] = l.Data[:t.Len]
	l.to = mem.List{Raw: l.raw[:]}
	f, _ := mem.Copy(&l.to, &t.Payload, uint64(t.Len), false)
	return f
}

// inlineData is the inline data of the next completion to push, and what filling it needs.
type inlineData struct {
	queue.InlineData
	raw               [1][]byte
	to                mem.List
	results, receives queue.Waiting // inline data that was pushed and is not written back yet
}

// writeResults writes back the results of earlier requests that still wait, writeReceives
// the messages. Each returns the fault that it meets.
func (q *QP) writeResults() mem.Fault {
	if q.inlineData == nil || q.inlineData.results.None() {
		return mem.Fault{}
	}
	return q.SendCQ.WriteBack(&q.inlineData.results)
}

func (q *QP) writeReceives() mem.Fault {
	if q.inlineData == nil || q.inlineData.receives.None() {
		return mem.Fault{}
	}
	return q.RecvCQ.WriteBack(&q.inlineData.receives)
}

// writtenBack calls writeResults and reports whether a fenced request may start. If the
// memory has to be fetched first, the requester stops until it is there.
func (q *QP) writtenBack() bool {
	f := q.writeResults()
	switch f.Kind {
	case mem.FaultNone:
		return true
	case mem.FaultPending:
		q.standStill(f, nil, CntFaultWaits)
	default:
		q.enterError() // the completion has the cause
	}
	return false
}

// deliver writes the payload of a train to a list, or makes it inline data and reports
// waits, which takes a train that is the whole message (whole). Before it writes, it writes
// back the inline data of earlier results or messages: none overtakes another.
func (q *QP) deliver(list *mem.List, t *train.Train, end, whole, result bool) (waits bool, f mem.Fault, side mem.Side) {
	if q.Scatter && whole && q.mayWait(list, t.Len) {
		if f = q.keep(list, t, result); !f.OK() {
			return false, f, mem.Src
		}
		q.Counters.add(CntInline, 1)
		return true, mem.Fault{}, 0
	}
	if result {
		f = q.writeResults()
	} else {
		f = q.writeReceives()
	}
	if !f.OK() {
		return false, f, mem.Dst
	}
	f, side = mem.Copy(list, &t.Payload, uint64(t.Len), end)
	return false, f, side
}

// ScatterBroke makes the queue pair fail because inline data could not be written back
// when its completion was polled, though the peer has its acknowledgement. It returns the
// code for the completion.
func (q *QP) ScatterBroke(f mem.Fault) (vendor uint16) {
	if q.state != ib.QPReset {
		q.enterError()
	}
	return vendorFault(f)
}
