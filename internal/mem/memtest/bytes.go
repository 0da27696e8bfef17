package memtest

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Tests of where the bytes go: every one of them is compared with a model.

const page = 4096

// testLengths moves every small length over a page boundary, at every offset in
// a word, from raw bytes, to raw bytes and between regions.
func testLengths(t *testing.T, e *env) {
	const maxLen = 130
	a, b := e.all(2*page), e.all(2*page)
	ma, mb := e.fill(a), e.fill(b)
	packet := make([]byte, maxLen)
	for n := range uint64(maxLen + 1) {
		for shift := range uint64(8) {
			last := e.rng.IntN(2) == 0
			to := page - min(n, e.rng.Uint64N(n+8)) - shift // ends before, at or behind the boundary
			from := page - e.rng.Uint64N(n+8)

			randomise(e.rng, packet)
			mustCopy(t, e.list(ib.AccessRemoteWrite, a.at(to, n)), raw(packet), n, last)
			copy(ma[to:to+n], packet)

			mustCopy(t, e.list(ib.AccessLocalWrite, b.at(to, n)), e.list(0, a.at(from, n)), n, last)
			copy(mb[to:to+n], ma[from:from+n])

			got := bytes.Repeat([]byte{0xee}, maxLen+2)
			mustCopy(t, raw(got[1:1+n]), e.list(ib.AccessRemoteRead, b.at(from, n)), n, last)
			want := bytes.Repeat([]byte{0xee}, maxLen+2)
			copy(want[1:], mb[from:from+n])
			if !bytes.Equal(got, want) {
				t.Fatalf("%d bytes read at %d differ", n, from)
			}
			a.want(t, ma)
			b.want(t, mb)
		}
	}
}

// testPieces copies random lists to random lists: pieces of any length, zero
// among them, in several regions and anywhere in there.
func testPieces(t *testing.T, e *env) {
	regions := []*region{e.all(3 * page), e.all(page + 13), e.all(257)}
	var models [][]byte
	for _, r := range regions {
		models = append(models, e.fill(r))
	}
	type place struct{ region, off int }
	// pieces makes a list and says for each of its bytes where it lies. The
	// places of a target are all different, as overlapping ones are undefined.
	pieces := func(access ib.Access, taken map[place]bool) (*mem.List, []place) {
		var sges []ib.SGE
		var places []place
		for range e.rng.IntN(12) {
			k := e.rng.IntN(len(regions))
			size := len(models[k])
			n := e.rng.IntN(min(size, 1<<e.rng.IntN(13)))
			off := e.rng.IntN(size - n + 1)
			free := true
			for i := range n {
				free = free && !taken[place{k, off + i}]
			}
			if !free {
				continue
			}
			for i := range n {
				taken[place{k, off + i}] = true
				places = append(places, place{k, off + i})
			}
			sges = append(sges, regions[k].at(uint64(off), uint64(n)))
		}
		return e.list(access, sges...), places
	}
	for round := range 300 {
		taken := make(map[place]bool)
		dst, to := pieces(ib.AccessLocalWrite, taken)
		src, from := pieces(0, taken)
		dst.Off, src.Off = e.rng.Uint64N(uint64(len(to)/2+1)), e.rng.Uint64N(uint64(len(from)/2+1))
		to, from = to[dst.Off:], from[src.Off:]
		n := e.rng.IntN(min(len(to), len(from)) + 1)
		before := fmt.Sprint(*dst, *src)
		if f := mem.Check(dst, uint64(n)); !f.OK() {
			t.Fatal(f)
		}
		mustCopy(t, dst, src, uint64(n), round%2 == 0)
		if after := fmt.Sprint(*dst, *src); after != before {
			t.Fatalf("Copy changed its lists:\n%s\n%s", before, after)
		}
		for i := range n {
			models[to[i].region][to[i].off] = models[from[i].region][from[i].off]
		}
		for k, r := range regions {
			r.want(t, models[k])
		}
	}
}

