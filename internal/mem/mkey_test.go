package mem_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
)

// Indirect keys of every shape, on every kind of memory, pass the suite.
func TestConformanceOfIndirectKeys(t *testing.T) {
	for _, shape := range []struct {
		name  string
		shape memtest.Shape
	}{{"list", memtest.List}, {"strided", memtest.Strided}, {"nested", memtest.Nested}} {
		for _, kind := range []memtest.Constructor{
			{Name: "heap", New: heapMemory}, {Name: "mmap", New: mmapMemory}, {Name: "scattered", New: scatteredMemory},
			{Name: "on-demand mmap", New: onDemandMmap, Access: ib.AccessOnDemand}, {Name: "implicit", New: implicitMmap, Access: ib.AccessOnDemand},
			{Name: "device", New: deviceMemory(mem.DeviceMemConfig{})},
		} {
			kind.Name = fmt.Sprintf("%s/%s", shape.name, kind.Name)
			switch kind.Name {
			case "list/heap", "strided/device", "nested/on-demand mmap":
			default:
				if mem.RaceEnabled {
					continue // each shape and each sort of memory once: it takes long
				}
			}
			kind.Shape = shape.shape
			memtest.Run(t, kind)
		}
	}
}

// keysOf makes a table and a region of n bytes of the Go heap in it.
func keysOf(t testing.TB, n int) (*mem.Table, *mem.Region, []byte) {
	t.Helper()
	table := mem.NewTable(mem.TableConfig{Seed: 1})
	b := make([]byte, n)
	return table, registered(t, table, b), b
}

func registered(t testing.TB, table *mem.Table, b []byte) *mem.Region {
	t.Helper()
	h, err := mem.NewHostBytes(b, ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		t.Fatal(err)
	}
	r, err := table.Register(mem.RegionConfig{PD: mkeyPD, Access: ib.AccessLocalWrite, Length: uint64(len(b)), Backing: h})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

const mkeyPD = 3

var mkeyActor = mem.Actor{PD: mkeyPD, QPN: 5}

func mkeyOf(t testing.TB, table *mem.Table, repeat uint64, pieces ...ib.Stride) *mem.MKey {
	t.Helper()
	m, err := table.CreateMKey(mkeyPD, len(pieces))
	if err != nil {
		t.Fatal(err)
	}
	if f := table.Configure(&mem.Layout{Key: m.Key(), Access: ib.AccessLocalWrite, Repeat: repeat, Pieces: pieces}, mkeyActor); !f.OK() {
		t.Fatal(f)
	}
	return m
}

// Keys stand on each other so deep and no deeper.
func TestMKeyDepth(t *testing.T) {
	table, r, _ := keysOf(t, 64)
	below := r.Key()
	var keys []*mem.MKey
	for range mem.MaxMKeyDepth {
		m := mkeyOf(t, table, 1, ib.Stride{Bytes: 64, LKey: below})
		below = m.Key()
		keys = append(keys, m)
	}
	last, err := table.CreateMKey(mkeyPD, 1)
	if err != nil {
		t.Fatal(err)
	}
	deeper := mem.Layout{Key: last.Key(), Repeat: 1, Pieces: []ib.Stride{{Bytes: 64, LKey: below}}}
	if f := table.Configure(&deeper, mkeyActor); f.Kind != mem.FaultDepth {
		t.Errorf("one more: %v", f)
	}
	// A key that others stand on cannot be made to stand on them.
	loop := mem.Layout{Key: keys[0].Key(), Repeat: 1, Pieces: []ib.Stride{{Bytes: 64, LKey: below}}}
	if f := table.Configure(&loop, mkeyActor); f.Kind != mem.FaultNotFree {
		t.Errorf("a loop: %v", f)
	}
	if f := table.Invalidate(keys[0].Key(), mkeyActor); f.Kind != mem.FaultNotInvalidatable {
		t.Errorf("its key: %v", f)
	}
	for i := len(keys) - 1; i >= 0; i-- {
		if err := keys[i].Close(); err != nil {
			t.Error(err)
		}
	}
	if f := table.Configure(&deeper, mkeyActor); f.Kind != mem.FaultKey {
		t.Errorf("on a key that is closed: %v", f)
	}
	if err := last.Close(); err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil || table.Len() != 0 {
		t.Errorf("%v, %d regions are left", err, table.Len())
	}
}

// Keys that several make anew of each other, in place and at once, never come to stand
// on themselves: what can be read through them ends, and they can be closed from the
// top down.
func TestMKeyInPlaceTogether(t *testing.T) {
	table, r, _ := keysOf(t, 64)
	var keys []*mem.MKey
	for range 6 {
		keys = append(keys, mkeyOf(t, table, 1, ib.Stride{Bytes: 64, LKey: r.Key()}))
	}
	var wg sync.WaitGroup
	var done, refused atomic.Int32
	for i := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 7))
			buf := make([]byte, 64)
			for range 3000 {
				of, on := keys[rng.IntN(len(keys))].Key(), keys[rng.IntN(len(keys))].Key()
				if rng.IntN(3) == 0 {
					on = r.Key()
				}
				l := mem.Layout{Key: of, Access: ib.AccessLocalWrite, Repeat: 1, Update: ib.MKeyInPlace, Pieces: []ib.Stride{{Bytes: 64, LKey: on}}}
				if f := table.Configure(&l, mkeyActor); f.OK() {
					done.Add(1)
				} else {
					refused.Add(1)
				}
				through := &mem.List{Table: table, Actor: mkeyActor, SGEs: []ib.SGE{{Length: 64, LKey: on}}}
				if f, _ := mem.Copy(&mem.List{Raw: [][]byte{buf}}, through, 64, false); !f.OK() && f.Kind != mem.FaultDead {
					t.Error(f)
				}
			}
		})
	}
	wg.Wait()
	for left := len(keys); left > 0; {
		before := left
		left = 0
		for _, m := range keys {
			if m.Close() != nil {
				left++
			}
		}
		if left == before {
			t.Fatalf("%d keys stand on each other", left)
		}
	}
	if err := r.Close(); err != nil || done.Load() == 0 || refused.Load() == 0 {
		t.Errorf("%v; %d done, %d refused", err, done.Load(), refused.Load())
	}
}

