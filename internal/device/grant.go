package device

// WRITEs and READs of other processes that do not come by here: see link's lanes. This
// file says who may do what by himself, and keeps the queue pairs of both sides in step.
//
//   - offer gives a peer a lane to a region that its queue pair has accessed.
//   - revoke takes lanes away by region, when that is closed, changes or moves; barGrants
//     by queue pair, when that changes or is closed. Nobody waits for another process under
//     a lock: lanes are shut under it, and waited for without.
//   - absorb moves a queue pair on past what was done.
//   - granted takes a lane that a peer has given; lanes use it.

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

// maxGrants is how many lanes lead to the memory of one queue pair, or from one.
const maxGrants = 4

// grant is a lane that was given to the peer of a queue pair.
type grant struct {
	*link.Grant
	region *mem.Region

	// Guarded by the queue pair's lock.
	absorbed shm.GrantCounts
	met      shm.GrantCounts // what it was at the last doubt
	vain     int             // doubts since then
}

// doubt is told of a request that did not come by the lane, though it could have. If that
// happens again and again while nothing comes by the lane, the peer has not got it: it is
// taken away, and another one may be given.
func (g *grant) doubt() bool {
	if g.absorbed != g.met {
		g.met, g.vain = g.absorbed, 0
	}
	if g.vain++; g.vain == maxVain {
		g.Shut()
	}
	return false
}

// maxVain is how many of those requests that are looked at do not come by a lane before
// it is given up.
const maxVain = 4

// grants are those of all queue pairs of a device, by region.
type grants struct {
	off      atomic.Bool // none are given: tests
	mu       sync.Mutex  // guards what follows
	byRegion map[*mem.Region][]*grant
	leaving  map[*mem.Region]chan struct{} // invalidated regions that peers are still at: closed when they are not
}

// add notes a grant that the peer has not been told of, and reports whether it may be:
// whether the region is open. Whoever keeps accesses out of the region calls revoke after
// that. So either revoke finds the grant, or add finds the region not open.
func (k *grants) add(g *grant) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !g.region.Open() {
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

// revoke takes away the lanes to a region. With wait, nobody accesses the region by a lane
// any more when it returns. Without, a peer may still be inside: what it does there is not
// counted.
func (k *grants) revoke(r *mem.Region, wait bool) {
	k.mu.Lock()
	list := slices.Clone(k.byRegion[r])
	k.mu.Unlock()
	shut(list, wait)
}

// killed is told of every region that is closed or changes, and without wait of one whose
// memory is about to move: see mem.TableConfig.
func (d *Device) killed(r *mem.Region, wait bool) {
	d.giveUpFetches()
	d.grants.revoke(r, wait)
	d.exports.revoke(r, wait)
}

// invalidated is told of a region that was invalidated, under the lock of a queue pair:
// see mem.TableConfig.
func (d *Device) invalidated(r *mem.Region) <-chan struct{} {
	d.giveUpFetches()
	d.grants.revoke(r, false)
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

// inside reports whether a peer is inside a lane to a region.
func (k *grants) inside(r *mem.Region) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.ContainsFunc(k.byRegion[r], func(g *grant) bool { return g.Inside() })
}

// offer is told of a request that another process has sent: see link.SharedConfig.
func (d *Device) offer(t *train.Train, via link.Via) (given bool) {
	q := d.qps.Get(t.DestQP)
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
		given = q.giveLocked(t, r, b, via)
	})
	return given
}

// giveLocked gives the peer a lane to a region whose read section is open.
func (q *QP) giveLocked(t *train.Train, r *mem.Region, b []byte, via link.Via) bool {
	segment, off := mem.SegmentOf(b)
	if segment == 0 {
		return false
	}
	q.absorbLocked()
	if i := slices.IndexFunc(q.grants, func(g *grant) bool { return g.region == r && g.Open() }); i >= 0 {
		return q.grants[i].doubt() // the peer will use it soon
	}
	if len(q.grants) == maxGrants || q.barred > 0 {
		return false
	}
	may := func(acc ib.Access) bool { return r.Access()&acc == acc && q.core.Grants(acc) }
	lane := via.NewGrant()
	if lane == nil {
		return false
	}
	g := &grant{Grant: lane, region: r}
	if !q.dev.grants.add(g) {
		g.Free()
		return false
	}
	if !g.Tell(&link.Offer{QPN: q.number, Peer: q.core.DestQPN(), RKey: t.RETH.RKey, VA: r.IOVA(), Bytes: b, Segment: segment, Off: off,
		Write: may(ib.AccessRemoteWrite), Read: may(ib.AccessRemoteRead)}) {
		q.dev.grants.remove(g)
		g.Free()
		return false
	}
	q.grants = append(q.grants, g)
	return true
}

// stoppedLocked is told by the core that requests are given up, or that the queue pair
// has failed. Nobody waits here: who makes progress must not stand still for one peer.
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

// shut takes lanes away; with wait, it also waits until no peer is inside any more. The
// caller then holds no lock of a queue pair: a peer that is stopped inside stays for long.
func shut(list []*grant, wait bool) {
	for _, g := range list {
		g.Shut()
	}
	for _, g := range list {
		if wait {
			g.Await()
		}
	}
}

// barGrants takes away the lanes to the queue pair's memory, waits until the peer is not
// inside any more, and keeps new ones from being given until unbarLocked.
func (q *QP) barGrants() {
	q.mu.Lock()
	q.barred++
	list := slices.Clone(q.grants)
	q.mu.Unlock()
	shut(list, true)
}

// unbarLocked ends what barGrants began: the queue pair moves on past what the peer has
// done by itself, and no lane is left. New ones may be given when the caller unlocks.
func (q *QP) unbarLocked() {
	q.absorbLocked()
	q.barred--
}

// absorbLocked moves the queue pair on past what the peer has written by itself.
func (q *QP) absorbLocked() {
	q.grants = slices.DeleteFunc(q.grants, func(g *grant) bool {
		over := g.Over() // before the counts are read
		counts := g.Counts()
		if n := counts.Less(&g.absorbed); n != (shm.GrantCounts{}) {
			q.core.Absorb(n[shm.GrantWrites], n[shm.GrantWritePackets], n[shm.GrantWritten], false)
			q.core.Absorb(n[shm.GrantReads], n[shm.GrantReadPackets], n[shm.GrantRead], true)
			g.absorbed = counts
		}
		if over {
			q.dev.grants.remove(g)
			g.Free()
		}
		return over
	})
}

// granted is told of a lane that a peer has given.
func (d *Device) granted(qpn, remote uint32, l *link.PeerGrant) {
	q := d.qps.Get(qpn)
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

// sendsLocked tells whether the queue pair is connected with the peer that its lanes
// lead to.
func (q *QP) sendsLocked() bool {
	s := q.core.State()
	return s == ib.QPRTS || s == ib.QPSQD
}

// lanes are how a queue pair accesses its peer's memory: a qp.Shortcut. The queue pair's
// lock guards them.
type peerGrants struct {
	q    *QP
	list []*link.PeerGrant
	next *link.PeerGrant // what Covers has found
}

// Covers implements qp.Shortcut.
func (k *peerGrants) Covers(x *qp.Request) bool {
	for _, l := range k.list {
		if l.Covers(x.RKey, x.VA, x.Len, x.Read) {
			k.next = l
			return true
		}
	}
	return false
}

// Copy implements qp.Shortcut: behind Covers. The owner absorbs what was done.
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
