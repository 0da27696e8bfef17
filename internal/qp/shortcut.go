package qp

// Shortcuts: WRITEs and READs that the requester executes in the peer's memory by itself,
// without a train and without an acknowledgement.
//
//  1. PostShortcut takes requests that are being posted, and pullShortcut takes the
//     request at the front of the send queue. Both fill in a Request.
//  2. try decides whether the request can take the shortcut now, and lets it copy. The
//     Shortcut is a grant of another process (the device implements it), or the
//     neighbour: the peer's queue pair, in the same process.
//  3. movePast moves the requester past the request. Absorb moves the responder past it:
//     the neighbour's at once, that of a grant's owner process when it reads how much was
//     done.
//
// All other requests go by train. If the peer is a neighbour, AckedBy saves the train of
// the acknowledgement.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
)

// Shortcut copies to and from the peer's memory, within the call.
type Shortcut interface {
	// Covers reports whether the shortcut leads to the peer's memory that a request names.
	Covers(x *Request) bool
	// Copy executes a request for which Covers has just returned true. The peer's
	// responder is moved past it (Absorb) at once or later. If Copy returns false the
	// request must go by train; some bytes may have been copied.
	Copy(x *Request) bool
}

// Request is a WRITE or READ that may take a shortcut.
type Request struct {
	RKey     uint32
	Read     bool
	signaled bool
	VA       uint64    // of the peer's memory
	Len      int       // bytes; 0 if the request cannot take any shortcut
	Own      *mem.List // the requester's memory

	id    uint64
	alone bool // it was posted by itself
	from  *QP  // the requester
}

// Awaited reports whether the program seems to wait for the request: it was posted by itself, with
// a completion, and the program has polled all completions before it.
func (x *Request) Awaited() bool { return x.alone && x.signaled && x.from.SendCQ.Len() == 0 }

// Packets returns how many packets the bytes would be.
func (x *Request) Packets() int { return x.from.packets(x.Len) }

// PostShortcut executes requests that are being posted, from the first on, up to one that
// cannot take the shortcut, and returns how many. The caller posts the others.
func (q *QP) PostShortcut(s Shortcut, wrs []ib.SendWR) (n int) {
	x := &q.short
	for n < len(wrs) && q.sq.head == q.sq.tail {
		wr := &wrs[n]
		x.RKey, x.VA, x.Len, x.Read = wr.RKey, wr.RemoteAddr, q.shortLen(wr), wr.Op == ib.OpRDMARead
		x.id, x.signaled, x.alone = wr.ID, wr.Flags&ib.SendSignaled != 0 || q.SignalAll, len(wrs) == 1
		if x.Len == 0 {
			break
		}
		if wr.Inline != nil {
			q.useInline(wr.Inline)
		} else {
			q.mine.sge[0] = wr.SGL[0]
			x.Own = &q.mine.list
		}
		if q.try(s) != done {
			break
		}
		n++
	}
	q.req.copied = 0
	return n
}

// shortLen returns the length of a request that is being posted; 0 if it cannot take a
// shortcut: it has to be a plain WRITE or READ of one piece, and have a place in the queue.
func (q *QP) shortLen(wr *ib.SendWR) int {
	s := &q.sq
	if wr.Op != ib.OpRDMAWrite && wr.Op != ib.OpRDMARead || wr.Flags&^ib.SendSignaled != 0 || s.tail-s.freed.Load() >= s.max {
		return 0
	}
	switch {
	case wr.Inline == nil && len(wr.SGL) == 1 && s.maxSGE > 0:
		return int(wr.SGL[0].Length)
	case wr.Inline != nil && len(wr.SGL) == 0 && len(wr.Inline) <= s.maxInline && wr.Op == ib.OpRDMAWrite:
		return len(wr.Inline)
	}
	return 0
}

// useInline makes bytes the requester's memory of the request.
func (q *QP) useInline(b []byte) {
	q.resp.raw[0] = b
	q.resp.from = mem.List{Raw: q.resp.raw[:]}
	q.short.Own = &q.resp.from
}

// outcome is what became of a request that might take a shortcut.
type outcome uint8

