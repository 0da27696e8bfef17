package sys

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The number of an ioctl is made of the direction, the size of its struct, the group and a number
// in it (asm-generic/ioctl.h). So a struct that differs from the kernel's gives itself away.
func TestDMABufNumbers(t *testing.T) {
	const in, out = 1, 2 // for the kernel to read, for the kernel to write
	for _, c := range []struct {
		name              string
		number, direction uint32
		size              uintptr
		group             byte
		index             uint32
	}{
		{"DMA_BUF_IOCTL_SYNC", dmaBufIoctlSync, in, unsafe.Sizeof(dmaBufSyncArg{}), 'b', 0},
		{"DMA_BUF_IOCTL_EXPORT_SYNC_FILE", dmaBufIoctlExportSyncFile, in | out, unsafe.Sizeof(dmaBufSyncFileArg{}), 'b', 2},
		{"DMA_BUF_IOCTL_IMPORT_SYNC_FILE", dmaBufIoctlImportSyncFile, in, unsafe.Sizeof(dmaBufSyncFileArg{}), 'b', 3},
		{"UDMABUF_CREATE_LIST", udmabufCreateList, in, 8, 'u', 0x43}, // of the list's head
		{"DMA_HEAP_IOCTL_ALLOC", dmaHeapIoctlAlloc, in | out, unsafe.Sizeof(dmaHeapAllocArg{}), 'H', 0},
		{"DRM_IOCTL_VERSION", drmIoctlVersion, in | out, unsafe.Sizeof(drmVersionArg{}), 'd', 0},
		{"DRM_IOCTL_GEM_CLOSE", drmIoctlGEMClose, in, unsafe.Sizeof(drmGEMCloseArg{}), 'd', 9},
		{"DRM_IOCTL_PRIME_HANDLE_TO_FD", drmIoctlPrimeHandleToFD, in | out, unsafe.Sizeof(drmPrimeHandleArg{}), 'd', 0x2d},
		{"DRM_IOCTL_PRIME_FD_TO_HANDLE", drmIoctlPrimeFDToHandle, in | out, unsafe.Sizeof(drmPrimeHandleArg{}), 'd', 0x2e},
		{"DRM_IOCTL_MODE_CREATE_DUMB", drmIoctlCreateDumb, in | out, unsafe.Sizeof(drmCreateDumbArg{}), 'd', 0xb2},
		{"DRM_IOCTL_VGEM_FENCE_ATTACH", vgemIoctlFenceAttach, in | out, unsafe.Sizeof(vgemFenceAttachArg{}), 'd', 0x41},
		{"DRM_IOCTL_VGEM_FENCE_SIGNAL", vgemIoctlFenceSignal, in, unsafe.Sizeof(vgemFenceSignalArg{}), 'd', 0x42},
	} {
		if want := c.direction<<30 | uint32(c.size)<<16 | uint32(c.group)<<8 | c.index; c.number != want {
			t.Errorf("%s is %#x, should be %#x", c.name, c.number, want)
		}
	}
	for _, c := range []struct {
		name         string
		offset, want uintptr
	}{
		{"dma_buf_export_sync_file.fd", unsafe.Offsetof(dmaBufSyncFileArg{}.fd), 4},
		{"dma_heap_allocation_data.fd", unsafe.Offsetof(dmaHeapAllocArg{}.fd), 8},
		{"dma_heap_allocation_data.fd_flags", unsafe.Offsetof(dmaHeapAllocArg{}.fdFlags), 12},
		{"dma_heap_allocation_data.heap_flags", unsafe.Offsetof(dmaHeapAllocArg{}.heapFlags), 16},
		{"drm_version.name_len", unsafe.Offsetof(drmVersionArg{}.nameLen), 16},
		{"drm_version.name", unsafe.Offsetof(drmVersionArg{}.name), 24},
		{"drm_prime_handle.fd", unsafe.Offsetof(drmPrimeHandleArg{}.fd), 8},
		{"drm_mode_create_dumb.handle", unsafe.Offsetof(drmCreateDumbArg{}.handle), 16},
		{"drm_mode_create_dumb.size", unsafe.Offsetof(drmCreateDumbArg{}.size), 24},
		{"drm_vgem_fence_attach.out_fence", unsafe.Offsetof(vgemFenceAttachArg{}.outFence), 8},
	} {
		if c.offset != c.want {
			t.Errorf("%s is at %d, should be at %d", c.name, c.offset, c.want)
		}
	}
}

