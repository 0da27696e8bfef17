package driver

import (
	"slices"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// Memory is bytes that the controller reaches, in one piece on the bus.
type Memory struct {
	Bytes []byte
	Addr  uint64 // on the bus; with an IOMMU, the address that it translates

	// Release gives the memory back; nil: there is nothing to be done. Callers use Free.
	Release func()
}

// Free gives the memory back.
func (m *Memory) Free() {
	if m.Release != nil {
		m.Release()
	}
	*m = Memory{}
}

// Slice returns a part of the memory, which does not give it back.
func (m Memory) Slice(off, n int) Memory {
	return Memory{Bytes: m.Bytes[off : off+n : off+n], Addr: m.Addr + uint64(off)}
}

// DMA allocates memory that the controller reaches.
type DMA interface {
	// Alloc returns n bytes or more, at an address that is a multiple of 4096.
	Alloc(n int) (Memory, error)
}

const pageSize = 4096

// pages rounds up to whole pages.
func pages(n int) int { return (n + pageSize - 1) &^ (pageSize - 1) }

// cmb allocates from a controller memory buffer.
type cmb struct {
	mem Memory

	mu   sync.Mutex // guards free
	free []span     // sorted, no two adjacent
}

type span struct{ off, n int }

func newCMB(mem Memory) *cmb {
	return &cmb{mem: mem, free: []span{{0, len(mem.Bytes) &^ (pageSize - 1)}}}
}

// Alloc takes whole pages from the first place that has enough.
//
// Errors: EINVAL for no bytes; ENOMEM if there is no such place.
func (c *cmb) Alloc(n int) (Memory, error) {
	const op = "nvme_cmb_alloc"
	if n <= 0 {
		return Memory{}, ib.Errorf(op, syscall.EINVAL, "%d bytes", n)
	}
	if n > len(c.mem.Bytes) {
		return Memory{}, ib.Errorf(op, syscall.ENOMEM, "%d bytes: the buffer has %d", n, len(c.mem.Bytes))
	}
	n = pages(n)
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.free {
		f := &c.free[i]
		if f.n < n {
			continue
		}
		got := span{f.off, n}
		f.off, f.n = f.off+n, f.n-n
		if f.n == 0 {
			c.free = slices.Delete(c.free, i, i+1)
		}
		m := c.mem.Slice(got.off, n)
		m.Release = sync.OnceFunc(func() { c.release(got) })
		return m, nil
	}
	return Memory{}, ib.Errorf(op, syscall.ENOMEM, "%d bytes", n)
}

func (c *cmb) release(s span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, _ := slices.BinarySearchFunc(c.free, s.off, func(f span, off int) int { return f.off - off })
	c.free = slices.Insert(c.free, i, s)
	if i+1 < len(c.free) && c.free[i].off+c.free[i].n == c.free[i+1].off {
		c.free[i].n += c.free[i+1].n
		c.free = slices.Delete(c.free, i+1, i+2)
	}
	if i > 0 && c.free[i-1].off+c.free[i-1].n == c.free[i].off {
		c.free[i-1].n += c.free[i].n
		c.free = slices.Delete(c.free, i, i+1)
	}
}
