package mem

// Memory that the library allocates (what IBV_ACCESS_ALLOCATE_MR asks for): a
// memory file, mapped in one piece, which other processes can map too.

import (
	"errors"
	"math"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Alloc is a Backing of memory that belongs to the library. It is host memory in
// every other respect.
type Alloc struct {
	*Host
	mapped []byte // all of it; the region may be shorter
	fd     int
	seg    *Segment // how processes that it is sent to get at it
	own    *Own     // how engines do
}

// NewAlloc allocates memory, which is zero.
func NewAlloc(length uint64, access ib.Access, lock ib.LockMode) (*Alloc, error) {
	const op = "alloc_mr"
	if length == 0 {
		return nil, ib.Errorf(op, syscall.EINVAL, "no bytes")
	}
	if length > math.MaxInt {
		return nil, ib.Errorf(op, syscall.ENOMEM, "%d bytes", length)
	}
	fd, b, err := sys.NewMappedFile("verbena-mr", int(length))
	if err != nil {
		return nil, opErrorf(op, err)
	}
	return newAlloc(fd, b, length, access, lock)
}

// OpenAlloc makes a backing of the memory of another process: the first length
// bytes of its file. It takes the descriptor over, also if it fails.
func OpenAlloc(fd int, length uint64, access ib.Access, lock ib.LockMode) (*Alloc, error) {
	const op = "open_shared_mr"
	b, err := sys.MapFile(fd)
	if err != nil {
		_ = sys.CloseFD(fd) // the first error says more
		return nil, opErrorf(op, err)
	}
	if length == 0 || length > uint64(len(b)) {
		_, _ = sys.FreeMapped(b), sys.CloseFD(fd)
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes of a memory file of %d", length, len(b))
	}
	return newAlloc(fd, b, length, access, lock)
}

func newAlloc(fd int, mapped []byte, length uint64, access ib.Access, lock ib.LockMode) (*Alloc, error) {
	h, err := newHost(addrOf(mapped), length, access, lock, nil, true)
	if err != nil {
		_, _ = sys.FreeMapped(mapped), sys.CloseFD(fd) // the first error says more
		return nil, err
	}
	return &Alloc{h, mapped, fd, AddSegment(mapped, fd), addOwn(mapped)}, nil
}

// opErrorf makes an *ib.OpError of a system call's error.
func opErrorf(op string, err error) error {
	errno := syscall.EIO
	errors.As(err, &errno)
	return ib.Errorf(op, errno, "%v", err)
}

// Bytes returns the memory. It is gone after Close.
func (a *Alloc) Bytes() []byte { return a.mapped[:a.length:a.length] }

// Shared returns the file that the memory is, and where in it the first byte
// lies. The descriptor is good until Close: a caller that keeps it duplicates it
// inside a read section, or while the region cannot be closed.
func (a *Alloc) Shared() (fd int, offset uint64, ok bool) { return a.fd, 0, true }

// Close gives the memory back: to the system, unless another process has it too.
func (a *Alloc) Close() error {
	a.seg.Close()
	a.own.close()
	return errors.Join(a.Host.Close(), sys.FreeMapped(a.mapped), sys.CloseFD(a.fd))
}
