package driver

import "sync"

// Bus shows memory of this process to a controller in software, at addresses of the bus. A *pci.Space is one.
type Bus interface {
	Add(base uint64, mem []byte) error
	Remove(base uint64) error
}

// HostMemory is memory of this process for a controller in software: a DMA.
type HostMemory struct {
	bus Bus

	mu   sync.Mutex // guards what follows
	next uint64
	used int
}

// NewHostMemory makes memory that a bus shows.
func NewHostMemory(bus Bus) *HostMemory { return &HostMemory{bus: bus, next: 1 << 20} }

// Alloc returns whole pages, all zero. Behind each piece is a page that nobody has.
//
// Errors: those of the bus.
func (h *HostMemory) Alloc(n int) (Memory, error) {
	b := make([]byte, pages(n))
	h.mu.Lock()
	defer h.mu.Unlock()
	addr := h.next
	if err := h.bus.Add(addr, b); err != nil {
		return Memory{}, err
	}
	h.next += uint64(len(b)) + pageSize
	h.used++
	return Memory{Bytes: b, Addr: addr, Release: sync.OnceFunc(func() {
		_ = h.bus.Remove(addr) // it was added
		h.mu.Lock()
		defer h.mu.Unlock()
		h.used--
	})}, nil
}

// Used returns how many pieces were not given back.
func (h *HostMemory) Used() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.used
}
