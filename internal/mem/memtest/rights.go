package memtest

import (
	"math"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Tests of what is refused: rights, domains, bounds.

// access tries an access in every way there is and returns the fault that all
// ways agree on.
func (e *env) access(sge ib.SGE, n uint64, access ib.Access, who mem.Actor) mem.FaultKind {
	t := e.t
	t.Helper()
	access = e.acc(access)
	l := e.list(access, sge)
	l.Actor = who
	_, release, f := Hold(e.table, sge.LKey, sge.Addr, n, access, who)
	release()
	if !f.OK() && (f.Key != sge.LKey || f.Addr != sge.Addr || f.Len != n) {
		t.Fatalf("the fault %v does not name key %#x, address %#x, length %d", f, sge.LKey, sge.Addr, n)
	}
	if n == 0 || n > math.MaxUint32 { // lists skip the one and cannot say the other
		return f.Kind
	}
	gather := unlessAway(func() mem.Fault {
		var pins mem.Pins
		_, f, _ := mem.Gather(l, n, make([][]byte, 0, 64), &pins)
		pins.Release()
		return f
	})
	if gather.Staged() {
		gather = mem.Fault{}
	}
	if check := unlessAway(func() mem.Fault { return mem.Check(l, n) }); check.Kind != f.Kind || gather.Kind != f.Kind {
		t.Fatalf("Hold: %v, Check: %v, Gather: %v", f, check, gather)
	}
	// Whether the list is source or target, the fault is the same.
	if n <= 1<<20 {
		buf := raw(make([]byte, n))
		out, _ := moveBytes(buf, l, n, false)
		if out.Kind != f.Kind {
			t.Fatalf("Hold: %v, Copy from it: %v", f, out)
		}
		if access&(ib.AccessLocalWrite|ib.AccessRemoteWrite) != 0 {
			if in, _ := moveBytes(l, buf, n, true); in.Kind != f.Kind {
				t.Fatalf("Hold: %v, Copy to it: %v", f, in)
			}
		}
	}
	return f.Kind
}

// testRights tries every set of rights on every set of rights.
func testRights(t *testing.T, e *env) {
	for granted := ib.Access(0); granted < 16; granted++ {
		if granted&(ib.AccessRemoteWrite|ib.AccessRemoteAtomic) != 0 && granted&ib.AccessLocalWrite == 0 {
			continue // no such region
		}
		r := e.register(page, mem.RegionConfig{Access: granted})
		for right := range ib.Access(16) {
			want := mem.FaultNone
			if right&granted != right {
				want = mem.FaultAccess
			}
			before := r.contents()
			got := e.access(r.at(8, 64), 64, right, self)
			if got != want {
				t.Fatalf("%v on a region with %v: %v, should be %v", right, granted, got, want)
			}
			if want != mem.FaultNone {
				r.want(t, before)
			}
		}
		if e.mk.NoAtomics {
			continue
		}
		_, f := changeWord(e.table, self, r.Key(), r.IOVA(), mem.FetchAdd, 0, 1)
		if f.OK() != (granted&ib.AccessRemoteAtomic != 0) {
			t.Fatalf("atomic on a region with %v: %v", granted, f)
		}
	}
}

// testDomain tries keys of another domain, and tags and indexes that are not
// given out.
func testDomain(t *testing.T, e *env) {
	r := e.all(page)
	before := e.fill(r)
	if got := e.access(r.at(0, 64), 64, ib.AccessLocalWrite, mem.Actor{PD: domain + 1}); got != mem.FaultDomain {
		t.Errorf("another domain: %v", got)
	}
	for bit := range 32 {
		sge := r.at(0, 64)
		sge.LKey ^= 1 << bit
		if got := e.access(sge, 64, ib.AccessLocalWrite, self); got != mem.FaultKey {
			t.Errorf("key %#x instead of %#x: %v", sge.LKey, r.Key(), got)
		}
	}
	for _, key := range []uint32{0, math.MaxUint32, r.Key() & 0xff} {
		sge := r.at(0, 64)
		if sge.LKey = key; key == r.Key() {
			continue
		}
		if got := e.access(sge, 64, 0, self); got != mem.FaultKey {
			t.Errorf("key %#x: %v", key, got)
		}
	}
	r.want(t, before)
}

// testBounds goes to the ends of regions and one byte beyond, at ordinary
// addresses and at those where sums wrap.
func testBounds(t *testing.T, e *env) {
	const size = page + 100
	for _, start := range []uint64{iova, page, math.MaxUint64 - size, 1} {
		r := e.register(size, mem.RegionConfig{Access: allAccess, IOVA: start})
		for _, c := range []struct{ off, n uint64 }{
			{0, 1}, {0, size}, {size - 1, 1}, {page - 1, 2}, {size, 0}, {0, 0}, // inside
			{0, size + 1}, {1, size}, {size, 1}, {size + 1, 0}, {size - 1, 2}, // beyond the end
			{math.MaxUint64, 1}, {math.MaxUint64, 2}, {math.MaxUint64, size + 1}, // before the start
			{math.MaxUint64 - page + 1, page + 1},
			{8, math.MaxUint32}, {8, math.MaxUint64}, {8, math.MaxUint64 - 7}, {8, math.MaxUint64 - 8}, // lengths that wrap
			{size, math.MaxUint64}, {size - 1, math.MaxUint64 - size + 2},
			{0, math.MaxUint64 - start}, {0, math.MaxUint64 - start + 1}, {1, math.MaxUint64 - start},
			{-start, 8}, {-start, math.MaxUint64}, // address 0
		} {
			want := mem.FaultBounds
			if c.off <= size && c.n <= size && c.off+c.n <= size {
				want = mem.FaultNone
			}
			sge := ib.SGE{Addr: start + c.off, Length: uint32(min(c.n, math.MaxUint32)), LKey: r.Key()}
			if got := e.access(sge, c.n, ib.AccessRemoteWrite, self); got != want {
				t.Errorf("%d bytes at %#x, region of %d at %#x: %v, should be %v", c.n, sge.Addr, uint64(size), start, got, want)
			}
		}
	}
}

// testZeroBased uses offsets instead of addresses, and a piece that passes the
// end of the address space: what comes behind must not be taken for the
// region's start.
func testZeroBased(t *testing.T, e *env) {
	r := e.register(page, mem.RegionConfig{Access: allAccess | ib.AccessZeroBased, IOVA: 0x1000})
	model := e.fill(r)
	if r.IOVA() != 0 {
		t.Fatalf("a zero-based region begins at %#x", r.IOVA())
	}
	copy(model[10:], "offset")
	mustCopy(t, e.list(ib.AccessRemoteWrite, ib.SGE{Addr: 10, Length: 6, LKey: r.Key()}), raw([]byte("offset")), 6, true)
	r.want(t, model)

	wraps := ib.SGE{Addr: math.MaxUint64 - 7, Length: 64, LKey: r.Key()}
	l := e.list(ib.AccessRemoteWrite, wraps)
	for _, l.Off = range []uint64{0, 7, 8, 9, 40} {
		f, side := moveBytes(l, raw(make([]byte, 64)), 16, false)
		wantFault(t, "wrapping piece", f, side, mem.FaultBounds, mem.Dst)
		if f := mem.Check(l, 16); f.Kind != mem.FaultBounds {
			t.Fatalf("Check of a wrapping piece: %v", f)
		}
	}
	r.want(t, model)
}

// testShortList asks for more bytes than a list has.
func testShortList(t *testing.T, e *env) {
	r := e.all(page)
	whole := e.list(ib.AccessLocalWrite, r.at(0, page))
	var pins mem.Pins
	// copied reports whether Gather leaves bytes to be copied.
	copied := func(f mem.Fault, all bool) bool { return !all && (f.OK() || f.Staged()) }
	_, f, all := mem.Gather(whole, 16, make([][]byte, 0, 64), &pins)
	pins.Release()
	mayGiveUp := copied(f, all) // before it comes to the end of a list
	for _, short := range []*mem.List{
		e.list(ib.AccessLocalWrite, r.at(0, 10), r.at(20, 5)), e.list(ib.AccessLocalWrite), raw(make([]byte, 15)), raw(),
	} {
		for _, off := range []uint64{0, 3, 15, 16, math.MaxUint64} {
			short.Off = off
			f, side := moveBytes(short, whole, 16, true)
			wantFault(t, "short target", f, side, mem.FaultBounds, mem.Dst)
			f, side = moveBytes(whole, short, 16, true)
			wantFault(t, "short source", f, side, mem.FaultBounds, mem.Src)
			if f := mem.Check(short, 16); f.Kind != mem.FaultBounds {
				t.Fatalf("Check of a short list: %v", f)
			}
			out, f, all := mem.Gather(short, 16, make([][]byte, 0, 64), &pins)
			if f.Kind != mem.FaultBounds && !(mayGiveUp && copied(f, all)) || len(out) != 0 || pins.Len() != 0 {
				t.Fatalf("Gather of a short list: %v, %d pieces, %d pins", f, len(out), pins.Len())
			}
			mustCopy(t, short, whole, 0, true)
		}
	}
}
