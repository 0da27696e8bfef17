package qp

// Whatever arrives: FuzzReceive feeds a queue pair trains whose every field is
// arbitrary, between requests and receives of its own, in any state. Nothing may
// panic; no memory changes but what is registered for it; there are never more
// completions than requests; and in the error state nothing changes at all.
//
// An input is a byte that chooses the type and the state of the queue pair, and
// records of a fixed size. What the scripts deliver and post are the seeds.

import (
	"bytes"
	"encoding/binary"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// record is one thing that happens, as it stands in an input.
type record struct {
	Op                             uint8 // opTrain and so on
	Kind, Extra, Flags             uint8
	Syndrome, Opcode               uint8
	PSN, DestQP, Imm, QKey, SrcQP  uint32
	N                              uint16
	Len, MTU, Payload              uint32 // Payload: how many bytes there really are
	VA, SwapAdd, Compare, Orig, ID uint64
	RKey, DMALen                   uint32
}

const (
	opTrain  = iota // a train arrives
	opSend          // a request is posted
	opRecv          // a receive is posted
	opPull          // the queue pair sends
	opTick          // time passes
	opSync          // storage does its work
	opAbsent        // memory has to be fetched first
	numOps
)

const (
	flagStart = 1 << iota
	flagEnd
	flagAckReq
	flagSolicited
	flagTransport // another transport
	flagSource    // another sender
	flagSignaled
	flagInline
)

func (r *record) append(b []byte) []byte {
	b, err := binary.Append(b, binary.LittleEndian, r)
	if err != nil {
		panic(err)
	}
	return b
}

func ofTrain(t *train.Train) *record {
	return &record{Op: opTrain, Kind: uint8(t.Kind), Extra: uint8(t.Extra),
		Syndrome: uint8(t.AETH.Syndrome) | t.RETH.Flush.Placement | t.RETH.Flush.Selectivity<<4,
		Flags:    uint8(b2i(t.Start)*flagStart | b2i(t.End)*flagEnd | b2i(t.AckReq)*flagAckReq | b2i(t.Solicited)*flagSolicited),
		PSN:      uint32(t.PSN), DestQP: t.DestQP, Imm: t.Imm, QKey: t.DETH.QKey, SrcQP: t.DETH.SrcQP | t.SRQ, N: uint16(t.N),
		Len: uint32(t.Len), MTU: uint32(t.MTU), Payload: uint32(t.Len), VA: t.RETH.VA | t.Atomic.VA, SwapAdd: t.Atomic.SwapAdd,
		Compare: t.Atomic.Compare, Orig: t.Orig, RKey: t.RETH.RKey | t.Atomic.RKey, DMALen: t.RETH.Len}
}

func ofSend(wr *ib.SendWR) *record {
	n := uint64(len(wr.Inline))
	for _, e := range wr.SGL {
		n += uint64(e.Length)
	}
	r := &record{Op: opSend, Opcode: uint8(wr.Op), Flags: flagSignaled, Len: uint32(n), VA: wr.RemoteAddr, RKey: wr.RKey,
		Imm: wr.Imm | wr.InvalidateKey, Compare: wr.CompareAdd, SwapAdd: wr.Swap, QKey: wr.RemoteQKey, DestQP: wr.RemoteQPN,
		Syndrome: uint8(wr.FlushType), Extra: uint8(wr.FlushLevel), DMALen: wr.RemoteLength}
	if wr.Inline != nil {
		r.Flags |= flagInline
	}
	return r
}

// train makes a train of a record. The payload may be shorter than it says: then
// it cannot be read, as when it lies in the sender's memory.
func (r *record) train(q *QP, peer *end) *train.Train {
	t := &train.Train{From: peer.addr, To: peer.peer.addr, Transport: q.transport, SRQ: r.SrcQP, Kind: wire.Kind(r.Kind),
		Extra: wire.Extra(r.Extra), Start: r.Flags&flagStart != 0, End: r.Flags&flagEnd != 0,
		AckReq: r.Flags&flagAckReq != 0, Solicited: r.Flags&flagSolicited != 0, PSN: wire.MakePSN(r.PSN), DestQP: r.DestQP,
		Imm: r.Imm, DETH: wire.DETH{QKey: r.QKey, SrcQP: r.SrcQP}, N: max(1, int(r.N)), Len: int(r.Len % (1 << 20)),
		MTU: int(r.MTU % (1 << 16)), RETH: wire.RETH{VA: r.VA, RKey: r.RKey, Len: r.DMALen,
			Flush: wire.FETH{Placement: r.Syndrome & 0xf, Selectivity: r.Syndrome >> 4 & 3}},
		Atomic: wire.AtomicETH{VA: r.VA, RKey: r.RKey, SwapAdd: r.SwapAdd, Compare: r.Compare},
		AETH:   wire.AETH{Syndrome: wire.Syndrome(r.Syndrome)}, Orig: r.Orig}
	if r.Flags&flagTransport != 0 {
		t.Transport = wire.Transport(r.Opcode)
	}
	if r.Flags&flagSource != 0 {
		t.From = t.To
	}
	t.Payload = mem.List{Raw: [][]byte{garbage[:r.Payload%uint32(len(garbage))]}}
	return t
}

var garbage = bytes.Repeat([]byte{0xee}, 1<<20)

// victim is the end that is fuzzed, with memory around its region that must not change.
type victim struct {
	*end
	world          *world
	around         []byte // "mem" lies in the middle of it
	private        *region
	sends, recvs   int // posted
	sent, received int // completed
}

// Small, because the fuzzer runs it some ten thousand times a second.
const (
	victimSize = 16 << 10
	canary     = 256
)

var untouched = func() []byte {
	b := make([]byte, canary+victimSize+canary)
	fill(b, 9)
	return b
}()

// fuzzTypes is how many types of queue pairs there are.
const fuzzTypes = byte(ib.NumQPTypes - 1)

func newVictim(t *testing.T, choice byte) *victim {
	s := usual()
	s.typ = ib.QPType(choice%fuzzTypes) + ib.RC
	s.memory = victimSize
	w := newWorld(t)
	a := w.newEnd("a", s)
	v := &victim{end: w.newEnd("b", s), world: w}
	a.peer, v.peer = v.end, a
	// "mem" keeps its key and its address, so that the scripts' requests hit; its
	// bytes are replaced by some with a guard on either side.
	if err := v.regions["mem"].Close(); err != nil {
		t.Fatal(err)
	}
	w.b = v.end
	v.guard(t, s)
	st := []ib.QPState{ib.QPRTS, ib.QPRTS, ib.QPRTS, ib.QPRTR, ib.QPSQD, ib.QPErr, ib.QPInit, ib.QPReset}[choice/fuzzTypes%8]
	up := min(st, ib.QPRTS)
	a.toState(ib.QPRTS, s, s)
	v.toState(up, s, s)
	if st > ib.QPRTS {
		if err := v.modify(ib.QPAttr{State: st}, ib.QPMaskState, s.window); err != nil {
			t.Fatal(err)
		}
	}
	return v
}

// guard makes the victim's memory anew: a table with the same seed gives the
// same keys.
func (v *victim) guard(t *testing.T, s setup) {
	v.around = bytes.Clone(untouched)
	inner := v.around[canary:][:s.memory]
	host, err := mem.NewHostBytes(inner, allRights, ib.LockOff)
	if err != nil {
		t.Fatal(err)
	}
	storage := &disk{Host: host, buf: inner, stored: make([]byte, s.memory)}
	lazily := newLazy(storage)
	v.table = mem.NewTable(mem.TableConfig{MaxRegions: 64, Seed: 202})
	v.q.Table = v.table
	for _, p := range []*piece{&v.q.mine, &v.q.named, &v.q.posted, &v.q.taken} {
		p.list.Table = v.table
	}
	r, err := v.table.Register(mem.RegionConfig{PD: testPD, Access: allRights | ib.AccessFlush, IOVA: v.regions["mem"].IOVA(),
		Length: uint64(s.memory), Backing: lazily})
	if err != nil {
		t.Fatal(err)
	}
	if r.Key() != v.regions["mem"].Key() {
		t.Fatalf("the key is %#x, not %#x", r.Key(), v.regions["mem"].Key())
	}
	v.regions["mem"] = &region{Region: r, buf: inner, disk: storage, lazy: lazily}
	v.private = v.register("private", canary, testPD, ib.AccessLocalWrite|ib.AccessRemoteInvalidate)
	v.register("other", canary, otherPD, allRights)
	copy(v.private.buf, untouched)
}

// step does what a record says.
func (v *victim) step(t *testing.T, r *record) {
	errored := v.q.State() == ib.QPErr
	var frozen []byte
	if errored {
		frozen = bytes.Clone(v.around)
	}
	memory := v.regions["mem"]
	switch r.Op % numOps {
	case opTrain:
		v.q.Receive(r.train(v.q, v.peer), v.w.now)
	case opSend:
		wr := ib.SendWR{ID: r.ID, Op: ib.Opcode(r.Opcode), RKey: r.RKey, RemoteAddr: r.VA, Imm: r.Imm, InvalidateKey: r.Imm,
			CompareAdd: r.Compare, Swap: r.SwapAdd, RemoteQPN: r.DestQP, RemoteSRQN: r.SrcQP, RemoteQKey: r.QKey, RemoteLength: r.DMALen,
			FlushType: ib.FlushType(r.Syndrome & 7), FlushLevel: ib.FlushLevel(r.Extra), Flags: ib.SendFlags(r.Flags >> 6 & 1)}
		if n := int(r.Len % uint32(len(memory.buf))); r.Flags&flagInline != 0 {
			wr.Inline = make([]byte, n%64)
		} else if n > 0 {
			wr.SGL = []ib.SGE{memory.at(0, n)}
		}
		if v.q.Type == ib.UD {
			wr.AH = ib.NewAH(ib.AHAttr{}, &Address{PD: testPD, Flow: v.flow(v.peer)}, nil)
		}
		n, _ := v.q.PostSend([]ib.SendWR{wr})
		v.sends += n
	case opRecv:
		wr := ib.RecvWR{ID: r.ID}
		if n := int(r.Len % uint32(len(memory.buf))); n > 0 {
			wr.SGL = []ib.SGE{memory.at(0, n)}
		}
		v.recvs += v.recv.Post([]ib.RecvWR{wr})
		v.q.FlushReceive()
	case opSync:
		for l := range NumWorkKinds {
			v.work(l)
		}
	case opAbsent:
		memory.lazy.drop(r.VA%victimSize, uint64(r.Len%victimSize))
	case opPull:
		v.pull()
		v.peer.wire = nil
	case opTick:
		v.w.now += time.Duration(r.PSN%1e8) * time.Nanosecond
		if d := v.q.Deadline(); d != 0 && d <= v.w.now {
			v.q.Tick(v.w.now)
		}
	}
	v.verify(t)
	if errored && !bytes.Equal(v.around, frozen) {
		t.Fatal("memory changed in the error state")
	}
}

// verify checks what holds after every step.
func (v *victim) verify(t *testing.T) {
	if err := v.q.broken(); err != nil {
		t.Fatal(err)
	}
	var wcs [16]ib.WC
	for n := v.sendCQ.Poll(wcs[:]); n > 0; n = v.sendCQ.Poll(wcs[:]) {
		v.sent += n
	}
	for n := v.recvCQ.Poll(wcs[:]); n > 0; n = v.recvCQ.Poll(wcs[:]) {
		v.received += n
	}
	if v.sent > v.sends || v.received > v.recvs {
		t.Fatalf("%d of %d requests and %d of %d receives completed", v.sent, v.sends, v.received, v.recvs)
	}
	if end := canary + victimSize; !bytes.Equal(v.around[:canary], untouched[:canary]) || !bytes.Equal(v.around[end:], untouched[end:]) {
		t.Fatal("memory around the region changed")
	}
	if !bytes.Equal(v.private.buf, untouched[:canary]) {
		t.Fatal("memory that no peer may write changed")
	}
}

func FuzzReceive(f *testing.F) {
	seeds := 0
	err := filepath.WalkDir("testdata", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".txt" {
			return err
		}
		story, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		typ := map[string]string{"rc": "\x00\x00", "pending": "\x00\x00", "state": "\x00\x00", "uc": "\x01\x01", "ud": "\x02\x02", "xrc": "\x03\x04"}[filepath.Base(filepath.Dir(path))]
		inputs := map[string][]byte{"a": {typ[0]}, "b": {typ[1]}}
		pull, tick := (&record{Op: opPull}).append(nil), (&record{Op: opTick, PSN: 1e7}).append(nil)
		tick = (&record{Op: opSync}).append(tick)
		absent := (&record{Op: opAbsent, Len: victimSize - 1}).append(nil)
		s := &script{t: f, tap: func(e *end, op any) {
			in := inputs[e.name]
			switch op := op.(type) {
			case *train.Train:
				in = ofTrain(op).append(in)
			case ib.SendWR:
				in = ofSend(&op).append(in)
			case ib.RecvWR:
				r := record{Op: opRecv, ID: op.ID}
				for _, e := range op.SGL {
					r.Len += e.Length
				}
				in = r.append(in)
			}
			inputs[e.name] = append(append(in, pull...), tick...)
		}}
		datadriven.RunTestFromStringAny(f, string(story), s.run)
		// b is the victim; the scripts' a plays its part with its own addresses.
		for _, in := range inputs {
			f.Add(append(append(bytes.Clone(in[:1]), absent...), in[1:]...))
			for state := range byte(8) {
				in := bytes.Clone(in)
				in[0] += fuzzTypes * state
				f.Add(in)
				seeds++
			}
		}
		return nil
	})
	if err != nil || seeds < 100 {
		f.Fatalf("%d seeds: %v", seeds, err)
	}
	size := binary.Size(record{})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 || len(in) > 64*size {
			return
		}
		v := newVictim(t, in[0])
		for in = in[1:]; len(in) >= size; in = in[size:] {
			var r record
			if _, err := binary.Decode(in, binary.LittleEndian, &r); err != nil {
				t.Fatal(err)
			}
			v.step(t, &r)
		}
	})
}
