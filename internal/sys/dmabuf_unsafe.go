package sys

// The kernel's dma-bufs: what a descriptor of one tells, the synchronisation of the CPU's
// accesses, fences as sync files, and two of the kernel's exporters (udmabuf and heaps). The
// third one, which has fences of its own, is in vgem_unsafe.go.
//
// All calls are ioctls. They are sound because each passes the struct that its request is defined
// with, and no struct here has a pointer in it. That of a list is bytes, as many as its count says.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From the kernel's linux/dma-buf.h, linux/udmabuf.h and linux/dma-heap.h.
const (
	dmaBufIoctlSync           = 0x40086200
	dmaBufIoctlExportSyncFile = 0xc0086202
	dmaBufIoctlImportSyncFile = 0x40086203

	dmaBufSyncRead  = 1 << 0
	dmaBufSyncWrite = 1 << 1
	dmaBufSyncEnd   = 1 << 2

	udmabufCreateList  = 0x40087543
	udmabufFlagCloexec = 1

	dmaHeapIoctlAlloc = 0xc0184800

	syncIoctlFileInfo = 0xc0383e04 // of linux/sync_file.h
)

// The kernel's structs of these calls.
type (
	dmaBufSyncArg     struct{ flags uint64 }
	dmaBufSyncFileArg struct {
		flags uint32
		fd    int32
	}
	dmaHeapAllocArg struct {
		length      uint64
		fd, fdFlags uint32
		heapFlags   uint64
	}
	syncFileInfoArg struct {
		name                  [32]byte
		status                int32
		flags, numFences, pad uint32
		fences                uint64 // the address of an array; unused here
	}
)

// DMABufInfo is what the kernel says of one of its dma-bufs.
type DMABufInfo struct {
	Size     uint64
	Exporter string // the kernel's name of it: "udmabuf", "system" for that heap, "drm" for most graphics drivers
	Name     string // what a program has called the buffer; usually nothing
}

// DMABufInfoOf returns what the kernel says of a dma-buf. The error is EBADF if the descriptor is
// not open, and EINVAL if it is open and no dma-buf of the kernel.
func DMABufInfoOf(fd int) (DMABufInfo, error) {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		return DMABufInfo{}, fmt.Errorf("descriptor %d: %w", fd, err)
	}
	what, err := readFDLink(fd)
	if err != nil {
		return DMABufInfo{}, err
	}
	if !strings.HasPrefix(what, "/dmabuf:") {
		return DMABufInfo{}, fmt.Errorf("%q is no dma-buf: %w", what, unix.EINVAL)
	}
	text, err := readFDInfo(fd)
	if err != nil {
		return DMABufInfo{}, err
	}
	info, ok := parseDMABufInfo(text)
	if !ok { // a file may have any name
		return DMABufInfo{}, fmt.Errorf("%q is no dma-buf: %w", what, unix.EINVAL)
	}
	return info, nil
}

// readFDInfo returns the lines that the kernel has about an open file.
func readFDInfo(fd int) (string, error) {
	var text []byte
	var err error
	for _, dir := range procFDs {
		// fd becomes fdinfo
		if text, err = os.ReadFile(fmt.Sprintf("%sinfo/%d", dir, fd)); !errors.Is(err, unix.ENOENT) {
			break
		}
	}
	return string(text), err
}

// checkSoleHolder returns EAGAIN if a dma-buf is held other than by this descriptor: by another descriptor in
// whatever process, a mapping, or a driver that has imported it. The kernel counts them all in one place,
// because all descriptors of a dma-buf are one open file.
func checkSoleHolder(fd int) error {
	text, err := readFDInfo(fd)
	if err != nil {
		return err
	}
	_, count, ok := strings.Cut(text, "\ncount:\t") // before the name, which may have any bytes in it
	count, _, _ = strings.Cut(count, "\n")
	switch {
	case !ok:
		return fmt.Errorf("the kernel does not count who holds a dma-buf: %w", unix.ENOTSUP)
	case count != "1":
		return unix.EAGAIN
	}
	return nil
}

