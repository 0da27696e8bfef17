package device

// Grants: WRITEs and READs that a peer process executes by itself (see link/grant.go). This
// file decides which peer gets a grant to which region, and keeps the
// queue pairs of both sides in step.
//
//   - offer gives the peer of a queue pair a grant to a region that the peer has accessed. If
//     the memory is plain, grant_plain.go prepares that.
//   - revoke takes grants away by region, when the region is closed, changes or moves;
//     barGrants by queue pair, when the queue pair changes or is closed. No call waits for
//     another process while it holds a queue pair's lock.
//   - absorbLocked moves a queue pair on past the requests that its peer has executed.
//   - granted takes a grant that a peer has given; peerGrants uses it.

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// maxGrants is how many grants a queue pair gives at most, and how many of its peer's it
// keeps.
const maxGrants = 4

// grant is a grant that was given to the peer of a queue pair: the owner's end.
type grant struct {
	*link.Grant
	region *mem.Region
	plain  *plainGrant // nil: the memory is a segment's
	moves  bool        // the memory is a segment that its owner may leave

	// Guarded by the queue pair's lock.
	absorbed shm.GrantCounts
	met      shm.GrantCounts // absorbed, as it was at the last call of doubt that found it changed
	vain     int             // calls of doubt since then, and that one
}

// doubt counts a request that came by the ring, though the grant covers it. After maxVain of
// them, with none by the grant in between, the peer has not got the grant: doubt takes it
// away, and another one may be given. It returns false: nothing new was given.
func (g *grant) doubt() bool {
	if g.absorbed != g.met {
		g.met, g.vain = g.absorbed, 0
	}
	if g.vain++; g.vain == maxVain {
		g.Shut()
	}
	return false
}

// grantWorth is how many requests a grant to memory that moves has to serve, or giving it counts
// as refused. The peer has to ask for the segment and map it, which takes as long as some dozens of
// requests by the ring. So where the memory moves often, a grant is given less and less often.
const grantWorth = 256

// maxVain is how many requests in a row that offer looks at come by the ring before the grant
// that covers them is taken away.
const maxVain = 4

// grants are the grants that all queue pairs of a device have given, by region.
type grants struct {
	off      atomic.Bool // set by tests: none are given
	mu       sync.Mutex  // guards what follows
	byRegion map[*mem.Region][]*grant
	pins     map[*mem.Region]*pin          // of plain memory that peers write to
	leaving  map[*mem.Region]chan struct{} // of an invalidated region that peers still access: closed when none does
}

// add lists a grant before the peer hears of it, and reports whether the peer may: whether
// the region is open, and the pages that the peer is lent are the region's. A call that shuts the region calls revoke afterwards, so either revoke
// finds the grant, or add finds the region not open.
func (k *grants) add(g *grant) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !g.region.Open() || g.plain != nil && g.plain.loan != nil && k.pins[g.region] != g.plain.pin {
		return false
	}
	if k.byRegion == nil {
		k.byRegion = make(map[*mem.Region][]*grant)
	}
	k.byRegion[g.region] = append(k.byRegion[g.region], g)
	return true
}

func (k *grants) remove(g *grant) {
	k.mu.Lock()
	defer k.mu.Unlock()
	list := slices.DeleteFunc(k.byRegion[g.region], func(o *grant) bool { return o == g })
	if k.byRegion[g.region] = list; len(list) == 0 {
		delete(k.byRegion, g.region)
	}
}

// revoke takes away the grants to a region. With wait, no peer writes to the region by a grant
// any more when revoke returns, nor reads a segment. Without, a peer may still be copying to or
// from a segment: that copy is not counted. A peer that reads plain memory is never waited for.
func (k *grants) revoke(r *mem.Region, wait bool) {
	k.mu.Lock()
	list := slices.Clone(k.byRegion[r])
	p := k.pins[r]
	delete(k.pins, r)
	k.mu.Unlock()
	shut(list)
	if wait {
		for _, g := range list {
			if g.plain == nil {
				g.Await()
			}
		}
	}
	p.close()
}

// shut keeps peers from beginning another access to a region.
func (k *grants) shut(r *mem.Region) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, g := range k.byRegion[r] {
		g.Shut()
	}
}

// killed keeps other processes out of a region that is closed or changes, and, without wait,
// out of one whose memory is about to move. The table calls it: see mem.TableConfig.
func (d *Device) killed(r *mem.Region, wait bool) {
	d.giveUpFetches()
	d.grants.revoke(r, wait)
	d.exports.revoke(r, wait)
}

// left waits until no peer copies by a grant to a region that was taken away without waiting. The
// table calls it: see mem.TableConfig.
func (d *Device) left(r *mem.Region) {
	k := &d.grants
	k.mu.Lock()
	list := slices.Clone(k.byRegion[r])
	k.mu.Unlock()
	for _, g := range list {
		if g.plain == nil && !g.Open() { // an open one was given since
			g.Await()
		}
	}
}

