package memtest

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Tests of memory that is taken away: suspended for a moment, in which it may move, or
// revoked for good.

// poison is what nobody who accesses memory ever sees: it stands in pages that the
// memory has moved away from, and in those that it is about to move to.
const poison = 0xdb

// leaf is a region that stands on memory itself.
type leaf struct {
	*mem.Region
	Memory
	size uint64
}

// leaves returns those that a region of the suite stands on.
func (r *region) leaves() []leaf {
	switch {
	case r.window != nil:
		return []leaf{{r.window.parent, r.window.whole, r.window.parent.Length()}}
	case r.indirect != nil:
		var list []leaf
		for _, p := range r.indirect.parts {
			list = append(list, leaf{p.Region, p.Memory, p.size})
		}
		return list
	}
	return []leaf{{r.Region, r.Memory, r.Length()}}
}

// move moves the memory, which is suspended.
func (l *leaf) move() {
	if l.Move != nil {
		l.Move(poison)
		return
	}
	b := make([]byte, l.size)
	l.Read(0, b)
	l.Write(0, bytes.Repeat([]byte{poison}, len(b)))
	l.Write(0, b)
}

// each calls f with every leaf of a region.
func (r *region) each(f func(l *leaf)) {
	for _, l := range r.leaves() {
		f(&l)
	}
}

// insist does something until its memory can be had, as a queue pair would.
func insist(f func() mem.Fault) mem.Fault {
	for {
		fault := f()
		if fault.Kind != mem.FaultPending {
			return fault
		}
		fault.Await()
	}
}

// unlessAway is insist for memory that may be suspended: then it returns that fault. The kernel may take a page at any time.
func unlessAway(f func() mem.Fault) mem.Fault {
	for {
		fault := f()
		if fault.Kind != mem.FaultPending || fault.Staged() || fault.Suspended() != nil {
			return fault
		}
		fault.Await()
	}
}

// testSuspended accesses memory that is suspended: nothing touches it, and rights are
// still told from wrongs.
func testSuspended(t *testing.T, e *env) {
	r := e.all(page)
	want := e.fill(r)
	if e.mk.Discards {
		want = make([]byte, page)
	}
	r.each(func(l *leaf) {
		for range 2 {
			if !l.Suspend() {
				t.Fatal("not suspended")
			}
		}
	})
	for times := range 2 { // of which the first Resume ends nothing
		got := make([]byte, 16)
		f, side := moveBytes(raw(got), e.list(0, r.at(0, 16)), 16, true)
		wantFault(t, "reading", f, side, mem.FaultPending, mem.Src)
		if !f.Brief() || f.Suspended() == nil {
			t.Error("the fault does not say that the memory is suspended")
		}
		f, side = moveBytes(e.list(ib.AccessLocalWrite, r.at(page-100, 100)), raw(make([]byte, 100)), 100, true)
		wantFault(t, "writing", f, side, mem.FaultPending, mem.Dst)
		if !e.mk.NoAtomics {
			_, f = changeWord(e.table, self, r.Key(), r.IOVA(), mem.FetchAdd, 0, 1)
			wantFault(t, "an atomic", f, mem.Dst, mem.FaultPending, mem.Dst)
		}
		var pins mem.Pins
		if _, f, _ = mem.Gather(e.list(0, r.at(8, 64)), 64, make([][]byte, 0, 64), &pins); f.Kind != mem.FaultPending || pins.Len() != 0 {
			t.Errorf("gathering: %v, %d sections", f, pins.Len())
		}
		if f = mem.Check(e.list(ib.AccessLocalWrite, r.at(0, page)), page); !f.OK() {
			t.Errorf("checking: %v", f)
		}
		if got := e.access(r.at(0, 8), 8, 0, mem.Actor{PD: domain + 1, QPN: self.QPN}); got != mem.FaultDomain {
			t.Errorf("another domain: %v", got)
		}
		if got := e.access(r.at(page-4, 8), 8, 0, self); got != mem.FaultBounds {
			t.Errorf("out of bounds: %v", got)
		}
		if !r.Alive() {
			t.Error("the key is dead")
		}
		if times == 0 {
			r.each(func(l *leaf) { l.Resume() })
		}
	}
	// Each Await ends, one leaf after the other.
	waited := make(chan mem.Fault)
	got := make([]byte, page)
	go func() {
		waited <- insist(func() mem.Fault {
			f, _ := moveBytes(raw(got), e.list(0, r.at(0, page)), page, true)
			return f
		})
	}()
	time.Sleep(time.Millisecond)
	r.each(func(l *leaf) {
		select {
		case f := <-waited:
			t.Fatalf("the access did not wait: %v", f)
		default:
		}
		l.move()
		l.Resume()
	})
	if f := <-waited; !f.OK() {
		t.Fatal(f)
	}
	if !bytes.Equal(got, want) {
		t.Error("other bytes than before")
	}
}

// testSuspendWaits suspends memory while sections are open on it.
func testSuspendWaits(t *testing.T, e *env) {
	r := e.all(page)
	release, second := e.section(r.at(0, 8), 8), e.section(r.at(0, 8), 8)
	var done atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		r.each(func(l *leaf) { l.Suspend() })
		done.Store(true)
	})
	for !someShut(r) {
		runtime.Gosched()
	}
	time.Sleep(time.Millisecond)
	if done.Load() {
		t.Fatal("Suspend did not wait for the open sections")
	}
	release()
	time.Sleep(time.Millisecond)
	if done.Load() {
		t.Fatal("Suspend did not wait for the second section")
	}
	second()
	wg.Wait()
	r.each(func(l *leaf) { l.Resume() })
	if got := e.access(r.at(0, 8), 8, 0, self); got != mem.FaultNone {
		t.Errorf("access after Resume: %v", got)
	}
}

