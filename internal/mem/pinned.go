package mem

// Pinned memory promises the pages of registration time. Hardware keeps them
// when the program unmaps them, and goes on in pages that the program cannot see. A
// Host is accessed at its address, where accesses must never touch what is mapped
// next. So the parts that are unmapped, mapped anew or discarded become stale, for
// good: accesses to them fail. That needs a notifier; without one, only memory that is
// not mapped is noticed, when it is accessed.

import (
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// pinnedWatch is what has become of a Host's pages since registration.
type pinnedWatch struct {
	place *membership
	sysv  *sys.SysV                   // not nil: System V shared memory, with an attachment of its own (attach): it is not watched
	mu    sync.Mutex                  // held while lost changes
	lost  atomic.Pointer[[]addrRange] // the parts that are stale; nil: none
	all   atomic.Bool                 // all of it is watched, but for what becomes stale
}

// watch begins to watch the memory. The pages of registration time are those that are
// there when it has returned.
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

// watched reports whether the program may remap the pages, and the kernel reports it.
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

// missed makes stale what is not watched any more, since a report was lost: that was mapped
// anew. What was discarded cannot be found out: memory that works is not refused on
// suspicion.
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
