package gpu

import (
	"math/bits"
	"slices"
	"sort"
)

// extent is a part of a heap, or of an address space.
type extent struct{ off, n uint64 }

func (e extent) end() uint64 { return e.off + e.n }

// spaces are the free parts of a range of bytes: in order, apart from each other.
type spaces struct {
	free  []extent
	total uint64 // bytes that are free
	next  uint64 // where takeNext looks first
}

func newSpaces(size uint64) spaces { return spaces{free: []extent{{0, size}}, total: size} }

// maxExtents bounds in how many pieces an object may lie, and so what its table costs.
const maxExtents = 1024

// take takes n bytes below limit: in one piece where there is one, otherwise in several unless
// whole is set. It returns nil if there are too few.
func (s *spaces) take(n, limit uint64, whole bool) []extent {
	for i, e := range s.free {
		if e.off >= limit {
			break
		}
		if min(e.end(), limit)-e.off >= n {
			s.cut(i, 0, n)
			return []extent{{e.off, n}}
		}
	}
	if whole {
		return nil
	}
	left, count := n, 0
	for _, e := range s.free {
		if left == 0 || e.off >= limit {
			break
		}
		left -= min(left, min(e.end(), limit)-e.off)
		count++
	}
	if left > 0 || count > maxExtents {
		return nil
	}
	var got []extent
	for left = n; left > 0; {
		e := s.free[0] // the earlier ones are used up
		part := min(left, min(e.end(), limit)-e.off)
		s.cut(0, 0, part)
		got = append(got, extent{e.off, part})
		left -= part
	}
	return got
}

// takeNext takes n bytes in one piece at a multiple of align, after what it took last: what was
// given back comes again as late as possible.
func (s *spaces) takeNext(n, align uint64) (off uint64, ok bool) {
	for _, from := range []uint64{s.next, 0} {
		for i, e := range s.free {
			at := (max(e.off, from) + align - 1) &^ (align - 1)
			if at < e.end() && e.end()-at >= n {
				s.cut(i, at-e.off, n)
				s.next = at + n
				return at, true
			}
		}
	}
	return 0, false
}

// cut takes n bytes, from skip on, out of the free part i.
func (s *spaces) cut(i int, skip, n uint64) {
	e := s.free[i]
	s.total -= n
	var rest []extent
	if skip > 0 {
		rest = append(rest, extent{e.off, skip})
	}
	if skip+n < e.n {
		rest = append(rest, extent{e.off + skip + n, e.n - skip - n})
	}
	s.free = slices.Replace(s.free, i, i+1, rest...)
}

// put gives a part back.
func (s *spaces) put(e extent) {
	s.total += e.n
	i := sort.Search(len(s.free), func(i int) bool { return s.free[i].off > e.off })
	from, to := i, i
	if i > 0 && s.free[i-1].end() == e.off {
		from--
		e = extent{s.free[from].off, s.free[from].n + e.n}
	}
	if i < len(s.free) && s.free[i].off == e.end() {
		to++
		e.n += s.free[i].n
	}
	s.free = slices.Replace(s.free, from, to, e)
}

// largest returns the longest free part.
func (s *spaces) largest() (n uint64) {
	for _, e := range s.free {
		n = max(n, e.n)
	}
	return n
}

// pageSet is a set of pages.
type pageSet []uint64

func newPageSet(pages uint64) pageSet { return make(pageSet, (pages+63)/64) }

// mark adds pages, or removes them.
func (p pageSet) mark(first, n uint64, in bool) {
	for n > 0 {
		bit := first % 64
		count := min(64-bit, n)
		mask := (^uint64(0) >> (64 - count)) << bit
		if in {
			p[first/64] |= mask
		} else {
			p[first/64] &^= mask
		}
		first, n = first+count, n-count
	}
}

// run returns the next run of pages in the set, from first on and before end.
func (p pageSet) run(first, end uint64) (at, n uint64) {
	at = p.seek(first, end, true)
	return at, p.seek(at, end, false) - at
}

// seek returns the first page from first on that is in the set, or is not; end if there is none.
func (p pageSet) seek(first, end uint64, in bool) uint64 {
	for first < end {
		w := p[first/64]
		if !in {
			w = ^w
		}
		if w >>= first % 64; w != 0 {
			return min(first+uint64(bits.TrailingZeros64(w)), end)
		}
		first = (first/64 + 1) * 64
	}
	return end
}