const (
	byTrain outcome = iota // it goes by train
	waits                  // it waits for the requests before it
	done
)

// pullShortcut executes the request at the front of the queue, if it can take the
// shortcut.
func (q *QP) pullShortcut(w *wqe) outcome {
	r, x := &q.req, &q.short
	x.RKey, x.VA, x.Len, x.Read = w.rkey, w.remote, int(w.len), w.op == ib.OpRDMARead
	x.id, x.signaled, x.alone = w.id, w.flags&ib.SendSignaled != 0, false
	switch {
	case w.op != ib.OpRDMAWrite && !x.Read || w.flags&ib.SendFence != 0:
		x.Len = 0
	case w.inline:
		q.useInline(q.sq.inlineData(r.cur))
	default:
		x.Own = q.localList(r.cur, 0)
	}
	return q.try(q.Shortcut)
}

// try executes the request in q.short by the shortcut s, if s covers it and nothing is
// under way. The request has number r.cur, also if it is not in the queue.
func (q *QP) try(s Shortcut) outcome {
	r, x := &q.req, &q.short
	if x.Len == 0 || x.Len > train.MaxBytes || !s.Covers(x) {
		r.other, r.hasOther = r.cur, true
		return byTrain
	}
	if !q.free() {
		if r.nxt == r.max && r.unacked == 0 && q.state == ib.QPRTS && r.failing == 0 && !q.mixed() {
			return waits // for acknowledgements that were asked for
		}
		return byTrain
	}
	if r.copied >= train.MaxBytes {
		return waits // enough was copied in one call; the device calls again
	}
	if x.Read {
		x.Own.Access = ib.AccessLocalWrite
		if !q.mayRead() {
			return byTrain
		}
	} else {
		x.Own.Access = 0
	}
	if !s.Copy(x) {
		return byTrain
	}
	q.movePast()
	return done
}

// free reports whether a new request could be executed now: nothing is under way.
func (q *QP) free() bool {
	r := &q.req
	return q.state == ib.QPRTS && r.una == r.max && r.nxt == r.max && r.failing == 0 && !r.congestion.waits() && !r.fetching && !r.draining
}

// mixed reports whether a request is under way that could not take the shortcut. More of
// its kind will probably come, and to wait for each takes longer than to send trains.
func (q *QP) mixed() bool {
	r := &q.req
	return r.hasOther && r.other-q.sq.head < r.cur-q.sq.head
}

// mayRead reports whether the result of a READ can be written now. It writes back earlier
// results first, so that this one does not overtake them.
func (q *QP) mayRead() bool {
	if q.attr.MaxRDAtomic == 0 {
		return false
	}
	f := q.writeResults()
	return f.OK()
}

// movePast moves the requester past the request in q.short, which is executed: the PSNs, the
// counters, the queue, and the completion.
func (q *QP) movePast() {
	r, x, c := &q.req, &q.short, &q.Counters
	packets := x.Packets()
	wc := ib.WC{ID: x.id, Op: ib.WCRDMAWrite, QPN: q.Number} // made early: see docs/performance.md, structures that are copied too soon
	if x.Read {
		wc.Op, wc.ByteLen = ib.WCRDMARead, uint32(x.Len)
		c.add(CntTxPackets, 1)
		c.add(CntRxPackets, packets)
		c.add(CntRxBytes, x.Len)
	} else {
		c.add(CntTxPackets, packets)
		c.add(CntTxBytes, x.Len)
	}
	r.max = r.max.Add(packets)
	r.una, r.nxt, r.unacked = r.max, r.max, 0
	r.copied += max(x.Len, shortcutLeast)
	if r.cur == q.sq.tail {
		q.sq.tail++ // it was never in the queue
	}
	r.cur++
	q.sq.head = r.cur
	if x.signaled {
		q.pushed(q.SendCQ.PushSend(&wc, q.sq.freed, q.sq.head))
	}
}

// Absorb moves the responder past requests that the peer has executed by itself, given
// their number and how many packets and bytes they would have been. With read, they are
// READs.
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

// shortcutLeast is the least that a request counts for in copied: the bytes that are copied
// in the time that everything but the copy takes.
const shortcutLeast = 2 << 10

