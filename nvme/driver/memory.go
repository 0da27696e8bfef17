package driver

import (
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	alloc "github.com/verbena-rdma/verbena/internal/pages"
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

	mu   sync.Mutex // guards pool
	pool alloc.Pool
}

func newCMB(mem Memory) *cmb { return &cmb{mem: mem, pool: alloc.New(uint64(len(mem.Bytes)))} }

// Alloc takes whole pages from the first place that has enough.
//
// Errors: EINVAL for no bytes; ENOMEM if there is no such place.
func (c *cmb) Alloc(n int) (Memory, error) {
	const op = "nvme_cmb_alloc"
	if n <= 0 {
		return Memory{}, ib.Errorf(op, syscall.EINVAL, "%d bytes", n)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	got, ok := c.pool.Alloc(uint64(n))
	if !ok {
		return Memory{}, ib.Errorf(op, syscall.ENOMEM, "%d bytes: of the buffer's %d, %d are free", n, c.pool.Size(), c.pool.Available())
	}
	m := c.mem.Slice(int(got.Off), int(got.N)) //nolint:gosec // inside the memory
	m.Release = sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.pool.Free(got)
	})
	return m, nil
}
