package sys

import "golang.org/x/sys/unix"

// Calls about ranges of addresses rather than slices: the memory may be mapped
// only in part, and a slice of it would be a lie. They are sound because the
// kernel checks every address, and because nothing is read or written.

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

// errnoOrNil keeps a zero errno from becoming an error that is not nil.
func errnoOrNil(_, _ uintptr, errno unix.Errno) error {
	if errno != 0 {
		return errno
	}
	return nil
}
