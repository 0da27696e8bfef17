package verbs

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// AllocMR allocates memory and registers it: length bytes, zero, in one piece, on
// huge pages where the system has some to give. [MR.Bytes] returns it. It is a
// memory file, which other processes can open too ([MR.Share]). What
// IBV_ACCESS_ALLOCATE_MR does elsewhere, this does here.
//
// Peers in other processes of this host that have the right to WRITE to it, or to READ
// it, soon do so by themselves, without this process: several times faster than with
// other memory.
//
// The memory belongs to the region. When [MR.Close], or [MR.Rereg] to other memory,
// has returned, it is gone, and touching it ends the program.
//
// Errors: those of [PD.RegMR]; EINVAL also for AccessOnDemand, since on-demand
// paging does not do contiguous pages; ENOMEM if there is not so much memory;
// EMFILE and ENFILE if there is no descriptor left.
func (pd *PD) AllocMR(length int, access Access) (*MR, error) {
	if !pd.ok() {
		return nil, invalid("alloc_mr", "nil protection domain")
	}
	if length < 0 {
		return nil, invalid("alloc_mr", "negative length")
	}
	p, err := pd.p.AllocMR(uint64(length), access)
	if err != nil {
		return nil, err
	}
	return &MR{p: p}, nil
}

// OpenSharedMR opens a region that another process of this user on this host has
// allocated and shared ([MR.Share]), or this one: the same memory, in a region of
// its own, with keys and rights of its own. The memory lives until the last of its
// regions is closed.
//
// Errors: EINVAL if the handle is none, or access has AccessOnDemand; ENOENT if the
// process is gone, or the region is closed or has other memory now; EACCES if the
// process is another user's; otherwise those of [PD.AllocMR].
func (pd *PD) OpenSharedMR(handle string, access Access) (*MR, error) {
	if !pd.ok() {
		return nil, invalid("open_shared_mr", "nil protection domain")
	}
	p, err := pd.p.OpenSharedMR(handle, access)
	if err != nil {
		return nil, err
	}
	return &MR{p: p}, nil
}

// Bytes returns the region's memory, if it was allocated by [PD.AllocMR] or opened
// by [PD.OpenSharedMR], and nil otherwise, and after Close.
func (mr *MR) Bytes() []byte { return mr.p.Bytes() }

// Share returns a handle by which other processes of this user on this host can
// open the region's memory ([PD.OpenSharedMR]). Whoever has the handle can read and
// write all of it, so it is passed on with care; it cannot be guessed. It is good
// until the region is closed or gets other memory.
//
// Errors: EINVAL if the memory was not allocated by the library, or the region is
// nil or closed; EOPNOTSUPP if the device was opened with LinkLoop, where no other
// process finds it.
func (mr *MR) Share() (handle string, err error) {
	if mr == nil || mr.p == nil {
		return "", invalid("share_mr", "nil memory region")
	}
	return mr.p.Share()
}

// MRChange says what [MR.Rereg] changes. A nil field keeps what is; all nil
// changes nothing but the keys.
type MRChange struct {
	Buf    []byte   // other memory: a slice, as for [PD.RegMR]
	Range  *MRRange // other memory: by address, as for [PD.RegMRAddr]; not with Buf
	PD     *PD      // another protection domain of the device
	Access *Access  // other rights
}

// MRRange is memory by address.
type MRRange struct {
	Addr   uintptr
	Length uint64
	IOVA   *uint64 // the address of the first byte in requests; nil: Addr
}

// Rereg makes another region of the region, in place: with other memory, another
// protection domain, other rights, or several of these at once. It costs less than
// closing it and registering another. See ibv_rereg_mr(3).
//
// The keys change, and when Rereg has returned nil only the new ones work.
// Requests that are under way, of either side, complete on the old memory or fail;
// none is half in the old and half in the new. Receives that were posted with the
// old key fail when a message comes for them, which its sender sees as a remote
// operation error.
//
// Memory that the region no longer covers is the program's again. That of
// [PD.AllocMR] is then gone.
//
// The error, if any, is a *[ReregError]: it says whether the region is what it was,
// or what it was to become, or unusable. Whatever it says, the region must be
// closed in the end, and can be.
//
// Errors, with the old region valid: EBUSY while memory windows are bound to it;
// those of [PD.RegMR] for the memory and the rights; EINVAL if both Buf and Range
// are set, or the domain is closed or of another device; EOPNOTSUPP for peer
// memory, which cannot be registered again. With the region unusable: EINVAL if it
// is closed, or a peer has invalidated it. With the new region valid: what went
// wrong when the old memory was given back. EINVAL for a nil region.
func (mr *MR) Rereg(c MRChange) error {
	const op = "rereg_mr"
	if mr == nil || mr.p == nil {
		return &ib.ReregError{State: ReregUnusable, Err: invalid(op, "nil memory region")}
	}
	refuse := func(format string, args ...any) error {
		return &ib.ReregError{State: ReregOldValid, Err: ib.Errorf(op, syscall.EINVAL, format, args...)}
	}
	pc := provider.MRChange{Buf: c.Buf, Access: c.Access}
	if c.PD != nil {
		if !c.PD.ok() {
			return refuse("PD was not made by AllocPD")
		}
		pc.PD = c.PD.p
	}
	if r := c.Range; r != nil {
		if c.Buf != nil {
			return refuse("both a slice and a range")
		}
		pc.Range = &provider.MRRange{Addr: r.Addr, Length: r.Length, IOVA: uint64(r.Addr)}
		if r.IOVA != nil {
			pc.Range.IOVA = *r.IOVA
		}
	}
	return mr.p.Rereg(pc)
}
