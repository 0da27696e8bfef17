package mem

import (
	"fmt"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
)

func benchRegion(tb testing.TB, t *Table, n int) *Region {
	h, err := NewHostBytes(make([]byte, n), ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		tb.Fatal(err)
	}
	r, err := t.Register(RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessRemote, IOVA: uint64(h.Addr()), Length: h.Len(), Backing: h})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { r.Close() })
	return r
}

var sink uint32

func BenchmarkPermSlot(b *testing.B) {
	p := NewPerm24(RandomPermKey())
	x := uint32(12345)
	for b.Loop() {
		x = p.Slot(x)
	}
	sink = x
}

func BenchmarkGet(b *testing.B) {
	t := NewTable(TableConfig{})
	r := benchRegion(b, t, 4096)
	for b.Loop() {
		if t.Lookup(r.key) != r {
			b.Fatal()
		}
	}
}

func BenchmarkResolve(b *testing.B) {
	t := NewTable(TableConfig{})
	r := benchRegion(b, t, 4096)
	who := Actor{PD: 1}
	b.ReportAllocs()
	for b.Loop() {
		s, f := t.Resolve(r.key, r.iova+8, 64, ib.AccessRemoteWrite, who)
		if !f.OK() {
			b.Fatal(f)
		}
		s.Release()
	}
}

func BenchmarkCopy(b *testing.B) {
	t := NewTable(TableConfig{})
	for _, n := range []int{8, 64, 4096, 65536} {
		x, y := benchRegion(b, t, n), benchRegion(b, t, n)
		p, _ := x.backing.Run(0, uint64(n), 0)
		q, _ := y.backing.Run(0, uint64(n), 0)
		b.Run(fmt.Sprintf("plain/%d", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for b.Loop() {
				copy(p, q)
			}
		})
		b.Run(fmt.Sprintf("floor/%d", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for b.Loop() {
				x.state.Add(1)
				y.state.Add(1)
				copy(p, q)
				y.state.Add(^uint64(0))
				x.state.Add(^uint64(0))
			}
		})
		for _, last := range []bool{false, true} {
			b.Run(fmt.Sprintf("last=%v/%d", last, n), func(b *testing.B) {
				d := List{Table: t, Actor: Actor{PD: 1}, Access: ib.AccessRemoteWrite, SGEs: []ib.SGE{{Addr: x.iova, Length: uint32(n), LKey: x.key}}}
				s := List{Table: t, Actor: Actor{PD: 1}, SGEs: []ib.SGE{{Addr: y.iova, Length: uint32(n), LKey: y.key}}}
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					if f, _ := Copy(&d, &s, uint64(n), last); !f.OK() {
						b.Fatal(f)
					}
				}
			})
		}
	}
}
