package dmabuftest

// dma-bufs of a PCI device's memory, which vfio exports from Linux 7.x on: memory that no process can map
// by the descriptor. It takes a device behind an IOMMU that no driver has.
//
// All calls are ioctls. They are sound because each passes the struct that its request is defined with, or
// an address of bytes that the kernel reads to their end, and no struct here has a pointer in it.

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// From the kernel's linux/vfio.h.
const (
	vfioSetIOMMU         = 0x3b66
	vfioGroupContainer   = 0x3b68
	vfioGroupDevice      = 0x3b6a
	vfioRegionInfo       = 0x3b6c
	vfioDeviceFeature    = 0x3b75
	vfioType1IOMMU       = 1
	vfioFeatureGet       = 1 << 16
	vfioFeatureDMABuf    = 11
	vfioPCIBARs          = 6
	vfioBusDriver        = "/sys/bus/pci/drivers/vfio-pci"
	qemuNVMe             = "1b36 0010" // the emulator's device with memory of its own
	qemuNVMeVendor, nvme = "0x1b36\n", "0x0010\n"
)

// The kernel's structs of these calls.
type (
	vfioRegionInfoArg struct {
		argsz, flags, index, capOffset uint32
		size, offset                   uint64
	}
	vfioDMABufArg struct {
		argsz, feature                        uint32
		region, openFlags, flags, rangesCount uint32
		offset, length                        uint64
	}
)

// NewVFIO makes a dma-buf of size bytes of the largest memory of the emulator's NVMe device, which it takes
// for itself. Absent reports whether the machine or its kernel does not have that.
func NewVFIO(size uint64) (fd int, cleanup func(), err error) {
	address, err := vfioAddress()
	if err != nil {
		return -1, nil, err
	}
	link, err := os.Readlink("/sys/bus/pci/devices/" + address + "/iommu_group")
	if err != nil {
		return -1, nil, fmt.Errorf("an IOMMU: %w", err)
	}
	var open []int
	closeAll := func() {
		for _, fd := range open {
			_ = sys.CloseFD(fd) // it is open: it cannot fail
		}
	}
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	for _, name := range []string{"/dev/vfio/vfio", "/dev/vfio/" + filepath.Base(link)} {
		fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1, nil, fmt.Errorf("%s: %w", name, err)
		}
		open = append(open, fd)
	}
	container, group := open[0], open[1]
	of := int32(container)
	if _, err := ioctl(group, vfioGroupContainer, unsafe.Pointer(&of)); err != nil {
		return -1, nil, fmt.Errorf("VFIO_GROUP_SET_CONTAINER: %w", err)
	}
	if err := unix.IoctlSetInt(container, vfioSetIOMMU, vfioType1IOMMU); err != nil {
		return -1, nil, fmt.Errorf("VFIO_SET_IOMMU: %w", err)
	}
	name := append([]byte(address), 0)
	device, err := ioctl(group, vfioGroupDevice, unsafe.Pointer(&name[0]))
	if err != nil {
		return -1, nil, fmt.Errorf("VFIO_GROUP_GET_DEVICE_FD of %s: %w", address, err)
	}
	open = append(open, device)
	var region, most = uint32(0), uint64(0)
	for i := range uint32(vfioPCIBARs) {
		info := vfioRegionInfoArg{argsz: uint32(unsafe.Sizeof(vfioRegionInfoArg{})), index: i}
		if _, err := ioctl(device, vfioRegionInfo, unsafe.Pointer(&info)); err != nil {
			return -1, nil, fmt.Errorf("VFIO_DEVICE_GET_REGION_INFO %d: %w", i, err)
		}
		if info.size > most {
			region, most = i, info.size
		}
	}
	if most < size {
		return -1, nil, fmt.Errorf("the device has %d bytes of memory: %w", most, unix.ENODEV)
	}
	arg := vfioDMABufArg{argsz: uint32(unsafe.Sizeof(vfioDMABufArg{})), feature: vfioFeatureGet | vfioFeatureDMABuf,
		region: region, openFlags: unix.O_RDWR | unix.O_CLOEXEC, rangesCount: 1, length: size}
	fd, err = ioctl(device, vfioDeviceFeature, unsafe.Pointer(&arg))
	if errors.Is(err, unix.ENOTTY) {
		err = fmt.Errorf("this kernel's vfio exports no dma-bufs: %w", unix.ENODEV)
	}
	if err != nil {
		return -1, nil, fmt.Errorf("region %d of %s as a dma-buf: %w", region, address, err)
	}
	open = append(open, fd)
	return fd, closeAll, nil
}

// vfioAddress returns the address of the NVMe device, which it gives to vfio.
func vfioAddress() (string, error) {
	if err := os.WriteFile(vfioBusDriver+"/new_id", []byte(qemuNVMe), 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return "", err
	}
	all, err := filepath.Glob(vfioBusDriver + "/*/vendor")
	if err != nil {
		return "", err
	}
	for _, vendor := range all {
		dir := filepath.Dir(vendor)
		v, _ := os.ReadFile(vendor)          // it fails if the device has gone
		d, _ := os.ReadFile(dir + "/device") // so does this
		if strings.EqualFold(string(v), qemuNVMeVendor) && strings.EqualFold(string(d), nvme) {
			return filepath.Base(dir), nil
		}
	}
	return "", fmt.Errorf("no NVMe device of the emulator: %w", unix.ENODEV)
}

func ioctl(fd int, request uintptr, arg unsafe.Pointer) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}
