package sys

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Fold maps the same n bytes of memory times times, one after the other, each as a
// mapping of its own: many populated pages that take little memory.
//
// This is sound because each mapping replaces memory that Reserve has mapped, which is
// not Go's.
func Fold(n, times int) (_ []byte, err error) {
	fd, err := unix.MemfdCreate("verbena-benchsuite", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	defer unix.Close(fd) //nolint:errcheck // the mappings keep the memory
	if err := unix.Ftruncate(fd, int64(n)); err != nil {
		return nil, fmt.Errorf("ftruncate: %w", err)
	}
	all, err := Reserve(n * times)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	for i := range times {
		at := unsafe.Pointer(unsafe.SliceData(all[i*n:]))
		if _, err := unix.MmapPtr(fd, 0, at, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
			return nil, errors.Join(fmt.Errorf("mmap: %w", err), unix.Munmap(all))
		}
	}
	return all, nil
}
