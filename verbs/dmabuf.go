package verbs

import (
	"fmt"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// DMABuf is a part of a dma-buf: memory of another device, or of an exporter of package dmabuf.
type DMABuf struct {
	Buffer *dmabuf.Buffer // the buffer; nil: FD is its descriptor
	// FD is a descriptor of the buffer, used if Buffer is nil. It may be closed once the call
	// has returned.
	FD int

	Offset uint64 // where in the buffer the part begins
	Length uint64
	// IOVA is the address of the first byte in requests. It lies at the same place in a page
	// of 4,096 bytes as Offset does.
	IOVA uint64
}

func (d DMABuf) internal() importer.Range {
	return importer.Range{Buffer: d.Buffer, FD: d.FD, Offset: d.Offset, Length: d.Length, IOVA: d.IOVA}
}

// RegDMABufMR registers a part of a dma-buf. The region keeps the buffer alive. See
// ibv_reg_dmabuf_mr(3).
//
// The exporter may move the buffer at any time: requests wait for a moment, and find it at its
// new place. If the exporter revokes the buffer, later requests end in access errors
// (WCRemAccessErr at the peer); the keys stay as they are until [MR.Close]. With PinDMABuf in
// [Config] the region holds the buffer in place.
//
// Requests wait for the buffer's Kernel fences, and for no others. [MR.PagingStats] counts the
// moves, and how often requests found the buffer moved; [PD.AdviseMR] brings a buffer that has moved
// back before a request needs it. [Device.Counters] has the sums of all
// regions, closed ones too: dmabuf_regions, dmabuf_mappings, dmabuf_faults (mappings that
// requests have waited for), dmabuf_invalidations and dmabuf_pins.
//
// Errors, in the order in which they are looked for: EINVAL if Offset and IOVA differ in their
// place in a page, for rights other than AccessLocalWrite, AccessRemoteRead, AccessRemoteWrite,
// AccessRemoteAtomic and AccessRelaxedOrdering, and for a part that wraps around; EBADF if FD is
// not open; EINVAL if it is no dma-buf; EINVAL if the part is empty or not inside the buffer; then
// the exporter's: EBUSY or EOPNOTSUPP if it refuses the device, or to hold the buffer in place;
// ENODEV if the buffer is revoked; ETIMEDOUT if the exporter does not answer.
func (pd *PD) RegDMABufMR(d DMABuf, access Access) (*MR, error) {
	if !pd.ok() {
		return nil, invalid("reg_dmabuf_mr", "nil protection domain")
	}
	p, err := importer.Register(pd.p, d.internal(), access)
	if err != nil {
		return nil, err
	}
	return &MR{p: p}, nil
}

// reregDMABuf changes the region to a part of a dma-buf.
func (mr *MR) reregDMABuf(d DMABuf, c provider.MRChange, both bool) error {
	if both {
		return &ib.ReregError{State: ReregOldValid, Err: ib.Errorf("rereg_mr", syscall.EINVAL, "both a dma-buf and other memory")}
	}
	return importer.Rereg(mr.p, d.internal(), c)
}

// GPUMemory is memory of a GPU: a *[gpu.Buffer], or a *[cuda.Buffer]; or memory that the process shares with GPUs, a
// *[hmm.Mirror].
//
// [hmm.Mirror]: https://pkg.go.dev/github.com/verbena-rdma/verbena/hmm#Mirror
// [gpu.Buffer]: https://pkg.go.dev/github.com/verbena-rdma/verbena/gpu#Buffer
// [cuda.Buffer]: https://pkg.go.dev/github.com/verbena-rdma/verbena/gpu/cuda#Buffer
type GPUMemory interface {
	Addr() uint64 // the GPU's address of the first byte
	Len() uint64
}

// exportedMemory is memory that is registered by its dma-buf.
type exportedMemory interface {
	// Region returns the dma-buf that the memory is a part of, with a reference for the caller, where in it the memory
	// begins, how long it is, and the GPU's address of its first byte.
	Region() (buf *dmabuf.Buffer, off, n, addr uint64, err error)
}

// engineMemory is memory whose bytes only its device moves.
type engineMemory interface {
	RegisterIn(pd provider.PD, access ib.Access) (provider.MR, error)
}

// RegGPU registers memory of a GPU. The address of the first byte in requests is the GPU's own.
//
// A [gpu.Buffer] is registered as RegDMABufMR does with its dma-buf: the GPU may move the memory, evict it to system
// memory, and bring it back, and requests find it where it is. Order requests and the GPU's work by fences: OpWaitFence
// and OpSignalFence. A [cuda.Buffer] stays where it is, and the GPU's driver copies its bytes. Pages of a [hmm.Mirror] move
// at any time: requests find them in VRAM that the device reaches, or have them come home.
//
// When the memory is freed, requests of peers end in access errors (WCRemAccessErr).
//
// Errors: those of RegDMABufMR; EINVAL if the memory is freed, or for other memory.
//
// [hmm.Mirror]: https://pkg.go.dev/github.com/verbena-rdma/verbena/hmm#Mirror
// [gpu.Buffer]: https://pkg.go.dev/github.com/verbena-rdma/verbena/gpu#Buffer
// [cuda.Buffer]: https://pkg.go.dev/github.com/verbena-rdma/verbena/gpu/cuda#Buffer
func (pd *PD) RegGPU(m GPUMemory, access Access) (*MR, error) {
	const op = "reg_gpu"
	if !pd.ok() {
		return nil, invalid(op, "nil protection domain")
	}
	switch m := m.(type) {
	case engineMemory:
		p, err := m.RegisterIn(pd.p, access)
		if err != nil {
			return nil, err
		}
		return &MR{p: p}, nil
	case exportedMemory:
		buf, off, n, addr, err := m.Region()
		if err != nil {
			return nil, err
		}
		defer buf.Put()
		return pd.RegDMABufMR(DMABuf{Buffer: buf, Offset: off, Length: n, IOVA: addr}, access)
	}
	return nil, invalid(op, fmt.Sprintf("%T is no memory of a GPU", m))
}
