package mem_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// benchRegion registers n bytes, of the Go heap or mapped.
func benchRegion(tb testing.TB, t *mem.Table, n int, mapped bool) (*mem.Region, []byte) {
	tb.Helper()
	b := make([]byte, n)
	if mapped {
		b = mmap(tb, -1, uint64(n), unix.PROT_READ|unix.PROT_WRITE, anonymous)
		tb.Cleanup(func() { unix.Munmap(b) })
	}
	h, err := mem.NewHostBytes(b, ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		tb.Fatal(err)
	}
	r, err := t.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessRemote, IOVA: 0x1000, Length: uint64(n), Backing: h})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { r.Close() })
	return r, b
}

// one makes a list of one piece: all of a region.
func one(t *mem.Table, r *mem.Region, access ib.Access) *mem.List {
	return &mem.List{Table: t, Actor: who, Access: access,
		SGEs: []ib.SGE{{Addr: r.IOVA(), Length: uint32(r.Length()), LKey: r.Key()}}}
}

func BenchmarkPermSlot(b *testing.B) {
	p := mem.NewPerm24(mem.RandomPermKey())
	x := uint32(12345)
	for b.Loop() {
		x = p.Slot(x)
	}
	if p.Index(p.Slot(x)) != x {
		b.Fatal("not a permutation")
	}
}

func BenchmarkLookup(b *testing.B) {
	t := mem.NewTable(mem.TableConfig{})
	r, _ := benchRegion(b, t, 4096, false)
	for b.Loop() {
		if t.Lookup(r.Key()) != r {
			b.Fatal("not found")
		}
	}
}

func BenchmarkCheck(b *testing.B) {
	t := mem.NewTable(mem.TableConfig{})
	r, _ := benchRegion(b, t, 4096, false)
	l := one(t, r, ib.AccessRemoteWrite)
	for b.Loop() {
		if f := mem.Check(l, 64); !f.OK() {
			b.Fatal(f)
		}
	}
}

// BenchmarkCopy measures Copy between two regions beside what it consists of at
// least: copy alone, and copy between the four atomic additions of two read
// sections.
func BenchmarkCopy(b *testing.B) {
	t := mem.NewTable(mem.TableConfig{})
	var sections [2]atomic.Uint64
	for _, n := range []int{8, 64, 4096, 65536} {
		dst, p := benchRegion(b, t, n, false)
		src, q := benchRegion(b, t, n, false)
		run := func(name string, f func()) {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.SetBytes(int64(n))
				for b.Loop() {
					f()
				}
			})
		}
		run("copy", func() { copy(p, q) })
		run("sections", func() {
			sections[0].Add(1)
			sections[1].Add(1)
			copy(p, q)
			sections[1].Add(^uint64(0))
			sections[0].Add(^uint64(0))
		})
		copyLists := func(d, s *mem.List, last bool) func() {
			return func() {
				if f, _ := mem.Copy(d, s, uint64(n), last); !f.OK() {
					b.Fatal(f)
				}
			}
		}
		d, s := one(t, dst, ib.AccessRemoteWrite), one(t, src, 0)
		run("Copy", copyLists(d, s, false))
		run("CopyLast", copyLists(d, s, true))
		mapped, _ := benchRegion(b, t, n, true)
		run("CopyLastMapped", copyLists(one(t, mapped, ib.AccessRemoteWrite), s, true))
		run("CopyLastFromRaw", copyLists(d, &mem.List{Raw: [][]byte{q}}, true))
	}
}

func BenchmarkGather(b *testing.B) {
	t := mem.NewTable(mem.TableConfig{})
	r, _ := benchRegion(b, t, 4096, false)
	l := one(t, r, 0)
	var pins mem.Pins
	out := make([][]byte, 0, 1)
	for b.Loop() {
		if _, f, whole := mem.Gather(l, 4096, out, &pins); !whole {
			b.Fatal(f)
		}
		pins.Release()
	}
}

func BenchmarkAtomic(b *testing.B) {
	t := mem.NewTable(mem.TableConfig{})
	r, _ := benchRegion(b, t, 4096, false)
	for b.Loop() {
		if _, f := mem.Atomic(t, who, r.Key(), r.IOVA(), mem.FetchAdd, 0, 1); !f.OK() {
			b.Fatal(f)
		}
	}
}

