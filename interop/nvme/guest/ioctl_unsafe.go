package main

import (
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// logPage reads a log page by the kernel's interface for admin commands. It is sound: the kernel writes no more than n bytes,
// while both variables are kept.
func logPage(device string, page uint8, n uint32) ([]byte, error) {
	f, err := os.Open(device)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := make([]byte, n)
	cmd := struct { // struct nvme_passthru_cmd
		opcode, flags    uint8
		_                uint16
		nsid, cdw2, cdw3 uint32
		metadata, addr   uint64
		metaLen, dataLen uint32
		cdw              [6]uint32
		timeout, result  uint32
	}{opcode: 2, addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), dataLen: n, cdw: [6]uint32{uint32(page) | (n/4-1)<<16}}
	const ioctlAdmin = 0xc0484e41
	status, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), ioctlAdmin, uintptr(unsafe.Pointer(&cmd)))
	if errno != 0 {
		return nil, errno
	}
	if status != 0 {
		return nil, syscall.EIO
	}
	return b, nil
}
