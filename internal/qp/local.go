package qp

// Requests that concern this device alone: binding a memory window, and
// invalidating a key. They take no PSN and send nothing.
//
//  1. PostBind posts the verb, PostSend the requests.
//  2. passLocal carries them out when they come to the front: everything before
//     them has been sent, and nothing behind them, so that whoever binds a
//     window and then sends its key can be sure of it (IBA 10.8.3.3). They do
//     not wait for answers unless they are fenced.
//  3. They complete in their turn (advance, completeLocal).

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// PostBind posts a bind as the verb does it, for windows of type 1.
func (q *QP) PostBind(id uint64, flags ib.SendFlags, b *ib.MWBind) error {
	_, err := q.PostSend([]ib.SendWR{{ID: id, Op: ib.OpBindMW, Flags: flags, Bind: *b}})
	if err == nil {
		q.sq.at(q.sq.tail - 1).verb = true
	}
	return err
}

// setBind keeps what a bind is made of.
func (w *wqe) setBind(b *ib.MWBind) {
	w.imm, w.rkey, w.qpn = b.MW, b.RKey, b.LKey
	w.remote, w.compareAdd, w.swap = b.Addr, b.Length, uint64(b.Access)
}

func (w *wqe) bind() ib.MWBind {
	return ib.MWBind{MW: w.imm, RKey: w.rkey, LKey: w.qpn, Addr: w.remote, Length: w.compareAdd, Access: ib.Access(w.swap)}
}

// passLocal carries out the local request at the front and goes on behind it. It
// returns false if the request must wait or has failed. One that was done before,
// and is met again because the queue has gone back, is passed only.
func (q *QP) passLocal(now Time) bool {
	r := &q.req
	w := q.sq.at(r.cur)
	if w.started {
		r.cur++
		return true
	}
	if q.state == ib.QPSQD {
		return false // IBA 10.3.1.5: nothing new is started while draining
	}
	if w.flags&ib.SendFence != 0 && q.sq.head != r.cur {
		return q.askAgain()
	}
	if f := q.execute(w); !f.OK() {
		q.failLocal(ib.WCMWBindErr, vendorFault(f), now)
		return r.failing != 0 && r.cur != r.failAt // what askAgain left
	}
	w.started, w.first, w.n = true, r.max, 0
	r.cur++
	if q.reliable {
		q.advance(r.una, now)
	} else {
		q.completeLocal()
		q.settle(now)
	}
	if w.flags&ib.SendSignaled != 0 && q.sq.head != r.cur {
		q.askAgain() // it waits for those before it
	}
	return true
}

// execute does what a local request asks for.
func (q *QP) execute(w *wqe) mem.Fault {
	if w.op == ib.OpLocalInv {
		return q.Table.Invalidate(w.imm, q.actor())
	}
	q.Bound = q.Bound || !w.verb
	b := w.bind()
	return q.Table.Bind(&b, w.verb, q.actor())
}

// completeLocal completes the local requests at the head of an unreliable queue
// that are done: those before them have left.
func (q *QP) completeLocal() {
	for q.sq.head != q.req.cur {
		w := q.sq.at(q.sq.head)
		if !w.facts().local || !w.started {
			return
		}
		q.sq.head++
		q.completeSend(w)
	}
}
