package tools

import (
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// bench is a perftest test in progress.
//
// The main buffer is laid out as in the program: first an area for every queue
// pair that it sends or writes from, then one for every queue pair that the peer
// writes to, reads from or does atomics on. Messages of a bandwidth test that are
// no longer than half a page use the slots of a page in turn. Longer ones, and all
// of a latency test, use the start of the area.
//
// What arrives by SEND, or as the result of READs and atomics, goes to another
// buffer. Its slots are not used twice at a time, so that the contents can be
// compared before the next message comes.
type bench struct {
	*rig
	cfg   PerftestConfig
	terms terms
	verb  verb
	lat   bool

	main   []byte
	mainMR *verbs.MR
	area   int // bytes of an area of the main buffer
	stride int // bytes from slot to slot in an area
	slots  int // slots in an area

	in       []byte // results or receives, inSlots for each queue pair
	inMR     *verbs.MR
	inStride int
	inSlots  int
	header   int // bytes in front of a receive: UD's

	flows  []*flow
	expect *expectation
	wr     []verbs.SendWR
}

// flow is one of the queue pairs.
type flow struct {
	index int
	qp    *verbs.QP
	ah    *verbs.AH
	mine  Keys
	peer  Keys

	posted   uint64 // requests
	done     uint64 // of those, completed
	received uint64
	lost     uint64 // messages that must have been sent before the last received one, and were not received

	here  []uint64 // atomics: what was in this side's memory when the test began
	there []uint64 // atomics: what is in the peer's memory, as far as it is known
	known []bool   // which of those are
}

// inMemory bounds the buffer for what arrives. Receives for which it has no room are not
// posted, whatever RxDepth is.
const inMemory = 64 << 20

func newBench(dev *verbs.Device, cfg PerftestConfig, t terms, res *Result) (_ *bench, err error) {
	info := &perftests[cfg.Test]
	b := &bench{cfg: cfg, terms: t, verb: info.verb, lat: info.lat, wr: make([]verbs.SendWR, 1)}
	attr := dev.Attr()
	room := attr.MaxCQE/cfg.QPs - cfg.TxDepth // in the completion queue, for receives
	if cfg.TxDepth > attr.MaxQPWR || room < 1 {
		return nil, fmt.Errorf("depth %d for %d queue pairs: the device has %d and %d completions",
			cfg.TxDepth, cfg.QPs, attr.MaxQPWR, attr.MaxCQE)
	}
	b.layout(min(attr.MaxQPWR, room))
	if b.rig, err = newRig(dev, cfg.GIDIndex, cfg.QPs*(cfg.TxDepth+b.inSlots), res); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	access := b.access()
	if b.main, b.mainMR, err = b.buffer(2*cfg.QPs*b.area, access|verbs.AccessLocalWrite); err != nil {
		return nil, err
	}
	if b.in, b.inMR, err = b.buffer(cfg.QPs*b.inSlots*b.inStride, verbs.AccessLocalWrite); err != nil {
		return nil, err
	}
	b.fill()
	return b, b.makeFlows(access)
}

// layout computes strides and numbers of slots. most is how many receives the device has room
// for, whatever RxDepth is.
func (b *bench) layout(most int) {
	size, t := b.cfg.Size, b.terms
	b.area = max(size, t.cycle)
	b.stride, b.slots = b.area, 1
	if !b.lat && size <= t.cycle/2 {
		b.stride = (size + t.line - 1) / t.line * t.line
		b.slots = t.cycle / b.stride
	}
	b.inSlots = b.cfg.TxDepth
	if b.receives() {
		b.inSlots = min(b.cfg.RxDepth, most)
	}
	if b.cfg.Type == verbs.UD {
		b.header = verbs.GRHLength
	}
	b.inStride = (size + b.header + 7) &^ 7
	b.inSlots = max(1, min(b.inSlots, inMemory/b.cfg.QPs/b.inStride))
}

// receives reports whether the test's messages consume receives.
func (b *bench) receives() bool { return b.verb == verbSend || b.cfg.Imm }

// access returns what the peer may do with the main buffer.
func (b *bench) access() verbs.Access {
	switch b.verb {
	case verbWrite:
		return verbs.AccessRemoteWrite
	case verbRead:
		return verbs.AccessRemoteRead
	case verbAtomic:
		return verbs.AccessRemoteAtomic
	}
	return 0
}

// fill fills the main buffer as the program does: zeros for ib_write_lat, random
// bytes otherwise. Areas that the peer will write to stay zero.
func (b *bench) fill() {
	if b.verb == verbWrite && b.lat {
		return
	}
	filled := len(b.main)
	if b.verb == verbWrite {
		filled = b.cfg.QPs * b.area
	}
	newRandStream(uint32(time.Now().Unix())).fill(b.main[:filled])
}

func (b *bench) makeFlows(access verbs.Access) error {
	outReads := 1
	if b.verb == verbRead || b.verb == verbAtomic {
		outReads = min(b.dev.Attr().MaxQPRDAtom, 255)
		if b.cfg.OutReads != 0 {
			outReads = min(outReads, b.cfg.OutReads)
		}
	}
	depth := verbs.QPCap{MaxSendWR: b.cfg.TxDepth, MaxSendSGE: 1}
	if b.receives() {
		depth.MaxRecvWR, depth.MaxRecvSGE = b.inSlots, 1
	}
	for i := range b.cfg.QPs {
		qp, err := b.queuePair(b.cfg.Type, depth, nil, access)
		if err != nil {
			return err
		}
		f := &flow{index: i, qp: qp, mine: Keys{
			OutReads: uint16(outReads), QPN: qp.Number(), PSN: (b.cfg.PSN + uint32(i)) & maxPSN,
			RKey: b.mainMR.RKey(), VAddr: b.mainMR.Addr() + uint64(b.target(i)), GID: b.gid,
		}}
		if b.verb == verbAtomic {
			f.here, f.there, f.known = make([]uint64, b.slots), make([]uint64, b.slots), make([]bool, b.slots)
			for s := range f.here {
				f.here[s] = loadWord(b.main[b.target(i)+s*b.stride:])
			}
		}
		b.flows = append(b.flows, f)
	}
	return nil
}

// source and target return where the areas of a queue pair start: the one that it
// sends from and the one that the peer works on.
func (b *bench) source(qp int) int { return qp * b.area }
func (b *bench) target(qp int) int { return (b.cfg.QPs + qp) * b.area }

// place returns where message n lies in its area.
func (b *bench) place(n uint64) int { return int(n%uint64(b.slots)) * b.stride }

// remotePlace returns where message n goes in the peer's area: to the same place, except that
// WRITEs with immediate data in both directions all go to the start, as with the programs.
func (b *bench) remotePlace(n uint64) int {
	if b.cfg.Imm && b.cfg.Duplex {
		return 0
	}
	return b.place(n)
}

// inSlot returns the offset of a slot in the buffer for what arrives.
func (b *bench) inSlot(qp int, n uint64) int {
	return (qp*b.inSlots + int(n%uint64(b.inSlots))) * b.inStride
}

// postReceives posts all the receives that there is room for.
func (b *bench) postReceives() error {
	for _, f := range b.flows {
		for s := range b.inSlots {
			if err := b.postReceive(f, uint64(s)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) postReceive(f *flow, slot uint64) error {
	_, err := f.qp.PostRecv([]verbs.RecvWR{{
		ID:  recvID | makeID(f.index, slot),
		SGL: []verbs.SGE{b.inMR.SGE(b.inSlot(f.index, slot), b.cfg.Size+b.header)},
	}})
	return err
}

// post posts request n = f.posted of a queue pair.
func (b *bench) post(f *flow) error {
	n := f.posted
	wr := verbs.SendWR{
		ID: makeID(f.index, n), Flags: verbs.SendSignaled,
		RemoteAddr: f.peer.VAddr + uint64(b.remotePlace(n)), RKey: f.peer.RKey,
		AH: f.ah, RemoteQPN: f.peer.QPN, RemoteQKey: udQKey,
	}
	out := b.mainMR.SGE(b.source(f.index)+b.place(n), b.cfg.Size)
	in := b.inMR.SGE(b.inSlot(f.index, n), b.cfg.Size)
	switch b.verb {
	case verbSend:
		wr.Op, wr.SGL = verbs.OpSend, []verbs.SGE{out}
	case verbWrite:
		wr.Op, wr.SGL = verbs.OpRDMAWrite, []verbs.SGE{out}
		if b.cfg.Imm {
			wr.Op, wr.Imm = verbs.OpRDMAWriteImm, uint32(n)
		}
	case verbRead:
		wr.Op, wr.SGL = verbs.OpRDMARead, []verbs.SGE{in}
	case verbAtomic:
		wr.SGL = []verbs.SGE{in}
		b.atomic(f, n, &wr)
	}
	b.wr[0] = wr
	if _, err := f.qp.PostSend(b.wr); err != nil {
		return err
	}
	f.posted++
	return nil
}
