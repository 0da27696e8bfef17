package sys

// A raw io_uring(7), as far as pinned pages need one: a table of registered buffers,
// and requests that are submitted one at a time and have ended when submit returns.
//
// Why this is sound. The rings are mappings that live until close, and close is called
// when no goroutine uses the ring any more. The kernel returns the offsets of the fields
// in them; newRing checks each against the mapping's length before it makes a pointer of
// it. Counters that are shared with the kernel are read and written as atomic variables.
// Addresses of registered memory and of user buffers are passed as numbers: the kernel
// checks them, and no Go pointer is made of one. Arguments of the calls are Go variables
// that are alive until the call returns, and the kernel keeps none of them.

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From the kernel's linux/io_uring.h.
const (
	uringSetupClamp     = 1 << 4
	uringSetupNoSQArray = 1 << 16 // Linux 6.6: the queue is the entries themselves

	uringFeatSingleMmap = 1 << 0

	uringOffSQRing = 0
	uringOffSQEs   = 0x10000000

	uringEnterGetEvents = 1

	uringOpReadFixed  = 4 // from a file into a registered buffer
	uringOpWriteFixed = 5 // from a registered buffer to a file

	uringRegisterBuffers2 = 15 // Linux 5.13
	uringUpdateBuffers    = 16
	uringCloneBuffers     = 30 // Linux 6.12, with offsets since 6.13

	uringSparse     = 1 << 0 // Linux 5.19
	uringDstReplace = 1 << 1

	uringMaxBuffers = 1 << 14 // in one table
	uringMaxBuffer  = 1 << 30 // bytes in one buffer
)

// The kernel's structs of these calls.
type (
	uringParams struct {
		sqEntries, cqEntries, flags, _, _, features, _ uint32
		_                                              [3]uint32

		sq struct {
			head, tail, mask, entries, flags, dropped, array, _ uint32
			_                                                   uint64
		}
		cq struct {
			head, tail, mask, entries, overflow, cqes, flags, _ uint32
			_                                                   uint64
		}
	}
	uringSQE struct {
		opcode, flags uint8
		_             uint16
		fd            int32
		off, addr     uint64
		len, rwFlags  uint32
		userData      uint64
		bufIndex, _   uint16
		_             uint32
		_             [2]uint64
	}
	uringCQE struct {
		userData uint64
		res      int32
		flags    uint32
	}
	uringRegisterArg struct {
		nr, flags        uint32
		_, iovecs, _tags uint64
	}
	uringUpdateArg struct {
		offset, _ uint32
		iovecs    *uringBuffer
		_         [8 - unsafe.Sizeof(uintptr(0))]byte // the kernel's field has 8 bytes, its lower half first
		_tags     uint64
		nr, _     uint32
	}
	uringCloneArg struct {
		srcFD, flags, srcOff, dstOff, nr uint32
		_                                [3]uint32
	}
	// uringBuffer is struct iovec with the address as a number.
	uringBuffer struct{ addr, length uintptr }
)

