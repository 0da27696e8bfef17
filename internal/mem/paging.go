package mem

// What on-demand paging counts.

import (
	"math/bits"
	"os"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
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

// Stats returns the device's counters, after applying pending changes of mappings.
func (p *Paging) Stats() ib.PagingStats {
	theSpace.applyChanges()
	s := p.counts.stats()
	s.MRs, s.MRPages, s.MRsNotFound = p.regions.Load(), p.regionPages.Load(), p.regionsNotFound.Load()
	return s
}

// Stats returns the region's counters.
func (m *OnDemand) Stats() ib.PagingStats {
	theSpace.applyChanges()
	u := m.used.Load()
	if u == nil {
		return ib.PagingStats{}
	}
	return u.counts.stats()
}

// Present returns how many pages of the region are present by the device's page table.
func (m *OnDemand) Present() uint64 {
	theSpace.applyChanges()
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

// countFault counts a page fault that ended in kind. A fault that ends in FaultPending is
// counted when Await fetches its pages.
func (m *OnDemand) countFault(u *pagedIn, pages uint64, acc ib.Access, kind FaultKind) {
	if pages == 0 && (kind == FaultPending || kind == FaultNone) {
		return // Await counts it, or another access has brought in the pages meanwhile
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
