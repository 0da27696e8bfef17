package qp

import (
	"math/bits"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// opFacts is all that distinguishes an operation in the requester and the completer.
type opFacts struct {
	kind   wire.Kind
	extra  wire.Extra
	wc     ib.WCOpcode
	types  uint8 // bit set of queue pair types
	rd     bool  // counts against MaxRDAtomic, completes by its response
	single bool  // rd: always one packet, also the response
	atomic bool  // answered with the value before it
	remote bool  // has a remote address
	local  bool  // concerns this device alone: no packet (local.go)
	data   data
}

// data is what the list of a request is for.
type data uint8

const (
	dataOut    data = iota // what is sent; may be inline
	dataIn                 // where the result goes
	dataInWord             // the same, 8 bytes
	dataWord               // what is sent, 8 bytes; may be inline
	dataNone               // there is no list
)

// in reports whether the list is where the result goes.
func (d data) in() bool { return d == dataIn || d == dataInWord }

const (
	onRC  = 1 << ib.RC
	onUC  = 1 << ib.UC
	onUD  = 1 << ib.UD
	onXRC = 1 << ib.XRCSend

	onReliable = onRC | onXRC
)

// IBA table 36: which operations each transport service has. Annex A19 adds
// ATOMIC WRITE and FLUSH. Both are answered by a READ response (without data),
// and count as READs do: the responder keeps a place among its answers for them.
var opTable = [ib.NumOpcodes]opFacts{
	ib.OpSend:           {kind: wire.KindSend, wc: ib.WCSend, types: onReliable | onUC | onUD},
	ib.OpSendImm:        {kind: wire.KindSend, wc: ib.WCSend, types: onReliable | onUC | onUD, extra: wire.WithImm},
	ib.OpSendInv:        {kind: wire.KindSend, wc: ib.WCSend, types: onReliable, extra: wire.WithInv},
	ib.OpRDMAWrite:      {kind: wire.KindWrite, wc: ib.WCRDMAWrite, types: onReliable | onUC, remote: true},
	ib.OpRDMAWriteImm:   {kind: wire.KindWrite, wc: ib.WCRDMAWrite, types: onReliable | onUC, remote: true, extra: wire.WithImm},
	ib.OpRDMARead:       {kind: wire.KindReadRequest, wc: ib.WCRDMARead, types: onReliable, remote: true, rd: true, data: dataIn},
	ib.OpAtomicCmpSwap:  {kind: wire.KindCmpSwap, wc: ib.WCCompSwap, types: onReliable, remote: true, rd: true, single: true, atomic: true, data: dataInWord},
	ib.OpAtomicFetchAdd: {kind: wire.KindFetchAdd, wc: ib.WCFetchAdd, types: onReliable, remote: true, rd: true, single: true, atomic: true, data: dataInWord},
	ib.OpAtomicWrite:    {kind: wire.KindAtomicWrite, wc: ib.WCAtomicWrite, types: onReliable, remote: true, rd: true, single: true, data: dataWord},
	ib.OpFlush:          {kind: wire.KindFlush, wc: ib.WCFlush, types: onReliable, remote: true, rd: true, single: true, data: dataNone},
	ib.OpBindMW:         {wc: ib.WCBindMW, types: onRC | onUC, local: true, data: dataNone},
	ib.OpLocalInv:       {wc: ib.WCLocalInv, types: onRC | onUC, local: true, data: dataNone},
	ib.OpConfigureMKey:  {wc: ib.WCConfigureMKey, types: onRC | onUC, local: true, data: dataNone},
	ib.OpWaitFence:      {wc: ib.WCWaitFence, types: onRC | onUC, local: true, data: dataNone},
	ib.OpSignalFence:    {wc: ib.WCSignalFence, types: onRC | onUC, local: true, data: dataNone},
}

// wqe is a send request in the queue. It holds no pointer, so that the
// collector need not look at ten thousand idle queues. The parameters of a bind, and
// of an indirect key without its pieces, lie in fields that those requests do not use
// otherwise (setBind, setConfigure); the pieces wait in their own queue, and so do
// fences.
type wqe struct {
	id         uint64
	remote     uint64
	compareAdd uint64
	swap       uint64
	rkey       uint32
	imm        uint32 // immediate data, or the key to invalidate
	qpn        uint32 // UD: the queue pair; XRC: the shared receive queue
	qkey       uint32 // UD
	remoteLen  uint32 // FLUSH: bytes there
	len        uint32 // payload bytes
	n          uint32 // PSNs that it takes, once started
	first      wire.PSN
	op         ib.Opcode
	flags      ib.SendFlags
	flush      wire.FETH
	nsge       uint8
	inline     bool
	started    bool
	staged     bool // its payload lies, at least in part, where the CPU does not address it
	verb       bool // a bind by the verb, of a type 1 window
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
	pieces pieceQueue    // of the indirect keys that are to be configured
	fences fenceQueue    // of the requests that wait for one, or signal one

	max               uint32 // requests that fit; the ring may be larger
	maxSGE, maxInline int
	head, tail        uint32

	// freed follows head when completions are polled.
	freed *queue.Freed
}

func (s *sendQueue) init(c ib.QPCap, datagram bool) {
	size := 1
	if c.MaxSendWR > 1 {
		size = 1 << bits.Len(uint(c.MaxSendWR-1))
	}
	s.max, s.maxSGE, s.maxInline = uint32(c.MaxSendWR), c.MaxSendSGE, c.MaxInlineData
	s.freed = new(queue.Freed)
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

// Room returns how many requests the send queue has room for.
func (q *QP) Room() int {
	s := &q.sq
	return int(s.max - min(s.max, s.tail-s.freed.Load()))
}

// flushIfFailed flushes what was posted to a queue that does not send any more
// (IBA 10.3.1.7: requests posted in the error states complete flushed).
func (q *QP) flushIfFailed() {
	if (q.state == ib.QPErr || q.state == ib.QPSQE) && !q.moves.flushing {
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
	total, err := q.checkData(wr, f)
	if err != nil {
		return err
	}
	if f.kind == wire.KindFlush {
		if err := checkFlush(wr); err != nil {
			return err
		}
	}
	if wr.Op == ib.OpConfigureMKey {
		if err := checkConfigure(wr.Configure); err != nil {
			return err
		}
	}
	if wr.Op == ib.OpWaitFence || wr.Op == ib.OpSignalFence {
		if err := checkFence(wr); err != nil {
			return err
		}
	}
	if q.half == initiator && wr.RemoteSRQN >= 1<<24 {
		return ib.Errorf("post_send", syscall.EINVAL, "remote_srqn %#x is longer than 24 bits", wr.RemoteSRQN)
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
	if wr.Op == ib.OpWaitFence || wr.Op == ib.OpSignalFence {
		if err := q.announceFence(wr); err != nil {
			return err
		}
	}
	w := &s.wqes[k]
	*w = wqe{id: wr.ID, remote: wr.RemoteAddr, compareAdd: wr.CompareAdd, swap: wr.Swap, rkey: wr.RKey,
		imm: wr.Imm, qpn: wr.RemoteQPN, qkey: wr.RemoteQKey, remoteLen: wr.RemoteLength, len: uint32(total),
		op: wr.Op, flush: feth(wr), flags: wr.Flags, nsge: uint8(len(wr.SGL)), inline: wr.Inline != nil}
	if f.extra == wire.WithInv || wr.Op == ib.OpLocalInv {
		w.imm = wr.InvalidateKey
	}
	if wr.Op == ib.OpBindMW {
		w.setBind(&wr.Bind)
	}
	if wr.Op == ib.OpConfigureMKey {
		w.setConfigure(wr.Configure)
		s.pieces.add(wr.Configure)
	}
	if wr.Op == ib.OpWaitFence || wr.Op == ib.OpSignalFence {
		w.setFence(wr)
		s.fences.add(wr)
	}
	if q.half == initiator {
		w.qpn = wr.RemoteSRQN
	}
	if q.SignalAll {
		w.flags |= ib.SendSignaled
	}
	copy(s.sges[k*s.maxSGE:], wr.SGL)
	copy(s.inline[k*s.maxInline:], wr.Inline)
	s.tail++
	return nil
}

// checkData checks what a request's data is and returns how many bytes.
func (q *QP) checkData(wr *ib.SendWR, f *opFacts) (total uint64, err error) {
	bad := func(format string, args ...any) (uint64, error) {
		return 0, ib.Errorf("post_send", syscall.EINVAL, format, args...)
	}
	total = uint64(len(wr.Inline))
	if wr.Inline != nil {
		if f.data != dataOut && f.data != dataWord || len(wr.SGL) > 0 {
			return bad("inline data goes with SEND, WRITE and ATOMIC WRITE, instead of an SGL")
		}
		if len(wr.Inline) > q.sq.maxInline {
			return bad("%d bytes of inline data, the queue pair takes %d", len(wr.Inline), q.sq.maxInline)
		}
	}
	for i := range wr.SGL {
		total += uint64(wr.SGL[i].Length) // at most 32 times 2^32
	}
	switch {
	case total > MaxMsgSize:
		return bad("message of %d bytes, the port takes %d", total, MaxMsgSize)
	case f.data == dataInWord && total != 8:
		return bad("an atomic returns 8 bytes, the SGL holds %d", total)
	case f.data == dataWord && total != 8:
		return bad("an ATOMIC WRITE is of 8 bytes, the request has %d", total)
	case f.data == dataNone && len(wr.SGL) > 0:
		return bad("a %v has no data, the request has an SGL", wr.Op)
	}
	return total, nil
}

// checkFlush checks what a FLUSH asks for.
func checkFlush(wr *ib.SendWR) error {
	switch {
	case wr.FlushType == 0 || wr.FlushType&^(ib.FlushGlobal|ib.FlushPersistent) != 0:
		return ib.Errorf("post_send", syscall.EINVAL, "flush type %#x: it is global visibility, persistence or both", uint8(wr.FlushType))
	case wr.FlushLevel != ib.FlushRange && wr.FlushLevel != ib.FlushMR:
		return ib.Errorf("post_send", syscall.EINVAL, "flush level %d: it is a range or a region", wr.FlushLevel)
	}
	return nil
}

// feth returns the header of a FLUSH.
func feth(wr *ib.SendWR) wire.FETH {
	h := wire.FETH{Placement: uint8(wr.FlushType)} // the bits are the same
	if wr.FlushLevel == ib.FlushMR {
		h.Selectivity = wire.SelectRegion
	}
	return h
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
	if wr.RemoteQPN >= 1<<24 {
		return ib.Errorf("post_send", syscall.EINVAL, "remote_qpn %#x is longer than 24 bits", wr.RemoteQPN)
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
		t.SetSGEs(q.Table, q.Actor(), 0, q.sq.list(i), off, n)
	}
}

// checkLocal checks a request's own memory before anything is sent of it, and reports
// whether the CPU does not address some of it.
func (q *QP) checkLocal(i uint32) (f mem.Fault, staged bool) {
	w := q.sq.at(i)
	if w.inline || w.len == 0 {
		return mem.Fault{}, false
	}
	return mem.CheckStaged(q.localList(i, 0), uint64(w.len))
}

// localList is the request's scatter/gather list from off on, with the rights
// it needs: results are written.
func (q *QP) localList(i uint32, off uint64) *mem.List {
	l := &q.posted.list
	l.SGEs, l.Off, l.Access = q.sq.list(i), off, 0
	if q.sq.at(i).facts().data.in() {
		l.Access = ib.AccessLocalWrite
	}
	return l
}