// invalidated keeps other processes out of a region that was invalidated. The table calls it
// under the lock of a queue pair (see mem.TableConfig), so it does not wait: it returns a
// channel that is closed when no peer accesses the region any more, or nil if none does now.
func (d *Device) invalidated(r *mem.Region) <-chan struct{} {
	d.giveUpFetches()
	d.grants.shut(r)
	d.exports.shut(r)
	if !d.grants.inside(r) && !d.exports.inside(r) {
		return nil
	}
	k := &d.grants
	k.mu.Lock()
	defer k.mu.Unlock()
	if left := k.leaving[r]; left != nil {
		return left // a goroutine waits for these peers already
	}
	if k.leaving == nil {
		k.leaving = make(map[*mem.Region]chan struct{})
	}
	left := make(chan struct{})
	k.leaving[r] = left
	d.work.workers.Go(func() {
		d.killed(r, true)
		k.mu.Lock()
		delete(k.leaving, r)
		k.mu.Unlock()
		close(left)
	})
	return left
}

// inside reports whether a peer is copying to or from a segment by a grant to a region, or has a
// loan of the region's pages.
func (k *grants) inside(r *mem.Region) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.pins[r] != nil || slices.ContainsFunc(k.byRegion[r], func(g *grant) bool {
		return g.plain == nil && g.Inside() || g.plain != nil && g.plain.loan != nil
	})
}

