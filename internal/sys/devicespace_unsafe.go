package sys

// Memory of a device that software plays, and the addresses that the device has for it.
//
// Why this is sound. The mappings are made by the kernel at places that it chose, and the Go
// collector does not know them. An address space is reserved without any access: a load from
// it is a fault, as from an address that the CPU does not decode. A slice of a part of it is
// good from MapAt until HideAt.

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// NewDeviceMemory makes a memory file of size bytes, zero and sealed, on ordinary pages that the
// kernel is asked to join to huge ones, and maps it. The descriptor and the mapping are the
// caller's (FreeMapped).
func NewDeviceMemory(name string, size int) (fd int, b []byte, err error) {
	if size <= 0 {
		return -1, nil, fmt.Errorf("memory of %d bytes: %w", size, unix.EINVAL)
	}
	if fd, err = NewMemfd(name, size); err != nil {
		return -1, nil, err
	}
	align := int(pageSize)
	if size >= hugePage {
		align = hugePage
	}
	if b, err = mapAligned(fd, size, align); err != nil {
		_ = unix.Close(fd) // the first error says more
		return -1, nil, err
	}
	PreferHugePages(b)
	return fd, b, nil
}

// AddressSpace is a range of addresses that nothing answers to but what MapAt has put there.
type AddressSpace struct {
	base unsafe.Pointer
	size uintptr
}

// ReserveAddresses reserves size bytes of address space, a multiple of the page size.
func ReserveAddresses(size int) (*AddressSpace, error) {
	if size <= 0 || uintptr(size)%pageSize != 0 {
		return nil, fmt.Errorf("%d bytes of address space: %w", size, unix.EINVAL)
	}
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(size), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", size, err)
	}
	return &AddressSpace{p, uintptr(size)}, nil
}

// Base returns the first address.
func (s *AddressSpace) Base() uint64 { return uint64(uintptr(s.base)) }

// Size returns how many addresses there are.
func (s *AddressSpace) Size() uint64 { return uint64(s.size) }

// inside reports whether a range of whole pages lies in the address space.
func (s *AddressSpace) inside(off, n uint64) bool {
	return n > 0 && off%uint64(pageSize) == 0 && n%uint64(pageSize) == 0 && off <= uint64(s.size) && n <= uint64(s.size)-off
}

// MapAt shows n bytes of a file, from fileOff on, at the offset off of the address space, for
// reading and writing. It replaces what was there.
func (s *AddressSpace) MapAt(off uint64, fd int, fileOff int64, n uint64) ([]byte, error) {
	if !s.inside(off, n) {
		return nil, fmt.Errorf("%d bytes at %d of an address space of %d: %w", n, off, s.size, unix.EINVAL)
	}
	at := unsafe.Add(s.base, off)
	if _, err := unix.MmapPtr(fd, fileOff, at, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", n, err)
	}
	return unsafe.Slice((*byte)(at), n), nil
}

// Bytes returns a part of the address space that MapAt has shown, which may be more than one call's.
func (s *AddressSpace) Bytes(off, n uint64) []byte {
	if n == 0 || off > uint64(s.size) || n > uint64(s.size)-off {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Add(s.base, off)), n)
}

// HideAt makes a range inaccessible again. No goroutine may touch it any more.
func (s *AddressSpace) HideAt(off, n uint64) error {
	if !s.inside(off, n) {
		return fmt.Errorf("%d bytes at %d of an address space of %d: %w", n, off, s.size, unix.EINVAL)
	}
	_, err := unix.MmapPtr(-1, 0, unsafe.Add(s.base, off), uintptr(n), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED)
	return err
}

// Release gives the addresses back to the process. No goroutine may touch them any more.
func (s *AddressSpace) Release() error { return unix.MunmapPtr(s.base, s.size) }

// OffsetIn returns where in a slice another slice lies; -1 if not all of it does.
func OffsetIn(all, part []byte) int {
	if len(part) == 0 || len(all) == 0 {
		return -1
	}
	from, at := uintptr(unsafe.Pointer(unsafe.SliceData(all))), uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	if at < from || at-from > uintptr(len(all)) || uintptr(len(part)) > uintptr(len(all))-(at-from) {
		return -1
	}
	return int(at - from)
}
