package p2p

import "slices"

// pageSize is the unit of allocations.
const pageSize = 4096

func roundUp(n uint64) uint64 { return (n + pageSize - 1) &^ (pageSize - 1) }

// extent is a range of a pool.
type extent struct{ off, n uint64 }

// pool allocates ranges: the first that is large enough, as the kernel's gen_pool does. Its owner
// locks it.
type pool struct {
	size uint64
	free []extent // in order; neighbours do not touch
}

func newPool(size uint64) pool {
	size &^= pageSize - 1
	p := pool{size: size}
	if size > 0 {
		p.free = []extent{{0, size}}
	}
	return p
}

// available returns how many bytes are free.
func (p *pool) available() (n uint64) {
	for _, e := range p.free {
		n += e.n
	}
	return n
}

// alloc takes whole pages. n is neither 0 nor within a page of the end of 64 bits.
func (p *pool) alloc(n uint64) (off uint64, ok bool) {
	n = roundUp(n)
	i := slices.IndexFunc(p.free, func(e extent) bool { return e.n >= n })
	if i < 0 {
		return 0, false
	}
	e := &p.free[i]
	off = e.off
	if e.n == n {
		p.free = slices.Delete(p.free, i, i+1)
	} else {
		e.off, e.n = e.off+n, e.n-n
	}
	return off, true
}

// release gives back what alloc has returned for n.
func (p *pool) release(off, n uint64) {
	n = roundUp(n)
	i, _ := slices.BinarySearchFunc(p.free, off, func(e extent, off uint64) int {
		if e.off < off {
			return -1
		}
		return 1
	})
	p.free = slices.Insert(p.free, i, extent{off, n})
	if i+1 < len(p.free) && p.free[i].off+p.free[i].n == p.free[i+1].off {
		p.free[i].n += p.free[i+1].n
		p.free = slices.Delete(p.free, i+1, i+2)
	}
	if i > 0 && p.free[i-1].off+p.free[i-1].n == p.free[i].off {
		p.free[i-1].n += p.free[i].n
		p.free = slices.Delete(p.free, i, i+1)
	}
}
