// Package dmabuftest makes dma-bufs of the kernel for tests: of each kind that needs no hardware.
// Most machines have none of them. Then Absent reports so of the error, and a test is skipped
// with a message that begins with "kernel:".
package dmabuftest

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Kind is a kind of dma-buf.
type Kind struct {
	Name     string
	Exporter string // what the kernel calls it
	// New makes a buffer of size bytes, all zero; size is a multiple of 4096. cleanup closes fd, and all
	// that New has opened besides.
	New func(size uint64) (fd int, cleanup func(), err error)
}

// Kinds returns all kinds.
func Kinds() []Kind {
	return []Kind{
		{"udmabuf", "udmabuf", NewUDMABuf},
		{"heap", "system", NewHeap},
		{"vgem", "drm", NewVGEM},
	}
}

// Absent reports whether an error of New means that this kernel does not have the kind, or does not let
// this user have it.
func Absent(err error) bool {
	for _, errno := range []error{unix.ENOENT, unix.ENODEV, unix.ENXIO, unix.EACCES} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// NewUDMABuf makes a dma-buf of the pages of a memory file.
func NewUDMABuf(size uint64) (fd int, cleanup func(), err error) {
	fd, memfd, err := NewUDMABufOf(size)
	if err != nil {
		return -1, nil, err
	}
	_ = sys.CloseFD(memfd) // the dma-buf keeps the pages
	return fd, closing(fd), nil
}

// NewUDMABufOf makes a dma-buf of the pages of a memory file, and returns the descriptors of both,
// which the caller closes.
func NewUDMABufOf(size uint64) (fd, memfd int, err error) {
	if size > 1<<40 {
		return -1, -1, fmt.Errorf("a memory file of %d bytes: %w", size, unix.EINVAL)
	}
	memfd, err = sys.NewMemfd("dmabuftest", int(size))
	if err != nil {
		return -1, -1, err
	}
	fd, err = sys.NewUDMABuf(sys.UDMABufPart{FD: memfd, Size: size})
	if err != nil {
		_ = sys.CloseFD(memfd) // the first error says more
		return -1, -1, err
	}
	return fd, memfd, nil
}

// NewHeap makes a dma-buf in the kernel's heap of ordinary memory.
func NewHeap(size uint64) (fd int, cleanup func(), err error) {
	fd, err = sys.NewHeapDMABuf("system", size)
	if err != nil {
		return -1, nil, err
	}
	return fd, closing(fd), nil
}

// NewVGEM makes a dma-buf of the vgem device. It must be mapped from offset 0.
func NewVGEM(size uint64) (fd int, cleanup func(), err error) {
	b, err := NewVGEMBuffer(size)
	if err != nil {
		return -1, nil, err
	}
	return b.FD, b.Close, nil
}

func closing(fd int) func() { return func() { _ = sys.CloseFD(fd) } }

// VGEMBuffer is a dma-buf whose fences the test attaches and signals.
type VGEMBuffer struct {
	FD     int
	dev    *sys.VGEM
	handle uint32
}

// NewVGEMBuffer makes a buffer. The device is opened for it alone.
func NewVGEMBuffer(size uint64) (*VGEMBuffer, error) {
	dev, err := sys.OpenVGEM()
	if err != nil {
		return nil, err
	}
	b := &VGEMBuffer{dev: dev}
	if b.handle, _, err = dev.NewBuffer(size); err == nil {
		b.FD, err = dev.DMABuf(b.handle)
	}
	if err != nil {
		_ = dev.Close() // the first error says more
		return nil, err
	}
	return b, nil
}

// Fence adds a pending fence to the buffer: that of a reader, or of a writer if write is set.
// signal ends it. The kernel does so after ten seconds: then signal returns ETIMEDOUT.
func (b *VGEMBuffer) Fence(write bool) (signal func() error, err error) {
	fence, err := b.dev.AttachFence(b.handle, write)
	if err != nil {
		return nil, err
	}
	return func() error { return b.dev.SignalFence(fence) }, nil
}

// Close closes the buffer, and signals the fences that are left.
func (b *VGEMBuffer) Close() {
	_ = sys.CloseFD(b.FD) // it is open: it cannot fail
	_ = b.dev.Close()     // it is open: it cannot fail
}
