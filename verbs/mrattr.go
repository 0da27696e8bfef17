package verbs

import (
	"fmt"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// MRAttr says what a region is to be made of, whichever kind of memory that is. It is what libfabric's
// fi_mr_regattr(3) is told: DMABuf stands for its flag FI_MR_DMABUF, Device for the interface and the device.
type MRAttr struct {
	Length uint64
	Access Access

	DMABuf *DMABufAttr  // the memory is a part of this dma-buf, whoever owns it; Addr and Device are not used
	Device MemoryDevice // it is this device's; nil: it is the process's
	Addr   uint64       // its address, the owner's and in requests. Go's memory moves: see RegMRAddr
}

// DMABufAttr is a place in a dma-buf.
type DMABufAttr struct {
	Buffer *dmabuf.Buffer // the buffer; nil: FD is its descriptor
	FD     int            // as in [DMABuf]
	Offset uint64         // where in the buffer the memory begins
	Base   uint64         // the address of the buffer's first byte in requests
}

// MemoryDevice is a device with memory that has addresses of its own: a *[gpu.Device], or a *[cuda.Device].
//
// [gpu.Device]: https://pkg.go.dev/github.com/verbena-rdma/verbena/gpu#Device
// [cuda.Device]: https://pkg.go.dev/github.com/verbena-rdma/verbena/gpu/cuda#Device
type MemoryDevice interface{ Name() string }

// exportingDevice is a device whose memory is registered by its dma-bufs.
type exportingDevice interface {
	// RegionAt returns the dma-buf that the n bytes at an address are a part of, with a reference for the caller,
	// and where in it they begin.
	RegionAt(addr, n uint64) (buf *dmabuf.Buffer, off uint64, err error)
}

// engineDevice is a device that alone moves the bytes of its memory.
type engineDevice interface {
	RegisterAt(pd provider.PD, addr, n uint64, access ib.Access) (provider.MR, error)
}

// RegMRAttr registers memory of any kind: by [PD.RegDMABufMR] if it is a part of a dma-buf, as [PD.RegGPU]
// does if it is a device's, by [PD.RegMRAddr] if it is the process's.
//
// Errors: those of the call that it stands for; the device's, if the memory is not there; EINVAL if Base and Offset
// wrap around, and for a device that is none.
func (pd *PD) RegMRAttr(a MRAttr) (*MR, error) {
	const op = "reg_mr_attr"
	switch d := a.DMABuf; {
	case !pd.ok():
		return nil, invalid(op, "nil protection domain")
	case d != nil:
		if d.Base+d.Offset < d.Base {
			return nil, invalid(op, "base and offset wrap around")
		}
		return pd.RegDMABufMR(DMABuf{Buffer: d.Buffer, FD: d.FD, Offset: d.Offset, Length: a.Length, IOVA: d.Base + d.Offset}, a.Access)
	case a.Device != nil:
		return pd.regAt(op, a.Device, a.Addr, a.Length, a.Access)
	}
	return pd.RegMRAddr(uintptr(a.Addr), a.Length, a.Access)
}

// regAt registers memory of a device by its address there.
func (pd *PD) regAt(op string, dev MemoryDevice, addr, n uint64, access Access) (*MR, error) {
	switch dev := dev.(type) {
	case engineDevice:
		p, err := dev.RegisterAt(pd.p, addr, n, access)
		if err != nil {
			return nil, err
		}
		return &MR{p: p}, nil
	case exportingDevice:
		buf, off, err := dev.RegionAt(addr, n)
		if err != nil {
			return nil, err
		}
		defer buf.Put()
		return pd.RegDMABufMR(DMABuf{Buffer: buf, Offset: off, Length: n, IOVA: addr}, access)
	}
	return nil, invalid(op, fmt.Sprintf("%T has no memory", dev))
}
