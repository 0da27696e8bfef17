package verbs

import (
	"crypto/rand"
	"encoding/binary"
	"math"

	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// PD is a protection domain: a queue pair uses only regions, memory windows, indirect
// keys and address handles of its own domain. See ibv_alloc_pd(3).
type PD struct {
	p   provider.PD
	dev *Device
}

func (pd *PD) ok() bool { return pd != nil && pd.p != nil }

// RegMR registers a slice, which may lie anywhere in the Go heap or outside it.
// The device may access it from now until [MR.Close], and so may peers if access has
// remote rights; until then the region keeps the slice alive. See ibv_reg_mr(3), and
// the package comment for what a Go program must heed.
//
// Local reading is always allowed; access adds to that. AccessRemoteWrite and
// AccessRemoteAtomic need AccessLocalWrite too.
//
// With AccessOnDemand, RegMR neither pins nor fetches nor checks the memory. Pages are
// brought in when the device first accesses them. The program may unmap, remap and
// change the memory at will; the device sees what the CPU would see. An access to
// memory that is not mapped, or whose mapping does not allow it, fails. A slice
// outside the Go heap need not be mapped yet.
//
// AccessFlushPersistent promises peers that what they flush survives. So the memory
// must be that of a file which is mapped shared (MAP_SHARED), not deleted, and on a
// file system that has storage. A FLUSH writes its range back and waits for the
// storage, as msync(2) with MS_SYNC does.
//
// Errors: EINVAL for an empty slice, unknown rights, remote writing or
// atomics without AccessLocalWrite, or AccessFlushPersistent for other memory than
// that of such a file; ENOMEM if the device has no more regions (MaxMR in
// [DeviceAttr]), or the host has no memory to back the range; EFAULT if a slice
// outside the Go heap is not mapped, or is not writable though access has
// AccessLocalWrite. With LockStrict, ENOMEM if holding the pages would exceed
// RLIMIT_MEMLOCK, and EPERM if that limit is 0, or if the slice is of the Go heap and
// this machine cannot hold pages. EINVAL for a domain that is nil or closed.
func (pd *PD) RegMR(buf []byte, access Access) (*MR, error) {
	if !pd.ok() {
		return nil, invalid("reg_mr", "nil protection domain")
	}
	p, err := pd.p.RegMR(buf, access)
	if err != nil {
		return nil, err
	}
	return &MR{p: p}, nil
}

// RegMRAddr registers memory by address: memory that is not Go's, such as a
// mapping or what a C library allocated. It keeps nothing alive; the memory
// must stay mapped until [MR.Close] has returned, unless access has
// AccessOnDemand: then anything may be mapped there, at any time. Requests fail if
// they touch a range that was unmapped earlier; StalePinnedRange in [DeviceAttr]
// describes what the device does if something else is mapped there.
//
// The address of a Go variable is never right here: it may lie on a goroutine's
// stack, which moves. For slices use [PD.RegMR].
//
// If the range is no memory of the process, the PeerDirect clients of package peermem are asked
// for it. A region of theirs cannot be registered again, nor have windows.
//
// Errors: those of RegMR; EINVAL also if length is 0 or the range is in the Go
// heap, EFAULT if it wraps around the end of the address space. If a PeerDirect client has the
// memory: EINVAL for AccessMWBind and AccessFlushPersistent; the client's; ETIMEDOUT if it does not
// answer.
func (pd *PD) RegMRAddr(addr uintptr, length uint64, access Access) (*MR, error) {
	iova := uint64(addr)
	if access&AccessZeroBased != 0 {
		iova = 0
	}
	return pd.RegMRIOVA(addr, length, iova, access)
}

// RegMRIOVA registers memory by address, as [PD.RegMRAddr] does, and gives the
// region an address of its own: requests name the first byte as iova, and
// [MR.Addr] returns iova. An iova of 0 has the effect of AccessZeroBased; with
// AccessZeroBased the address is 0, whatever iova is. See ibv_reg_mr_iova(3).
//
// Errors: those of RegMRAddr; EINVAL also if iova and length wrap around.
func (pd *PD) RegMRIOVA(addr uintptr, length, iova uint64, access Access) (*MR, error) {
	if !pd.ok() {
		return nil, invalid("reg_mr", "nil protection domain")
	}
	p, err := pd.p.RegMRAddr(addr, length, iova, access)
	if err != nil {
		p, err = importer.RegisterPeer(pd.p, addr, length, iova, access, err)
	}
	if err != nil {
		return nil, err
	}
	return &MR{p: p}, nil
}

// CreateQP makes a queue pair, in state [QPReset]. Its queues hold at least what
// cfg.Cap asks for; [QP.Query] returns how much. See ibv_create_qp(3).
//
// An SRQ may be of another domain: the memory of receives is then checked against the
// SRQ's domain, everything else against this one. UC has no shared receive queues.
//
// An XRCSend queue pair has no receive side: RecvCQ and SRQ must be nil. Queue pairs
// of type XRCRecv are made by [XRCD.CreateQP].
//
// Errors: EINVAL if cfg or one of its completion queues is nil, a queue belongs
// to another device or is closed, the type is unknown or XRCRecv, the type does not
// go with the SRQ or RecvCQ, the SRQ is one for XRC, or Cap asks for a negative
// number or for more than [DeviceAttr] offers (MaxQPWR, MaxSGE, MaxInlineData);
// ENOMEM if the device has no more queue pairs (MaxQP); ENODEV if the device is
// closed; EINVAL for a domain that is nil or closed.
func (pd *PD) CreateQP(cfg *QPConfig) (*QP, error) {
	const op = "create_qp"
	switch {
	case !pd.ok():
		return nil, invalid(op, "nil protection domain")
	case cfg == nil:
		return nil, invalid(op, "nil QPConfig")
	case !cfg.SendCQ.ok():
		return nil, invalid(op, "nil SendCQ")
	case !cfg.RecvCQ.ok() && (cfg.Type != XRCSend || cfg.RecvCQ != nil):
		return nil, invalid(op, "nil RecvCQ")
	}
	pc := provider.QPConfig{
		Type:      cfg.Type,
		SendCQ:    cfg.SendCQ.p,
		Cap:       cfg.Cap,
		SignalAll: cfg.SignalAll,

		NoScatterToCQE: cfg.NoScatterToCQE,
	}
	if cfg.RecvCQ != nil {
		pc.RecvCQ = cfg.RecvCQ.p
	}
	if cfg.SRQ != nil {
		if !cfg.SRQ.ok() {
			return nil, invalid(op, "SRQ was not made by CreateSRQ")
		}
		pc.SRQ = cfg.SRQ.p
	}
	p, err := pd.p.CreateQP(pc)
	if err != nil {
		return nil, err
	}
	qp := &QP{p: p, dev: pd.dev, psn: randomPSN()}
	if cfg.Type == UD {
		qp.qkey = randomQKey()
	}
	return qp, nil
}

// randomPSN returns 24 bits that a stranger cannot guess: a stranger who knows the
// PSN can forge packets into a connection.
func randomPSN() uint32 { return random32() & (1<<24 - 1) }

// randomQKey returns a Q_Key other than 0. The top bit stays clear: it marks
// controlled Q_Keys, which are for privileged programs, and in a request it means
// "send the queue pair's own Q_Key".
func randomQKey() uint32 {
	for {
		if k := random32() &^ (1 << 31); k != 0 {
			return k
		}
	}
}

func random32() uint32 {
	var b [4]byte
	rand.Read(b[:]) // never fails
	return binary.NativeEndian.Uint32(b[:])
}

// CreateSRQ makes a shared receive queue, from which any number of queue pairs
// take their receives, or with an XRCD any number of XRC targets. The memory of the
// receives is of this domain. See ibv_create_srq(3) and ibv_create_srq_ex(3).
//
// Errors: EINVAL if cfg is nil, MaxWR is less than 1 or more than MaxSRQWR in
// [DeviceAttr], MaxSGE is negative or more than MaxSRQSGE, Limit is negative or more
// than MaxWR, or XRCD or CQ is set without the other, closed or of another device;
// ENOMEM if the device has no more shared receive queues (MaxSRQ); ENODEV if the
// device is closed; EINVAL for a domain that is nil or closed.
func (pd *PD) CreateSRQ(cfg *SRQConfig) (*SRQ, error) {
	if !pd.ok() {
		return nil, invalid("create_srq", "nil protection domain")
	}
	if cfg == nil {
		return nil, invalid("create_srq", "nil SRQConfig")
	}
	pc := provider.SRQConfig{MaxWR: cfg.MaxWR, MaxSGE: cfg.MaxSGE, Limit: cfg.Limit}
	if cfg.XRCD != nil {
		if !cfg.XRCD.ok() {
			return nil, invalid("create_srq", "XRCD was not made by OpenXRCD")
		}
		pc.XRCD = cfg.XRCD.p
	}
	if cfg.CQ != nil {
		if !cfg.CQ.ok() {
			return nil, invalid("create_srq", "CQ was not made by CreateCQ")
		}
		pc.CQ = cfg.CQ.p
	}
	p, err := pd.p.CreateSRQ(pc)
	if err != nil {
		return nil, err
	}
	return &SRQ{p: p}, nil
}

// CreateAH makes an address handle: a peer, or a multicast group, that UD requests
// of the domain can be sent to. See ibv_create_ah(3).
//
// Errors: EINVAL if the DGID is unset or link-local, the SGIDIndex is not that of a
// local GID, the two are not of one address family, the FlowLabel has more than 20
// bits or the port does not exist; EHOSTUNREACH if the links that the
// device may use do not reach the peer; ENOMEM if the device has no more
// address handles (MaxAH in [DeviceAttr]); EMFILE and ENFILE if there is no
// descriptor left for a socket; EINVAL for a domain that is nil or closed.
func (pd *PD) CreateAH(attr AHAttr) (*AH, error) {
	if !pd.ok() {
		return nil, invalid("create_ah", "nil protection domain")
	}
	return pd.p.CreateAH(attr)
}

// Close destroys the domain. It is idempotent. See ibv_dealloc_pd(3).
//
// Errors: EBUSY while something in the domain is open; EINVAL for a nil domain.
func (pd *PD) Close() error {
	if !pd.ok() {
		return invalid("dealloc_pd", "nil protection domain")
	}
	return pd.p.Close()
}

// MR is a memory region: memory that the device may access. See ibv_reg_mr(3).
type MR struct {
	p provider.MR
}

// LKey returns the key by which local requests name the region, in their [SGE]s.
func (mr *MR) LKey() uint32 { return mr.p.LKey() }

// RKey returns the key by which peers name the region. A peer that has it, and is
// connected to a queue pair of the domain, has the region's remote rights.
func (mr *MR) RKey() uint32 { return mr.p.RKey() }

// Addr returns the address of the first byte, as requests name it: 0 if the
// region is zero-based.
func (mr *MR) Addr() uint64 { return mr.p.Addr() }

// Length returns the number of bytes.
func (mr *MR) Length() uint64 { return mr.p.Length() }

// Access returns the rights that the region was registered with.
func (mr *MR) Access() Access { return mr.p.Access() }

// Locked reports whether the region's pages are locked in memory, and returns why
// they are not. The Go heap is never locked.
func (mr *MR) Locked() (bool, string) { return mr.p.Locked() }

// SGE returns the scatter/gather element for n bytes of the region from offset
// off on. It checks nothing: a request whose range is not inside the region fails. If
// n is negative or too large for an element, the element has the largest length, and
// no message is that long.
func (mr *MR) SGE(off, n int) SGE {
	length := uint32(math.MaxUint32)
	if n >= 0 && uint64(n) <= math.MaxUint32 {
		length = uint32(n)
	}
	return SGE{Addr: mr.p.Addr() + uint64(off), Length: length, LKey: mr.p.LKey()}
}

// Close deregisters the region. When it has returned, neither the device nor
// any peer accesses the memory any more; requests that still name the region
// fail. It is idempotent. See ibv_dereg_mr(3).
//
// Errors: EBUSY while memory windows are bound to it or indirect keys are made of it;
// it then stays as it is. EINVAL for a nil region.
func (mr *MR) Close() error {
	if mr == nil || mr.p == nil {
		return invalid("dereg_mr", "nil memory region")
	}
	return mr.p.Close()
}
