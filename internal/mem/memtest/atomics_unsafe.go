package memtest

import (
	"encoding/binary"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Tests of atomics. The unsafe code makes atomic variables of words in test
// memory, which is sound: they are aligned, and outlive the test.

func (r *region) word(off uint64) uint64 {
	var b [8]byte
	r.Read(off, b[:])
	return binary.NativeEndian.Uint64(b[:])
}

func (r *region) setWord(off, v uint64) {
	r.Write(off, binary.NativeEndian.AppendUint64(nil, v))
}

// testAtomics checks what atomics do and what they refuse, one by one.
func testAtomics(t *testing.T, e *env) {
	r := e.all(page)
	if e.mk.NoAtomics {
		_, f := changeWord(e.table, self, r.Key(), r.IOVA(), mem.FetchAdd, 0, 1)
		if f.Kind != mem.FaultAccess {
			t.Fatalf("a kind without atomics: %v", f)
		}
		return
	}
	for _, c := range []struct {
		name                           string
		op                             mem.AtomicOp
		before, compare, swapAdd, want uint64
	}{
		{"swap", mem.CmpSwap, 5, 5, 9, 9},
		{"no swap", mem.CmpSwap, 5, 6, 9, 5},
		{"swap with itself", mem.CmpSwap, math.MaxUint64, math.MaxUint64, math.MaxUint64, math.MaxUint64},
		{"add", mem.FetchAdd, 5, 0, 9, 14},
		{"add nothing", mem.FetchAdd, 5, 0, 0, 5},
		{"add and wrap", mem.FetchAdd, math.MaxUint64, 0, 2, 1},
		{"add a negative number", mem.FetchAdd, 5, 99, math.MaxUint64, 4},
	} {
		for _, off := range []uint64{0, 64, page - 8} {
			e.fill(r)
			r.setWord(off, c.before)
			model := r.contents()
			binary.NativeEndian.PutUint64(model[off:], c.want)
			orig, f := changeWord(e.table, self, r.Key(), r.IOVA()+off, c.op, c.compare, c.swapAdd)
			if !f.OK() || orig != c.before {
				t.Fatalf("%s at %d: %d, %v, should be %d", c.name, off, orig, f, c.before)
			}
			r.want(t, model)
		}
	}

	model := e.fill(r)
	for off := uint64(1); off < 8; off++ {
		for _, op := range []mem.AtomicOp{mem.FetchAdd, mem.Store} {
			if _, f := changeWord(e.table, self, r.Key(), r.IOVA()+off, op, 0, 1); f.Kind != mem.FaultAlign {
				t.Errorf("atomic %d at offset %d: %v", op, off, f)
			}
		}
	}
	for _, off := range []uint64{0, 64, page - 8} {
		binary.NativeEndian.PutUint64(model[off:], 0x0123456789abcdef+off)
		if _, f := changeWord(e.table, self, r.Key(), r.IOVA()+off, mem.Store, 0, 0x0123456789abcdef+off); !f.OK() {
			t.Errorf("store at %d: %v", off, f)
		}
	}
	// Storing is writing: it needs that right, and no other.
	writable := e.register(page, mem.RegionConfig{Access: ib.AccessLocalWrite | ib.AccessRemoteWrite, IOVA: iova})
	if _, f := changeWord(e.table, self, writable.Key(), iova, mem.Store, 0, 1); !f.OK() {
		t.Errorf("store with the right to write: %v", f)
	}
	other := e.register(page, mem.RegionConfig{Access: ib.AccessLocalWrite | ib.AccessRemoteRead | ib.AccessRemoteAtomic, IOVA: iova})
	if _, f := changeWord(e.table, self, other.Key(), iova, mem.Store, 0, 1); f.Kind != mem.FaultAccess {
		t.Errorf("store without the right to write: %v", f)
	}
	// The request's address is aligned, the memory is not, and the other way
	// round: on regions that begin off a word.
	odd := e.register(page, mem.RegionConfig{Access: allAccess, IOVA: iova + 4})
	for _, off := range []uint64{4, 0} {
		if _, f := changeWord(e.table, self, odd.Key(), odd.IOVA()+off, mem.FetchAdd, 0, 1); f.Kind != mem.FaultAlign {
			t.Errorf("atomic at offset %d of a region at %#x: %v", off, odd.IOVA(), f)
		}
	}
	for _, c := range []struct {
		addr uint64
		who  mem.Actor
		want mem.FaultKind
	}{
		{iova + page - 4, self, mem.FaultBounds}, {iova + page, self, mem.FaultBounds}, {iova - 8, self, mem.FaultBounds},
		{math.MaxUint64 - 7, self, mem.FaultBounds}, {0, self, mem.FaultBounds},
		{iova, mem.Actor{PD: domain + 1}, mem.FaultDomain},
	} {
		if _, f := changeWord(e.table, c.who, r.Key(), c.addr, mem.CmpSwap, 0, 1); f.Kind != c.want {
			t.Errorf("atomic at %#x: %v, should be %v", c.addr, f, c.want)
		}
	}
	r.want(t, model)
}

// testAtomicsTogether adds from several goroutines at once, with both kinds of
// atomics and, where the CPU sees the memory, with its own.
func testAtomicsTogether(t *testing.T, e *env) {
	if e.mk.NoAtomics {
		return
	}
	const adds = 2000
	r := e.all(page)
	var total atomic.Uint64
	var wg sync.WaitGroup
	run := func(add func(n uint64) bool) {
		wg.Go(func() {
			for n := range uint64(adds) {
				for !add(n) {
				}
				total.Add(n)
			}
		})
	}
	const off = 128
	run(func(n uint64) bool {
		_, f := changeWord(e.table, self, r.Key(), iova+off, mem.FetchAdd, 0, n)
		return f.OK()
	})
	run(func(n uint64) bool {
		now, f := changeWord(e.table, self, r.Key(), iova+off, mem.FetchAdd, 0, 0)
		if !f.OK() {
			return false
		}
		was, f := changeWord(e.table, self, r.Key(), iova+off, mem.CmpSwap, now, now+n)
		return f.OK() && was == now
	})
	if r.Bytes != nil {
		word := (*uint64)(unsafe.Pointer(&r.Bytes[off]))
		run(func(n uint64) bool { atomic.AddUint64(word, n); return true })
	}
	wg.Wait()
	if got := r.word(off); got != total.Load() {
		t.Fatalf("the sum is %d, should be %d", got, total.Load())
	}
}

// testTail has a receiver that only looks at the last bytes of a message: once
// they have come, all of it must have. Where the CPU sees the memory it spins
// on it; else the reads go through the owner's eyes.
func testTail(t *testing.T, e *env) {
	const rounds = 300
	r := e.all(2 * page)
	for _, c := range []struct{ off, n uint64 }{
		{0, 8}, {0, 64}, {8, 4096}, {3, 5}, {0, 1}, {7, 1}, {5, 2}, {4, 4}, {1, 1023}, {2, 77}, {page - 3, 3}, {page - 3, 11}, {9, page},
	} {
		guard := byte(0xa7) // what lies around the message, and stays
		around := make([]byte, r.Length())
		for i := range around {
			around[i] = guard
		}
		r.Write(0, around)
		r.Write(c.off, make([]byte, c.n))
		seen := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			defer close(seen)
			got := make([]byte, c.n)
			for round := range rounds {
				mark := byte(round%250 + 1)
				for spin := 1; ; spin++ {
					if spin%64 == 0 {
						runtime.Gosched() // there may be one core only
					}
					var end [1]byte
					if r.Bytes != nil {
						end[0] = lastByte(&r.Bytes[c.off+c.n-1])
					} else {
						r.Read(c.off+c.n-1, end[:])
					}
					if end[0] == mark {
						break
					}
				}
				r.Read(c.off, got)
				for i := range got {
					if got[i] != mark {
						t.Errorf("%d bytes at %d: byte %d is %d when the last one is %d", c.n, c.off, i, got[i], mark)
						return
					}
				}
				seen <- struct{}{}
			}
		})
		msg := make([]byte, c.n)
		for round := range rounds {
			for i := range msg {
				msg[i] = byte(round%250 + 1)
			}
			// In two pieces, so that the end of the first must not count as the
			// message's.
			half := c.n / 2
			mustCopy(t, e.list(ib.AccessRemoteWrite, r.at(c.off, half), r.at(c.off+half, c.n-half)), raw(msg), c.n, true)
			if _, ok := <-seen; !ok {
				break
			}
		}
		wg.Wait()
		copy(around[c.off:], msg)
		r.want(t, around)
	}
}
