package verbs

import "github.com/verbena-rdma/verbena/ib"

// Operations that may use on-demand memory.
const (
	ODPSend        = ib.ODPSend
	ODPRecv        = ib.ODPRecv
	ODPWrite       = ib.ODPWrite
	ODPRead        = ib.ODPRead
	ODPAtomic      = ib.ODPAtomic
	ODPSRQRecv     = ib.ODPSRQRecv
	ODPFlush       = ib.ODPFlush
	ODPAtomicWrite = ib.ODPAtomicWrite
)

// Advice for [PD.AdviseMR].
const (
	AdvisePrefetch        = ib.AdvisePrefetch        // bring pages in, to be read
	AdvisePrefetchWrite   = ib.AdvisePrefetchWrite   // bring pages in, to be written
	AdvisePrefetchNoFault = ib.AdvisePrefetchNoFault // take what is in memory already
)

// AdviseFlags modify [PD.AdviseMR], with the values of IBV_ADVISE_MR_FLAG_*.
type AdviseFlags uint32

// AdviseFlush makes AdviseMR wait until the pages are there, and return an error if
// some could not be brought in.
const AdviseFlush AdviseFlags = 1 << 0

// QueryODPCaps returns which operations of each transport may use on-demand memory,
// and by what means of the kernel this machine pages. See ibv_query_device_ex(3).
func (d *Device) QueryODPCaps() (ODPCaps, error) {
	if !d.ok() {
		return ODPCaps{}, invalid("query_device", "nil device")
	}
	return d.p.ODPCaps(), nil
}

// PagingStats returns what on-demand paging has done on the device since it was
// opened, in this process. Changes that the kernel reports are counted exactly. Those
// that it does not report (mprotect, truncation, reclaim) are counted once, when the
// device finds them.
func (d *Device) PagingStats() (PagingStats, error) {
	if !d.ok() {
		return PagingStats{}, invalid("query_device", "nil device")
	}
	return d.p.PagingStats(), nil
}

// PagingStats returns what on-demand paging has done for the region. All counters are
// zero if the region is not on demand.
func (mr *MR) PagingStats() PagingStats { return mr.p.PagingStats() }

// RegImplicitMR registers the whole address space of the process, with all that is
// mapped in it now or later: [MR.Addr] is 0, and requests name memory by its address.
// access must have AccessOnDemand. A peer that gets the key may access all memory of
// the process with the remote rights in access; memory windows can narrow that. See
// ibv_reg_mr(3), for an address of NULL and a length of SIZE_MAX.
//
// Memory of the Go heap may be named only while the program keeps it alive, and
// goroutine stacks never: they move.
//
// Errors: those of [PD.RegMR]; EINVAL also without AccessOnDemand.
func (pd *PD) RegImplicitMR(access Access) (*MR, error) {
	if !pd.ok() {
		return nil, invalid("reg_mr", "nil protection domain")
	}
	p, err := pd.p.RegImplicitMR(access)
	if err != nil {
		return nil, err
	}
	return &MR{p: p}, nil
}

// AdviseMR prefetches memory of on-demand regions that is about to be used. A dma-buf that has
// moved, or was evicted, is mapped again as a whole. The
// elements of sgl name the memory by the regions' local keys. AdviseMR is a hint and
// returns at once, unless flags has AdviseFlush or a lot of advice is waiting already. A
// prefetch ends when its region is closed. See ibv_advise_mr(3).
//
// Errors: ENOENT if no region has the key of an element; EPERM if its region is
// of another domain, or may not be written and the advice is AdvisePrefetchWrite;
// EINVAL if the region is neither on demand nor of a dma-buf that may move, for an empty list, an unknown flag or a
// domain that is nil or closed; EFAULT if the element is not inside its region or,
// with AdviseFlush, not all of it is mapped and allows the access; EOPNOTSUPP for
// unknown advice.
func (pd *PD) AdviseMR(advice Advice, flags AdviseFlags, sgl ...SGE) error {
	const op = "advise_mr"
	if !pd.ok() {
		return invalid(op, "nil protection domain")
	}
	if flags&^AdviseFlush != 0 {
		return invalid(op, "unknown flags")
	}
	return pd.p.Advise(advice, flags&AdviseFlush != 0, sgl)
}