// testQuanta copies more than a quantum at once, at odd places. No section may
// last longer than a quantum.
func testQuanta(t *testing.T, e *env) {
	const n = 3*mem.Quantum + 4320 // with the margin a multiple of 32: not too many pieces, however it is cut
	a, b := e.all(n+64), e.all(n+64)
	ma, mb := e.fill(a), e.fill(b)
	mustCopy(t, e.list(ib.AccessLocalWrite, b.at(3, n)), e.list(0, a.at(50, n)), n, true)
	copy(mb[3:3+n], ma[50:])
	b.want(t, mb)
	a.want(t, ma)
	for _, r := range []*region{a, b} {
		if got := r.watch.longest.Load(); got > mem.Quantum {
			t.Errorf("a section was open on %d bytes", got)
		}
	}
}

// testGather reads what Gather gives, where the CPU reads the memory itself, and
// checks that a fault leaves nothing behind.
func testGather(t *testing.T, e *env) {
	a, b := e.all(2*page), e.all(mem.Quantum+page)
	ma, mb := e.fill(a), e.fill(b)
	var pins mem.Pins
	l := e.list(0, a.at(100, 300), a.at(0, 0), b.at(5, mem.Quantum+1000), a.at(page-1, 2))
	l.Off = 7
	const n = 300 + mem.Quantum + 1000 + 2 - 7
	room := make([][]byte, 1, 1<<16)
	room[0] = []byte("kept")
	out, f, whole := mem.Gather(l, n, room, &pins)
	if f.Staged() || f.OK() && !whole {
		if len(out) != 1 || pins.Len() != 0 {
			t.Fatalf("%d pieces, %d sections of memory that the CPU does not address", len(out)-1, pins.Len())
		}
		return
	}
	if !f.OK() {
		t.Fatal(f)
	}
	var want []byte
	want = append(want, "kept"...)
	want = append(want, ma[107:400]...)
	want = append(want, mb[5:5+mem.Quantum+1000]...)
	want = append(want, ma[page-1:page+1]...)
	if !bytes.Equal(bytes.Join(out, nil), want) {
		t.Fatal("gathered bytes differ")
	}
	if pins.Len() == 0 {
		t.Fatal("nothing is pinned")
	}
	held := pins.Len()
	bad := e.list(0, a.at(0, 8), b.at(0, 8), a.at(2*page-1, 2))
	got, f, whole := mem.Gather(bad, 18, out, &pins)
	if f.Kind != mem.FaultBounds || whole || len(got) != len(out) || pins.Len() != held {
		t.Fatalf("%v, %d pieces, %d pins, should be out of bounds, %d, %d", f, len(got), pins.Len(), len(out), held)
	}
	pins.Release()
	if pins.Len() != 0 {
		t.Fatalf("%d pins after Release", pins.Len())
	}

	// More pieces than Pins have room for without an allocation, twice.
	many := make([]ib.SGE, 200)
	for i := range many {
		many[i] = a.at(uint64(i)*16, 16)
	}
	for range 2 {
		out, f, whole = mem.Gather(e.list(0, many...), 200*16, room[:0], &pins)
		if !f.OK() || !whole || !bytes.Equal(bytes.Join(out, nil), ma[:200*16]) {
			t.Fatalf("200 pieces: %v", f)
		}
		pins.Release()
	}
}

// testCounters checks that bytes are counted by kind, once.
func testCounters(t *testing.T, e *env) {
	r := e.all(page)
	kind := r.Memory.Backing.Kind()
	buf := make([]byte, page)
	mustCopy(t, e.list(ib.AccessLocalWrite, r.at(0, 100), r.at(200, 50)), raw(buf), 150, true)
	mustCopy(t, raw(buf), e.list(0, r.at(0, 70)), 70, false)
	mustCopy(t, e.list(ib.AccessLocalWrite, r.at(0, 30)), e.list(0, r.at(100, 30)), 30, false)
	mustCopy(t, raw(buf), raw(make([]byte, 9)), 9, false)
	for _, c := range []struct {
		from, to mem.Kind
		want     uint64
	}{{mem.KindRaw, kind, 150}, {kind, mem.KindRaw, 70}, {kind, kind, 30}, {mem.KindRaw, mem.KindRaw, 0}} {
		if got := e.table.Moved(c.from, c.to); got != c.want {
			t.Errorf("%v to %v: %d bytes, should be %d", c.from, c.to, got, c.want)
		}
	}
}
