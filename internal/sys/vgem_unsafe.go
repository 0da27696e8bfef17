package sys

// vgem is a driver of the kernel for graphics memory without a graphics card. Its buffers are
// dma-bufs with fences that a program attaches and signals, which no other software exporter of a
// usual kernel has. So tests of what waits for fences run on it.

import (
	"fmt"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From the kernel's drm/drm.h, drm/drm_mode.h and drm/vgem_drm.h.
const (
	drmIoctlVersion         = 0xc0406400
	drmIoctlGEMClose        = 0x40086409
	drmIoctlPrimeHandleToFD = 0xc00c642d
	drmIoctlPrimeFDToHandle = 0xc00c642e
	drmIoctlCreateDumb      = 0xc02064b2
	vgemIoctlFenceAttach    = 0xc0106441
	vgemIoctlFenceSignal    = 0x40086442

	vgemFenceWrite = 1
)

// The kernel's structs of these calls.
type (
	drmVersionArg struct {
		major, minor, patch int32
		nameLen             uintptr
		name                *byte
		dateLen             uintptr
		date                *byte
		descLen             uintptr
		desc                *byte
	}
	drmGEMCloseArg    struct{ handle, pad uint32 }
	drmPrimeHandleArg struct {
		handle, flags uint32
		fd            int32
	}
	drmCreateDumbArg struct {
		height, width, bpp, flags, handle, pitch uint32
		size                                     uint64
	}
	vgemFenceAttachArg struct{ handle, flags, outFence, pad uint32 }
	vgemFenceSignalArg struct{ fence, flags uint32 }
)

// VGEM is the kernel's vgem device, opened. Buffers and fences belong to it: they are gone after
// Close, unless they are used elsewhere.
type VGEM struct{ fd int }

// OpenVGEM opens the device. The error is ENODEV if the driver is not loaded.
func OpenVGEM() (*VGEM, error) {
	nodes, err := filepath.Glob("/dev/dri/card*") // render nodes make no buffers
	if err != nil {
		return nil, err
	}
	for _, node := range nodes {
		fd, err := unix.Open(node, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			continue // it is not ours
		}
		if name, err := drmDriver(fd); err == nil && name == "vgem" {
			return &VGEM{fd}, nil
		}
		_ = unix.Close(fd) // it is open: it cannot fail
	}
	return nil, fmt.Errorf("no vgem among %d graphics devices: %w", len(nodes), unix.ENODEV)
}

// drmDriver returns the name of a graphics device's driver.
//
// It is sound: the struct has a pointer to a slice, which it keeps alive, with the slice's length,
// behind which the kernel does not write.
func drmDriver(fd int) (string, error) {
	name := make([]byte, 64)
	arg := &drmVersionArg{nameLen: uintptr(len(name)), name: &name[0]}
	if err := retryIoctl(fd, drmIoctlVersion, unsafe.Pointer(arg)); err != nil {
		return "", fmt.Errorf("DRM_IOCTL_VERSION: %w", err)
	}
	return string(name[:min(arg.nameLen, uintptr(len(name)))]), nil // the kernel stores the whole length
}

// A buffer is made as a picture with rows of vgemRow bytes.
const (
	vgemRow     = 4096
	vgemMaxRows = 1<<20 - 1 // the kernel counts the bytes in 32 bits
)

// NewBuffer makes a buffer of at least size bytes, and returns its number and its size. The size
// must be a multiple of 4096.
func (v *VGEM) NewBuffer(size uint64) (handle uint32, got uint64, err error) {
	if size == 0 || size%vgemRow != 0 || size/vgemRow > vgemMaxRows {
		return 0, 0, fmt.Errorf("a buffer of %d bytes: %w", size, unix.EINVAL)
	}
	arg := drmCreateDumbArg{height: uint32(size / vgemRow), width: vgemRow / 4, bpp: 32}
	if err := retryIoctl(v.fd, drmIoctlCreateDumb, unsafe.Pointer(&arg)); err != nil {
		return 0, 0, fmt.Errorf("DRM_IOCTL_MODE_CREATE_DUMB of %d bytes: %w", size, err)
	}
	return arg.handle, arg.size, nil
}

// DMABuf returns a descriptor of a buffer, closed on exec. It lives on when the buffer's number is
// given up. It must be mapped from offset 0: at other offsets Linux 6.12 shows the beginning.
func (v *VGEM) DMABuf(handle uint32) (int, error) {
	arg := drmPrimeHandleArg{handle: handle, flags: unix.O_RDWR | unix.O_CLOEXEC, fd: -1}
	if err := retryIoctl(v.fd, drmIoctlPrimeHandleToFD, unsafe.Pointer(&arg)); err != nil {
		return -1, fmt.Errorf("DRM_IOCTL_PRIME_HANDLE_TO_FD: %w", err)
	}
	return int(arg.fd), nil
}

// Import makes a buffer of a dma-buf, whoever has exported it. The descriptor stays the caller's.
func (v *VGEM) Import(fd int) (handle uint32, err error) {
	arg := drmPrimeHandleArg{fd: int32(fd)}
	if err := retryIoctl(v.fd, drmIoctlPrimeFDToHandle, unsafe.Pointer(&arg)); err != nil {
		return 0, fmt.Errorf("DRM_IOCTL_PRIME_FD_TO_HANDLE: %w", err)
	}
	return arg.handle, nil
}

// CloseBuffer gives up the number of a buffer.
func (v *VGEM) CloseBuffer(handle uint32) error {
	arg := drmGEMCloseArg{handle: handle}
	if err := retryIoctl(v.fd, drmIoctlGEMClose, unsafe.Pointer(&arg)); err != nil {
		return fmt.Errorf("DRM_IOCTL_GEM_CLOSE: %w", err)
	}
	return nil
}

// AttachFence adds a fence to a buffer, that of a reader, or of a writer if write is set. The
// error is EBUSY while the buffer has a fence that excludes it. The kernel signals the fence with an
// error after ten seconds, if SignalFence has not been called.
func (v *VGEM) AttachFence(handle uint32, write bool) (fence uint32, err error) {
	arg := vgemFenceAttachArg{handle: handle}
	if write {
		arg.flags = vgemFenceWrite
	}
	if err := retryIoctl(v.fd, vgemIoctlFenceAttach, unsafe.Pointer(&arg)); err != nil {
		return 0, fmt.Errorf("DRM_IOCTL_VGEM_FENCE_ATTACH: %w", err)
	}
	return arg.outFence, nil
}

// SignalFence signals a fence and gives up its number. The error is ETIMEDOUT if the kernel has
// signalled it before, and ENOENT if there is no such fence.
func (v *VGEM) SignalFence(fence uint32) error {
	arg := vgemFenceSignalArg{fence: fence}
	if err := retryIoctl(v.fd, vgemIoctlFenceSignal, unsafe.Pointer(&arg)); err != nil {
		return fmt.Errorf("DRM_IOCTL_VGEM_FENCE_SIGNAL: %w", err)
	}
	return nil
}

// Close closes the device. It is idempotent, but no goroutine may be using the device. The kernel
// signals the fences that are left.
func (v *VGEM) Close() error {
	if v.fd < 0 {
		return nil
	}
	fd := v.fd
	v.fd = -1
	return unix.Close(fd)
}
