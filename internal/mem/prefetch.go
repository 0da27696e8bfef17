package mem

// Prefetching: parts of on-demand regions, and dma-bufs that have moved, are brought in before an
// access needs them, of as many regions as one call of the program names.

import "github.com/verbena-rdma/verbena/internal/sys"

// Prefetch is what one call asks for.
type Prefetch struct {
	Parts   []Part
	Write   bool // to be written
	NoFault bool // take only what is in memory already
}

// Part is a part of a region.
type Part struct {
	Region *Region
	Key    uint32 // the region's at the call; if it has another by now, it was re-registered
	Off, N uint64
}

// prefetcher is a Backing of another kind whose bytes can be brought in as a whole. Prefetch is called
// outside any read section: perhaps after Close, when it must do no harm.
type prefetcher interface {
	Prefetch() FaultKind
	Pins() bool // the bytes are held in place: they are always there
}

// Prefetches reports whether bytes of a backing may have to be brought in, although it is not on demand: a
// dma-buf that may move.
func Prefetches(b Backing) bool {
	p, ok := b.(prefetcher)
	return ok && !p.Pins()
}

// prefetchStep is how much a prefetch brings in at once: closing the region
// waits for one step.
const prefetchStep = 2 << 20

// Do makes the parts present. It may take long; a part ends early if its region is
// closed or re-registered. A region that is neither on demand nor on a dma-buf needs nothing.
//
// It returns the first part that could not be made present and why, after doing the
// others, or at once if it is strict. If there is none, the call is counted: once for
// the device and once for each region.
func (p *Prefetch) Do(strict bool) (failed int, kind FaultKind) {
	done := make(map[*OnDemand]struct{}, 1)
	for i := range p.Parts {
		m, k := p.part(&p.Parts[i])
		if k != FaultNone && kind == FaultNone {
			failed, kind = i, k
		}
		if kind != FaultNone && strict {
			break
		}
		if m != nil {
			done[m] = struct{}{}
		}
	}
	if kind == FaultNone {
		countPrefetch(done)
	}
	return failed, kind
}

// countPrefetch counts a call. Regions that are closed count no more, nor does a
// call if all are.
func countPrefetch(regions map[*OnDemand]struct{}) {
	counted := false
	for m := range regions {
		u := m.used.Load()
		u.mu.Lock()
		if !u.closed {
			if !counted {
				m.device.counts.prefetches.Add(1)
				counted = true
			}
			u.counts.prefetches.Add(1)
		}
		u.mu.Unlock()
	}
}

// part makes one part present.
func (p *Prefetch) part(of *Part) (*OnDemand, FaultKind) {
	r := of.Region
	if r.enter(shutToLooks) != FaultNone {
		return nil, FaultDead
	}
	m, ok := r.backing.(*OnDemand)
	other, moves := r.backing.(prefetcher)
	same := r.Key() == of.Key
	r.leave()
	if !same {
		return nil, FaultDead
	}
	if moves && !p.NoFault {
		return nil, other.Prefetch()
	}
	if !ok {
		return nil, FaultNone
	}
	if of.Off > m.length || of.N > m.length-of.Off {
		return nil, FaultBounds
	}
	u := m.use()
	if u == nil {
		return nil, FaultDead
	}
	if of.N == 0 {
		return m, FaultNone
	}
	at, end := sys.PageAlign(m.addr+uintptr(of.Off), uintptr(of.N))
	for at < end {
		upto, kind := m.prefetchSome(u, at, min(end, at+prefetchStep), p.Write, p.NoFault)
		if kind != FaultNone {
			return nil, kind
		}
		at = upto
	}
	return m, FaultNone
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
