// Package remap gives tests memory whose pages come and go while its content stays:
// a mapped memory file.
//
// The unsafe code is sound: it maps over its own mapping, which stays mapped until Close.
package remap

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Memory is whole pages of a memory file.
type Memory struct {
	Bytes []byte
	fd    int
}

// New maps size bytes.
func New(size int) (*Memory, error) {
	fd, err := unix.MemfdCreate("verbena-test", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	m := &Memory{fd: fd}
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		m.Bytes, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return m, nil
}

// Addr returns the address of the first byte.
func (m *Memory) Addr() uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes))) }

// Again maps pages again, over themselves: a reader finds the old or the new mapping,
// with the same bytes.
func (m *Memory) Again(off, n int) error {
	_, err := unix.MmapPtr(m.fd, int64(off), unsafe.Pointer(&m.Bytes[off]), uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	return err
}

// Discard gives pages back: the next access gets them from the file again.
func (m *Memory) Discard(off, n int) error {
	return unix.Madvise(m.Bytes[off:][:n], unix.MADV_DONTNEED)
}

// Forbid takes the rights to pages away, or gives them back.
func (m *Memory) Forbid(off, n int, forbidden bool) error {
	prot := unix.PROT_READ | unix.PROT_WRITE
	if forbidden {
		prot = unix.PROT_NONE
	}
	return unix.Mprotect(m.Bytes[off:][:n], prot)
}

// Close unmaps it.
func (m *Memory) Close() error {
	_ = unix.Close(m.fd)
	return unix.Munmap(m.Bytes)
}
