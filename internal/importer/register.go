package importer

import (
	"errors"
	"math"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Range is a part of a buffer that is to be registered.
type Range struct {
	Buffer *dmabuf.Buffer // nil: FD is its descriptor, which the caller may close afterwards
	FD     int

	Offset, Length uint64
	IOVA           uint64 // the address of its first byte in requests
}

// allowed are the rights that a region of a dma-buf may have, in the kernel.
const allowed = ib.AccessLocalWrite | ib.AccessRemoteRead | ib.AccessRemoteWrite | ib.AccessRemoteAtomic | ib.AccessRelaxedOrdering

// registrar is a protection domain of a software device.
type registrar interface {
	RegBacking(b mem.Backing, iova uint64, access ib.Access) (provider.MR, error)
	dmabufDevice
}

// dmabufDevice is what a device, or an object of it, has for dma-bufs.
type dmabufDevice interface {
	// PinsDMABuf reports whether the device holds dma-bufs in place.
	PinsDMABuf() bool
	// DMABufCounts returns the device's counters of dma-bufs.
	DMABufCounts() *mem.DMABufCounts
}

// Register registers a part of a dma-buf. The errors, and the order in which they are looked for,
// are the kernel's.
func Register(pd provider.PD, r Range, access ib.Access) (provider.MR, error) {
	const op = "reg_dmabuf_mr"
	p, ok := pd.(registrar)
	if !ok {
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "the device has no dma-bufs")
	}
	b, err := r.open(op, access, p, pd)
	if err != nil {
		return nil, err
	}
	mr, err := p.RegBacking(b, r.IOVA, access)
	if err == nil {
		p.DMABufCounts().Regions.Add(1)
	}
	return mr, err
}

// RegisterAddr registers a part of a buffer by its address, as PeerDirect does with memory of a GPU: it is pinned, and
// revoked when it is freed. The rights are those of memory of the process, and the address in requests is any.
//
// Errors: EINVAL for rights that such regions cannot have; the exporter's.
func RegisterAddr(pd provider.PD, r Range, access ib.Access) (provider.MR, error) {
	const op = "reg_mr"
	p, ok := pd.(registrar)
	switch {
	case !ok:
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "the device has no memory of GPUs")
	case access&(notForPeers|ib.AccessOnDemand) != 0:
		return nil, ib.Errorf(op, syscall.EINVAL, "access bits %#x are not for memory of a GPU", uint32(access))
	case access&(ib.AccessRemoteWrite|ib.AccessRemoteAtomic) != 0 && access&ib.AccessLocalWrite == 0:
		return nil, ib.Errorf(op, syscall.EINVAL, "remote write and remote atomic access need local write access")
	}
	b, err := Import(r.Buffer, Config{Offset: r.Offset, Length: r.Length, Pinned: true, Device: pd, Counts: p.DMABufCounts()})
	if err != nil {
		return nil, err
	}
	return p.RegBacking(b, r.IOVA, access)
}

// Check reports what is wrong with what is asked for, before anybody looks at the buffer: EINVAL.
func (r *Range) Check(op string, access ib.Access) error {
	const page = 4096 // the kernel compares offsets within a page of this size, on all machines
	switch {
	case r.Offset%page != r.IOVA%page:
		return ib.Errorf(op, syscall.EINVAL, "the offset %#x and the address %#x are not at the same place in a page", r.Offset, r.IOVA)
	case access&^allowed != 0:
		return ib.Errorf(op, syscall.EINVAL, "access bits %#x are not for dma-bufs", uint32(access&^allowed))
	case access&(ib.AccessRemoteWrite|ib.AccessRemoteAtomic) != 0 && access&ib.AccessLocalWrite == 0:
		return ib.Errorf(op, syscall.EINVAL, "remote write and remote atomic access need local write access")
	case r.Length > math.MaxUint64-r.Offset || r.Length > math.MaxUint64-r.IOVA:
		return ib.Errorf(op, syscall.EINVAL, "%d bytes at %#x pass the end of the address space", r.Length, max(r.Offset, r.IOVA))
	}
	return nil
}

// open checks what is asked for, and imports it.
func (r *Range) open(op string, access ib.Access, d dmabufDevice, device any) (*Backing, error) {
	if err := r.Check(op, access); err != nil {
		return nil, err
	}
	buffer := r.Buffer
	if buffer == nil {
		var err error
		if buffer, err = dmabuf.Get(r.FD); err != nil {
			return nil, err
		}
		defer buffer.Put()
	}
	return Import(buffer, Config{Offset: r.Offset, Length: r.Length, Pinned: d.PinsDMABuf(), Device: device, Counts: d.DMABufCounts()})
}

// Rereg registers a region anew, with a part of a dma-buf as its memory. The error is an
// *ib.ReregError. c has what else changes.
func Rereg(mr provider.MR, r Range, c provider.MRChange) error {
	const op = "rereg_mr"
	m, ok := mr.(interface {
		ReregBacking(b mem.Backing, iova uint64, c provider.MRChange) error
		dmabufDevice
	})
	if !ok {
		return &ib.ReregError{State: ib.ReregOldValid, Err: ib.Errorf(op, syscall.EOPNOTSUPP, "the device has no dma-bufs")}
	}
	access := mr.Access()
	if c.Access != nil {
		access = *c.Access
	}
	b, err := r.open(op, access, m, mr)
	if err != nil {
		return &ib.ReregError{State: ib.ReregOldValid, Err: err}
	}
	err = m.ReregBacking(b, r.IOVA, c)
	var failed *ib.ReregError
	if !errors.As(err, &failed) || failed.State == ib.ReregNewValid {
		m.DMABufCounts().Regions.Add(1)
	}
	return err
}
