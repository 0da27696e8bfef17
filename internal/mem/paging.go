package mem

// What on-demand paging counts, and prefetching.

import (
	"math/bits"
	"os"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

var (
	pageSize  = uint64(os.Getpagesize())
	pageShift = bits.TrailingZeros64(pageSize)
)

// pagingCounts are the counters of a region, and those of a device: every event
// is counted in both.
type pagingCounts struct {
	faults, faultPages               atomic.Uint64
	local, remote                    atomic.Uint64 // of faults
	invalidations, invalidationPages atomic.Uint64
	contentions                      atomic.Uint64
	prefetches, prefetchPages        atomic.Uint64
	failed                           atomic.Uint64
}

// Paging is what on-demand paging of a device counts. The zero value is good.
type Paging struct {
	counts                                pagingCounts
	regions, regionPages, regionsNotFound atomic.Uint64
}

// Stats returns the device's counters, after taking in what the kernel has told.
func (p *Paging) Stats() ib.PagingStats {
	theSpace.settle()
	s := p.counts.stats()
	s.MRs, s.MRPages, s.MRsNotFound = p.regions.Load(), p.regionPages.Load(), p.regionsNotFound.Load()
	return s
}

// Stats returns the region's counters.
func (m *OnDemand) Stats() ib.PagingStats {
	theSpace.settle()
	u := m.used.Load()
	if u == nil {
		return ib.PagingStats{}
	}
	return u.counts.stats()
}

// Present returns how many pages of the region are present, as far as the device
// knows.
func (m *OnDemand) Present() uint64 {
	theSpace.settle()
	u := m.used.Load()
	if u == nil {
		return 0
	}
	return u.pages.count()
}

func (c *pagingCounts) stats() ib.PagingStats {
	return ib.PagingStats{
		PageFaults: c.faults.Load(), PageFaultPages: c.faultPages.Load(),
		LocalFaults: c.local.Load(), RemoteFaults: c.remote.Load(),
		Invalidations: c.invalidations.Load(), InvalidationPages: c.invalidationPages.Load(),
		Contentions: c.contentions.Load(),
		Prefetches:  c.prefetches.Load(), PrefetchPages: c.prefetchPages.Load(),
		FailedResolutions: c.failed.Load(),
	}
}

// count counts for the region and its device.
func (m *OnDemand) count(u *pagedIn, add func(*pagingCounts)) {
	add(&u.counts)
	add(&m.device.counts)
}

// countFault counts a page fault that ended in kind. One that is left to
// somebody who may wait is counted by him.
func (m *OnDemand) countFault(u *pagedIn, pages uint64, acc ib.Access, kind FaultKind) {
	if kind == FaultPending && pages == 0 {
		return
	}
	m.count(u, func(c *pagingCounts) {
		c.faults.Add(1)
		c.faultPages.Add(pages)
		if acc&ib.AccessRemote != 0 {
			c.remote.Add(1)
		} else {
			c.local.Add(1)
		}
		if kind != FaultNone && kind != FaultPending && pages == 0 {
			c.failed.Add(1)
		}
	})
}

// prefetchStep is how much a prefetch brings in at once: closing the region
// waits for so much.
const prefetchStep = 2 << 20

// Prefetch makes a part of an on-demand region present, for writing if write is
// set. With noFault it takes only what is in memory already. It may take long,
// and ends early if the region is closed, or becomes another one than that with the
// key. A region that is not on demand needs none.
func (r *Region) Prefetch(key uint32, off, n uint64, write, noFault bool) FaultKind {
	if !r.enter() {
		return FaultDead
	}
	m, ok := r.backing.(*OnDemand)
	same := r.Key() == key
	r.leave()
	if !same {
		return FaultDead
	}
	if !ok || n == 0 {
		return FaultNone
	}
	if off >= m.length || n > m.length-off {
		return FaultBounds
	}
	u := m.use()
	if u == nil {
		return FaultDead
	}
	at, end := sys.PageAlign(m.addr+uintptr(off), uintptr(n))
	for at < end {
		upto, kind := m.prefetchSome(u, at, min(end, at+prefetchStep), write, noFault)
		if kind != FaultNone {
			return kind
		}
		at = upto
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed {
		return FaultDead // and counts no more
	}
	m.count(u, func(c *pagingCounts) { c.prefetches.Add(1) })
	return FaultNone
}

// prefetchSome is one step of a prefetch, of pages from at to end.
func (m *OnDemand) prefetchSome(u *pagedIn, at, end uintptr, write, noFault bool) (upto uintptr, kind FaultKind) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for range maxGone {
		if u.closed {
			return at, FaultDead
		}
		before := theSpace.changes.Load()
		if noFault {
			upto = m.takeIn(u, at, end)
		} else if upto, kind = m.bringIn(at, end, write, true); kind == FaultNone {
			m.prefetched(u, at, upto, write)
		}
		if kind != FaultNone || !m.disturbed(u, before, at, upto) {
			return upto, kind
		}
	}
	return upto, FaultNone // best effort
}

// takeIn notes the pages that are in memory already. They are good for reading:
// whether a write would have to copy them first is not known.
func (m *OnDemand) takeIn(u *pagedIn, at, end uintptr) (upto uintptr) {
	for next := at; next < end; {
		where, err := sys.NextMapping(next)
		if err != nil || where.Start >= end {
			break
		}
		from, to := max(next, where.Start), min(end, where.End)
		next = where.End
		if !where.Allows(false) {
			continue
		}
		theSpace.cover(u.place, from, to, &where)
		_ = sys.Present(from, to, func(from, to uintptr) bool {
			m.prefetched(u, from, to, false)
			return true
		})
	}
	return end
}

// prefetched notes pages that a prefetch has brought in.
func (m *OnDemand) prefetched(u *pagedIn, from, to uintptr, write bool) {
	news := u.pages.set(m.pageAt(from), uint64(to-from)>>pageShift, write)
	m.count(u, func(c *pagingCounts) { c.prefetchPages.Add(news) })
}
