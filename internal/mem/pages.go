package mem

// Pinned memory as an adapter has it: the pages of registration time are held, and are
// read and written whatever the program does with their addresses afterwards
// (sys.PinnedPages). The kernel copies; the pages have no address in this process. The way
// of an access:
//
//  1. Run returns staging bytes: a copy of the pages' bytes, or a place for what is to
//     be written.
//  2. The copy loop reads them, or writes them and calls Store, which brings them to the
//     pages.
//  3. Done takes the staging bytes back. If it is not called the collector frees them.

import (
	"errors"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Pages is a Backing of pages that are held.
type Pages struct {
	pinned *sys.PinnedPages
	addr   uint64 // of the first byte, when it was registered
	length uint64
}

// NewPages pins the pages of memory at addr. The error is a *sys.PinError: if pages like
// these cannot be pinned at all, it is ENOSYS, EPERM, EINVAL, EFAULT or EOPNOTSUPP.
func NewPages(addr uintptr, length uint64, access ib.Access) (*Pages, error) {
	if uint64(uintptr(length)) != length {
		return nil, &sys.PinError{Reason: "longer than the address space", Err: syscall.EINVAL}
	}
	pinned, err := sys.PinPages(addr, uintptr(length), access&writing != 0)
	if err != nil {
		return nil, err
	}
	return &Pages{pinned: pinned, addr: uint64(addr), length: length}, nil
}

// Kind returns KindPinned.
func (p *Pages) Kind() Kind { return KindPinned }

// Len returns the number of bytes.
func (p *Pages) Len() uint64 { return p.length }

// NeverFaults returns true: Run offers staging bytes.
func (p *Pages) NeverFaults() bool { return true }

// Run returns a copy of bytes, or if they are to be written a place for them.
func (p *Pages) Run(off, n uint64, acc ib.Access) ([]byte, FaultKind) {
	if off >= p.length || n > p.length-off {
		return nil, FaultBounds
	}
	b := staging.get(int(min(n, Quantum)))
	if acc&writing != 0 {
		return b, FaultNone
	}
	if kind := pinFault(p.pinned.ReadAt(b, off)); kind != FaultNone {
		staging.put(b)
		return nil, kind
	}
	return b, FaultNone
}

// Done takes back bytes that Run has returned, as they were returned. The caller does not use
// them any more.
func (p *Pages) Done(b []byte) { staging.put(b) }

// Store writes bytes. If they end a message, those in their last word are written after the
// rest: the program may be spinning on that word.
func (p *Pages) Store(off uint64, b []byte, last bool) FaultKind {
	if last && len(b) > 0 {
		end := int((p.addr+off+uint64(len(b))-1)%wordSize) + 1
		if head := len(b) - end; head > 0 {
			if kind := pinFault(p.pinned.WriteAt(b[:head], off)); kind != FaultNone {
				return kind
			}
			off, b = off+uint64(head), b[head:]
		}
	}
	return pinFault(p.pinned.WriteAt(b, off))
}

// Close unpins the pages.
func (p *Pages) Close() error { return p.pinned.Close() }

// pinFault returns the fault of an access to pinned pages that has failed.
func pinFault(err error) FaultKind {
	switch {
	case err == nil:
		return FaultNone
	case errors.Is(err, syscall.EBADF):
		return FaultDead
	case errors.Is(err, syscall.EINVAL):
		return FaultBounds
	case errors.Is(err, syscall.EACCES):
		return FaultAccess
	case errors.Is(err, syscall.EFAULT):
		return FaultStale
	}
	return FaultPending // the kernel lacks memory, or the process descriptors, just now
}

// Gone is never called: what Run offers cannot be gone.
func (p *Pages) Gone(uint64, uint64, ib.Access) FaultKind { return FaultStale }

// Await gives other threads and processes the time to free memory or descriptors.
func (p *Pages) Await(uint64, uint64, ib.Access) FaultKind {
	time.Sleep(pagesPause)
	return FaultNone
}

const pagesPause = time.Millisecond
