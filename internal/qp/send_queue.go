package qp

import (
	"math/bits"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// opFacts is all that the requester knows about an operation.
type opFacts struct {
	kind   wire.Kind
	extra  wire.Extra
	wc     ib.WCOpcode
	types  uint8 // bit set of queue pair types
	rd     bool  // READ or atomic: counts against MaxRDAtomic, completes by its response
	atomic bool
	remote bool // has a remote address
}

const (
	onRC = 1 << ib.RC
	onUC = 1 << ib.UC
	onUD = 1 << ib.UD
)

// IBA table 36: which operations each transport service has.
var opTable = [ib.NumOpcodes]opFacts{
	ib.OpSend:           {kind: wire.KindSend, wc: ib.WCSend, types: onRC | onUC | onUD},
	ib.OpSendImm:        {kind: wire.KindSend, wc: ib.WCSend, types: onRC | onUC | onUD, extra: wire.WithImm},
	ib.OpSendInv:        {kind: wire.KindSend, wc: ib.WCSend, types: onRC, extra: wire.WithInv},
	ib.OpRDMAWrite:      {kind: wire.KindWrite, wc: ib.WCRDMAWrite, types: onRC | onUC, remote: true},
	ib.OpRDMAWriteImm:   {kind: wire.KindWrite, wc: ib.WCRDMAWrite, types: onRC | onUC, remote: true, extra: wire.WithImm},
	ib.OpRDMARead:       {kind: wire.KindReadRequest, wc: ib.WCRDMARead, types: onRC, remote: true, rd: true},
	ib.OpAtomicCmpSwap:  {kind: wire.KindCmpSwap, wc: ib.WCCompSwap, types: onRC, remote: true, rd: true, atomic: true},
	ib.OpAtomicFetchAdd: {kind: wire.KindFetchAdd, wc: ib.WCFetchAdd, types: onRC, remote: true, rd: true, atomic: true},
}

// wqe is a send request in the queue. It holds no pointer, so that the
// collector need not look at ten thousand idle queues.
type wqe struct {
	id         uint64
	remote     uint64
	compareAdd uint64
	swap       uint64
	rkey       uint32
	imm        uint32 // immediate data, or the key to invalidate
	qpn        uint32 // UD
	qkey       uint32 // UD
	len        uint32 // payload bytes
	n          uint32 // PSNs that it takes, once started
	first      wire.PSN
	op         ib.Opcode
	flags      ib.SendFlags
	nsge       uint8
	inline     bool
	started    bool
}

func (w *wqe) facts() *opFacts { return &opTable[w.op] }

// end returns the PSN after the last one of the request.
func (w *wqe) end() wire.PSN { return w.first.Add(int(w.n)) }

// sendQueue is a ring: head ≤ next to send ≤ tail, as free-running numbers.
type sendQueue struct {
	wqes   []wqe
	sges   []ib.SGE
	inline []byte
	flows  []*train.Flow // UD: where each goes
	addrPD []uint32      // UD: the domain of its address handle

	max               uint32 // requests that fit; the ring may be larger
	maxSGE, maxInline int
	head, tail        uint32

	// freed is the number of the first request that still holds its place: it
	// follows head when completions are polled, as on hardware.
	freed *atomic.Uint32
}

func (s *sendQueue) init(c ib.QPCap, datagram bool) {
	size := 1
	if c.MaxSendWR > 1 {
		size = 1 << bits.Len(uint(c.MaxSendWR-1))
	}
	s.max, s.maxSGE, s.maxInline = uint32(c.MaxSendWR), c.MaxSendSGE, c.MaxInlineData
	s.freed = new(atomic.Uint32)
	s.wqes = make([]wqe, size)
	s.sges = make([]ib.SGE, size*s.maxSGE)
	s.inline = make([]byte, size*s.maxInline)
	if datagram {
		s.flows = make([]*train.Flow, size)
		s.addrPD = make([]uint32, size)
	}
}

func (s *sendQueue) slot(i uint32) int { return int(i) & (len(s.wqes) - 1) }
func (s *sendQueue) at(i uint32) *wqe  { return &s.wqes[s.slot(i)] }
func (s *sendQueue) list(i uint32) []ib.SGE {
	k := s.slot(i)
	return s.sges[k*s.maxSGE:][:s.wqes[k].nsge]
}
func (s *sendQueue) inlineData(i uint32) []byte {
	k := s.slot(i)
	return s.inline[k*s.maxInline:][:s.wqes[k].len]
}

// PostSend appends requests to the send queue and returns how many; the first
// one that is refused ends it.
func (q *QP) PostSend(wrs []ib.SendWR) (int, error) {
	switch q.state {
	case ib.QPRTS, ib.QPSQD, ib.QPSQE, ib.QPErr:
	default:
		return 0, ib.Errorf("post_send", syscall.EINVAL, "the queue pair is in state %v, it must be in RTS", q.state)
	}
	for i := range wrs {
		if err := q.postOne(&wrs[i]); err != nil {
			q.flushIfFailed()
			return i, err
		}
	}
	q.flushIfFailed()
	return len(wrs), nil
}

// flushIfFailed flushes what was posted to a queue that does not send any more
// (IBA 10.3.1.7: requests posted in the error states complete flushed).
func (q *QP) flushIfFailed() {
	if q.state == ib.QPErr || q.state == ib.QPSQE {
		q.flushSend()
	}
}

func (q *QP) postOne(wr *ib.SendWR) error {
	if wr.Op == 0 || int(wr.Op) >= ib.NumOpcodes {
		return ib.Errorf("post_send", syscall.EINVAL, "opcode %d is unknown", wr.Op)
	}
	if unknown := wr.Flags &^ (ib.SendSignaled | ib.SendSolicited | ib.SendFence); unknown != 0 {
		return ib.Errorf("post_send", syscall.EINVAL, "send flags %#x are unknown", uint8(unknown))
	}
	f := &opTable[wr.Op]
	if f.types&(1<<q.Type) == 0 {
		return ib.Errorf("post_send", syscall.EINVAL, "%v is not an operation of %v queue pairs", wr.Op, q.Type)
	}
	s := &q.sq
	if len(wr.SGL) > s.maxSGE {
		return ib.Errorf("post_send", syscall.EINVAL, "%d SGEs, the queue pair takes %d", len(wr.SGL), s.maxSGE)
	}
	total := uint64(len(wr.Inline))
	if wr.Inline != nil {
		if f.rd || len(wr.SGL) > 0 {
			return ib.Errorf("post_send", syscall.EINVAL, "inline data goes with SEND and WRITE, instead of an SGL")
		}
		if len(wr.Inline) > s.maxInline {
			return ib.Errorf("post_send", syscall.EINVAL, "%d bytes of inline data, the queue pair takes %d", len(wr.Inline), s.maxInline)
		}
	}
	for i := range wr.SGL {
		total += uint64(wr.SGL[i].Length) // at most 32 times 2^32
	}
	if total > MaxMsgSize {
		return ib.Errorf("post_send", syscall.EINVAL, "message of %d bytes, the port takes %d", total, MaxMsgSize)
	}
	if f.atomic && total != 8 {
		return ib.Errorf("post_send", syscall.EINVAL, "an atomic returns 8 bytes, the SGL holds %d", total)
	}
	if s.tail-s.freed.Load() >= s.max {
		return ib.Errorf("post_send", syscall.ENOMEM, "the send queue is full: %d requests whose completions have not been polled", s.max)
	}
	k := s.slot(s.tail)
	if q.Type == ib.UD {
		if err := q.postAddress(wr, k); err != nil {
			return err
		}
	}
	w := &s.wqes[k]
	*w = wqe{id: wr.ID, remote: wr.RemoteAddr, compareAdd: wr.CompareAdd, swap: wr.Swap, rkey: wr.RKey,
		imm: wr.Imm, qpn: wr.RemoteQPN, qkey: wr.RemoteQKey, len: uint32(total),
		op: wr.Op, flags: wr.Flags, nsge: uint8(len(wr.SGL)), inline: wr.Inline != nil}
	if f.extra == wire.WithInv {
		w.imm = wr.InvalidateKey
	}
	if q.SignalAll {
		w.flags |= ib.SendSignaled
	}
	copy(s.sges[k*s.maxSGE:], wr.SGL)
	copy(s.inline[k*s.maxInline:], wr.Inline)
	s.tail++
	return nil
}

func (q *QP) postAddress(wr *ib.SendWR, slot int) error {
	if wr.AH == nil {
		return ib.Errorf("post_send", syscall.EINVAL, "a datagram needs an address handle")
	}
	a, ok := wr.AH.Impl().(*Address)
	if !ok {
		return ib.Errorf("post_send", syscall.EINVAL, "the address handle belongs to another provider")
	}
	if a.Closed.Load() {
		return ib.Errorf("post_send", syscall.EINVAL, "the address handle is closed")
	}
	q.sq.flows[slot], q.sq.addrPD[slot] = a.Flow, a.PD
	return nil
}

// setPayload makes bytes off to off+n of a request the train's payload.
func (q *QP) setPayload(t *train.Train, i uint32, off uint64, n int) {
	w := q.sq.at(i)
	switch {
	case n == 0:
		t.SetNone()
	case w.inline:
		t.SetInline(q.sq.inlineData(i)[off:][:n])
	default:
		t.SetSGEs(q.Table, q.actor(), 0, q.sq.list(i), off, n)
	}
}

// checkLocal checks a request's own memory before anything is sent of it.
func (q *QP) checkLocal(i uint32) mem.Fault {
	w := q.sq.at(i)
	if w.inline || w.len == 0 {
		return mem.Fault{}
	}
	return mem.Check(q.localList(i, 0), uint64(w.len))
}

// localList is the request's scatter/gather list from off on, with the rights
// it needs: results of READs and atomics are written.
func (q *QP) localList(i uint32, off uint64) *mem.List {
	l := &q.req.list
	*l = mem.List{Table: q.Table, Actor: q.actor(), SGEs: q.sq.list(i), Off: off}
	if q.sq.at(i).facts().rd {
		l.Access = ib.AccessLocalWrite
	}
	return l
}