// Configuring again a key of the same size allocates nothing, and a million
// elements take as little as one.
func TestMKeyAllocs(t *testing.T) {
	table, r, _ := keysOf(t, 16<<20)
	pieces := make([]ib.Stride, 16)
	for i := range pieces {
		pieces[i] = ib.Stride{Addr: uint64(i) * 4096, Bytes: 64, LKey: r.Key()}
	}
	list, strided := mkeyOf(t, table, 1, pieces...), mkeyOf(t, table, 1<<20, ib.Stride{Bytes: 8, Skip: 8, LKey: r.Key()})
	layouts := []mem.Layout{
		{Key: list.Key(), Access: ib.AccessLocalWrite, Repeat: 1, Pieces: pieces},
		{Key: strided.Key(), Access: ib.AccessLocalWrite, Repeat: 1 << 20, Pieces: []ib.Stride{{Bytes: 8, Skip: 8, LKey: r.Key()}}},
	}
	for i := range layouts {
		if n := testing.AllocsPerRun(100, func() {
			if f := table.Invalidate(layouts[i].Key, mkeyActor); !f.OK() {
				t.Fatal(f)
			}
			if f := table.Configure(&layouts[i], mkeyActor); !f.OK() {
				t.Fatal(f)
			}
		}); n != 0 {
			t.Errorf("layout %d: %v allocations", i, n)
		}
	}
	if got := table.Lookup(strided.Key()).Length(); got != 8<<20 {
		t.Errorf("a million elements have %d bytes", got)
	}
}

