package sys

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// OpenMemory opens the memory of another process, to read and to write. It fails with
// EACCES or EPERM if this process may not debug the other. The descriptor refers to the
// memory that the process has at the call: never to that of another process which gets
// the same number later, nor to what the process has after exec.
//
// The numbers in /proc are those of the PID namespace that it was mounted in, which need
// not be that of this process.
func OpenMemory(pid int) (int, error) {
	return unix.Open(fmt.Sprintf("/proc/%d/mem", pid), unix.O_RDWR|unix.O_CLOEXEC, 0)
}

// ReadMemory reads all of b from an address, and reports whether it could. It cannot if
// some of the memory is not mapped, or the process has ended.
func ReadMemory(fd int, b []byte, addr uint64) bool { return moveAll(unix.Pread, fd, b, addr) }

// WriteMemory writes all of b to an address, and reports whether it could, as ReadMemory
// does.
func WriteMemory(fd int, b []byte, addr uint64) bool { return moveAll(unix.Pwrite, fd, b, addr) }

func moveAll(call func(fd int, b []byte, off int64) (int, error), fd int, b []byte, addr uint64) bool {
	for len(b) > 0 {
		n, err := call(fd, b, int64(addr))
		switch {
		case err == unix.EINTR:
		case err != nil || n <= 0:
			return false
		default:
			b, addr = b[n:], addr+uint64(n)
		}
	}
	return true
}
