package mem

// Host memory that other processes write to by themselves, in its pinned pages
// (sys.LentRings). Accesses of this process fail where the memory is stale (pinned.go). What
// goes to pinned pages does not notice that, so pages are lent only where the kernel reports
// every change: the other process looks at a ticket (AddTicket) before and after it writes,
// and what it has written does not count if the ticket has changed.

import (
	"errors"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// ErrNotLendable means that the memory of a region is of a kind that is not lent.
var ErrNotLendable = errors.New("mem: memory of this kind is not lent to other processes")

// maxHeapLent is the most memory of the Go heap that is pinned to be lent. Registration does
// not make such memory present, but pinning it does.
const maxHeapLent = 256 << 20

// PinToLend pins the pages of a region, for sys.LentRings. It may take long, and holds no
// section of the region: the caller looks afterwards whether the region is still what it was.
//
// The error is ErrNotLendable unless the memory is of the Go heap, or private and anonymous
// and all of it watched; and if it was registered with ib.LockOff. It is a *sys.PinError if the
// pages cannot be pinned.
func PinToLend(r *Region) (*sys.PinnedPages, error) {
	cfg, ok := r.Snapshot()
	h, isHost := cfg.Backing.(*Host)
	if !ok || !isHost || h.note == noteOff || h.inHeap && h.length > maxHeapLent || !h.inHeap && !h.lendable() {
		return nil, ErrNotLendable
	}
	p, err := sys.PinPages(h.at(), uintptr(h.length), true)
	if err != nil {
		return nil, err
	}
	// Pages that were mapped over the region before they were pinned are not watched.
	if !h.inHeap && h.mappedAnew() {
		_ = p.Close() // the first error says more
		return nil, ErrNotLendable
	}
	return p, nil
}

// lendable reports whether the memory is private, anonymous, and all of it watched.
func (h *Host) lendable() bool {
	if !h.watched() || !h.fate.all.Load() || theSpace.notifier.Load() == nil {
		return false
	}
	start, end := sys.PageAlign(h.addr, uintptr(h.length))
	plain := true
	err := sys.Mappings(start, end, func(m *sys.Mapping) bool {
		plain = plain && !m.File && !m.Shared
		return plain
	})
	return plain && err == nil
}

// mappedAnew reports whether a part of the memory is not watched, or may not be.
func (h *Host) mappedAnew() bool {
	start, end := sys.PageAlign(h.addr, uintptr(h.length))
	anew := false
	err := sys.Unwatched(start, end, func(uintptr, uintptr) bool {
		anew = true
		return false
	})
	return anew || err != nil
}

// NewLoanNumber returns a number for rings that are lent to other processes. It is none of a
// segment's.
func NewLoanNumber() uint64 {
	segments.mu.Lock()
	defer segments.mu.Unlock()
	segments.last++
	return segments.last
}

// ForgetLoan has other processes give up the rings with a number (WatchSegments).
func ForgetLoan(number uint64) { tellSegmentGone(number) }
