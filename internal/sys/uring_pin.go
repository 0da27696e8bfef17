package sys

// Pinned pages, which stay as those of an adapter's memory regions do: whatever the
// program does with the addresses afterwards (munmap, MAP_FIXED, MADV_DONTNEED, mremap,
// fork), accesses go to the pages that were mapped at the time of PinPages. The pages are
// buffers that are registered with io_uring (uring_bank.go); bytes go through pipes
// (uring_pipe_unsafe.go).
//
// WriteAt does the following; ReadAt does the same in reverse:
//
//  1. It takes a pipe and fills it with the caller's bytes. This may wait for a page of
//     the caller's.
//  2. It locks a ring of the pages' bank. If the pages were closed, it ends here.
//  3. The kernel copies from the pipe to the pages. This never waits.
//  4. It unlocks the ring, and puts the pipe, which is empty, back.
//
// The kernel pins for writing, as adapters do: private memory gets pages of its own, and
// memory that is mapped read-only cannot be pinned.

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// PinError is why pages cannot be pinned. It wraps an errno:
//
//   - ENOSYS, EPERM, EINVAL: there is no io_uring, it is forbidden, or it is too old;
//     EINVAL also if the range is empty, or reaches beyond the end of the address space.
//   - ENOMEM: RLIMIT_MEMLOCK would be exceeded, or there is no memory.
//   - EFAULT: a part is not mapped, or may not be written, or is a file's and the kernel
//     does not pin it.
//   - EOPNOTSUPP: a part is a mapping of a file or of a device that the kernel does not
//     pin.
//   - EMFILE, ENFILE: there are too many descriptors.
//   - EBADF: this process is the child of a fork.
type PinError struct {
	Reason string
	Err    error
}

func (e *PinError) Error() string { return "pin pages: " + e.Reason + ": " + e.Err.Error() }
func (e *PinError) Unwrap() error { return e.Err }

// PinAccessError is why ReadAt or WriteAt failed. Some bytes at the beginning may have
// been copied.
type PinAccessError struct {
	// Buffer is set if the caller's bytes could not be accessed, rather than the pages.
	Buffer bool
	// Err is EFAULT (with Buffer: not mapped, or without the right), EBADF (the pages are
	// closed, or this process is the child of a fork), EINVAL (not within the pages),
	// EACCES (not pinned for writing), or ENOMEM or EMFILE (the kernel lacks memory or
	// descriptors).
	Err unix.Errno
}

func (e *PinAccessError) Error() string {
	if e.Buffer {
		return "the bytes beside pinned pages: " + e.Err.Error()
	}
	return "pinned pages: " + e.Err.Error()
}
func (e *PinAccessError) Unwrap() error { return e.Err }

// PinnedPages are the pages that were mapped at a range at the time of PinPages.
type PinnedPages struct {
	table        *pinTable
	addr, length uintptr
	write        bool
	bank         *pinBank
	slot, slots  int

	closed atomic.Bool // set before Close takes the buffers out of the rings
	close  sync.Once
	err    error // what Close returns
}

// thePins is the table of the process.
var thePins struct {
	table atomic.Pointer[pinTable]

	mu  sync.Mutex // guards err, and that one table is made
	err error      // why there will never be one
}

// pins returns the table of the process, or why there is none. A process without io_uring
// never has one; a shortage of memory or descriptors may end.
func pins() (*pinTable, error) {
	if t := thePins.table.Load(); t != nil {
		return t, nil
	}
	thePins.mu.Lock()
	defer thePins.mu.Unlock()
	if t := thePins.table.Load(); t != nil || thePins.err != nil {
		return t, thePins.err
	}
	err := markFork()
	if err == nil {
		var t *pinTable
		if t, err = newPinTable(); err == nil {
			thePins.table.Store(t)
			return t, nil
		}
	}
	for _, short := range []error{unix.ENOMEM, unix.EMFILE, unix.ENFILE} {
		if errors.Is(err, short) {
			return nil, err
		}
	}
	thePins.err = err
	return nil, err
}

// CanPin returns nil if this process may pin pages, or a *PinError.
func CanPin() error {
	_, err := pins()
	switch {
	case err != nil:
		return &PinError{"not possible here", err}
	case forked():
		return errForked
	}
	return nil
}

var errForked = &PinError{"this process is the child of a fork", unix.EBADF}

// PinPages pins the pages that are mapped at length bytes from addr on, and fetches those
// that are not present. The range need not begin or end with a page. Without write only
// ReadAt is allowed. The error is a *PinError.
func PinPages(addr, length uintptr, write bool) (*PinnedPages, error) {
	t, err := pins()
	switch {
	case err != nil:
		return nil, &PinError{"not possible here", err}
	case forked():
		return nil, errForked
	case length == 0 || addr+(length-1) < addr:
		return nil, &PinError{fmt.Sprintf("%d bytes at %#x", length, addr), unix.EINVAL}
	}
	return t.pin(addr, length, write)
}

func (t *pinTable) pin(addr, length uintptr, write bool) (*PinnedPages, error) {
	slots := (length-1)/t.bufferSize + 1
	if slots > uringMaxBuffers {
		return nil, &PinError{fmt.Sprintf("%d bytes are more than one table holds", length), unix.ENOMEM}
	}
	buffers := make([]uringBuffer, slots)
	for i := range buffers {
		off := uintptr(i) * t.bufferSize
		buffers[i] = uringBuffer{addr + off, min(length-off, t.bufferSize)}
	}
	bank, slot, err := t.place(buffers)
	if err != nil {
		return nil, &PinError{pinReason(err, length), err}
	}
	return &PinnedPages{table: t, addr: addr, length: length, write: write, bank: bank, slot: slot, slots: len(buffers)}, nil
}

