package device

// Every operation reaches every kind of memory, as source and as target, on every link. (The
// suite in internal/mem/memtest tries every length, right and bound on each kind.)

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

const (
	kindRows, kindColumns, kindWidth = 48, 40, 160
	kindSize                         = kindRows * kindColumns * kindWidth // more than a train carries
	kindMargin                       = 1024                               // on both sides of it, in an end's own memory
)

// reachable is memory of one kind, as requests name it and as its owner sees it.
type reachable struct {
	addr       uint64
	lkey, rkey uint32        // lkey 0: the owner's requests cannot name it
	get        func() []byte // all of it
	set        func(b []byte)
	around     func() []byte // what the keys do not lead to
}

// outsideHeap gives an end, which is not connected yet, memory outside the Go heap: the race
// detector sees no order between two devices that use the heap.
func (e *end) outsideHeap() {
	e.t.Helper()
	closeAll(e.t, e.mr)
	e.buf = mapping(e.t, len(e.buf))
	e.mr = must[provider.MR](e.t)(e.pd.RegMR(e.buf, allRemote))
}

// inBuffer is memory between the margins of the end's own.
func (e *end) inBuffer(lkey, rkey uint32) *reachable {
	inside := e.buf[kindMargin:][:kindSize]
	return &reachable{
		addr: e.mr.Addr() + kindMargin, lkey: lkey, rkey: rkey,
		get:    func() []byte { return bytes.Clone(inside) },
		set:    func(b []byte) { copy(inside, b) },
		around: func() []byte { return append(bytes.Clone(e.buf[:kindMargin]), e.buf[kindMargin+kindSize:]...) },
	}
}

// inRegion is a region of its own.
func inRegion(mr provider.MR, memory []byte) *reachable {
	return &reachable{addr: mr.Addr(), lkey: mr.LKey(), rkey: mr.RKey(),
		get: func() []byte { return bytes.Clone(memory) }, set: func(b []byte) { copy(memory, b) }, around: func() []byte { return nil }}
}

func inWindow(typ ib.MWType) func(e *end) *reachable {
	return func(e *end) *reachable {
		e.allowWindows()
		return e.inBuffer(0, e.bind(e.window(typ), kindMargin, kindSize, ib.AccessRemote))
	}
}

// byColumns is the memory of an end as a matrix, column by column.
func byColumns(e *end) *reachable {
	k := e.mkey(kindRows)
	e.configure(e.columns(k, kindRows, kindColumns, kindWidth))
	each := func(f func(inKey, inMemory int)) {
		for r := range kindRows {
			for c := range kindColumns {
				f((c*kindRows+r)*kindWidth, (r*kindColumns+c)*kindWidth)
			}
		}
	}
	return &reachable{
		lkey: k.Key(), rkey: k.Key(),
		get: func() []byte {
			b := make([]byte, kindSize)
			each(func(inKey, inMemory int) { copy(b[inKey:][:kindWidth], e.buf[inMemory:]) })
			return b
		},
		set:    func(b []byte) { each(func(inKey, inMemory int) { copy(e.buf[inMemory:], b[inKey:][:kindWidth]) }) },
		around: func() []byte { return bytes.Clone(e.buf[kindSize:]) },
	}
}

// kindsOfMemory are the kinds that peers reach. Kinds that grant no atomics refuse them.
var kindsOfMemory = []struct {
	name      string
	make      func(e *end) *reachable
	noAtomics bool
}{
	{"window of type 1", inWindow(ib.MWType1), false},
	{"window of type 2", inWindow(ib.MWType2), false},
	{"indirect key", byColumns, false},
	{"device memory", func(e *end) *reachable {
		dm, mr := e.deviceMemory(kindSize)
		r := inRegion(mr, nil)
		r.get = func() []byte { return fromDM(e.t, dm, 0, kindSize) }
		r.set = func(b []byte) { must[int](e.t)(dm.WriteAt(b, 0)) }
		return r
	}, false},
	{"allocated", func(e *end) *reachable {
		mr := must[provider.MR](e.t)(e.pd.AllocMR(kindSize, allRemote))
		e.t.Cleanup(func() { closeAll(e.t, mr) })
		return inRegion(mr, mr.Bytes())
	}, false},
	{"on demand", func(e *end) *reachable {
		memory := mapping(e.t, kindSize)
		mr := must[provider.MR](e.t)(e.pd.RegMR(memory, allRemote|ib.AccessOnDemand))
		e.t.Cleanup(func() { closeAll(e.t, mr) })
		return inRegion(mr, memory)
	}, false},
	{"fetched first", func(e *end) *reachable {
		e.buf = e.buf[:kindSize]
		p := e.lazily()
		p.rng = rand.New(rand.NewPCG(1, 1))
		p.evict = func() bool { return p.rng.IntN(4) == 0 }
		return inRegion(e.mr, e.buf)
	}, false},
	{"imported", func(e *end) *reachable {
		x := newExporter(e.t, kindSize)
		mr, _ := x.importTo(e, 1)
		return inRegion(mr, x.buf)
	}, true},
}

