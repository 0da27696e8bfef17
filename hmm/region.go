package hmm

import (
	"errors"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Memory regions on mirrors. Their bytes are read and written by the engine, where the pages lie: so the copy loop of
// package mem sees staging bytes, and nothing in Go ever holds a page.

// region is a mem.Backing of a mirror. Its methods are called by several goroutines.
type region struct {
	m     *Mirror
	reach uint64
}

// notForMirrors are rights that regions of mirrors cannot have.
const notForMirrors = ib.AccessFlushPersistent

// RegisterIn registers the memory for RDMA. Package verbs calls it (PD.RegGPU). The device reaches the memory of those GPUs
// that say so (gpu.Config.Distance); pages in others' come home when a request needs them. Nothing is pinned: regions of
// mirrors are on demand, whether AccessOnDemand is set or not.
//
// When the mirror or the space is closed, or the memory unmapped, requests of peers end in access errors.
func (m *Mirror) RegisterIn(pd provider.PD, access ib.Access) (provider.MR, error) {
	const op = "reg_gpu"
	p, ok := pd.(interface {
		RegBacking(b mem.Backing, iova uint64, access ib.Access) (provider.MR, error)
	})
	switch {
	case !ok:
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "the device has no memory of GPUs")
	case access&notForMirrors != 0:
		return nil, ib.Errorf(op, syscall.EINVAL, "access bits %#x are not for memory of a space", uint32(access&notForMirrors))
	case access&(ib.AccessRemoteWrite|ib.AccessRemoteAtomic) != 0 && access&ib.AccessLocalWrite == 0:
		return nil, ib.Errorf(op, syscall.EINVAL, "remote write and remote atomic access need local write access")
	}
	if err := m.begin(op); err != nil {
		return nil, err
	}
	r := &region{m: m}
	for _, d := range m.space.devices {
		if d.reachedBy(pd) {
			r.reach |= 1 << d.id
		}
	}
	m.space.mu.RUnlock()
	return p.RegBacking(r, m.addr, access&^ib.AccessOnDemand)
}

// Kind returns KindGPU.
func (r *region) Kind() mem.Kind { return mem.KindGPU }

// Len returns the number of bytes.
func (r *region) Len() uint64 { return r.m.n }

// Close does nothing: the mirror is the program's.
func (r *region) Close() error { return nil }

// begin keeps the space open until the caller unlocks it.
func (r *region) begin(off, n uint64) mem.FaultKind {
	switch {
	case n > r.m.n || off > r.m.n-n:
		return mem.FaultBounds
	case r.m.begin("") != nil:
		return mem.FaultRevoked
	}
	return mem.FaultNone
}

// faultOf returns what an error of the engine is for a request.
func faultOf(err error) mem.FaultKind {
	switch {
	case err == nil:
		return mem.FaultNone
	case errors.Is(err, syscall.EFAULT), errors.Is(err, syscall.EPERM):
		return mem.FaultUnmapped
	}
	return mem.FaultStorage
}

const writes = ib.AccessLocalWrite | ib.AccessRemoteWrite | ib.AccessRemoteAtomic

// Run returns staging bytes, with the memory's bytes in them if the access reads.
func (r *region) Run(off, n uint64, acc ib.Access) ([]byte, mem.FaultKind) {
	n = min(n, mem.Quantum)
	if kind := r.begin(off, n); kind != mem.FaultNone {
		return nil, kind
	}
	defer r.m.space.mu.RUnlock()
	b := mem.Staging(int(n))
	if acc&writes != 0 {
		return b, mem.FaultNone
	}
	if kind := faultOf(r.m.space.engine.steady(r.m.self, r.reach, r.m.addr+off, b, false, false)); kind != mem.FaultNone {
		mem.GiveStaging(b)
		return nil, kind
	}
	return b, mem.FaultNone
}

// Store writes staging bytes to the memory. If a message ends with them, their last word is written last.
func (r *region) Store(off uint64, b []byte, last bool) mem.FaultKind {
	if kind := r.begin(off, uint64(len(b))); kind != mem.FaultNone {
		return kind
	}
	defer r.m.space.mu.RUnlock()
	return faultOf(r.m.space.engine.steady(r.m.self, r.reach, r.m.addr+off, b, true, last))
}

// Done takes staging bytes back.
func (r *region) Done(b []byte) { mem.GiveStaging(b) }

// Atomic changes 8 bytes.
func (r *region) Atomic(off uint64, op mem.AtomicOp, compare, swapAdd uint64) (uint64, mem.FaultKind) {
	if kind := r.begin(off, 8); kind != mem.FaultNone {
		return 0, kind
	}
	defer r.m.space.mu.RUnlock()
	if (r.m.addr+off)%8 != 0 {
		return 0, mem.FaultAlign
	}
	what, x, y := atomicAdd, swapAdd, uint64(0)
	switch op {
	case mem.CmpSwap:
		what, x, y = atomicCAS, compare, swapAdd
	case mem.Store:
		what = atomicSwap
	}
	old, err := r.m.space.engine.atomic(r.reach, r.m.addr+off, what, x, y)
	return old, faultOf(err)
}