// parseDMABufInfo reads the lines that only a dma-buf has in fdinfo. The name comes last and may
// have any bytes in it, lines too: so the first line of each kind counts, and all behind "name:" is
// the name.
func parseDMABufInfo(text string) (info DMABufInfo, ok bool) {
	var hasSize, hasExporter bool
	for text != "" {
		line, rest, _ := strings.Cut(text, "\n")
		key, value, _ := strings.Cut(line, ":\t")
		switch {
		case key == "size" && !hasSize:
			size, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				return DMABufInfo{}, false
			}
			info.Size, hasSize = size, true
		case key == "exp_name" && !hasExporter:
			info.Exporter, hasExporter = value, true
		case key == "name":
			_, name, _ := strings.Cut(text, ":\t")
			info.Name = strings.TrimSuffix(name, "\n")
			rest = ""
		}
		text = rest
	}
	return info, hasSize && hasExporter
}

// MapDMABuf maps a dma-buf from its beginning, shared, for reading, and for writing if write is set.
// size may be less than the buffer's. It is unmapped by Unmap. The error is EINVAL or that of the
// exporter where it cannot be mapped.
func MapDMABuf(fd int, size uint64, write bool) ([]byte, error) {
	if size == 0 || size > maxMapping {
		return nil, fmt.Errorf("mapping %d bytes: %w", size, unix.EINVAL)
	}
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	b, err := unix.Mmap(fd, 0, int(size), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", size, err)
	}
	return b, nil
}

// DMABufIdle reports whether no fence of a reader or writer is pending on a dma-buf, so that
// DMABufSync does not wait.
func DMABufIdle(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLOUT}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1 && fds[0].Revents&(unix.POLLIN|unix.POLLOUT) == unix.POLLIN|unix.POLLOUT
}

// DMABufSync begins the CPU's accesses to a mapped dma-buf, or ends them. The beginning waits for
// the fences of those who write it, and if write is set of those who read it. At least one
// of read and write must be set: EINVAL.
func DMABufSync(fd int, read, write, end bool) error {
	arg := dmaBufSyncArg{flags: dmaBufAccess(read, write)}
	if end {
		arg.flags |= dmaBufSyncEnd
	}
	for {
		switch _, _, errno := ioctl(fd, dmaBufIoctlSync, unsafe.Pointer(&arg)); errno {
		case 0:
			return nil
		case unix.EAGAIN, unix.EINTR:
		default:
			return fmt.Errorf("DMA_BUF_IOCTL_SYNC: %w", errno)
		}
	}
}

func dmaBufAccess(read, write bool) (flags uint64) {
	if read {
		flags |= dmaBufSyncRead
	}
	if write {
		flags |= dmaBufSyncWrite
	}
	return flags
}

// DMABufExportSyncFile returns a sync file of the fences that a reader of a dma-buf waits for, or a
// writer if write is set. It is readable once all of them are signalled, and closed on exec. Fences
// that are added later are not in it. Kernels older than 6.0 have no sync files of dma-bufs: ENOTTY.
func DMABufExportSyncFile(fd int, write bool) (int, error) {
	arg := dmaBufSyncFileArg{flags: uint32(dmaBufAccess(!write, write)), fd: -1}
	if err := retryIoctl(fd, dmaBufIoctlExportSyncFile, unsafe.Pointer(&arg)); err != nil {
		return -1, fmt.Errorf("DMA_BUF_IOCTL_EXPORT_SYNC_FILE: %w", err)
	}
	return int(arg.fd), nil
}

// DMABufImportSyncFile adds the fences of a sync file to a dma-buf, as those of a reader, or of a
// writer if write is set. The sync file stays the caller's.
func DMABufImportSyncFile(fd, syncFile int, write bool) error {
	arg := dmaBufSyncFileArg{flags: uint32(dmaBufAccess(!write, write)), fd: int32(syncFile)}
	if err := retryIoctl(fd, dmaBufIoctlImportSyncFile, unsafe.Pointer(&arg)); err != nil {
		return fmt.Errorf("DMA_BUF_IOCTL_IMPORT_SYNC_FILE: %w", err)
	}
	return nil
}

