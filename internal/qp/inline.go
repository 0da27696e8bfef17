package qp

// Inline receive ("scatter to CQE"): the bytes of a short message, or the result of
// a short READ or an atomic, wait beside the completion and are copied to where they
// belong when it is polled (queue.Late). The program cannot tell: the bytes are
// there when it has the completion, and before it must not look.
//
// Hardware does so because it then need not read the scatter list. Here it costs a
// second copy where the memory is at hand. But memory that has to be fetched first
// need not keep the peer waiting: the message is taken, and whoever polls waits for
// the page.
//
// What other work of the queue pair may count on does not wait for a poll: a fenced
// request starts, and a later result is written, when earlier results have been; and
// so it is with messages, whose receives may share a buffer.
//
// It is never done for indirect keys and device memory, nor for a message that does
// not fit the first piece of its list, nor for requests that make no completion, nor
// for the targets of XRC, whose messages go to many completion queues.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
)

// mayWait tells whether a message of n bytes that goes to a list may wait.
func (q *QP) mayWait(list *mem.List, n int) bool {
	return n > 0 && n <= queue.MaxInlineData && list.Off == 0 && len(list.SGEs) > 0 && uint64(n) <= uint64(list.SGEs[0].Length) &&
		q.Table.IsHost(list.SGEs[0].LKey, list.SGEs[0].Addr, uint64(n), list.Access, list.Actor)
}

// keep makes the payload of a train wait for its completion. A fault is that of the
// payload.
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

// inlineData is what waits, until it is pushed, and what it takes to fill it.
type inlineData struct {
	queue.InlineData
	raw               [1][]byte
	to                mem.List
	results, receives queue.Waiting // what has been pushed, and waits still
}

// writeResults writes the results of earlier requests that still wait, writeReceives
// what was received. A fault is what keeps it from doing so.
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

// settled is writeResults, for a request that starts behind it: it reports whether it may.
func (q *QP) writtenBack() bool {
	f := q.writeResults()
	switch f.Kind {
	case mem.FaultNone:
		return true
	case mem.FaultPending:
		q.standStill(f, nil)
	default:
		q.enterError() // the completion will say why
	}
	return false
}

// deliver puts what came to a list, which is the whole message if whole is set; or
// lets it wait, and reports that. Neither a result nor a message overtakes another.
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

// ScatterBroke tells that bytes which waited could not be written when their
// completion was polled: it says so, with the code that this returns, and the queue
// pair fails, though the peer was told that all is well.
func (q *QP) ScatterBroke(f mem.Fault) (vendor uint16) {
	if q.state != ib.QPReset {
		q.enterError()
	}
	return vendorFault(f)
}
