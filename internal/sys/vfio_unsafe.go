package sys

// PCI devices of this process, by vfio: their BARs mapped, and memory that they reach through the IOMMU. The device is
// one that vfio-pci has, behind an IOMMU.
//
// All calls are ioctls. They are sound because each passes the struct that its request is defined with, or an address
// of bytes that the kernel reads to their end. The addresses of memory in them are of mappings made here, which the Go
// collector does not know and does not move. Registers are read and written at aligned places inside of a mapping.

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From the kernel's linux/vfio.h.
const (
	vfioSetIOMMU       = 0x3b66
	vfioGroupStatus    = 0x3b67
	vfioGroupContainer = 0x3b68
	vfioGroupDevice    = 0x3b6a
	vfioRegionInfo     = 0x3b6c
	vfioDeviceReset    = 0x3b6f
	vfioMapDMA         = 0x3b71
	vfioUnmapDMA       = 0x3b72

	vfioType1v2IOMMU   = 3
	vfioGroupViable    = 1
	vfioRegionMappable = 1 << 2
	vfioConfigRegion   = 7
	vfioMapReadWrite   = 3
)

type (
	vfioGroupArg  struct{ argsz, flags uint32 }
	vfioRegionArg struct {
		argsz, flags, index, capOffset uint32
		size, offset                   uint64
	}
	vfioMapArg struct {
		argsz, flags      uint32
		vaddr, iova, size uint64
	}
	vfioUnmapArg struct {
		argsz, flags uint32
		iova, size   uint64
	}
)

// PCIRange is addresses on the bus.
type PCIRange struct{ Start, Size uint64 }

// PCIBARs returns where on the bus the BARs of a device are; those that it does not have are empty.
func PCIBARs(address string) (bars [6]PCIRange, err error) {
	text, err := os.ReadFile("/sys/bus/pci/devices/" + address + "/resource")
	if err != nil {
		return bars, err
	}
	return parseBARs(string(text))
}

// parseBARs reads the first lines of the file resource: first address, last address, flags.
func parseBARs(text string) (bars [6]PCIRange, err error) {
	lines := strings.Split(text, "\n")
	for i := range min(len(bars), len(lines)) {
		var first, last, flags uint64
		if _, err := fmt.Sscanf(lines[i], "%v %v %v", &first, &last, &flags); err != nil || last < first {
			return bars, fmt.Errorf("resource %q: %w", lines[i], unix.EINVAL)
		}
		if last > 0 {
			bars[i] = PCIRange{first, last - first + 1}
		}
	}
	return bars, nil
}

// VFIO is a PCI device that belongs to this process.
type VFIO struct {
	fds                      []int // in the order of opening
	container, group, device int
}

// OpenVFIO opens the device with an address, as in "0000:00:04.0".
//
// Errors: ENOENT if there is no such device, no IOMMU, or vfio does not have the device; EBUSY if another process has
// it, or another driver has a device of its group.
func OpenVFIO(address string) (v *VFIO, err error) {
	link, err := os.Readlink("/sys/bus/pci/devices/" + address + "/iommu_group")
	if err != nil {
		return nil, fmt.Errorf("the IOMMU group of %s: %w", address, err)
	}
	v = &VFIO{}
	defer func() {
		if err != nil {
			v.Close()
		}
	}()
	for _, open := range []struct {
		to   *int
		name string
	}{{&v.container, "/dev/vfio/vfio"}, {&v.group, "/dev/vfio/" + filepath.Base(link)}} {
		if *open.to, err = unix.Open(open.name, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
			return nil, fmt.Errorf("%s: %w", open.name, err)
		}
		v.fds = append(v.fds, *open.to)
	}
	status := vfioGroupArg{argsz: uint32(unsafe.Sizeof(vfioGroupArg{}))}
	if _, err := vfioCall(v.group, vfioGroupStatus, unsafe.Pointer(&status)); err != nil {
		return nil, fmt.Errorf("VFIO_GROUP_GET_STATUS: %w", err)
	}
	if status.flags&vfioGroupViable == 0 {
		return nil, fmt.Errorf("another driver has a device of the group of %s: %w", address, unix.EBUSY)
	}
	of := int32(v.container)
	if _, err := vfioCall(v.group, vfioGroupContainer, unsafe.Pointer(&of)); err != nil {
		return nil, fmt.Errorf("VFIO_GROUP_SET_CONTAINER: %w", err)
	}
	if err := unix.IoctlSetInt(v.container, vfioSetIOMMU, vfioType1v2IOMMU); err != nil {
		return nil, fmt.Errorf("VFIO_SET_IOMMU: %w", err)
	}
	name := append([]byte(address), 0)
	if v.device, err = vfioCall(v.group, vfioGroupDevice, unsafe.Pointer(&name[0])); err != nil {
		return nil, fmt.Errorf("VFIO_GROUP_GET_DEVICE_FD of %s: %w", address, err)
	}
	v.fds = append(v.fds, v.device)
	return v, nil
}

