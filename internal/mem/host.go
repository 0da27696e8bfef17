package mem

// Host memory, the kind that most programs register. The stages of making it:
//
//  1. NewHostBytes takes a slice, NewHost a raw address.
//  2. A raw address must not lie in the Go heap.
//  3. Memory outside the Go heap is watched (pinned.go), and made present, which
//     proves that it is there and that the rights fit, as ibv_reg_mr does; and
//     then no page in the middle may be the Go heap's either.
//  4. Memory that peers may flush to persistence must be that of a file.
//  5. The pages are locked, unless they are the Go heap's or locking is off.

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/goheap"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Host is a Backing of memory in this process: a slice of the Go heap, or
// memory that was mapped or came from C.
type Host struct {
	addr   uintptr // where it was registered
	length uint64
	owner  any          // what keeps the memory alive
	inHeap bool         // it is the Go heap's
	writes bool         // it was found to be writable
	inFile bool         // persistent has found it to be of a file that keeps it
	note   string       // why the pages are neither locked nor held; empty if they are
	locked bool         // by mlock
	shard  uint32       // where the notifier counts accesses to it (remap.go)
	fate   *pinnedWatch // nil: it is the Go heap's, to which nothing can happen
}

// hosts counts those that were made, to spread them over the notifier's counters.
var hosts atomic.Uint32

const (
	noteOff  = "off"
	noteHeap = "Go heap"
)

// NewHostBytes makes a backing of a slice, which it keeps alive. Slices of the
// Go heap are not made present first, which would take long for large ones:
// they are always there, and always writable.
func NewHostBytes(b []byte, access ib.Access, lock ib.LockMode) (*Host, error) {
	return newHost(addrOf(b), uint64(len(b)), access, lock, b, false)
}

// NewHost makes a backing of memory at an address outside the Go heap. It keeps
// owner, which may be nil, alive; the caller answers for the memory otherwise.
//
// All pages are made present, writable ones if access has AccessLocalWrite.
// That takes about 0.3 s for a GiB that was not touched before, and it takes
// the memory; registration with hardware does the same.
//
// The errors are those of reg_mr: EINVAL, for no bytes or for the Go heap;
// EFAULT, if not all of it is mapped or the rights do not fit; EINVAL, if access
// has AccessFlushPersistent and it is not all of a file, mapped shared, on a file
// system that keeps it; and with LockStrict ENOMEM or EPERM, if it cannot be
// locked.
func NewHost(addr uintptr, length uint64, access ib.Access, lock ib.LockMode, owner any) (*Host, error) {
	return newHost(addr, length, access, lock, owner, true)
}

func newHost(addr uintptr, length uint64, access ib.Access, lock ib.LockMode, owner any, raw bool) (*Host, error) {
	const op = "reg_mr"
	if length == 0 {
		return nil, ib.Errorf(op, syscall.EINVAL, "no bytes")
	}
	if lock > ib.LockStrict {
		return nil, ib.Errorf(op, syscall.EINVAL, "%v", lock)
	}
	if length > math.MaxInt || uintptr(length) > math.MaxInt-min(addr, math.MaxInt) { // nor does user space reach that far
		return nil, ib.Errorf(op, syscall.EFAULT, "%d bytes at %#x are not memory of this process", length, addr)
	}
	h := &Host{addr: addr, length: length, owner: owner, writes: access&ib.AccessLocalWrite != 0, shard: hosts.Add(1)}
	if raw && (goheap.Contains(addr) || goheap.Contains(addr+uintptr(length)-1)) {
		return nil, heapError(addr, length)
	}
	h.inHeap = goheap.Contains(addr)
	if !h.inHeap && !h.attach() {
		h.watch()
	}
	if err := h.take(access, lock); err != nil {
		h.unwatch()
		return nil, err
	}
	return h, nil
}

// attach attaches System V shared memory once more, for accesses: the kernel does not report
// when a program detaches its own. It reports whether it was such memory. As with an adapter,
// the segment then lasts until the region is closed.
func (h *Host) attach() bool {
	v, ok := sys.AttachSysV(h.addr, uintptr(h.length))
	if ok {
		h.fate = &pinnedWatch{sysv: &v}
	}
	return ok
}

// at returns where the memory is accessed.
func (h *Host) at() uintptr {
	if h.fate != nil && h.fate.sysv != nil {
		return h.fate.sysv.At
	}
	return h.addr
}

// take makes the memory present, which checks that it is there and that the rights fit, and
// locks it.
func (h *Host) take(access ib.Access, lock ib.LockMode) error {
	if !h.inHeap {
		if err := h.present(access&ib.AccessLocalWrite != 0); err != nil {
			return err
		}
		// Page by page only now, when it is certain that there are not more
		// pages than there is memory.
		if goheap.Overlaps(h.addr, uintptr(h.length)) {
			return heapError(h.addr, h.length)
		}
	}
	if access&ib.AccessFlushPersistent != 0 {
		if err := h.persistent(); err != nil {
			return err
		}
	}
	return h.lock(lock)
}

// Adapt makes sure that the memory is good for other rights than those it was made
// for. It is called while no access is under way, by one goroutine at a time.
func (h *Host) Adapt(access ib.Access) error {
	if access&ib.AccessLocalWrite != 0 && !h.writes {
		if !h.inHeap {
			if err := h.present(true); err != nil {
				return err
			}
		}
		h.writes = true
	}
	if access&ib.AccessFlushPersistent != 0 && !h.inFile {
		return h.persistent()
	}
	return nil
}

