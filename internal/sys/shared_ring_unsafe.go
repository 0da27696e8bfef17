package sys

// The system calls of shared_ring.go, on the structs of uring_unsafe.go, which is sound for
// the reasons given there. The queues of a borrowed ring are memory that another process can
// map, too. Nothing that is read from them is used as an address or as an index without a mask:
// a wrong number makes a Write fail.

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const uringUnregisterBuffers = 1

// setupRing makes a ring whose queue has so many entries. It returns the descriptor, which is
// close-on-exec, and the layout of the queues.
func setupRing(entries int) (int, *uringParams, error) {
	p := &uringParams{flags: uringSetupNoSQArray | uringSetupClamp}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if errno != 0 {
		return -1, nil, uringReason(errno)
	}
	return int(fd), p, nil
}

// newUnmappedRing makes a ring with a table of slots for registered buffers, all empty, and
// maps nothing of it.
func newUnmappedRing(entries, slots int) (*uring, error) {
	fd, _, err := setupRing(entries)
	if err != nil {
		return nil, err
	}
	r := &uring{fd: fd}
	arg := uringRegisterArg{nr: uint32(slots), flags: uringSparse}
	if _, err := r.register(uringRegisterBuffers2, unsafe.Pointer(&arg), unsafe.Sizeof(arg)); err != nil {
		r.close()
		return nil, fmt.Errorf("io_uring's table of %d buffers: %w", slots, err)
	}
	return r, nil
}

// ringLayout returns how the queues of lent rings lie in their mappings: as those of all rings
// that one kernel makes with the same arguments.
var ringLayout = sync.OnceValues(func() (*uringParams, error) {
	fd, p, err := setupRing(lentEntries)
	if err != nil {
		return nil, err
	}
	return p, unix.Close(fd)
})

// unregisterBuffers empties the whole table of a ring.
func (r *uring) unregisterBuffers() error {
	_, err := r.register(uringUnregisterBuffers, nil, 0)
	return err
}

// moveTwice copies head bytes between a pipe and memory at an address that is registered as
// buffer number slot, and then tail bytes behind them: uringOpReadFixed into the memory,
// uringOpWriteFixed out of it. The pipe has the bytes, or room for them. moveTwice reports
// whether both was done in full. If the first request fails, so does the second: both name the
// same buffer.
func (r *uring) moveTwice(opcode uint8, pipe, slot int, at uint64, head, tail int) bool {
	first := *r.sqTail // only moveTwice writes it
	last := first
	for _, n := range [...]int{head, tail} {
		if n == 0 {
			continue
		}
		r.entries[last&r.sqMask] = uringSQE{
			opcode: opcode, fd: int32(pipe), off: ^uint64(0), // the file's position, of which a pipe has none
			addr: at, len: uint32(n), bufIndex: uint16(slot), userData: uint64(n),
		}
		at += uint64(n)
		last++
	}
	atomic.StoreUint32(r.sqTail, last)
	n, _, errno := unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(last-first), 0, 0, 0, 0)
	taken := uint32(0)
	if errno == 0 {
		taken = min(uint32(n), last-first)
	}
	atomic.StoreUint32(r.sqTail, first+taken) // the kernel has not taken the others, and never will
	done := taken == last-first
	for range taken {
		place := *r.cqHead
		for atomic.LoadUint32(r.cqTail) == place { // the kernel has deferred it
			_, _, _ = unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), 0, 1, uringEnterGetEvents, 0, 0)
		}
		c := &r.completions[place&r.cqMask]
		done = done && c.res > 0 && uint64(c.res) == c.userData
		atomic.StoreUint32(r.cqHead, place+1)
	}
	return done
}
