package qp

// Requests that concern this device alone: binding a memory window, configuring
// an indirect key, and invalidating a key. They take no PSN and send nothing.
//
//  1. PostBind posts the verb, PostSend the requests.
//  2. passLocal carries them out when they come to the front: everything before
//     them has been sent, and nothing behind them, so that a window is bound
//     before a later request sends its key (IBA 10.8.3.3). They do not wait for
//     answers unless they are fenced.
//  3. They complete in the order of posting (advance, completeLocal).

import (
	"math"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// PostBind posts the bind of the verb bind_mw, for windows of type 1.
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

// checkConfigure checks the form of what an indirect key is to be made of.
func checkConfigure(c *ib.MKeyConfig) error {
	bad := func(format string, args ...any) error { return ib.Errorf("post_send", syscall.EINVAL, format, args...) }
	switch {
	case c == nil:
		return bad("a CONFIGURE_MKEY needs to be told what the key is made of")
	case len(c.List) > 0 && len(c.Interleaved) > 0:
		return bad("an indirect key is a list or an interleaved pattern, not both")
	case c.Pieces() > mem.MaxMKeyPieces:
		return bad("%d pieces, an indirect key has %d at most", c.Pieces(), mem.MaxMKeyPieces)
	case c.Update > ib.MKeyInPlace|ib.MKeyKeepAccess|ib.MKeyKeepLayout, c.Update != 0 && c.Update&ib.MKeyInPlace == 0:
		return bad("what of an indirect key is kept (%#x) makes no sense", uint8(c.Update))
	case c.Update&ib.MKeyKeepLayout != 0 && c.Pieces() > 0:
		return bad("an indirect key that keeps its bytes is not made of others")
	}
	return nil
}

// setConfigure keeps what an indirect key is made of, without its pieces.
func (w *wqe) setConfigure(c *ib.MKeyConfig) {
	w.imm, w.remote, w.swap = c.MKey, c.Addr, uint64(c.Update)<<32|uint64(c.Access)
	w.remoteLen, w.compareAdd = uint32(c.Pieces()), c.Repeat
	if len(c.List) > 0 {
		w.compareAdd = 1
	}
}

// pieceQueue holds the pieces of the indirect keys that are to be configured, in
// the order of the requests. Room in front that is not used any more is used again, so
// that the queue does not grow beyond what waits at once; room for more than keptPieces is
// given up when the queue is empty.
type pieceQueue struct {
	list []ib.Stride
	head int
}

const keptPieces = 1 << 16

// add appends the pieces of a request, all in one form.
func (p *pieceQueue) add(c *ib.MKeyConfig) {
	if p.head > len(p.list)/2 || p.head == len(p.list) {
		p.list, p.head = p.list[:copy(p.list, p.list[p.head:])], 0
	}
	if len(p.list) == 0 && cap(p.list) > keptPieces {
		p.list = nil
	}
	p.list = slices.Grow(p.list, c.Pieces())
	for _, e := range c.List {
		p.list = append(p.list, ib.Stride{Addr: e.Addr, Bytes: uint64(e.Length), LKey: e.LKey})
	}
	p.list = append(p.list, c.Interleaved...)
}

// take removes the next n pieces, which are good until the next add.
func (p *pieceQueue) take(n uint32) []ib.Stride {
	next := p.list[p.head:][:n]
	p.head += int(n)
	return next
}

func (p *pieceQueue) clear() { p.list, p.head = p.list[:0], 0 }

// passLocal carries out the local request at the front and goes on behind it. It
// returns false if the request must wait or has failed. A request that was done before
// and is at the front again, because the requester has gone back, is only passed over; it
// completes here if the requests before it have just taken a shortcut, without an answer.
func (q *QP) passLocal(now Time) bool {
	r := &q.req
	w := q.sq.at(r.cur)
	if w.started {
		r.cur++
		if q.reliable {
			q.advance(r.una, now)
		}
		return true
	}
	if q.state == ib.QPSQD {
		return false // IBA 10.3.1.5: nothing new is started while draining
	}
	if w.flags&ib.SendFence != 0 && q.sq.head != r.cur {
		return q.askAgain()
	}
	if w.flags&ib.SendFence != 0 && !q.writtenBack() {
		return false
	}
	f := q.execute(w, now)
	if f.Kind == mem.FaultPending { // another process, or an engine, is still at memory that is invalidated; or a fence is pending
		why := CntFaultWaits
		if w.op == ib.OpWaitFence {
			why = CntFenceWaits
		}
		q.standStill(f, nil, why)
		return false
	}
	if !f.OK() {
		q.failLocal(localFailure(w.op), vendorFault(f), now)
		return r.failing != 0 && r.cur != r.failAt // what askAgain left
	}
	w.started, w.first, w.n = true, r.max, 0
	r.cur++
	if q.reliable {
		q.advance(r.una, now)
	} else {
		q.completeLocal()
		q.resumeWaiting(now)
	}
	if w.flags&ib.SendSignaled != 0 && q.sq.head != r.cur {
		q.askAgain() // its completion waits for those before it
	}
	return true
}

// execute does what a local request asks for.
func (q *QP) execute(w *wqe, now Time) mem.Fault {
	switch w.op {
	case ib.OpWaitFence:
		return q.waitFence(w, now)
	case ib.OpSignalFence:
		q.signalFence(q.sq.fences.take(), nil)
		return mem.Fault{}
	case ib.OpLocalInv:
		return q.Table.InvalidateOwn(w.imm, q.Actor())
	case ib.OpConfigureMKey:
		q.layout = mem.Layout{Key: w.imm, Access: ib.Access(w.swap & math.MaxUint32), Update: ib.MKeyUpdate(w.swap >> 32),
			Addr: w.remote, Repeat: w.compareAdd, Pieces: q.sq.pieces.take(w.remoteLen)}
		f := q.Table.Configure(&q.layout, q.Actor())
		if f.Kind == mem.FaultPending { // the request is executed again
			q.sq.pieces.head -= int(w.remoteLen)
		}
		return f
	}
	q.Bound = q.Bound || !w.verb
	b := w.bind()
	return q.Table.Bind(&b, w.verb, q.Actor())
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