// persistent makes sure that the memory can be made persistent. Drivers refuse
// the right for memory that cannot, and so does the kernel's software device.
func (h *Host) persistent() error {
	if why := notDurable(h.addr, h.length); why != "" {
		return ib.Errorf("reg_mr", syscall.EINVAL, "%d bytes at %#x are not persistent memory (%s)", h.length, h.addr, why)
	}
	h.inFile = true
	return nil
}

func heapError(addr uintptr, length uint64) error {
	return ib.Errorf("reg_mr", syscall.EINVAL,
		"%d bytes at %#x lie in the Go heap, where stacks move and objects are collected: register a []byte instead", length, addr)
}

// present makes sure that all of the memory is mapped as it must be. The kernel
// answers a registration of memory that is not mapped, and one that asks for
// more than the mapping grants, with EFAULT both.
func (h *Host) present(write bool) error {
	err := sys.Populate(h.addr, uintptr(h.length), write)
	if err == nil {
		return nil
	}
	errno := syscall.EFAULT
	if err == syscall.ENOMEM || err == syscall.EINVAL {
		// Out of memory, a mapping that cannot be populated (a device's), an
		// old kernel: or it is not mapped so after all.
		mapped, lookErr := sys.Mapped(h.addr, uintptr(h.length), write)
		switch {
		case lookErr != nil:
			return nil // it is not known; each access is guarded against faults
		case mapped && (err == syscall.EINVAL || allPresent(h.addr, h.length)):
			return nil
		case mapped:
			errno = syscall.ENOMEM
		}
	}
	rights := "readable"
	if write {
		rights = "writable"
	}
	return ib.Errorf("reg_mr", errno, "not all of %d bytes at %#x are %s memory", h.length, h.addr, rights)
}

// allPresent reports whether the page tables have all of some memory. Memory of a PCI device that the kernel gives to
// processes (p2pmem/allocate) is mapped whole, and the kernel answers ENOMEM to whoever wants its pages present.
func allPresent(addr uintptr, length uint64) bool {
	start, end := sys.PageAlign(addr, uintptr(length))
	absent := false
	err := sys.Absent(start, end, func(uintptr, uintptr) bool {
		absent = true
		return false
	})
	return err == nil && !absent
}

// lock locks the pages, or notes why not.
func (h *Host) lock(mode ib.LockMode) error {
	if mode == ib.LockOff {
		h.note = noteOff
		return nil
	}
	errno := syscall.EPERM
	if h.inHeap {
		h.note = noteHeap
	} else {
		err := sys.LockPages(h.at(), uintptr(h.length))
		if err == nil {
			h.locked = true
			return nil
		}
		errors.As(err, &errno)
		h.note = lockNote(errno, sys.MemlockLimit())
	}
	if mode == ib.LockStrict {
		return ib.Errorf("reg_mr", errno, "%d bytes at %#x cannot be locked: %s", h.length, h.addr, h.note)
	}
	return nil
}

// lockNote returns why mlock failed. Of its errors these two mean the limit, if
// there is one: ENOMEM that it is exceeded, EPERM that it is zero.
func lockNote(errno syscall.Errno, limit uint64) string {
	if limit == math.MaxUint64 || errno != syscall.ENOMEM && errno != syscall.EPERM {
		return "mlock: " + errno.Error()
	}
	return "RLIMIT_MEMLOCK (" + limitText(limit) + ")"
}

func limitText(limit uint64) string {
	if limit%1024 != 0 {
		return fmt.Sprintf("%d bytes", limit)
	}
	return fmt.Sprintf("%d KiB", limit/1024)
}

// Source returns what the backing was made of: a slice, or an address.
func (h *Host) Source() ([]byte, uintptr) {
	if b, ok := h.owner.([]byte); ok {
		return b, 0
	}
	return nil, h.addr
}

// Kind returns KindPinned.
func (h *Host) Kind() Kind { return KindPinned }

// Addr returns the address of the first byte.
func (h *Host) Addr() uintptr { return h.addr }

// Len returns the number of bytes.
func (h *Host) Len() uint64 { return h.length }

// NeverFaults reports whether accesses can never fault: the Go heap does not go away
// while something refers to it, other memory may be unmapped at any time.
func (h *Host) NeverFaults() bool { return h.inHeap }

// Pinned returns the Host itself if its memory may be remapped under it; nil if not.
func (h *Host) Pinned() *Host {
	if !h.watched() {
		return nil
	}
	return h
}

// Locked reports whether the pages are locked in memory, or held there.
func (h *Host) Locked() bool { return h.note == "" }

// LockNote returns why the pages are neither locked nor held: "off", "Go heap", or the limit
// that was in the way. It is empty if they are.
func (h *Host) LockNote() string { return h.note }

// Run returns the bytes at off: all of them, or none if some are stale.
func (h *Host) Run(off, n uint64, _ ib.Access) ([]byte, FaultKind) {
	if off >= h.length || n > h.length-off {
		return nil, FaultBounds
	}
	if h.watched() {
		if !theSpace.applyChangesSoon() {
			return nil, FaultBrief // changes of mappings are pending
		}
		if h.staleAt(off, n) {
			return nil, FaultStale
		}
	}
	return bytesAt(h.at()+uintptr(off), int(n)), FaultNone
}

// Durable reports whether Persist makes the bytes persistent: that they were
// found to be a file's, because the access asked for it.
func (h *Host) Durable() bool { return h.inFile }

// Persist writes a range back to the file that it is mapped from.
func (h *Host) Persist(off, n uint64) error {
	return sys.SyncFile(h.addr+uintptr(off), uintptr(n))
}

// Close unlocks the pages that no other region keeps locked.
func (h *Host) Close() error {
	if h.locked {
		sys.UnlockPages(h.at(), uintptr(h.length))
	}
	h.unwatch()
	h.owner = nil
	return nil
}