func someShut(r *region) (shut bool) {
	r.each(func(l *leaf) { shut = shut || !l.Open() })
	return shut
}

// testMoves moves memory at random while others read it, write it and change it. No
// access sees poison, none is lost, and none is done twice.
func testMoves(t *testing.T, e *env) {
	const size = 3*page + 1000/8*8
	r := e.all(size)
	other := e.all(size)
	var stop atomic.Bool
	var wg sync.WaitGroup
	var rounds [4]atomic.Int64
	run := func(i int, seed uint64, shoot func(rng *rand.Rand, n byte) mem.Fault) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			for n := byte(1); !stop.Load(); n = n%100 + 1 {
				if f := insist(func() mem.Fault { return shoot(rng, n) }); !f.OK() {
					t.Errorf("%d: %v", i, f)
					stop.Store(true)
				}
				rounds[i].Add(1)
			}
		})
	}
	clean := func(who string, b []byte) {
		if i := bytes.IndexByte(b, poison); i >= 0 {
			t.Errorf("%s sees poison at byte %d of %d", who, i, len(b))
			stop.Store(true)
		}
	}
	// The first page counts, the second is written, all of it is read.
	var last byte
	msg := make([]byte, page)
	run(0, e.rng.Uint64(), func(_ *rand.Rand, n byte) mem.Fault {
		repeat(msg, n)
		f, _ := moveBytes(e.list(ib.AccessRemoteWrite, r.at(page, page)), raw(msg), page, true)
		if f.OK() {
			last = n
		}
		return f
	})
	got := make([]byte, size)
	run(1, e.rng.Uint64(), func(rng *rand.Rand, _ byte) mem.Fault {
		off := rng.Uint64N(size)
		n := 1 + rng.Uint64N(size-off)
		f, _ := moveBytes(raw(got[:n]), e.list(0, r.at(off, n)), n, false)
		if f.OK() {
			clean("a reader", got[:n])
		}
		return f
	})
	run(2, e.rng.Uint64(), func(rng *rand.Rand, _ byte) mem.Fault {
		off := rng.Uint64N(size)
		n := 1 + rng.Uint64N(size-off)
		f, _ := moveBytes(e.list(ib.AccessLocalWrite, other.at(off, n)), e.list(0, r.at(off, n)), n, false)
		return f
	})
	adds := uint64(0)
	if !e.mk.NoAtomics && !e.mk.Discards {
		run(3, e.rng.Uint64(), func(*rand.Rand, byte) mem.Fault {
			_, f := changeWord(e.table, self, r.Key(), r.IOVA()+8, mem.FetchAdd, 0, 0x100) // no byte of a small count is poison
			if f.OK() {
				adds++
			}
			if adds == 0x60 { // nor is it ever
				stop.Store(true)
			}
			return f
		})
	}
	moves := 0
	enough := func() bool {
		for i := range 3 {
			if rounds[i].Load() < 10 {
				return false
			}
		}
		return moves >= 50
	}
	for ; !enough() && !stop.Load(); moves++ {
		list := r.leaves()
		if e.rng.IntN(4) == 0 {
			list = other.leaves()
		}
		l := list[e.rng.IntN(len(list))]
		if !l.Suspend() {
			t.Fatal("not suspended")
		}
		if e.rng.IntN(3) > 0 {
			l.move()
		}
		l.Resume()
		time.Sleep(time.Duration(e.rng.IntN(50)) * time.Microsecond)
	}
	stop.Store(true)
	wg.Wait()
	clean("another region", other.contents())
	if e.mk.Discards {
		return
	}
	b := r.contents()
	clean("the owner", b)
	if !bytes.Equal(b[page:2*page], bytes.Repeat([]byte{last}, page)) {
		t.Errorf("what was written last is not there")
	}
	if adds > 0 && b[9] != byte(adds) {
		t.Errorf("%d additions have left %#x", adds, b[8:16])
	}
}

// testRevoke revokes memory under fire: no byte changes afterwards, and the key is still
// there.
func testRevoke(t *testing.T, e *env) {
	for round := range e.revocations() {
		e.revoke(t, round, func(r *region) {
			key := r.Key()
			r.each(func(l *leaf) {
				for range 2 { // the second time does nothing
					if !l.Revoke() {
						t.Error("not revoked")
					}
				}
				if l.Suspend() {
					t.Error("suspended though revoked")
				}
			})
			f, side := moveBytes(raw(make([]byte, 8)), e.list(0, r.at(0, 8)), 8, false)
			wantFault(t, "access after Revoke", f, side, mem.FaultRevoked, mem.Src)
			if f = mem.Check(e.list(0, r.at(0, 8)), 8); r.indirect == nil && f.Kind != mem.FaultRevoked {
				t.Errorf("a check after Revoke: %v", f) // what a key stands on shows when it is accessed
			}
			if !r.Alive() || e.table.Lookup(key) != r.Region {
				t.Error("the key is gone before Close")
			}
		})
	}
	// Whoever waits for memory that is suspended learns that it was revoked, or closed.
	for _, end := range []func(r *region){
		func(r *region) { r.each(func(l *leaf) { l.Revoke() }) },
		func(r *region) { r.Close() },
	} {
		r := e.all(page)
		r.each(func(l *leaf) { l.Suspend() })
		waited := make(chan mem.Fault)
		go func() {
			waited <- insist(func() mem.Fault {
				f, _ := moveBytes(raw(make([]byte, 8)), e.list(0, r.at(0, 8)), 8, false)
				return f
			})
		}()
		time.Sleep(time.Millisecond)
		end(r)
		if f := <-waited; f.Kind != mem.FaultRevoked && !dead(f.Kind) {
			t.Errorf("who waited: %v", f)
		}
	}
}
