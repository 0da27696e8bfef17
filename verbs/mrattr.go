package verbs

import "github.com/verbena-rdma/verbena/dmabuf"

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

// MemoryDevice is a device with memory that has addresses of its own. A *[gpu.Device] is one.
//
// [gpu.Device]: https://pkg.go.dev/github.com/verbena-rdma/verbena/gpu#Device
type MemoryDevice interface {
	// RegionAt returns the dma-buf that the n bytes at an address are a part of, with a reference for the caller,
	// and where in it they begin.
	RegionAt(addr, n uint64) (buf *dmabuf.Buffer, off uint64, err error)
}

// RegMRAttr registers memory of any kind: by [PD.RegDMABufMR] if it is a part of a dma-buf or a device's, by
// [PD.RegMRAddr] if it is the process's.
//
// Errors: those of the call that it stands for; the device's, if the memory is not there; EINVAL if Base and Offset
// wrap around.
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
		buf, off, err := a.Device.RegionAt(a.Addr, a.Length)
		if err != nil {
			return nil, err
		}
		defer buf.Put()
		return pd.RegDMABufMR(DMABuf{Buffer: buf, Offset: off, Length: a.Length, IOVA: a.Addr}, a.Access)
	}
	return pd.RegMRAddr(uintptr(a.Addr), a.Length, a.Access)
}