// TakeShortcut returns about how many bytes Pull has copied by the shortcut since the last
// call of TakeShortcut. If there are some, there may be more to Pull.
func (q *QP) TakeShortcut() (n int) {
	n, q.req.copied = q.req.copied, 0
	return n
}

// DestQPN returns the number of the peer's queue pair.
func (q *QP) DestQPN() uint32 { return q.attr.DestQPN }

// Joined reports whether two queue pairs are connected with each other.
func (q *QP) Joined(p *QP) bool {
	return q.Type == p.Type && q.attr.DestQPN == p.Number && p.attr.DestQPN == q.Number &&
		q.path.Flow != nil && p.path.Flow != nil && q.peer == p.path.Flow.Src && p.peer == q.path.Flow.Src
}

// neighbour is a queue pair as the Shortcut, for WRITEs, of the queue pair in the same
// process that it is joined with. The caller has locked both.
type neighbour QP

// Neighbour returns the queue pair as the Shortcut of the one that it is joined with.
func (q *QP) Neighbour() Shortcut { return (*neighbour)(q) }

// MayWrite reports whether the caller should lock the neighbour for a request: it is a
// WRITE, and the queue is empty.
func (q *QP) MayWrite(wr *ib.SendWR) bool { return wr.Op == ib.OpRDMAWrite && q.sq.head == q.sq.tail }

// open reports whether nothing keeps the queue pair from sending a request: the window is
// open, the path has no credits, and no answer is due.
func (q *QP) open() bool {
	return q.req.congestion.open() && q.path.Credits == nil && !q.Answering()
}

// expects reports whether the queue pair would execute the next WRITE of its peer at once,
// and has no answer to send before the acknowledgement of that WRITE.
func (q *QP) expects(from *QP) bool {
	r := &q.resp
	return q.state == ib.QPRTS && q.established && q.attr.Access&ib.AccessRemoteWrite != 0 &&
		r.kind == 0 && r.n == 0 && !r.ack.pending && !r.nakSent && r.epsn == from.req.nxt && !r.busy()
}

// Covers implements Shortcut. It does not check the key: Copy does.
func (p *neighbour) Covers(x *Request) bool {
	q := x.from
	return !x.Read && q.mtu == p.mtu && x.Packets() <= q.req.congestion.allowance(x.Len) && q.open() && (*QP)(p).expects(q)
}

// Copy implements Shortcut: it changes all that the train and the acknowledgement would
// change in the neighbour.
func (p *neighbour) Copy(x *Request) bool {
	q := (*QP)(p)
	dst := q.remoteList(ib.AccessRemoteWrite, q.Actor(), x.RKey, x.VA, x.Len)
	if !mem.CopyWhole(dst, x.Own, uint64(x.Len), true) {
		if f, _ := mem.CopyPieces(dst, x.Own, uint64(x.Len), true); !f.OK() {
			return false // the request goes by train, and meets the fault there
		}
	}
	q.Absorb(1, uint64(x.Packets()), uint64(x.Len), false)
	if x.signaled {
		q.acked(x.from)
	}
	return true
}

// acked counts an acknowledgement that goes without a train.
func (q *QP) acked(to *QP) {
	q.Counters.add(CntAcksSent, 1)
	q.Counters.add(CntTxPackets, 1)
	to.Counters.add(CntRxPackets, 1)
}

// AckedBy takes the acknowledgement of everything sent so far from the neighbour, which has
// just executed it, without a train. It reports false, and has done nothing, if the
// neighbour has any other answer to send, or a READ or atomic is not answered yet.
func (q *QP) AckedBy(p *QP, now Time) bool {
	r, a := &q.req, &p.resp
	if a.n > 0 || a.nakSent || a.busy() || r.rd.len() > 0 || p.state == ib.QPErr || a.ack.pending && !a.ack.syndrome.IsAck() ||
		a.epsn != r.nxt || r.nxt != r.max || q.state != ib.QPRTS && q.state != ib.QPSQD {
		return false
	}
	if a.ack.pending {
		a.ack.pending, a.yielded = false, false
		p.acked(q)
	}
	r.unacked = 0
	q.advance(r.nxt, now)
	return true
}
