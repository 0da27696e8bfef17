package mem

// Pinned memory promises the pages of registration time. Hardware keeps them
// when the program unmaps them, and works on in pages that nobody sees; we work
// at addresses, and must never touch what is mapped there next. So the parts
// that are unmapped, mapped anew or discarded become stale, for good: accesses
// to them fail. That needs a notifier; without one, only memory that is not there
// is noticed, when it is accessed.

import (
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// pinnedWatch is what a Host knows about the fate of its pages.
type pinnedWatch struct {
	place *membership
	sysv  *sys.SysV                   // not nil: memory of System V, with an attachment of our own: it is not watched
	mu    sync.Mutex                  // held while lost changes
	lost  atomic.Pointer[[]addrRange] // the parts that are stale; nil: none
	all   atomic.Bool                 // all of it is watched, but for what becomes stale
}

// watch begins to listen. The pages of registration time are those that are
// there after it.
func (h *Host) watch() {
	start, end := sys.PageAlign(h.addr, uintptr(h.length))
	h.fate = new(pinnedWatch)
	h.fate.place = theSpace.join(start, end, h, false)
	all := true
	err := sys.Mappings(start, end, func(m *sys.Mapping) bool {
		all = theSpace.cover(h.fate.place, max(start, m.Start), min(end, m.End), m) && all
		return true
	})
	h.fate.all.Store(all && err == nil)
}

// unwatch ends it.
func (h *Host) unwatch() {
	if h.fate != nil && h.fate.place != nil {
		theSpace.leave(h.fate.place)
		h.fate.place = nil
	}
	if h.fate != nil && h.fate.sysv != nil {
		h.fate.sysv.Detach()
	}
}

// watched reports whether something may happen to the pages that the kernel tells of.
func (h *Host) watched() bool { return h.fate != nil && h.fate.sysv == nil }

// staleAt reports whether a part of n bytes at off is stale.
func (h *Host) staleAt(off, n uint64) bool {
	if h.fate == nil {
		return false
	}
	lost := h.fate.lost.Load()
	if lost == nil {
		return false
	}
	at := h.addr + uintptr(off)
	for _, r := range *lost {
		if at < r.end && r.start < at+uintptr(n) {
			return true
		}
	}
	return false
}

// changed makes a part stale.
func (h *Host) changed(start, end uintptr) {
	h.fate.mu.Lock()
	defer h.fate.mu.Unlock()
	lost := []addrRange{{start, end}}
	if old := h.fate.lost.Load(); old != nil {
		for _, r := range *old {
			if r.end < lost[0].start || lost[0].end < r.start {
				lost = append(lost, r)
				continue
			}
			lost[0] = addrRange{min(r.start, lost[0].start), max(r.end, lost[0].end)}
		}
	}
	h.fate.lost.Store(&lost)
}

// missed: something has happened, perhaps here. What was mapped anew is not watched,
// and so tells itself. What was discarded does not: memory that works is not refused
// for a suspicion.
func (h *Host) missed() {
	if !h.fate.all.Load() || theSpace.notifier.Load() == nil { // without one nothing is watched
		return
	}
	start, end := sys.PageAlign(h.addr, uintptr(h.length))
	_ = sys.Unwatched(start, end, func(from, to uintptr) bool {
		h.changed(from, to)
		return true
	})
}

// sweep has nothing to look for.
func (h *Host) sweep() {}