func BenchmarkConfigureMKey(b *testing.B) {
	table, r, _ := keysOf(b, 1<<20)
	other := registered(b, table, make([]byte, 1<<20))
	for _, c := range []struct {
		name string
		keys []uint32
	}{{"one region", []uint32{r.Key()}}, {"two regions", []uint32{r.Key(), other.Key()}}} {
		b.Run(c.name, func(b *testing.B) {
			pieces := make([]ib.Stride, 16)
			for i := range pieces {
				pieces[i] = ib.Stride{Addr: uint64(i) * 4096, Bytes: 64, LKey: c.keys[i%len(c.keys)]}
			}
			m := mkeyOf(b, table, 1, pieces...)
			l := mem.Layout{Key: m.Key(), Access: ib.AccessLocalWrite, Repeat: 1, Pieces: pieces}
			b.ReportAllocs()
			for b.Loop() {
				table.Invalidate(l.Key, mkeyActor)
				table.Configure(&l, mkeyActor)
			}
			_ = m.Close()
		})
	}
}

// BenchmarkMKeyCopy scatters 64 KiB to 1,024 places by one key, and by a list of as
// many pieces, the least that it can cost.
func BenchmarkMKeyCopy(b *testing.B) {
	table, r, _ := keysOf(b, 1<<20)
	raw := mem.List{Raw: [][]byte{make([]byte, 64<<10)}}
	pieces := make([]ib.Stride, 1024)
	sges := make([]ib.SGE, 1024)
	for i := range pieces {
		pieces[i] = ib.Stride{Addr: uint64(i) * 1000, Bytes: 64, LKey: r.Key()}
		sges[i] = ib.SGE{Addr: uint64(i) * 1000, Length: 64, LKey: r.Key()}
	}
	list, strided := mkeyOf(b, table, 1, pieces...), mkeyOf(b, table, 1024, ib.Stride{Bytes: 64, Skip: 936, LKey: r.Key()})
	nested := mkeyOf(b, table, 1, ib.Stride{Bytes: 64 << 10, LKey: list.Key()})
	for _, c := range []struct {
		name string
		sges []ib.SGE
	}{
		{"list", []ib.SGE{{Length: 64 << 10, LKey: list.Key()}}}, {"strided", []ib.SGE{{Length: 64 << 10, LKey: strided.Key()}}},
		{"nested", []ib.SGE{{Length: 64 << 10, LKey: nested.Key()}}}, {"1024 SGEs", sges}, {"contiguous", []ib.SGE{{Length: 64 << 10, LKey: r.Key()}}},
	} {
		b.Run(c.name, func(b *testing.B) {
			dst := mem.List{Table: table, Actor: mkeyActor, Access: ib.AccessLocalWrite, SGEs: c.sges}
			b.SetBytes(64 << 10)
			for b.Loop() {
				if f, _ := mem.Copy(&dst, &raw, 64<<10, true); !f.OK() {
					b.Fatal(f)
				}
			}
		})
	}
}

// Gather takes what fits, and leaves nothing behind of what does not.
func TestGather(t *testing.T) {
	table, r, b := keysOf(t, 4096)
	for i := range b {
		b[i] = byte(i)
	}
	k := mkeyOf(t, table, 64, ib.Stride{Bytes: 8, Skip: 8, LKey: r.Key()})
	l := &mem.List{Table: table, Actor: mkeyActor, SGEs: []ib.SGE{{Length: 512, LKey: k.Key()}}}
	for _, c := range []struct {
		room int
		n    uint64
		ok   bool
	}{{64, 512, true}, {63, 512, false}, {63, 504, true}, {0, 8, false}, {1, 8, true}, {1, 9, false}} {
		var pins mem.Pins
		out, f, whole := mem.Gather(l, c.n, make([][]byte, 0, c.room), &pins)
		if !f.OK() || whole != c.ok || whole && pins.Len() != 2 || !whole && pins.Len()+len(out) > 0 { // a section on the key, one on its leaf
			t.Errorf("%d bytes into %d pieces: %v, %v, %d pieces, %d pins", c.n, c.room, f, whole, len(out), pins.Len())
		}
		pins.Release()
	}
	if err := k.Close(); err != nil { // no section is open
		t.Error(err)
	}
}