// Close gives the device back. What was mapped of it stays mapped, and the process faults if it uses that.
func (v *VFIO) Close() {
	for i := len(v.fds) - 1; i >= 0; i-- {
		_ = CloseFD(v.fds[i]) // it is open: it cannot fail
	}
	v.fds = nil
}

// Reset resets the function, if it can be reset alone.
func (v *VFIO) Reset() error {
	_, err := vfioCall(v.device, vfioDeviceReset, nil)
	return err
}

// SetBusMaster lets the device access memory, and be accessed.
func (v *VFIO) SetBusMaster() error {
	const command, memory, master = 4, 1 << 1, 1 << 2
	r, err := v.region(vfioConfigRegion)
	if err != nil {
		return err
	}
	var b [2]byte
	if _, err := unix.Pread(v.device, b[:], int64(r.offset)+command); err != nil {
		return fmt.Errorf("reading the command register: %w", err)
	}
	binary.LittleEndian.PutUint16(b[:], binary.LittleEndian.Uint16(b[:])|memory|master)
	if _, err := unix.Pwrite(v.device, b[:], int64(r.offset)+command); err != nil {
		return fmt.Errorf("writing the command register: %w", err)
	}
	return nil
}

func (v *VFIO) region(index int) (vfioRegionArg, error) {
	r := vfioRegionArg{argsz: uint32(unsafe.Sizeof(vfioRegionArg{})), index: uint32(index)}
	if _, err := vfioCall(v.device, vfioRegionInfo, unsafe.Pointer(&r)); err != nil {
		return r, fmt.Errorf("VFIO_DEVICE_GET_REGION_INFO %d: %w", index, err)
	}
	return r, nil
}

// BARSize returns the size of a BAR; 0: there is none.
func (v *VFIO) BARSize(bar int) (uint64, error) {
	r, err := v.region(bar)
	return r.size, err
}

// MapBAR maps n bytes of a BAR, whole pages. UnmapMemory ends that.
//
// Errors: EINVAL if they do not lie in the BAR, or it cannot be mapped.
func (v *VFIO) MapBAR(bar int, off, n uint64) ([]byte, error) {
	r, err := v.region(bar)
	if err != nil {
		return nil, err
	}
	if off > r.size || n == 0 || n > r.size-off || n > uint64(maxInt) || r.flags&vfioRegionMappable == 0 {
		return nil, fmt.Errorf("%d bytes at %#x of BAR %d, which has %d: %w", n, off, bar, r.size, unix.EINVAL)
	}
	return unix.Mmap(v.device, int64(r.offset+off), int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// UnmapMemory ends a mapping of MapBAR or MapDMA.
func UnmapMemory(b []byte) error { return unix.Munmap(b) }

// NewDMA makes memory of n bytes, whole pages, and has the device reach it at an address.
func (v *VFIO) NewDMA(n int, iova uint64) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	arg := vfioMapArg{argsz: uint32(unsafe.Sizeof(vfioMapArg{})), flags: vfioMapReadWrite,
		vaddr: uint64(uintptr(unsafe.Pointer(&b[0]))), iova: iova, size: uint64(n)}
	if _, err := vfioCall(v.container, vfioMapDMA, unsafe.Pointer(&arg)); err != nil {
		_ = unix.Munmap(b) // the first error says more
		return nil, fmt.Errorf("VFIO_IOMMU_MAP_DMA of %d bytes at %#x: %w", n, iova, err)
	}
	return b, nil
}

// FreeDMA takes memory of NewDMA away from the device and gives it back.
func (v *VFIO) FreeDMA(b []byte, iova uint64) error {
	arg := vfioUnmapArg{argsz: uint32(unsafe.Sizeof(vfioUnmapArg{})), iova: iova, size: uint64(len(b))}
	if _, err := vfioCall(v.container, vfioUnmapDMA, unsafe.Pointer(&arg)); err != nil {
		return fmt.Errorf("VFIO_IOMMU_UNMAP_DMA: %w", err)
	}
	return unix.Munmap(b)
}

// ReadRegister and WriteRegister access 4 bytes of a mapped BAR, at a multiple of 4 inside of it, by one instruction.
// PCI is little-endian.
func ReadRegister(b []byte, off uint32) uint32 {
	var v [4]byte
	binary.NativeEndian.PutUint32(v[:], atomic.LoadUint32(registerAt(b, off)))
	return binary.LittleEndian.Uint32(v[:])
}

// WriteRegister is ReadRegister's counterpart.
func WriteRegister(b []byte, off uint32, value uint32) {
	var v [4]byte
	binary.LittleEndian.PutUint32(v[:], value)
	atomic.StoreUint32(registerAt(b, off), binary.NativeEndian.Uint32(v[:]))
}

func registerAt(b []byte, off uint32) *uint32 {
	return (*uint32)(unsafe.Pointer(&b[off : off+4 : off+4][0]))
}

func vfioCall(fd int, request uintptr, arg unsafe.Pointer) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}
