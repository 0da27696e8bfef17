// Package pages allocates ranges of whole pages out of one piece of memory.
package pages

import "slices"

// Size is the unit of allocations.
const Size = 4096

// RoundUp returns the bytes of the pages that n bytes need. n is not within a page of the end of 64 bits.
func RoundUp(n uint64) uint64 { return (n + Size - 1) &^ (Size - 1) }

// Range is a part of a Pool.
type Range struct{ Off, N uint64 }

// Pool allocates ranges: the first that is large enough, as the kernel's gen_pool does. Its owner locks it.
type Pool struct {
	size uint64
	free []Range // in order; neighbours do not touch
}

// New returns a pool of the whole pages in size bytes, all of them free.
func New(size uint64) Pool {
	size &^= Size - 1
	p := Pool{size: size}
	if size > 0 {
		p.free = []Range{{0, size}}
	}
	return p
}

// Size returns how many bytes there are.
func (p *Pool) Size() uint64 { return p.size }

// Available returns how many bytes are free.
func (p *Pool) Available() (n uint64) {
	for _, r := range p.free {
		n += r.N
	}
	return n
}

// Alloc takes the pages that n bytes need; false: there are not so many that lie together, or n is 0.
func (p *Pool) Alloc(n uint64) (Range, bool) {
	if n == 0 || n > p.size {
		return Range{}, false
	}
	n = RoundUp(n)
	i := slices.IndexFunc(p.free, func(r Range) bool { return r.N >= n })
	if i < 0 {
		return Range{}, false
	}
	r := &p.free[i]
	got := Range{r.Off, n}
	if r.N == n {
		p.free = slices.Delete(p.free, i, i+1)
	} else {
		r.Off, r.N = r.Off+n, r.N-n
	}
	return got, true
}

// Free gives back what Alloc has returned.
func (p *Pool) Free(r Range) {
	i, _ := slices.BinarySearchFunc(p.free, r.Off, func(r Range, off uint64) int {
		if r.Off < off {
			return -1
		}
		return 1
	})
	from, to := i, i
	if i > 0 && p.free[i-1].Off+p.free[i-1].N == r.Off {
		from--
		r = Range{p.free[from].Off, p.free[from].N + r.N}
	}
	if i < len(p.free) && r.Off+r.N == p.free[i].Off {
		to++
		r.N += p.free[i].N
	}
	p.free = slices.Replace(p.free, from, to, r)
}
