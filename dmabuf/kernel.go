package dmabuf

// Buffers of the kernel: of udmabuf, a dma-heap, a driver of graphics. This process is their
// importer by mapping them, and their exporter towards its own devices.
//
// They do not move as far as a process can see: the kernel changes the mapping underneath. What
// the kernel's exporter has to do around accesses of the CPU, and so of our devices, is asked for
// when a device maps the buffer (DMA_BUF_IOCTL_SYNC), and ended when it unmaps it.
//
// SYNC also waits for the fences of readers and writers. Devices do not wait for those, so a
// device that maps a buffer with such fences goes without SYNC: it matters only where the CPU's
// caches and devices are not coherent.

import (
	"errors"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// kernelBuffer is a dma-buf of the kernel.
type kernelBuffer struct {
	fd     int
	b      []byte
	synced int // mappings that have begun with SYNC; guarded by the reservation lock
}

// fromKernel makes a buffer of a descriptor of the kernel's.
func fromKernel(op string, fd int) (*Buffer, error) {
	own, err := sys.DupFD(fd) // the program may close or replace its own meanwhile
	if err != nil {
		return nil, descriptorError(op, err)
	}
	b, err := openKernel(op, own)
	if err != nil {
		_ = sys.CloseFD(own) // the first error says more
		return nil, err
	}
	return b, nil
}

func openKernel(op string, fd int) (*Buffer, error) {
	info, err := sys.DMABufInfoOf(fd)
	if err != nil {
		return nil, ib.Errorf(op, syscall.EINVAL, "the descriptor is not that of a dma-buf")
	}
	m, err := sys.MapDMABuf(fd, info.Size, true)
	switch {
	case errors.Is(err, syscall.EACCES):
		return nil, ib.Errorf(op, syscall.EACCES, "the dma-buf of %s is read-only", info.Exporter)
	case errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EAGAIN):
		return nil, ib.Errorf(op, syscall.ENOMEM, "the dma-buf of %s: %v", info.Exporter, err)
	case err != nil: // EINVAL from exporters without mmap, as vfio's
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "the CPU cannot map the dma-buf of %s, and this device moves memory by the CPU: %v", info.Exporter, err)
	}
	k := &kernelBuffer{fd: fd, b: m}
	b, err := Export(Config{Size: info.Size, Exporter: info.Exporter, Priv: k, Ops: Ops{
		Map: func(*Attachment, Direction) (*Table, error) {
			if sys.DMABufIdle(k.fd) {
				if err := k.sync(Bidirectional, false); err != nil {
					return nil, err
				}
				k.synced++
			}
			return NewTable(k.b), nil
		},
		Unmap: func(*Attachment, *Table, Direction) {
			if k.synced > 0 {
				k.synced--
				_ = k.sync(Bidirectional, true) // it fails only for wrong arguments
			}
		},
		BeginCPUAccess: func(_ *Buffer, dir Direction) error { return k.sync(dir, false) },
		EndCPUAccess:   func(_ *Buffer, dir Direction) error { return k.sync(dir, true) },
		Mmap:           func(_ *Buffer, off, n uint64) ([]byte, error) { return k.b[off:][:n], nil },
		Vmap:           func(*Buffer) ([]byte, error) { return k.b, nil },
		Vunmap:         func(*Buffer, []byte) {},
		Release:        func(*Buffer) { k.close() },
	}})
	if err != nil {
		_ = sys.Unmap(m) // the first error says more
		return nil, err
	}
	if name := info.Name; len(name) <= maxName {
		_ = b.SetName(name) // it is not too long
	}
	return b, nil
}

// sync begins or ends accesses of the CPU. A device that writes memory is, to the kernel, a CPU
// that does.
func (k *kernelBuffer) sync(dir Direction, end bool) error {
	// FromDevice: the CPU reads what a device has written.
	return sys.DMABufSync(k.fd, dir != ToDevice, dir != FromDevice, end)
}

func (k *kernelBuffer) close() {
	_ = sys.Unmap(k.b) // it is our own mapping
	_ = sys.CloseFD(k.fd)
}
