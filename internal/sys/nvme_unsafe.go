package sys

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// NVMeLogPage reads the beginning of a log page of a controller of the kernel's, by its interface for admin commands
// (/dev/nvmeN). It is sound: the kernel writes no more than the bytes, which are kept until it has.
//
// Errors: EINVAL unless the length is a multiple of 4, and positive; EIO if the controller answers with another status than
// success; those of ioctl(2).
func NVMeLogPage(fd int, page uint8, b []byte) error {
	if len(b) == 0 || len(b)%4 != 0 || len(b) > 1<<18 {
		return syscall.EINVAL
	}
	const getLogPage, ioctlAdmin = 2, 0xc0484e41
	n := uint32(len(b))
	cmd := struct { // struct nvme_passthru_cmd
		opcode, flags    uint8
		_                uint16
		nsid, cdw2, cdw3 uint32
		metadata, addr   uint64
		metaLen, dataLen uint32
		cdw              [6]uint32
		timeout, result  uint32
	}{opcode: getLogPage, addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), dataLen: n, cdw: [6]uint32{uint32(page) | (n/4-1)<<16}}
	status, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlAdmin, uintptr(unsafe.Pointer(&cmd)))
	runtime.KeepAlive(b)
	switch {
	case errno != 0:
		return errno
	case status != 0:
		return syscall.EIO
	}
	return nil
}
