package sys

// What device memory needs besides a memory file.

import (
	"os"

	"golang.org/x/sys/unix"
)

// PreferHugePages asks for huge pages behind a mapping, where the kernel has them.
func PreferHugePages(b []byte) { _ = unix.Madvise(b, unix.MADV_HUGEPAGE) }

// PunchHole makes whole pages of a memory file zero and gives them back.
func PunchHole(fd int, off, n int64) error {
	for {
		err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		if err != unix.EINTR {
			return err
		}
	}
}

// DupFile makes a file of a copy of a descriptor.
func DupFile(fd int, name string) (*os.File, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(own), name), nil
}