// DMABufReady reports whether no fence is pending that a reader of a dma-buf waits for, or a writer if
// write is set.
func DMABufReady(fd int, write bool) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if write {
		fds[0].Events = unix.POLLOUT
	}
	for {
		n, err := unix.Poll(fds, 0)
		if err != unix.EINTR {
			return err == nil && n == 1
		}
	}
}

// syncFileStatus returns the status of a sync file: 1 if it is signalled, 0 if it is pending, and
// otherwise the negative errno with which it was signalled.
func syncFileStatus(fd int) (int32, error) {
	var arg syncFileInfoArg // room for no fences: the kernel tells of all together
	if err := retryIoctl(fd, syncIoctlFileInfo, unsafe.Pointer(&arg)); err != nil {
		return 0, fmt.Errorf("SYNC_IOC_FILE_INFO: %w", err)
	}
	return arg.status, nil
}

// retryIoctl repeats an ioctl that a signal has interrupted.
func retryIoctl(fd int, request uintptr, arg unsafe.Pointer) error {
	for {
		if _, _, errno := ioctl(fd, request, arg); errno != unix.EINTR {
			return errnoOrNil(0, 0, errno)
		}
	}
}

// UDMABufPart is a part of a memory file.
type UDMABufPart struct {
	FD           int
	Offset, Size uint64
}

// NewUDMABuf makes a dma-buf of parts of memory files, one behind the other, closed on exec. The buffer
// has the files' pages: what is written to one is seen in the other. The files must be sealed against
// shrinking and not against writing; offsets and sizes must be multiples of the page size. The kernel takes up to
// 1,024 parts and 64 MiB, unless udmabuf's parameters list_limit and size_limit_mb say otherwise. The error
// is ENOENT where the kernel has no udmabuf.
func NewUDMABuf(parts ...UDMABufPart) (int, error) {
	return withDevice("/dev/udmabuf", func(dev int) (int, error) {
		arg := binary.NativeEndian.AppendUint32(nil, udmabufFlagCloexec)
		arg = binary.NativeEndian.AppendUint32(arg, uint32(len(parts)))
		for _, p := range parts {
			arg = binary.NativeEndian.AppendUint32(arg, uint32(p.FD))
			arg = binary.NativeEndian.AppendUint32(arg, 0)
			arg = binary.NativeEndian.AppendUint64(arg, p.Offset)
			arg = binary.NativeEndian.AppendUint64(arg, p.Size)
		}
		fd, _, errno := ioctl(dev, udmabufCreateList, unsafe.Pointer(&arg[0]))
		if errno != 0 {
			return -1, fmt.Errorf("UDMABUF_CREATE_LIST of %d parts: %w", len(parts), errno)
		}
		return int(fd), nil
	})
}

// NewHeapDMABuf makes a dma-buf in a heap of the kernel, as "system", closed on exec. The kernel
// rounds the size up to whole pages. The error is ENOENT where there is no such heap.
func NewHeapDMABuf(heap string, size uint64) (int, error) {
	if heap == "" || strings.ContainsRune(heap, '/') {
		return -1, fmt.Errorf("a heap named %q: %w", heap, unix.EINVAL)
	}
	return withDevice("/dev/dma_heap/"+heap, func(dev int) (int, error) {
		arg := dmaHeapAllocArg{length: size, fdFlags: unix.O_RDWR | unix.O_CLOEXEC}
		if err := retryIoctl(dev, dmaHeapIoctlAlloc, unsafe.Pointer(&arg)); err != nil {
			return -1, fmt.Errorf("DMA_HEAP_IOCTL_ALLOC of %d bytes: %w", size, err)
		}
		return int(arg.fd), nil
	})
}

// withDevice calls f with a descriptor of a device, and closes that.
func withDevice(path string, f func(dev int) (int, error)) (int, error) {
	dev, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("%s: %w", path, err)
	}
	defer func() { _ = unix.Close(dev) }() // it is open: it cannot fail
	return f(dev)
}