func BenchmarkRegister(b *testing.B) {
	t := mem.NewTable(mem.TableConfig{})
	buf := make([]byte, 1<<20)
	b.ReportAllocs()
	for b.Loop() {
		h, err := mem.NewHostBytes(buf, ib.AccessLocalWrite, ib.LockAuto)
		if err != nil {
			b.Fatal(err)
		}
		r, err := t.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Length: uint64(len(buf)), Backing: h})
		if err != nil {
			b.Fatal(err)
		}
		r.Close()
	}
}

// benchWindow makes a window over half of a region.
func benchWindow(tb testing.TB, t *mem.Table) (*mem.Window, ib.MWBind) {
	tb.Helper()
	r, err := t.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessMWBind, IOVA: 0x1000, Length: 1 << 20, Backing: hostOf(tb, 1<<20)})
	if err != nil {
		tb.Fatal(err)
	}
	w, err := t.AllocWindow(1, ib.MWType1)
	if err != nil {
		tb.Fatal(err)
	}
	b := ib.MWBind{MW: w.Key(), RKey: w.Key(), LKey: r.Key(), Addr: r.IOVA() + 4096, Length: 512 << 10, Access: ib.AccessRemote}
	if f := t.Bind(&b, true, who); !f.OK() {
		tb.Fatal(f)
	}
	return w, b
}

func hostOf(tb testing.TB, n int) *mem.Host {
	tb.Helper()
	h, err := mem.NewHostBytes(make([]byte, n), ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		tb.Fatal(err)
	}
	return h
}

func BenchmarkCheckWindow(b *testing.B) {
	t := mem.NewTable(mem.TableConfig{})
	w, bound := benchWindow(b, t)
	l := through(t, w, &bound)
	for b.Loop() {
		if f := mem.Check(l, 8); !f.OK() {
			b.Fatal(f)
		}
	}
}

// through returns a list of the bytes that a window is bound to.
func through(t *mem.Table, w *mem.Window, bound *ib.MWBind) *mem.List {
	return &mem.List{Table: t, Actor: who, Access: ib.AccessRemoteRead, SGEs: []ib.SGE{{Addr: bound.Addr, Length: uint32(bound.Length), LKey: w.Key()}}}
}

func BenchmarkBind(b *testing.B) {
	t := mem.NewTable(mem.TableConfig{})
	_, bound := benchWindow(b, t)
	b.ReportAllocs()
	for b.Loop() {
		if f := t.Bind(&bound, true, who); !f.OK() {
			b.Fatal(f)
		}
	}
}

// Nothing on the fast path allocates, faults included.
func TestNoAllocations(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{})
	a, _ := benchRegion(t, table, 4096, false)
	m, _ := benchRegion(t, table, 4096, true)
	w, bound := benchWindow(t, table)
	free := bound
	free.Length = 0
	var pins mem.Pins
	out := make([][]byte, 0, 8)
	packet := &mem.List{Raw: [][]byte{make([]byte, 4096)}}
	target, source, windowed := one(table, a, ib.AccessRemoteWrite), one(table, m, 0), through(table, w, &bound)
	for name, f := range map[string]func(){
		"Copy":           func() { mem.Copy(target, source, 4096, true) },
		"Copy, mapped":   func() { mem.Copy(source, target, 4096, true) },
		"Copy, raw":      func() { mem.Copy(target, packet, 4096, false) },
		"Copy, fault":    func() { mem.Copy(target, source, 5000, false) },
		"Copy, window":   func() { mem.Copy(packet, windowed, 4096, true) },
		"Check":          func() { mem.Check(target, 4096) },
		"Check, fault":   func() { mem.Check(target, 5000) },
		"Check, window":  func() { mem.Check(windowed, 8) },
		"Gather":         func() { mem.Gather(target, 4096, out, &pins); pins.Release() },
		"Atomic":         func() { mem.Atomic(table, who, a.Key(), 0x1000, mem.CmpSwap, 0, 1) },
		"Bind, free":     func() { table.Bind(&bound, true, who); table.Bind(&free, true, who); table.Bind(&bound, true, who) },
		"Atomic, mapped": func() { mem.Atomic(table, who, m.Key(), 0x1000, mem.FetchAdd, 0, 1) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