func TestKindsOfMemory(t *testing.T) {
	for _, mode := range allLinks {
		for _, k := range kindsOfMemory {
			t.Run(mode+"/"+k.name, func(t *testing.T) {
				a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.RC, kindSize+2*kindMargin, (*end).outsideHeap)
				to, from := k.make(b), a.inBuffer(a.mr.LKey(), a.mr.RKey())
				if to.lkey != 0 {
					from = k.make(a)
					sendBetween(t, a, b, from, to)
				}
				testKind(t, a, b, from, to, k.noAtomics)
			})
		}
		t.Run(mode+"/indirect key/UC", func(t *testing.T) {
			a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.UC, kindSize+2*kindMargin, (*end).outsideHeap)
			sendBetween(t, a, b, byColumns(a), byColumns(b))
		})
	}
}

func (r *reachable) sge(off, n int) []ib.SGE {
	return []ib.SGE{{Addr: r.addr + uint64(off), Length: uint32(n), LKey: r.lkey}}
}

func same(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if k := firstDifference(got, want); k >= 0 {
		t.Fatalf("%s: byte %d is wrong", what, k)
	}
}

// sendBetween sends a message from memory of a to a receive in memory of b.
func sendBetween(t *testing.T, a, b *end, from, to *reachable) {
	t.Helper()
	const n, fromAt, toAt = 5000, 7, 100
	want := bytes.Repeat([]byte{9}, kindSize)
	to.set(want)
	from.set(noise[:kindSize])
	copy(want[toAt:][:n], noise[fromAt:])
	b.recv(ib.RecvWR{ID: 3, SGL: to.sge(toAt, n)})
	a.post(ib.SendWR{Op: ib.OpSend, SGL: from.sge(fromAt, n)})
	a.ok()
	if wc := b.ok(); wc.ID != 3 || wc.ByteLen != n {
		t.Fatalf("%+v", wc)
	}
	same(t, "SEND", to.get(), want)
}

// testKind has a use the memory of b by RDMA, and then go one byte beyond its end.
func testKind(t *testing.T, a, b *end, from, to *reachable, noAtomics bool) {
	t.Helper()
	first, second := noise[:kindSize], noise[kindSize:][:kindSize]
	around := to.around()
	from.set(first)
	wr := ib.SendWR{Op: ib.OpRDMAWrite, SGL: from.sge(0, kindSize), RemoteAddr: to.addr, RKey: to.rkey, CompareAdd: 5}
	a.post(wr)
	a.ok()
	same(t, "WRITE", to.get(), first)
	to.set(second)
	wr.Op = ib.OpRDMARead
	a.post(wr)
	a.ok()
	same(t, "READ", from.get(), second)

	to.set(make([]byte, kindSize))
	wr.Op, wr.SGL, wr.RemoteAddr = ib.OpAtomicFetchAdd, from.sge(8, 8), to.addr+64
	if noAtomics {
		a.post(wr)
		a.status(ib.WCRemAccessErr)
		return
	}
	for range 3 {
		a.post(wr)
		a.ok()
	}
	sum, result := binary.NativeEndian.Uint64(to.get()[64:]), binary.NativeEndian.Uint64(from.get()[8:])
	if sum != 15 || result != 10 {
		t.Errorf("three additions of 5: the sum is %d, the last result %d", sum, result)
	}

	inside := to.get()
	wr.Op, wr.SGL, wr.RemoteAddr = ib.OpRDMAWrite, from.sge(0, 2), to.addr+kindSize-1
	a.post(wr)
	a.status(ib.WCRemAccessErr)
	eventually(t, "the target's queue pair fails", func() bool { return b.state() == ib.QPErr })
	same(t, "WRITE beyond the end", to.get(), inside)
	same(t, "around it", to.around(), around)
}
