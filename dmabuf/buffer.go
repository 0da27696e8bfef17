package dmabuf

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Ops are an exporter's operations. Map, Unmap and Release are mandatory; Pin and Unpin come
// together or not at all. Which of them run with the reservation locked is part of the
// package's documentation.
type Ops struct {
	// CacheMapping: the package keeps an attachment's mapping from Unmap until Detach, and
	// returns it from the next Map of the same direction. Not with Pin and Unpin, and not for
	// memory that moves or is taken away: InvalidateMappings panics.
	CacheMapping bool

	// Attach looks whether an importer can reach the memory, and refuses it with an errno:
	// EBUSY if the memory can neither be reached nor moved, EOPNOTSUPP if the importer must be
	// peer-to-peer or revocable. nil accepts all.
	Attach func(*Attachment) error
	Detach func(*Attachment)

	// Pin holds the memory in place until Unpin. A static importer's mapping pins it as long as
	// it lasts, if there is a Pin.
	Pin   func(*Attachment) error
	Unpin func(*Attachment)

	// Map returns where the bytes are. They stay there until Unmap, or until the importer has
	// been told otherwise by InvalidateMappings.
	Map   func(*Attachment, Direction) (*Table, error)
	Unmap func(*Attachment, *Table, Direction)

	// Release is called when the last reference is gone.
	Release func(*Buffer)

	// BeginCPUAccess and EndCPUAccess bracket accesses of the CPU through Mmap and Vmap. They
	// may return EAGAIN or EINTR: the caller repeats the call.
	BeginCPUAccess func(*Buffer, Direction) error
	EndCPUAccess   func(*Buffer, Direction) error

	// Mmap returns memory for the CPU, which is the exporter's; Vmap returns all of it in one
	// piece, until Vunmap.
	Mmap   func(b *Buffer, off, n uint64) ([]byte, error)
	Vmap   func(*Buffer) ([]byte, error)
	Vunmap func(*Buffer, []byte)
}

// Config is what a new buffer is made of.
type Config struct {
	Ops      Ops
	Size     uint64
	Exporter string // the exporter's name, for people
	// Reservation is the exporter's own, which several buffers may share; nil: a new one.
	Reservation *Reservation
	Priv        any // the exporter's own
}

// Buffer is a shared buffer. Its methods may be called by several goroutines.
type Buffer struct {
	cfg  Config
	resv *Reservation
	refs atomic.Int64
	// written is set if a process may still write to the place that the buffer leaves: see
	// StillWritten. The move that comes next clears it.
	written atomic.Bool

	mu          sync.Mutex // guards name and handle
	name        string
	handle      *sys.Handle   // what descriptors are made of; nil: there are none
	attachments []*Attachment // guarded by the reservation lock
	vmaps       int           // calls of Vmap without Vunmap; guarded by the reservation lock
	vmapped     []byte        // what they have returned; guarded by the reservation lock
	vmapLate    bool          // the exporter has not answered a Vmap in time; guarded by the reservation lock
}

// Export makes a buffer, with one reference: the caller's ([Buffer.Put]).
//
// Errors: EINVAL if a mandatory operation is missing, Pin comes without Unpin or Unpin without
// Pin, Vmap without Vunmap or Vunmap without Vmap, CacheMapping is set together with Pin, or the
// size is 0 or larger than an int.
func Export(cfg Config) (*Buffer, error) {
	const op = "dma_buf_export"
	o := &cfg.Ops
	switch {
	case o.Map == nil || o.Unmap == nil || o.Release == nil:
		return nil, ib.Errorf(op, syscall.EINVAL, "an exporter needs Map, Unmap and Release")
	case (o.Pin == nil) != (o.Unpin == nil):
		return nil, ib.Errorf(op, syscall.EINVAL, "Pin and Unpin come together")
	case o.CacheMapping && o.Pin != nil:
		return nil, ib.Errorf(op, syscall.EINVAL, "a mapping of memory that can be pinned is not cached")
	case (o.Vmap == nil) != (o.Vunmap == nil):
		return nil, ib.Errorf(op, syscall.EINVAL, "Vmap and Vunmap come together")
	case cfg.Size == 0 || cfg.Size > math.MaxInt:
		return nil, ib.Errorf(op, syscall.EINVAL, "a buffer of %d bytes", cfg.Size)
	}
	b := &Buffer{cfg: cfg, resv: cfg.Reservation}
	if b.resv == nil {
		b.resv = NewReservation()
	}
	b.refs.Store(1)
	if _, ok := cfg.Priv.(*Memory); !ok { // which enters when it is whole
		b.enterStorm()
	}
	return b, nil
}

// Size returns the number of bytes.
func (b *Buffer) Size() uint64 { return b.cfg.Size }

// Exporter returns the exporter's name.
func (b *Buffer) Exporter() string { return b.cfg.Exporter }

// Priv returns what the exporter has set.
func (b *Buffer) Priv() any { return b.cfg.Priv }

// Reservation returns the lock and the fences of the buffer.
func (b *Buffer) Reservation() *Reservation { return b.resv }

// maxName is how long a name may be, as for DMA_BUF_SET_NAME.
const maxName = 31

// SetName names the buffer, for people. It fails with EINVAL if the name has more than 31 bytes.
func (b *Buffer) SetName(name string) error {
	if len(name) > maxName {
		return ib.Errorf("dma_buf_set_name", syscall.EINVAL, "a name of %d bytes", len(name))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.name = name
	return nil
}

// Name returns the buffer's name.
func (b *Buffer) Name() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.name
}

// Get takes a reference. It reports whether there is still one: without, the buffer is
// released, and stays so.
func (b *Buffer) Get() bool {
	b.resv.mustNotHold("Get")
	for {
		n := b.refs.Load()
		if n <= 0 {
			return false
		}
		if b.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Put gives a reference back. With the last one the exporter releases the memory.
func (b *Buffer) Put() {
	b.resv.mustNotHold("Put")
	switch n := b.refs.Add(-1); {
	case n < 0:
		panic("dmabuf: Put of a buffer that is released")
	case n == 0:
		b.leaveStorm()
		if checking.Load() && b.vmaps > 0 { // no other goroutine uses it any more
			panic("dmabuf: Put of the last reference while the CPU has mapped the buffer")
		}
		b.cfg.Ops.Release(b)
	}
}

// InvalidateMappings tells every importer that has asked for it that the memory is about to
// move, or to be taken away. The exporter calls it with the reservation locked. When it returns,
// importers may still access the memory until the Bookkeep fences are signalled, and may read
// it until they unmap.
func (b *Buffer) InvalidateMappings() {
	b.resv.mustHold("InvalidateMappings")
	if b.cfg.Ops.CacheMapping {
		panic("dmabuf: InvalidateMappings of memory whose mappings are cached")
	}
	for _, a := range slices.Clone(b.attachments) {
		if a.importer != nil && a.importer.InvalidateMappings != nil {
			a.importer.InvalidateMappings(a)
		}
	}
}

// Attachments returns the importers that are attached. The caller has locked the reservation.
func (b *Buffer) Attachments() []*Attachment {
	b.resv.mustHold("Attachments")
	return slices.Clone(b.attachments)
}
