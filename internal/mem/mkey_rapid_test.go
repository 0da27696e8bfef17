package mem_test

import (
	"bytes"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// flat is a region or key of the property test, with the place of each of its bytes
// in the flat memory of the reference.
type flat struct {
	key   uint32
	addr  uint64
	place []int
	mkey  *mem.MKey
	depth int
}

// A random nest of list and interleaved keys leads reads and writes of any range to the
// same bytes as a flat reference, and to no others.
func TestMKeyProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := mem.NewTable(mem.TableConfig{Seed: 1})
		var memory []byte // the reference: all regions, one behind the other
		var regions [][]byte
		var all []*flat
		var hosts []*mem.Region
		for range rapid.IntRange(1, 3).Draw(t, "regions") {
			b := make([]byte, rapid.IntRange(1, 600).Draw(t, "size"))
			h, err := mem.NewHostBytes(b, ib.AccessLocalWrite, ib.LockOff)
			if err != nil {
				t.Fatal(err)
			}
			f := &flat{addr: rapid.Uint64Range(0, 1<<40).Draw(t, "iova")}
			r, err := table.Register(mem.RegionConfig{PD: mkeyPD, Access: ib.AccessLocalWrite, IOVA: f.addr, Length: uint64(len(b)), Backing: h})
			if err != nil {
				t.Fatal(err)
			}
			f.key = r.Key()
			for i := range b {
				b[i] = byte(len(memory) + i*7)
				f.place = append(f.place, len(memory)+i)
			}
			memory, regions, all, hosts = append(memory, b...), append(regions, b), append(all, f), append(hosts, r)
		}
		for range rapid.IntRange(1, 8).Draw(t, "keys") {
			all = append(all, drawKey(t, table, all))
		}
		for range rapid.IntRange(1, 12).Draw(t, "accesses") {
			f := rapid.SampledFrom(all).Draw(t, "through")
			off := rapid.IntRange(0, len(f.place)-1).Draw(t, "off")
			n := rapid.IntRange(1, len(f.place)-off).Draw(t, "n")
			sges := cutInTwo(t, f, off, n)
			l := &mem.List{Table: table, Actor: mkeyActor, SGEs: sges}
			got := make([]byte, n)
			if fault, _ := mem.Copy(&mem.List{Raw: [][]byte{got}}, l, uint64(n), false); !fault.OK() {
				t.Fatal(fault)
			}
			for i := range got {
				if want := memory[f.place[off+i]]; got[i] != want {
					t.Fatalf("byte %d of %d at %d is %d, should be %d", i, n, off, got[i], want)
				}
			}
			var pins mem.Pins
			runs, fault, whole := mem.Gather(l, uint64(n), make([][]byte, 0, n), &pins)
			if !whole || !bytes.Equal(bytes.Join(runs, nil), got) {
				t.Fatalf("gathered bytes differ: %v", fault)
			}
			pins.Release()
			if repeats(f.place[off : off+n]) {
				continue // what a byte that is written twice becomes is not defined
			}
			data := rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, "data")
			l.Access = ib.AccessLocalWrite
			if fault, _ := mem.Copy(l, &mem.List{Raw: [][]byte{data}}, uint64(n), true); !fault.OK() {
				t.Fatal(fault)
			}
			for i := range data {
				memory[f.place[off+i]] = data[i]
			}
			if !bytes.Equal(bytes.Join(regions, nil), memory) {
				t.Fatal("the regions differ from the reference")
			}
		}
		// The last made go first: nothing stands on them.
		for i := len(all) - 1; i >= len(hosts); i-- {
			if err := all[i].mkey.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for _, r := range hosts {
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if table.Len() != 0 {
			t.Fatalf("%d keys are left", table.Len())
		}
	})
}

// drawKey makes a key of random pieces of what there is.
func drawKey(t *rapid.T, table *mem.Table, all []*flat) *flat {
	f := &flat{addr: rapid.SampledFrom([]uint64{0, 0, 0x1000, 77}).Draw(t, "addr"), depth: 1}
	repeat := 1
	if rapid.Bool().Draw(t, "interleaved") {
		repeat = rapid.IntRange(1, 20).Draw(t, "repeat")
	}
	var pieces []ib.Stride
	var sources [][]int // by piece: its bytes, in all rounds
	for range rapid.IntRange(1, 5).Draw(t, "pieces") {
		from := rapid.SampledFrom(all).Draw(t, "from")
		if from.depth >= mem.MaxMKeyDepth || len(from.place) < repeat {
			continue
		}
		f.depth = max(f.depth, from.depth+1)
		n := rapid.IntRange(0, min(len(from.place)/repeat, 50)).Draw(t, "bytes")
		room := len(from.place) - n
		skip := 0
		if repeat > 1 && n > 0 {
			skip = rapid.IntRange(0, (room-(repeat-1)*n)/(repeat-1)).Draw(t, "skip")
		}
		off := rapid.IntRange(0, room-(repeat-1)*(n+skip)*min(n, 1)).Draw(t, "at")
		pieces = append(pieces, ib.Stride{Addr: from.addr + uint64(off), Bytes: uint64(n), Skip: uint64(skip), LKey: from.key})
		var source []int
		for round := range repeat {
			source = append(source, from.place[off+round*(n+skip)*min(n, 1):][:n]...)
		}
		sources = append(sources, source)
	}
	if len(slices.Concat(sources...)) == 0 { // take a byte, so that it is something
		pieces, repeat = []ib.Stride{{Addr: all[0].addr, Bytes: 1, LKey: all[0].key}}, 1
		sources = [][]int{all[0].place[:1]}
		f.depth = max(f.depth, all[0].depth+1)
	}
	for round := range repeat {
		for _, s := range sources {
			k := len(s) / repeat
			f.place = append(f.place, s[round*k:][:k]...)
		}
	}
	m, err := table.CreateMKey(mkeyPD, len(pieces))
	if err != nil {
		t.Fatal(err)
	}
	l := mem.Layout{Key: m.Key(), Access: ib.AccessLocalWrite, Addr: f.addr, Repeat: uint64(repeat), Pieces: pieces}
	if fault := table.Configure(&l, mkeyActor); !fault.OK() {
		t.Fatalf("%+v: %v", l, fault)
	}
	f.key, f.mkey = m.Key(), m
	if got := table.Lookup(m.Key()).Length(); got != uint64(len(f.place)) {
		t.Fatalf("%d bytes, should be %d", got, len(f.place))
	}
	return f
}

// cutInTwo names a range in one piece or two.
func cutInTwo(t *rapid.T, f *flat, off, n int) []ib.SGE {
	cut := rapid.IntRange(0, n).Draw(t, "cut")
	at := f.addr + uint64(off)
	return []ib.SGE{{Addr: at, Length: uint32(cut), LKey: f.key}, {Addr: at + uint64(cut), Length: uint32(n - cut), LKey: f.key}}
}

// repeats reports whether a place comes twice.
func repeats(place []int) bool {
	seen := make(map[int]bool, len(place))
	for _, p := range place {
		if seen[p] {
			return true
		}
		seen[p] = true
	}
	return false
}