// The sizes that the kernel expects of these structs.
var (
	_ [120]byte = [unsafe.Sizeof(uringParams{})]byte{}
	_ [64]byte  = [unsafe.Sizeof(uringSQE{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(uringCQE{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(uringRegisterArg{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(uringUpdateArg{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(uringCloneArg{})]byte{}
)

// uring is a ring. Its methods are called one at a time, except for update and clone,
// which the kernel orders.
type uring struct {
	fd         int
	ring, sqes []byte // the mappings

	sqTail, cqHead, cqTail *uint32 // shared with the kernel
	entries                []uringSQE
	completions            []uringCQE
	sqMask, cqMask         uint32
}

// newRing makes a ring with a table of slots for registered buffers, all empty.
func newRing(slots int) (*uring, error) {
	p := &uringParams{flags: uringSetupNoSQArray | uringSetupClamp}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(p)), 0)
	if errno != 0 {
		return nil, uringReason(errno)
	}
	r := &uring{fd: int(fd)} // io_uring_setup(2) makes it close-on-exec
	err := r.mapRings(p)
	if err == nil {
		arg := uringRegisterArg{nr: uint32(slots), flags: uringSparse}
		_, err = r.register(uringRegisterBuffers2, unsafe.Pointer(&arg), unsafe.Sizeof(arg))
		if err != nil {
			err = fmt.Errorf("io_uring's table of %d buffers: %w", slots, err)
		}
	}
	if err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// uringReason returns, for people, why io_uring_setup(2) failed.
func uringReason(errno unix.Errno) error {
	switch errno {
	case unix.ENOSYS:
		return fmt.Errorf("the kernel has no io_uring, or seccomp hides it: %w", errno)
	case unix.EPERM:
		return fmt.Errorf("io_uring is forbidden by seccomp or by the sysctl kernel.io_uring_disabled: %w", errno)
	case unix.EINVAL:
		return fmt.Errorf("the kernel's io_uring is too old (before Linux 6.6): %w", errno)
	case unix.ENOMEM:
		return fmt.Errorf("RLIMIT_MEMLOCK, %d bytes, or memory does not suffice for an io_uring: %w", MemlockLimit(), errno)
	}
	return fmt.Errorf("io_uring_setup: %w", errno)
}

// mapRings maps the two queues and the entries. A child of fork(2) does not inherit
// the mappings: the ring is not the child's.
func (r *uring) mapRings(p *uringParams) (err error) {
	if p.features&uringFeatSingleMmap == 0 {
		return fmt.Errorf("io_uring with two mappings: %w", unix.ENOSYS)
	}
	cqEnd := int(p.cq.cqes) + int(p.cqEntries)*int(unsafe.Sizeof(uringCQE{}))
	if r.ring, err = unix.Mmap(r.fd, uringOffSQRing, cqEnd, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return fmt.Errorf("mmap of an io_uring: %w", err)
	}
	size := int(p.sqEntries) * int(unsafe.Sizeof(uringSQE{}))
	if r.sqes, err = unix.Mmap(r.fd, uringOffSQEs, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return fmt.Errorf("mmap of an io_uring: %w", err)
	}
	for _, m := range [][]byte{r.ring, r.sqes} {
		if err := unix.Madvise(m, unix.MADV_DONTFORK); err != nil {
			return fmt.Errorf("MADV_DONTFORK on an io_uring: %w", err)
		}
	}
	word := func(off uint32) *uint32 {
		if off%4 != 0 || int(off) > len(r.ring)-4 {
			err = fmt.Errorf("io_uring with a counter at offset %d of %d: %w", off, len(r.ring), unix.ENOSYS)
			return new(uint32)
		}
		return (*uint32)(unsafe.Pointer(&r.ring[off]))
	}
	r.sqTail, r.cqHead, r.cqTail = word(p.sq.tail), word(p.cq.head), word(p.cq.tail)
	r.sqMask, r.cqMask = *word(p.sq.mask), *word(p.cq.mask)
	if err != nil {
		return err
	}
	if r.sqMask != p.sqEntries-1 || r.cqMask != p.cqEntries-1 || p.cq.cqes%8 != 0 {
		return fmt.Errorf("io_uring of %d and %d entries with masks %#x and %#x: %w", p.sqEntries, p.cqEntries, r.sqMask, r.cqMask, unix.ENOSYS)
	}
	r.entries = unsafe.Slice((*uringSQE)(unsafe.Pointer(&r.sqes[0])), p.sqEntries)
	r.completions = unsafe.Slice((*uringCQE)(unsafe.Pointer(&r.ring[p.cq.cqes])), p.cqEntries)
	return nil
}

// close closes the ring. If its table is not empty, the kernel unpins the pages some time
// later.
func (r *uring) close() {
	for _, m := range [][]byte{r.ring, r.sqes} {
		if m != nil {
			_ = unix.Munmap(m) // ours, and whole
		}
	}
	_ = unix.Close(r.fd) // it has nothing to write back
}

// submit copies n bytes between a pipe and memory at addr that is registered as buffer
// number slot: uringOpReadFixed into the memory, uringOpWriteFixed out of it. It returns
// how many bytes were copied. The pipe does not block, so the kernel does all of it in
// this call, and the goroutine keeps its place among GOMAXPROCS.
func (r *uring) submit(opcode uint8, pipe, slot int, addr uintptr, n int) (int, unix.Errno) {
	tail := *r.sqTail // only submit writes it
	r.entries[tail&r.sqMask] = uringSQE{
		opcode: opcode, fd: int32(pipe), off: ^uint64(0), // the file's position, of which a pipe has none
		addr: uint64(addr), len: uint32(n), bufIndex: uint16(slot),
	}
	atomic.StoreUint32(r.sqTail, tail+1)
	taken, _, errno := unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), 1, 0, 0, 0, 0)
	if errno != 0 || taken != 1 {
		atomic.StoreUint32(r.sqTail, tail) // the kernel has not taken it, and never will
		if errno == 0 || errno == unix.EAGAIN || errno == unix.EBUSY {
			errno = unix.ENOMEM // which is what the kernel means by them here
		}
		return 0, errno
	}
	head := *r.cqHead
	for atomic.LoadUint32(r.cqTail) == head { // the kernel has deferred it
		_, _, _ = unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), 0, 1, uringEnterGetEvents, 0, 0)
	}
	res := r.completions[head&r.cqMask].res
	atomic.StoreUint32(r.cqHead, head+1)
	if res < 0 {
		return 0, unix.Errno(-res)
	}
	return int(res), 0
}

// update replaces buffers of the table from slot on; a zero buffer empties its slot. The
// kernel pins the pages of the new buffers, and unpins those of the old ones if no other
// table has them. update returns how many slots were changed; the rest are as before.
func (r *uring) update(slot int, buffers []uringBuffer) (int, error) {
	arg := uringUpdateArg{offset: uint32(slot), nr: uint32(len(buffers)), iovecs: unsafe.SliceData(buffers)}
	return r.register(uringUpdateBuffers, unsafe.Pointer(&arg), unsafe.Sizeof(arg))
}

// clone copies n buffers of another ring's table to this table, from slot on. Both tables
// have them then; the pages are pinned once.
func (r *uring) clone(slot int, from *uring, fromSlot, n int) error {
	arg := uringCloneArg{
		srcFD: uint32(from.fd), flags: uringDstReplace,
		srcOff: uint32(fromSlot), dstOff: uint32(slot), nr: uint32(n),
	}
	_, err := r.register(uringCloneBuffers, unsafe.Pointer(&arg), 1)
	return err
}

// register is io_uring_register(2). Pinning may wait for pages, so it is an ordinary
// system call, during which another goroutine can take the place among GOMAXPROCS.
func (r *uring) register(opcode uintptr, arg unsafe.Pointer, n uintptr) (int, error) {
	for {
		done, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.fd), opcode, uintptr(arg), n, 0, 0)
		switch errno {
		case 0:
			return int(done), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
