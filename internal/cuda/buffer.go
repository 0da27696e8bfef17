package cuda

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Buffer is a part of a dma-buf that the driver has exported. The CPU cannot map such a buffer,
// and the descriptor does not say whose memory it is: that is known from the export, if it was
// seen, or else from the address that the caller gives for requests, which programs make that of
// the memory.
type Buffer struct {
	FD             int
	Offset, Length uint64
	IOVA           uint64

	// Exported is where the buffer's first byte lies on the GPU, and Size its length; 0 if the
	// export was not seen.
	Exported, Size uint64
}

// exporter is the kernel's name of the driver's dma-bufs.
const exporter = "nv_dmabuf"

// IsBuffer reports whether the driver has exported a dma-buf.
func (b *Buffer) IsBuffer() bool {
	if b.Exported != 0 {
		return true
	}
	info, err := sys.DMABufInfoOf(b.FD)
	return err == nil && info.Exporter == exporter
}

// addr returns the address of the part on the GPU, after it has checked that it is one.
func (b *Buffer) addr(op string, d *Driver) (uint64, error) {
	size := b.Size
	if b.Exported == 0 {
		info, err := sys.DMABufInfoOf(b.FD)
		if err != nil {
			return 0, ib.Errorf(op, syscall.EBADF, "%v", err)
		}
		size = info.Size
	}
	if b.Length == 0 || b.Offset > size || b.Length > size-b.Offset {
		return 0, ib.Errorf(op, syscall.EINVAL, "%d bytes at %d are not inside a buffer of %d", b.Length, b.Offset, size)
	}
	if b.Exported != 0 {
		return b.Exported + b.Offset, nil
	}
	if p, ok := d.ask(b.IOVA); !ok || !p.isDevice() {
		return 0, ib.Errorf(op, syscall.EINVAL, "nothing says which memory the dma-buf of descriptor %d is: the address for requests, %#x, is not one of a GPU's memory, and the export was not seen (verbena exec sees it)", b.FD, b.IOVA)
	}
	return b.IOVA, nil
}

// RegisterBuffer registers a part of a dma-buf that the driver has exported. ctx is as for Find. The caller has checked
// what the kernel checks for any dma-buf.
func (d *Driver) RegisterBuffer(pd provider.PD, b Buffer, access ib.Access, ctx uintptr) (provider.MR, error) {
	addr, err := b.addr("reg_dmabuf_mr", d)
	if err != nil {
		return nil, err
	}
	return d.Register(pd, addr, b.Length, b.IOVA, access, ctx)
}

// ReregBuffer registers a region anew, with a part of a dma-buf that the driver has exported.
func (d *Driver) ReregBuffer(mr provider.MR, b Buffer, c provider.MRChange, ctx uintptr) error {
	addr, err := b.addr("rereg_mr", d)
	if err != nil {
		return &ib.ReregError{State: ib.ReregOldValid, Err: err}
	}
	return d.Rereg(mr, addr, b.Length, b.IOVA, c, ctx)
}
