package mem

// Memory that is pinned strictly (ib.LockStrict): what an adapter's region is. Its pages
// are held (Pages), so they stay in memory, and accesses go to the pages, not to the
// address that they were registered at: the program may unmap them or map something else
// there, and the device goes on in the pages of registration time.
//
// Three things are done otherwise:
//   - Memory of the Go heap cannot be remapped: it is held, and accessed where it lies.
//   - Atomics need an address. They are done where the pages were mapped at registration,
//     while they still are; after that they fail as stale memory does.
//   - What cannot be held is locked by mlock(2), and watched as ever: read-only mappings,
//     shared mappings of files, and everything where the kernel forbids io_uring. What
//     exceeds RLIMIT_MEMLOCK is refused.

import (
	"errors"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Held is a Backing of host memory whose pages are held.
type Held struct {
	*Host  // what it was registered as, and is at its address
	*Pages // where its bytes are
}

// addressed is a staged Backing of bytes that also have an address here, for atomics.
type addressed interface {
	// InPlace returns n bytes at off where they are mapped, if they still are.
	InPlace(off, n uint64) (b []byte, at *Host, kind FaultKind)
}

// NewPinnedBytes makes a backing of a slice, as NewHostBytes does; with LockStrict of its
// pages, where they can be held.
func NewPinnedBytes(b []byte, access ib.Access, lock ib.LockMode) (Backing, error) {
	return newPinned(lock, func(lock ib.LockMode) (*Host, error) { return NewHostBytes(b, access, lock) })
}

// NewPinned makes a backing of memory at an address outside the Go heap, as NewHost does;
// with LockStrict of its pages, where they can be held.
func NewPinned(addr uintptr, length uint64, access ib.Access, lock ib.LockMode, owner any) (Backing, error) {
	return newPinned(lock, func(lock ib.LockMode) (*Host, error) { return NewHost(addr, length, access, lock, owner) })
}

func newPinned(lock ib.LockMode, register func(ib.LockMode) (*Host, error)) (Backing, error) {
	if lock != ib.LockStrict {
		return register(lock)
	}
	h, err := register(ib.LockOff)
	if err != nil {
		return nil, err
	}
	pages, err := NewPages(h.at(), h.length, writing)
	switch {
	case err == nil:
		h.note = ""
		h.locked = false // not by mlock
		return &Held{h, pages}, nil
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		_ = h.Close() // the first error says more
		return nil, ib.Errorf("reg_mr", syscall.ENOMEM, "%d bytes at %#x cannot be held: %v", h.length, h.addr, err)
	case errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EAGAIN):
		_ = h.Close() // the first error says more
		errno, limit := syscall.ENOMEM, sys.MemlockLimit()
		if limit == 0 {
			errno = syscall.EPERM // as mlock(2) returns it
		}
		return nil, ib.Errorf("reg_mr", errno, "%d bytes at %#x cannot be held: %v (RLIMIT_MEMLOCK is %s)", h.length, h.addr, err, limitText(limit))
	}
	_ = h.Close() // it had nothing
	return register(ib.LockStrict)
}

// Kind returns KindPinned.
func (h *Held) Kind() Kind { return KindPinned }

// Len returns the number of bytes.
func (h *Held) Len() uint64 { return h.Host.length }

// NeverFaults reports whether what Run offers cannot be gone: staging bytes cannot, nor can the
// Go heap.
func (h *Held) NeverFaults() bool { return true }

// Staged reports whether Run offers staging bytes.
func (h *Held) Staged() bool { return !h.inHeap }

// Pinned returns nil: what is mapped at the address is not what is accessed.
func (h *Held) Pinned() *Host { return nil }

// Run returns bytes: the Go heap's own, or staging bytes.
func (h *Held) Run(off, n uint64, acc ib.Access) ([]byte, FaultKind) {
	if h.inHeap {
		return h.Host.Run(off, n, acc)
	}
	return h.Pages.Run(off, n, acc)
}

// InPlace returns bytes where they were mapped at registration, if they still are.
func (h *Held) InPlace(off, n uint64) ([]byte, *Host, FaultKind) {
	b, kind := h.Host.Run(off, n, writing)
	return b, h.Host.Pinned(), kind
}

// Close unpins the pages.
func (h *Held) Close() error { return errors.Join(h.Pages.Close(), h.Host.Close()) }
