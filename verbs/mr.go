package verbs

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// AllocMR allocates memory and registers it: length bytes, zero, in one piece, on
// huge pages where the system has some to give. [MR.Bytes] returns the memory. It is
// a memory file, which other processes can open too ([MR.Share]). Some vendors'
// libibverbs make such regions with IBV_ACCESS_ALLOCATE_MR.
//
// After a few WRITEs or READs by a peer in another process of this host, that process
// copies into or out of the memory by itself, if the rights allow it: several times
// faster than with other memory.
//
// The memory belongs to the region. When [MR.Close], or [MR.Rereg] to other memory,
// has returned, the memory is unmapped, and touching it ends the program.
//
// Errors: those of [PD.RegMR]; EINVAL also for AccessOnDemand; ENOMEM if there is not
// that much memory; EMFILE and ENFILE if there is no descriptor left.
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

// OpenSharedMR registers memory that a process of this user on this host, or this
// process itself, has allocated and shared ([MR.Share]): the same memory, in another
// region with keys and rights of its own. The memory lives until the last of its
// regions is closed.
//
// Errors: EINVAL if the handle is malformed, or access has AccessOnDemand; ENOENT if
// the process that shared it has ended, or its region is closed or has other memory;
// EACCES if the process is another user's; otherwise those of [PD.AllocMR].
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

// Bytes returns the memory of a region that [PD.AllocMR] or [PD.OpenSharedMR] has
// made. For other regions, and after Close, it returns nil.
func (mr *MR) Bytes() []byte { return mr.p.Bytes() }

// Share returns a handle by which other processes of this user on this host can
// open the region's memory ([PD.OpenSharedMR]). A process that has the handle can read
// and write all of the memory, so pass it on with care; it cannot be guessed. It is
// valid until the region is closed or gets other memory.
//
// Errors: EINVAL if the memory was not allocated by the library, or the region is
// nil or closed; EOPNOTSUPP if the device was opened with LinkLoop: other processes
// do not find such a device.
func (mr *MR) Share() (handle string, err error) {
	if mr == nil || mr.p == nil {
		return "", invalid("share_mr", "nil memory region")
	}
	return mr.p.Share()
}

// MRChange is what [MR.Rereg] changes. A nil field changes nothing; if all fields are
// nil, only the keys change.
type MRChange struct {
	Buf    []byte   // other memory: a slice, as for [PD.RegMR]
	Range  *MRRange // other memory: by address, as for [PD.RegMRAddr]; not with Buf
	DMABuf *DMABuf  // other memory: a dma-buf, as for [PD.RegDMABufMR]; not with Buf or Range
	Alloc  int      // other memory: so many bytes that the library allocates, as for [PD.AllocMR]; not with the others; 0: none
	PD     *PD      // another protection domain of the device
	Access *Access  // other rights
}

// MRRange is memory by address.
type MRRange struct {
	Addr   uintptr
	Length uint64
	IOVA   *uint64 // the address of the first byte in requests; nil: Addr
}

// Rereg changes the region in place: its memory, its protection domain, its rights,
// or several of these at once. That costs less than closing the region and
// registering another. See ibv_rereg_mr(3).
//
// The keys change: when Rereg has returned nil only the new ones work. Requests that
// are under way, of either side, complete on the old memory or fail; no request
// accesses both the old memory and the new. Receives that were posted with the old key
// fail when a message comes for them; the sender of that message sees a remote
// operation error.
//
// Memory that the region no longer covers is the program's again; memory of
// [PD.AllocMR] is then unmapped.
//
// The error, if any, is a *[ReregError]. Its State is whether the old region is still
// valid, the new one is, or neither. In every state the region must be closed in the
// end, and can be.
//
// Errors, with the old region valid: EBUSY while memory windows are bound to the
// region or indirect keys are made of it; those of [PD.RegMR] for the memory and the
// rights, or of [PD.RegDMABufMR] or [PD.AllocMR]; EINVAL if more than one of Buf, Range, DMABuf and Alloc is set, or the domain is closed or of another
// device. With the region unusable: EINVAL if it is nil, closed or invalidated. With
// the new region valid: the error of giving the old memory back.
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
	if c.Alloc != 0 {
		if c.Alloc < 0 || c.Buf != nil || c.Range != nil || c.DMABuf != nil {
			return refuse("allocated memory of %d bytes, and other memory: %v", c.Alloc, c.Buf != nil || c.Range != nil || c.DMABuf != nil)
		}
		pc.Alloc = uint64(c.Alloc)
	}
	if c.DMABuf != nil {
		return mr.reregDMABuf(*c.DMABuf, pc, c.Buf != nil || c.Range != nil)
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
