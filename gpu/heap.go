package gpu

import (
	"os"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// page is the unit in which memory is given out.
var page = uint64(os.Getpagesize())

func roundUp(n, to uint64) uint64 { return (n + to - 1) &^ (to - 1) }

// heap is memory that objects lie in: VRAM, or the system memory that they are evicted to. The
// device maps it once, at addresses that programs do not see.
type heap struct {
	name string
	own  bool // memory of the GPU itself, and not of the host
	fd   int
	b    []byte

	spaces spaces  // guarded by the card's mu
	dirty  pageSet // free pages that are not zero; guarded by the card's mu
}

func newHeap(name string, size uint64) (*heap, error) {
	fd, b, err := sys.NewDeviceMemory("verbena-gpu-"+name, int(size))
	if err != nil {
		return nil, err
	}
	return &heap{name: name, fd: fd, b: b, spaces: newSpaces(size), dirty: newPageSet(size / page)}, nil
}

func (h *heap) close() {
	_ = sys.FreeMapped(h.b) // it is our own mapping
	_ = sys.CloseFD(h.fd)
	h.b = nil
}

// place is where an object's bytes lie.
type place struct {
	heap    *heap
	extents []extent
	table   *dmabuf.Table
}

// placeLocked takes memory below limit. It returns nil if there is too little. The card's mu is
// locked.
func (h *heap) placeLocked(n, limit uint64, whole bool) *place {
	got := h.spaces.take(n, limit, whole)
	if got == nil {
		return nil
	}
	return h.at(got)
}

// at makes a place of extents.
func (h *heap) at(extents []extent) *place {
	segments := make([]dmabuf.FileSegment, len(extents))
	for i, e := range extents {
		segments[i] = dmabuf.FileSegment{FD: h.fd, Offset: e.off, Bytes: h.b[e.off:e.end():e.end()]}
	}
	t := dmabuf.NewFileTable(segments...)
	if h.own {
		t = t.OfDevice()
	}
	return &place{h, extents, t}
}

// end returns where the last byte of the place ends in its heap.
func (p *place) end() (end uint64) {
	for _, e := range p.extents {
		end = max(end, e.end())
	}
	return end
}

// start returns where the first byte of the place lies in its heap.
func (p *place) start() uint64 {
	start := p.extents[0].off
	for _, e := range p.extents {
		start = min(start, e.off)
	}
	return start
}

// clear makes the place's bytes zero. It is the caller's: nobody else has it.
func (c *card) clear(p *place) {
	for _, e := range p.extents {
		first, end := e.off/page, e.end()/page
		for {
			c.mu.Lock()
			at, n := p.heap.dirty.run(first, end)
			p.heap.dirty.mark(at, n, false)
			c.mu.Unlock()
			if n == 0 {
				break
			}
			clear(p.heap.b[at*page:][:n*page])
			first = at + n
		}
	}
}

// copyTo copies the bytes to another place of the same size.
func (p *place) copyTo(to *place) {
	for off, n := uint64(0), p.table.Len(); off < n; {
		from := p.table.At(off, n-off)
		off += uint64(copy(to.table.At(off, uint64(len(from))), from))
	}
}

// punchAt is how long an extent is that goes back to the system when it is freed.
const punchAt = 64 << 10

// give gives a place back. If gone is set, what lay there is freed for good: the system gets its
// pages back where that is worth a call.
func (c *card) give(p *place, gone bool) {
	var clean []extent
	for _, e := range p.extents {
		if gone && e.n >= punchAt && sys.PunchHole(p.heap.fd, int64(e.off), int64(e.n)) == nil {
			clean = append(clean, e)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range p.extents {
		p.heap.dirty.mark(e.off/page, e.n/page, true)
		p.heap.spaces.put(e)
	}
	for _, e := range clean {
		p.heap.dirty.mark(e.off/page, e.n/page, false)
	}
}