// pinReason returns, for people, why memory could not be registered.
func pinReason(err error, length uintptr) string {
	switch {
	case errors.Is(err, unix.ENOMEM):
		return fmt.Sprintf("%d bytes more than this user's pinned pages exceed RLIMIT_MEMLOCK, %d bytes, or memory is short", length, MemlockLimit())
	case errors.Is(err, unix.EFAULT):
		return "a part is not mapped, may not be written, or is a file's"
	case errors.Is(err, unix.EOPNOTSUPP):
		return "a part is a file's or a device's"
	}
	return fmt.Sprintf("%d bytes", length)
}

// ReadAt copies len(b) bytes of the pages, from an offset on, to b. The error is a
// *PinAccessError.
func (p *PinnedPages) ReadAt(b []byte, off uint64) error {
	if errno := p.check(len(b), off); errno != 0 || len(b) == 0 {
		return accessError(false, errno)
	}
	pipe, err := p.table.pipes.get()
	if err != nil {
		return pipeError(err)
	}
	buffer, errno := p.read(pipe, b, uintptr(off))
	p.table.pipes.put(pipe, errno == 0)
	return accessError(buffer, errno)
}

// read is ReadAt through a pipe, which is empty afterwards if there is no error. buffer
// is set if the error is about b, not about the pages.
func (p *PinnedPages) read(pipe *pinPipe, b []byte, off uintptr) (buffer bool, errno unix.Errno) {
	for len(b) > 0 {
		n, errno := p.move(uringOpWriteFixed, pipe.w, off, min(len(b), pipeOut, pipe.size))
		if errno != 0 {
			return false, errno
		}
		if errno := pipe.empty(b[:n]); errno != 0 {
			return errno == unix.EFAULT, errno
		}
		b, off = b[n:], off+uintptr(n)
	}
	return false, 0
}

// WriteAt copies b to the pages, from an offset on, in no particular order. All bytes of
// one WriteAt are visible before those of the next. The error is a *PinAccessError.
func (p *PinnedPages) WriteAt(b []byte, off uint64) error {
	errno := p.check(len(b), off)
	if errno == 0 && !p.write {
		errno = unix.EACCES
	}
	if errno != 0 || len(b) == 0 {
		return accessError(false, errno)
	}
	pipe, err := p.table.pipes.get()
	if err != nil {
		return pipeError(err)
	}
	buffer, errno := p.store(pipe, b, uintptr(off))
	p.table.pipes.put(pipe, errno == 0)
	return accessError(buffer, errno)
}

// store is WriteAt through a pipe, which is empty afterwards if there is no error. buffer
// is set if the error is about b, not about the pages.
func (p *PinnedPages) store(pipe *pinPipe, b []byte, off uintptr) (buffer bool, errno unix.Errno) {
	for len(b) > 0 {
		filled, errno := pipe.fill(b)
		if errno != 0 {
			return errno == unix.EFAULT, errno
		}
		b = b[filled:]
		for filled > 0 {
			n, errno := p.move(uringOpReadFixed, pipe.r, off, filled)
			if errno != 0 {
				return false, errno
			}
			filled, off = filled-n, off+uintptr(n)
		}
	}
	return false, 0
}

// check returns why n bytes at off cannot be accessed, or 0.
func (p *PinnedPages) check(n int, off uint64) unix.Errno {
	switch {
	case p.closed.Load() || forked():
		return unix.EBADF
	case off > uint64(p.length) || uint64(n) > uint64(p.length)-off:
		return unix.EINVAL
	}
	return 0
}

// move copies up to n bytes between a pipe and the pages, at least one. It waits for
// nothing but other calls of move.
func (p *PinnedPages) move(opcode uint8, pipe int, off uintptr, n int) (int, unix.Errno) {
	size := p.table.bufferSize
	n = int(min(uintptr(n), size-off%size))
	r := p.bank.lock(p.slot)
	if p.closed.Load() { // if not, Close waits until this lock is free
		r.mu.Unlock()
		return 0, unix.EBADF
	}
	moved, errno := r.submit(opcode, pipe, p.slot+int(off/size), p.addr+off, n)
	r.mu.Unlock()
	if errno == 0 && (moved <= 0 || moved > n) {
		errno = unix.EIO
	}
	return moved, errno
}

func accessError(buffer bool, errno unix.Errno) error {
	if errno == 0 {
		return nil
	}
	return &PinAccessError{buffer, errno}
}

func pipeError(err error) error {
	errno := unix.EIO
	errors.As(err, &errno)
	return &PinAccessError{false, errno}
}

// Close unpins the pages. An access that is under way ends first, or fails with EBADF, as
// all later ones do. A second Close returns the same as the first.
func (p *PinnedPages) Close() error {
	p.close.Do(func() {
		p.closed.Store(true)
		if forked() {
			p.err = errForked
			return
		}
		p.bank.drain()
		p.err = p.table.remove(p.bank, p.slot, p.slots, p.length)
	})
	return p.err
}
