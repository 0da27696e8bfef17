package mem

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
)

// otherProcess is memory that pretends to be another process's.
type otherProcess struct {
	b    []byte
	gone bool
	own  bool

	mapped bool // it is mapped in this process
	late   bool // with mapped: it is given up while it is copied
}

func (o *otherProcess) Mapped(off, n uint64) []byte {
	if !o.mapped || o.gone || o.own {
		return nil
	}
	return o.b[off:][:n]
}

func (o *otherProcess) Still() bool { return !o.late }

func (o *otherProcess) ReadRef(b []byte, off uint64) (ok, own bool) {
	if o.gone || o.own {
		return false, o.own
	}
	return copy(b, o.b[off:]) == len(b), false
}

// Payload by reference arrives whole, from any offset, in any pieces.
func TestCopyFar(t *testing.T) {
	const seed = 11
	rng := rand.New(rand.NewPCG(seed, 0))
	all := make([]byte, 100_000)
	for i := range all {
		all[i] = byte(rng.Uint32())
	}
	for range 500 {
		n := 1 + rng.IntN(len(all)-1)
		tail := min(n, 1+rng.IntN(64))
		off := rng.IntN(n)
		o := &otherProcess{b: all[:n-tail], mapped: rng.IntN(2) == 0}
		src := &List{Ref: o, RefLen: uint64(n - tail), Raw: [][]byte{all[n-tail : n]}, Off: uint64(off)}
		cut := rng.IntN(n - off + 1)
		got := make([]byte, n-off)
		dst := &List{Raw: [][]byte{got[:cut], got[cut:]}}
		if f, side := Copy(dst, src, uint64(n-off), rng.IntN(2) == 1); !f.OK() || !bytes.Equal(got, all[off:n]) {
			t.Fatalf("%d bytes from %d on, %d of them at hand: %v, side %v", n, off, tail, f, side)
		}
		if f, side := Copy(dst, src, uint64(n-off)+1, false); f.Kind != FaultBounds || side == 0 {
			t.Fatalf("more than there is: %v, side %v", f, side)
		}
		o.gone = true
		if f, side := Copy(dst, src, uint64(n-off), false); off < n-tail && (f.OK() || side != Src) {
			t.Fatalf("a process that is gone: %v, side %v", f, side)
		}
		o.gone, o.mapped, o.late = false, true, true
		if f, side := Copy(dst, src, uint64(n-off), false); off < n-tail && (f.Kind != FaultStale || side != Src) {
			t.Fatalf("given up while it is copied: %v, side %v", f, side)
		}
	}
	// If the target's memory is gone, the fault is the target's.
	table := NewTable(TableConfig{})
	buf := make([]byte, 4096)
	h, err := NewHostBytes(buf, ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		t.Fatal(err)
	}
	r, err := table.Register(RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Backing: h, Length: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	dst := &List{Table: table, Actor: Actor{PD: 1}, Access: ib.AccessLocalWrite, SGEs: []ib.SGE{{Addr: r.IOVA(), Length: 4096, LKey: r.Key()}}}
	src := &List{Ref: &otherProcess{own: true}, RefLen: 4000, Raw: [][]byte{make([]byte, 96)}}
	if f, side := Copy(dst, src, 4096, true); f.Kind != FaultStale || side != Dst {
		t.Errorf("own memory is gone: %v, side %v", f, side)
	}
}

// BenchmarkCopyFar copies payload by reference that is mapped in this process, into a region
// of one piece and into one of 16.
func BenchmarkCopyFar(b *testing.B) {
	const n, tail = 64 << 10, 64
	table := NewTable(TableConfig{})
	h, err := NewHostBytes(make([]byte, n), ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		b.Fatal(err)
	}
	r, err := table.Register(RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Backing: h, Length: n})
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	src := &List{Ref: &otherProcess{b: make([]byte, n-tail), mapped: true}, RefLen: n - tail, Raw: [][]byte{make([]byte, tail)}}
	for _, pieces := range []int{1, 16} {
		dst := &List{Table: table, Actor: Actor{PD: 1}, Access: ib.AccessLocalWrite}
		for i := range pieces {
			dst.SGEs = append(dst.SGEs, ib.SGE{Addr: uint64(n / pieces * i), Length: uint32(n / pieces), LKey: r.Key()})
		}
		for _, size := range []uint64{4096, n} {
			b.Run(fmt.Sprintf("%d/%d", pieces, size), func(b *testing.B) {
				src.Off = n - size
				for b.Loop() {
					if f, _ := Copy(dst, src, size, true); !f.OK() {
						b.Fatal(f)
					}
				}
			})
		}
	}
}
