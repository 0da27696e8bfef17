package hmm

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// remap moves a mapping to other addresses by mremap.
func remap(t testing.TB, b []byte) []byte {
	t.Helper()
	size := uintptr(len(b))
	to, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	check(t, err)
	p, err := unix.MremapPtr(unsafe.Pointer(unsafe.SliceData(b)), size, to, size, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED)
	check(t, err)
	return unsafe.Slice((*byte)(p), size)
}

// mapOver maps a file over memory.
func mapOver(t testing.TB, b []byte, fd int) {
	t.Helper()
	_, err := unix.MmapPtr(fd, 0, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	check(t, err)
}

// unmapPart unmaps memory by munmap.
func unmapPart(t testing.TB, b []byte) {
	t.Helper()
	check(t, unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b))))
}

// counter returns the first 8 bytes as a number.
func counter(b []byte) *uint64 { return (*uint64)(unsafe.Pointer(unsafe.SliceData(b))) }