// offer gives another process a grant to the region that its request t names, if it may have
// one, and reports whether it did. The link calls it: see link.SharedConfig.
func (d *Device) offer(t *train.Train, via link.Via) (given bool) {
	q := d.findQP(t.DestQP)
	if q == nil || d.capture != nil || d.grants.off.Load() {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	acc := ib.AccessRemoteWrite
	if t.Kind == wire.KindReadRequest {
		acc = ib.AccessRemoteRead
	}
	if q.closed || q.core.Type != ib.RC || !q.core.Grants(acc) || !q.core.IsPeer(t) {
		return false
	}
	d.table.Whole(t.RETH.RKey, t.RETH.VA, acc, q.core.Actor(), func(r *mem.Region, b []byte) {
		o := &link.Offer{RKey: t.RETH.RKey, Bytes: b}
		if placed, ok := r.Backing().(mem.Placed); ok {
			// A grant to memory that moves often is not worth its price: see absorbLocked.
			if q.mayGiveLocked(r) {
				o.Segment, o.Off = placed.Segment(b, r.Access()&ib.AccessRemoteWrite != 0)
				given = o.Segment != 0 && q.giveLocked(o, r, via, nil) && !q.shortLived
			}
		} else if r.Kind() == mem.KindDMABuf {
			return // it may be no memory that another process can read
		} else if o.Segment, o.Off = mem.SegmentOf(b); o.Segment != 0 {
			given = q.mayGiveLocked(r) && q.giveLocked(o, r, via, nil)
		} else if via.Plain() {
			given = q.offerPlainLocked(r, plainOffer{t.RETH.RKey, t.RETH.VA, t.RETH.Len, acc, via})
		}
	})
	return given
}

// mayGiveLocked reports whether the peer may have another grant to a region: there is none, and
// there are not too many to others.
func (q *QP) mayGiveLocked(r *mem.Region) bool {
	q.absorbLocked()
	if i := slices.IndexFunc(q.grants, func(g *grant) bool { return g.region == r && g.Open() }); i >= 0 {
		return q.grants[i].doubt() // the peer may only not have read it yet
	}
	return len(q.grants) < maxGrants && q.barred == 0
}

// giveLocked gives the peer a grant to a region, and reports whether it did. The caller is in
// a read section of the region. o says where the memory lies.
func (q *QP) giveLocked(o *link.Offer, r *mem.Region, via link.Via, p *plainGrant) bool {
	may := func(acc ib.Access) bool { return r.Access()&acc == acc && q.core.Grants(acc) }
	fresh := via.NewGrant()
	if fresh == nil {
		return false
	}
	_, moves := r.Backing().(mem.Placed)
	g := &grant{Grant: fresh, region: r, plain: p, moves: moves}
	if !q.dev.grants.add(g) {
		g.Free()
		return false
	}
	o.QPN, o.Peer, o.VA = q.number, q.core.DestQPN(), r.IOVA()
	o.Write, o.Read = may(ib.AccessRemoteWrite) && (p == nil || p.loan != nil), may(ib.AccessRemoteRead)
	if !g.Tell(o) {
		q.dev.grants.remove(g)
		g.Free()
		return false
	}
	q.grants = append(q.grants, g)
	return true
}

// stoppedLocked takes back what a queue pair has lent out when it gives up requests or fails.
// The core calls it. It does not wait: the goroutine that makes progress for all queue pairs
// must not stand still for one peer.
func (q *QP) stoppedLocked() {
	if q.gaveUp != nil {
		close(q.gaveUp)
		q.gaveUp = nil
	}
	q.dev.giveUpFetches()
	if u := q.peer.Load(); u != nil && u.carrier != nil {
		u.carrier.GiveUp()
	}
	for _, g := range q.grants {
		g.Shut()
	}
}

// shut takes grants away, and ends the loans that peers write by. The caller holds no lock of a
// queue pair: it makes system calls.
func shut(list []*grant) {
	for _, g := range list {
		g.Shut()
	}
	for _, g := range list {
		g.plain.end()
	}
}

// barGrants takes away the grants that the queue pair has given, waits until the peer copies
// by none of them any more, and keeps new ones from being given until unbarLocked. The caller
// holds no lock of a queue pair: a peer process that was stopped amid a copy may stay there for
// long.
func (q *QP) barGrants() {
	q.mu.Lock()
	q.barred++
	list := slices.Clone(q.grants)
	q.mu.Unlock()
	shut(list)
	for _, g := range list {
		g.Await()
	}
}

// unbarLocked ends what barGrants began: the queue pair moves on past what the peer has
// executed by grants. New grants may be given when the caller unlocks, unless another call
// still bars them.
func (q *QP) unbarLocked() {
	q.absorbLocked()
	q.barred--
}

// absorbLocked moves the queue pair on past what the peer has executed by grants, and frees
// the grants that the peer can use no more.
func (q *QP) absorbLocked() {
	q.grants = slices.DeleteFunc(q.grants, func(g *grant) bool {
		over := g.Over() // before the counts are read: from then on they do not change
		counts := g.Counts()
		if n := counts.Since(&g.absorbed); n != (shm.GrantCounts{}) {
			q.core.Absorb(n[shm.GrantWrites], n[shm.GrantWritePackets], n[shm.GrantWritten], false)
			q.core.Absorb(n[shm.GrantReads], n[shm.GrantReadPackets], n[shm.GrantRead], true)
			g.absorbed = counts
		}
		if over {
			if g.moves {
				q.shortLived = g.absorbed[shm.GrantWrites]+g.absorbed[shm.GrantReads] < grantWorth
			}
			q.dev.forget(g)
		}
		return over
	})
}

// granted adds a grant that a peer has given to those that queue pair qpn uses. The link
// calls it.
func (d *Device) granted(qpn, remote uint32, l *link.PeerGrant) {
	q := d.findQP(qpn)
	if q == nil || d.capture != nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	s, local := d.link.(*link.Shared)
	if q.closed || q.core.Type != ib.RC || !q.sendsLocked() || q.core.DestQPN() != remote || !local || !s.LeadsTo(q.core.Flow(), remote, l) {
		return
	}
	k, _ := q.core.Shortcut.(*peerGrants)
	if k == nil {
		k = &peerGrants{q: q}
		q.core.Shortcut = k
	}
	k.list = slices.DeleteFunc(k.list, func(l *link.PeerGrant) bool { return !l.Good() })
	if len(k.list) == maxGrants {
		k.list = slices.Delete(k.list, 0, 1)
	}
	k.list = append(k.list, l)
}

// sendsLocked reports whether the queue pair is in a state in which the grants of its peer
// hold: RTS or SQD.
func (q *QP) sendsLocked() bool {
	s := q.core.State()
	return s == ib.QPRTS || s == ib.QPSQD
}

// peerGrants are the grants by which a queue pair accesses its peer's memory: a qp.Shortcut.
// The queue pair's lock guards them.
type peerGrants struct {
	q    *QP
	list []*link.PeerGrant
	next *link.PeerGrant // the one that Covers has found, for Copy
}

// Covers implements qp.Shortcut.
func (k *peerGrants) Covers(x *qp.Request) bool {
	for _, l := range k.list {
		if l.Covers(x.RKey, x.VA, x.Len, x.Read) {
			if l.Plain() && x.Len < plainLong && !x.Awaited() {
				return false
			}
			k.next = l
			return true
		}
	}
	return false
}

// Copy implements qp.Shortcut, by the grant that Covers has found. The owner process absorbs
// what was executed.
func (k *peerGrants) Copy(x *qp.Request) bool {
	if k.next.Copy(x.VA, x.Own, x.Len, x.Packets(), x.Read) {
		k.q.core.Counters[qp.CntByGrant]++
		return true
	}
	if !k.next.Good() {
		k.list = slices.DeleteFunc(k.list, func(l *link.PeerGrant) bool { return l == k.next })
		if len(k.list) == 0 {
			k.q.core.Shortcut = nil
		}
	}
	k.next = nil
	return false
}
