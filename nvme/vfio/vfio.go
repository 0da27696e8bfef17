// Package vfio gives a real NVMe controller to package driver: its registers, memory that it reaches through the IOMMU,
// and its controller memory buffer. The machine needs an IOMMU, and the controller the driver vfio-pci:
//
//	echo vfio-pci >/sys/bus/pci/devices/0000:01:00.0/driver_override
//	echo 0000:01:00.0 >/sys/bus/pci/drivers/nvme/unbind
//	echo 0000:01:00.0 >/sys/bus/pci/drivers_probe
//
// Then:
//
//	dev, err := vfio.Open("0000:01:00.0")
//	c, err := driver.Open(dev, dev, &driver.Config{MapBAR: dev.MapBAR})
package vfio

import (
	"fmt"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/driver"
)

// Device is a controller that belongs to this process. It is the registers and the memory that driver.Open takes.
type Device struct {
	dev  *sys.VFIO
	bars [6]sys.PCIRange

	regsMu sync.RWMutex // guards regs; held for reading by whoever accesses a register
	regs   []byte       // the first BAR; empty after Close

	mu     sync.Mutex // guards what follows
	next   uint64     // the address of the next memory
	held   int        // pieces of memory and mappings that were not given back
	closed bool
}

var (
	_ nvme.Registers = (*Device)(nil)
	_ driver.DMA     = (*Device)(nil)
)

const (
	pageSize = 4096

	// Addresses of memory begin above 4 GiB: below lies what IOMMUs keep for interrupts.
	firstAddr = 1 << 32
)

// Open takes a controller by its PCI address. vfio-pci has it already.
//
// Errors: ENOENT if vfio does not have it, or there is no IOMMU; EBUSY if another process has it; ENODEV if its first
// BAR is no NVMe controller's.
func Open(address string) (*Device, error) {
	const op = "nvme_vfio_open"
	dev, err := sys.OpenVFIO(address)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	d := &Device{dev: dev, next: firstAddr}
	if err := d.open(op, address); err != nil {
		dev.Close()
		return nil, err
	}
	return d, nil
}

func (d *Device) open(op, address string) error {
	var err error
	if d.bars, err = sys.PCIBARs(address); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if err := d.dev.SetBusMaster(); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	size, err := d.dev.BARSize(0)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if size < 2*pageSize {
		return ib.Errorf(op, syscall.ENODEV, "%s: a first BAR of %d bytes", address, size)
	}
	if d.regs, err = d.dev.MapBAR(0, 0, size&^(pageSize-1)); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// Close gives the controller back. The driver has been closed before. Registers read as all ones from then on, and
// writes of them do nothing.
//
// Errors: EBUSY if memory is still in use.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return nil
	case d.held > 0:
		return ib.Errorf("nvme_vfio_close", syscall.EBUSY, "%d pieces of memory are in use", d.held)
	}
	d.closed = true
	d.regsMu.Lock()
	err := sys.UnmapMemory(d.regs)
	d.regs = nil
	d.regsMu.Unlock()
	d.dev.Close()
	return err
}

// insideLocked reports whether n bytes of registers are there.
func (d *Device) insideLocked(off uint32, n int) bool {
	return off%4 == 0 && n <= len(d.regs) && int64(off) <= int64(len(d.regs)-n)
}

// Read32 reads 4 bytes of the first BAR; all ones where there is nothing.
func (d *Device) Read32(off uint32) uint32 {
	d.regsMu.RLock()
	defer d.regsMu.RUnlock()
	if !d.insideLocked(off, 4) {
		return ^uint32(0)
	}
	return sys.ReadRegister(d.regs, off)
}

// Write32 writes 4 bytes of the first BAR.
func (d *Device) Write32(off uint32, v uint32) {
	d.regsMu.RLock()
	defer d.regsMu.RUnlock()
	if d.insideLocked(off, 4) {
		sys.WriteRegister(d.regs, off, v)
	}
}

// Read64 reads 8 bytes, in two halves: not all controllers take more at once.
func (d *Device) Read64(off uint32) uint64 {
	return uint64(d.Read32(off)) | uint64(d.Read32(off+4))<<32
}

// Write64 writes 8 bytes, in two halves, the lower one first.
func (d *Device) Write64(off uint32, v uint64) {
	d.Write32(off, uint32(v))
	d.Write32(off+4, uint32(v>>32))
}

// Alloc makes memory that the controller reaches.
func (d *Device) Alloc(n int) (driver.Memory, error) {
	const op = "nvme_vfio_alloc"
	if n <= 0 || n > 1<<40 {
		return driver.Memory{}, ib.Errorf(op, syscall.EINVAL, "%d bytes", n)
	}
	n = (n + pageSize - 1) &^ (pageSize - 1)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return driver.Memory{}, ib.Errorf(op, syscall.ENODEV, "the device is closed")
	}
	addr := d.place(uint64(n))
	b, err := d.dev.NewDMA(n, addr)
	if err != nil {
		return driver.Memory{}, fmt.Errorf("%s: %w", op, err)
	}
	d.next = addr + uint64(n) + pageSize // a hole behind it, which faults
	d.held++
	return driver.Memory{Bytes: b, Addr: addr, Release: sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.dev.FreeDMA(b, addr) == nil {
			d.held--
		}
	})}, nil
}

// place returns an address for n bytes that is none of the device's own: a controller does not look for its own memory
// on the bus.
func (d *Device) place(n uint64) uint64 {
	addr := d.next
	for again := true; again; {
		again = false
		for _, b := range d.bars {
			if b.Size > 0 && addr < b.Start+b.Size && b.Start < addr+n {
				addr = (b.Start + b.Size + pageSize - 1) &^ (pageSize - 1)
				again = true
			}
		}
	}
	return addr
}

// MapBAR maps a part of a BAR, or as much of it as there is: what driver.Config.MapBAR does for controller memory
// buffers. The address is that of the BAR on the bus, by which peers know it, too.
func (d *Device) MapBAR(bar int, off, n uint64) (driver.Memory, error) {
	const op = "nvme_vfio_map_bar"
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return driver.Memory{}, ib.Errorf(op, syscall.ENODEV, "the device is closed")
	}
	size, err := d.dev.BARSize(bar)
	if err != nil {
		return driver.Memory{}, fmt.Errorf("%s: %w", op, err)
	}
	if bar < 0 || bar >= len(d.bars) || off >= size {
		return driver.Memory{}, ib.Errorf(op, syscall.EINVAL, "offset %#x of BAR %d, which has %d bytes", off, bar, size)
	}
	b, err := d.dev.MapBAR(bar, off, min(n, size-off))
	if err != nil {
		return driver.Memory{}, fmt.Errorf("%s: %w", op, err)
	}
	d.held++
	return driver.Memory{Bytes: b, Addr: d.bars[bar].Start + off, Release: sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if sys.UnmapMemory(b) == nil {
			d.held--
		}
	})}, nil
}
