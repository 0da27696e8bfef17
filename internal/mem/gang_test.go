package mem_test

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
)

// Every part of the work is done once, also when several callers want help at a time, and when it returns all is done.
func TestTogether(t *testing.T) {
	for _, helpers := range []int{0, 1, 7} {
		end := mem.WithHelpers(helpers)
		var callers sync.WaitGroup
		for range 4 {
			callers.Go(func() {
				for n := range 300 {
					done := make([]atomic.Int32, n)
					mem.Together(n, func(i int) { done[i].Add(1) })
					for i := range done {
						if k := done[i].Load(); k != 1 {
							t.Errorf("%d helpers: part %d of %d was done %d times", helpers, i, n, k)
						}
					}
				}
			})
		}
		callers.Wait()
		end()
	}
}

// hostRegion registers memory of the host.
func hostRegion(t *testing.T, table *mem.Table, b []byte) *mem.Region {
	t.Helper()
	h, err := mem.NewHostBytes(b, ib.AccessLocalWrite, ib.LockAuto)
	if err != nil {
		t.Fatal(err)
	}
	r, err := table.Register(mem.RegionConfig{Length: uint64(len(b)), Access: ib.AccessLocalWrite, Backing: h})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() }) // nothing is bound to it: it cannot fail
	return r
}

// engineRegion registers memory of an engine.
func engineRegion(t *testing.T, table *mem.Table, e *enginetest.Engine, n uint64) (*enginetest.Memory, *mem.Region) {
	t.Helper()
	m := e.Alloc(n)
	t.Cleanup(m.Free)
	r, err := table.Register(mem.RegionConfig{Length: n, Access: ib.AccessLocalWrite, Backing: m})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() }) // nothing is bound to it: it cannot fail
	return m, r
}

// Long transfers between memory of the host and an engine's, whose bytes several goroutines copy to and from staging bytes:
// all bytes arrive, none beside them changes, and no staging bytes that are not page-locked are used.
func TestTransferTogether(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	defer mem.WithHelpers(3)()
	e := enginetest.New(enginetest.Config{Latency: 5 * time.Microsecond, Locks: true})
	t.Cleanup(e.Close)
	const size = 24 << 20
	table := mem.NewTable(mem.TableConfig{})
	there, far := engineRegion(t, table, e, size)
	here := make([]byte, size)
	near := hostRegion(t, table, here)
	random := func(b []byte) {
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
	}
	list := func(r *mem.Region, off, n uint64) *mem.List {
		return &mem.List{Table: table, SGEs: []ib.SGE{{Addr: off, Length: uint32(n), LKey: r.Key()}}, Access: ib.AccessLocalWrite, Memo: new(mem.Memo)}
	}
	var s mem.Stream
	defer s.Close()
	for _, n := range []uint64{1, mem.Quantum, mem.Quantum + 1, 2 * mem.Quantum, 5<<20 + 77, 17*mem.Quantum + 3, 20 << 20} {
		for _, out := range []bool{true, false} {
			a, b := rnd.Uint64N(size-n+1), rnd.Uint64N(size-n+1)
			random(here)
			there.Lock()
			random(there.Bytes)
			want := bytes.Clone(there.Bytes)
			got := there.Bytes
			to, from := list(far, a, n), list(near, b, n)
			copy(want[a:a+n], here[b:])
			if !out {
				want, got = bytes.Clone(here), here
				to, from = list(near, b, n), list(far, a, n)
				copy(want[b:b+n], there.Bytes[a:])
			}
			there.Unlock()
			if f, _ := mem.CopyWaiting(to, from, n, true, &s); !f.OK() {
				t.Fatalf("%d bytes, to the engine %v: %v", n, out, f)
			}
			there.Lock()
			same := bytes.Equal(got, want)
			there.Unlock()
			if !same {
				t.Fatalf("%d bytes, to the engine %v, at %d and %d: other bytes", n, out, a, b)
			}
		}
	}
	if n := e.Unlocked(); n > 0 {
		t.Errorf("%d operations had bytes that are not page-locked", n)
	}
}

// Payload that is kept arrives whole, in however many parts it is copied.
func TestCopyToStaging(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	defer mem.WithHelpers(7)()
	table := mem.NewTable(mem.TableConfig{})
	here := make([]byte, 1<<20)
	for i := range here {
		here[i] = byte(rnd.Uint32())
	}
	near := hostRegion(t, table, here)
	for _, n := range []int{0, 1, 4095, 64 << 10, 128<<10 - 1, 128 << 10, 128<<10 + 1, 200000, mem.Quantum} {
		off := rnd.Uint64N(uint64(len(here) - n + 1))
		in := &mem.List{Table: table, SGEs: []ib.SGE{{Addr: off, Length: uint32(n), LKey: near.Key()}}, Memo: new(mem.Memo)}
		cut := n / 3
		raw := &mem.List{Raw: [][]byte{here[off:][:cut], here[off:][cut:n]}}
		for _, l := range []*mem.List{in, raw} {
			b := make([]byte, n+1)
			b[n] = 77
			if f := mem.CopyToStaging(&mem.List{Raw: [][]byte{b[:n]}}, l); !f.OK() || !bytes.Equal(b[:n], here[off:][:n]) || b[n] != 77 {
				t.Fatalf("%d bytes from %d: %v, or other bytes", n, off, f)
			}
		}
		if n > 0 {
			in.SGEs[0].Length--
			if f := mem.CopyToStaging(&mem.List{Raw: [][]byte{make([]byte, n)}}, in); f.Kind != mem.FaultBounds {
				t.Fatalf("%d bytes of a list of one less: %v", n, f)
			}
		}
	}
}

// Half of the host's side does not exist: the transfer ends in a fault, and its staging bytes are given back.
func TestTransferTogetherFails(t *testing.T) {
	defer mem.WithHelpers(3)()
	e := enginetest.New(enginetest.Config{Locks: true})
	t.Cleanup(e.Close)
	const size = 8 << 20
	table := mem.NewTable(mem.TableConfig{})
	_, far := engineRegion(t, table, e, size)
	near := hostRegion(t, table, make([]byte, size/2))
	var s mem.Stream
	defer s.Close()
	for range 20 {
		for _, out := range []bool{true, false} {
			host := &mem.List{Table: table, SGEs: []ib.SGE{{Length: size / 2, LKey: near.Key()}, {Length: size / 2, LKey: near.Key() ^ 0xff}}, Access: ib.AccessLocalWrite}
			engine := &mem.List{Table: table, SGEs: []ib.SGE{{Length: size, LKey: far.Key()}}, Access: ib.AccessLocalWrite}
			to, from := engine, host
			if !out {
				to, from = host, engine
			}
			if f, _ := mem.CopyWaiting(to, from, size, true, &s); f.Kind != mem.FaultKey {
				t.Fatalf("to the engine %v: %v", out, f)
			}
		}
	}
	if n := e.Unlocked(); n > 0 {
		t.Errorf("%d operations had bytes that are not page-locked: staging bytes were lost", n)
	}
}
