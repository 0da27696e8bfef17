package sys

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Calls that take ranges of addresses rather than slices: the memory may be mapped
// only in part, and Go must not have a slice of memory that is not mapped. They are
// sound because the kernel checks every address, and because the calls neither read nor
// write the memory.

func mlock(start, end uintptr) error {
	return errnoOrNil(unix.Syscall(unix.SYS_MLOCK, start, end-start, 0))
}

func munlock(start, end uintptr) error {
	return errnoOrNil(unix.Syscall(unix.SYS_MUNLOCK, start, end-start, 0))
}

func madvise(start, end uintptr, advice int) error {
	return errnoOrNil(unix.Syscall(unix.SYS_MADVISE, start, end-start, uintptr(advice)))
}

func msync(start, end uintptr) error {
	return errnoOrNil(unix.Syscall(unix.SYS_MSYNC, start, end-start, unix.MS_SYNC))
}

// mincore fills a byte of vec for each page. It checks that the range has at most as many
// pages as vec has bytes, so the kernel writes nothing behind vec.
func mincore(start, end uintptr, vec []byte) error {
	if start >= end || uintptr(len(vec)) < (end-start+pageSize-1)/pageSize {
		return unix.EINVAL
	}
	return errnoOrNil(unix.Syscall(unix.SYS_MINCORE, start, end-start, uintptr(unsafe.Pointer(unsafe.SliceData(vec)))))
}

// errnoOrNil keeps a zero errno from becoming an error that is not nil.
func errnoOrNil(_, _ uintptr, errno unix.Errno) error {
	if errno != 0 {
		return errno
	}
	return nil
}
