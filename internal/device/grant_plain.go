package device

// Grants to plain memory (see link/grant_plain.go): the owner's side.
//
//  1. offerPlainLocked starts a goroutine when a peer has accessed a region of plain memory: what
//     follows makes system calls, and pinning many pages takes long.
//  2. lend pins the pages of the region, once for all peers, and lends them to the peer, if the
//     region may be written.
//  3. givePlain gives the grant, if region and queue pair are still what they were.
//  4. plainGrant.end ends the loan, pin.close unpins the pages: when the region is closed, changes
//     or moves (grants.revoke), and when the queue pair changes or is closed (barGrants).
//  5. plainGrant.free lets other loans take the place of this one, when the grant is over.

import (
	"slices"
	"sync"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// plainGrant is what a grant has if the memory is plain.
type plainGrant struct {
	remaps uint64     // the peer uses the grant while Via.Remaps returns this
	loan   *link.Loan // nil: the peer may only read
	pin    *pin       // of the loan
}

// end ends the loan of a grant that is shut. When it returns, the peer does not write to the
// memory and never will. It is idempotent, and makes system calls.
func (p *plainGrant) end() {
	if p != nil && p.loan != nil {
		p.loan.End()
	}
}

// free is end, and gives the loan up. It is called once, when the grant is over or if the peer
// never got it.
func (p *plainGrant) free() {
	if p != nil && p.loan != nil {
		p.loan.Free()
	}
}

// pin is pages of a region that are pinned, to be lent to peers.
type pin struct {
	once  sync.Once
	pages *sys.PinnedPages // nil: they cannot be pinned; set by once
}

// pinned returns the pages, or nil. The first call pins them.
func (p *pin) pinned(r *mem.Region) *sys.PinnedPages {
	p.once.Do(func() {
		if pages, err := mem.PinToLend(r); err == nil {
			p.pages = pages
		}
	})
	return p.pages
}

// close unpins the pages, and keeps them from being pinned. It waits for a pinning that is
// under way.
func (p *pin) close() {
	if p == nil {
		return
	}
	p.once.Do(func() {})
	if p.pages != nil {
		_ = p.pages.Close() // no kernel has a reason to refuse; the pages then stay pinned
	}
}

// plainOffer is the request for which a grant to plain memory may be given.
type plainOffer struct {
	key uint32
	va  uint64
	len uint32
	acc ib.Access
	via link.Via
}

// offerPlainLocked starts to give the peer a grant to a region of plain memory. It reports
// whether the attempt before this one has succeeded. The caller is in a read section of the
// region.
func (q *QP) offerPlainLocked(r *mem.Region, o plainOffer) bool {
	now := o.via.Remaps()
	q.absorbLocked()
	for _, g := range q.grants {
		if g.region == r && g.Open() && g.plain != nil && g.plain.remaps != now {
			g.Shut() // the peer does not use it any more
			if c := &g.absorbed; q.lends == lendsDone && c[shm.GrantWrites]+c[shm.GrantReads] < plainWorth {
				q.lends = lendsNot
			}
		}
	}
	if o.len < plainLong && slices.ContainsFunc(q.grants, func(g *grant) bool { return g.region == r && g.Open() }) {
		return false // the peer has it, and uses it for some requests alone
	}
	if !q.mayGiveLocked(r) {
		return false
	}
	if q.lends == lendsNow {
		return false
	}
	succeeded := q.lends == lendsDone
	q.lends = lendsNot
	if q.dev.inBackground(func() { q.dev.givePlain(q, r, o) }) {
		q.lends = lendsNow
	}
	return succeeded
}

// plainLong is from how many bytes on every request to plain memory takes a grant. A shorter one
// takes less time by the ring, together with others, than the system calls for it: it takes the
// grant only if the program waits for it.
const plainLong = 16 << 10

// plainWorth is how many requests a grant to plain memory has to serve before mappings change,
// or the attempt to give it counts as failed: giving one takes as long as some dozens of requests
// by the ring, so where mappings change often, it is tried less and less often.
const plainWorth = 256

// lending is what has become of the latest attempt to give a grant to plain memory.
type lending uint8

const (
	lendsNot  lending = iota // there was none, or it has failed
	lendsNow                 // it is under way
	lendsDone                // it has succeeded
)

// inBackground runs f in a goroutine that the closing of the device waits for. It reports false
// if the device is closed.
func (d *Device) inBackground(f func()) bool {
	d.work.mu.Lock()
	defer d.work.mu.Unlock()
	if d.work.closed {
		return false
	}
	d.work.workers.Go(f)
	return true
}

// givePlain gives the peer of a queue pair a grant to a region of plain memory.
func (d *Device) givePlain(q *QP, r *mem.Region, o plainOffer) {
	p := d.lend(r, o.via)
	given := false
	q.mu.Lock()
	useful := o.acc != ib.AccessRemoteWrite || p.loan != nil
	if useful && !q.closed && q.core.Type == ib.RC && q.core.Grants(o.acc) && o.via.Leads(q.core.Flow(), q.core.DestQPN()) {
		p.remaps = o.via.Remaps() // before Whole looks whether the memory is stale
		d.table.Whole(o.key, o.va, o.acc, q.core.Actor(), func(now *mem.Region, b []byte) {
			given = now == r && q.mayGiveLocked(r) && q.giveLocked(&link.Offer{RKey: o.key, Bytes: b, Remaps: p.remaps, Loan: p.loan}, r, o.via, p)
		})
	}
	if q.lends = lendsNot; given {
		q.lends = lendsDone
	}
	q.mu.Unlock()
	if !given {
		p.free()
	}
}

// lend lends the pages of a region to a peer, if the region may be written and its pages can be
// pinned.
func (d *Device) lend(r *mem.Region, via link.Via) *plainGrant {
	cfg, ok := r.Snapshot()
	if !ok || cfg.Access&ib.AccessRemoteWrite == 0 {
		return &plainGrant{}
	}
	k := &d.grants
	k.mu.Lock()
	p := k.pins[r]
	if p == nil {
		if !r.Open() { // nothing would take the pin out of the map again
			k.mu.Unlock()
			return &plainGrant{}
		}
		if k.pins == nil {
			k.pins = make(map[*mem.Region]*pin)
		}
		p = &pin{}
		k.pins[r] = p // before the memory is looked at: a change of the region takes it out again
	}
	k.mu.Unlock()
	if pages := p.pinned(r); pages != nil {
		if l, err := via.Lend(pages); err == nil {
			return &plainGrant{loan: l, pin: p}
		}
	}
	return &plainGrant{}
}

// forget removes a grant that is over from the device's list and frees its slot. If it has a
// loan, a goroutine ends and frees the loan first: until then a call that closes the region finds
// the grant, and ends the loan too.
func (d *Device) forget(g *grant) {
	end := func() {
		g.plain.free()
		d.grants.remove(g)
		g.Free()
	}
	if g.plain == nil || g.plain.loan == nil || !d.inBackground(end) {
		end()
	}
}