func TestParseDMABufInfo(t *testing.T) {
	for _, c := range []struct {
		text string
		want DMABufInfo
		ok   bool
	}{
		{"pos:\t0\nflags:\t02\nmnt_id:\t9\nino:\t3\nsize:\t4096\ncount:\t2\nexp_name:\tsystem\n", DMABufInfo{4096, "system", ""}, true},
		{"size:\t18446744073709551615\ncount:\t2\nexp_name:\tudmabuf\nname:\tscreen\n", DMABufInfo{1<<64 - 1, "udmabuf", "screen"}, true},
		{"size:\t4096\nexp_name:\tudmabuf\nname:\ta\nsize:\t1\nexp_name:\tb\n", DMABufInfo{4096, "udmabuf", "a\nsize:\t1\nexp_name:\tb"}, true},
		{"size:\t18446744073709551616\nexp_name:\tudmabuf\n", DMABufInfo{}, false},
		{"pos:\t0\nflags:\t02\nmnt_id:\t9\nino:\t3\n", DMABufInfo{}, false},
		{"size:\t4096\n", DMABufInfo{4096, "", ""}, false},
		{"exp_name:\tsystem", DMABufInfo{0, "system", ""}, false},
		{"size:\texp_name:\tx\n", DMABufInfo{}, false},
		{"", DMABufInfo{}, false},
	} {
		if info, ok := parseDMABufInfo(c.text); info != c.want || ok != c.ok {
			t.Errorf("%q: %+v, %v", c.text, info, ok)
		}
	}
}

// What is no dma-buf is recognised as that. The kernel's dma-bufs are tested in package dmabuftest.
func TestNoDMABuf(t *testing.T) {
	before := openFDs(t)
	for _, fd := range []int{-1, 1 << 20} {
		if _, err := DMABufInfoOf(fd); !errors.Is(err, unix.EBADF) {
			t.Errorf("descriptor %d: %v", fd, err)
		}
		if err := DMABufSync(fd, true, false, false); !errors.Is(err, unix.EBADF) {
			t.Errorf("descriptor %d: %v", fd, err)
		}
	}
	h, err := NewHandle("dmabuf:verbena-test", 4096, func() {})
	if err != nil {
		t.Fatal(err)
	}
	fd := handleFD(t, h)
	named := filepath.Join(t.TempDir(), "dmabuf:x")
	file, err := os.Create(named)
	if err != nil {
		t.Fatal(err)
	}
	read, write, err := NewPipe()
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range []int{fd, int(file.Fd()), read} {
		if info, err := DMABufInfoOf(fd); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%+v, %v", info, err)
		}
		if err := checkSoleHolder(fd); !errors.Is(err, unix.ENOTSUP) {
			t.Errorf("who holds it: %v", err)
		}
		if err := DMABufSync(fd, true, true, true); !errors.Is(err, unix.ENOTTY) {
			t.Errorf("SYNC: %v", err)
		}
		if got, err := DMABufExportSyncFile(fd, true); got != -1 || !errors.Is(err, unix.ENOTTY) {
			t.Errorf("EXPORT: %d, %v", got, err)
		}
		if err := DMABufImportSyncFile(fd, fd, true); !errors.Is(err, unix.ENOTTY) {
			t.Errorf("IMPORT: %v", err)
		}
	}
	for _, size := range []uint64{0, 1 << 48, 1 << 63} {
		if b, err := MapDMABuf(fd, size, true); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%d bytes mapped: %d, %v", size, len(b), err)
		}
	}
	for _, heap := range []string{"", "../null", "/dev/null"} {
		if _, err := NewHeapDMABuf(heap, 4096); !errors.Is(err, unix.EINVAL) {
			t.Errorf("heap %q: %v", heap, err)
		}
	}
	if _, err := NewHeapDMABuf("verbena-no-heap", 4096); !errors.Is(err, unix.ENOENT) {
		t.Errorf("a heap that is not there: %v", err)
	}
	h.Close()
	file.Close()
	for _, fd := range []int{fd, read, write} {
		CloseFD(fd)
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// A file in the root directory can have the name of a dma-buf.
func TestFileNamedAsDMABuf(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("kernel: this user cannot make files in the root directory")
	}
	file, err := os.Create("/dmabuf:verbena-test")
	if errors.Is(err, unix.EROFS) {
		t.Skip("kernel: the root directory cannot be written to")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if info, err := DMABufInfoOf(int(file.Fd())); !errors.Is(err, unix.EINVAL) {
		t.Errorf("%+v, %v", info, err)
	}
}
