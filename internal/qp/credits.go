package qp

import "sync/atomic"

// Credits bound the packets under way from all queue pairs of a device to one
// peer, because they all end in one socket buffer there. A queue pair that gets none is
// stalled on credits (StalledOnCredits); the owner runs it again when there are some.
//
// Where the packets cross a network, a controller decides how many credits there are
// (control.go), and queue pairs that wait for them share them equally.
type Credits struct {
	pool *creditPool
	cost int64 // of a packet
}

// creditPool is the credits that several queue pairs take from.
type creditPool struct {
	used    atomic.Int64
	limit   atomic.Int64 // how many may be used
	users   atomic.Int32 // queue pairs that hold some
	waiting atomic.Int32 // queue pairs in the owner's line
	control *control     // nil: the limit is fixed
}

// NewCredits makes n credits, of which a packet costs one.
func NewCredits(n int) *Credits {
	c := &Credits{pool: &creditPool{}, cost: 1}
	c.pool.limit.Store(int64(n))
	return c
}

// NewControlled makes credits of which a controller decides how many there are: at most n for
// what waits in the peer's socket buffer, which stand for so many bytes, and more for what is in
// the network. mtu is the payload of a packet.
func NewControlled(n, bytes, mtu int) *Credits {
	c := &Credits{pool: &creditPool{}, cost: 1}
	c.pool.control = newControl(c.pool, n, bytes, mtu)
	return c
}

// Costing returns the same credits for a queue pair whose packets cost each credits.
func (c *Credits) Costing(each int) *Credits { return &Credits{c.pool, int64(each)} }

// Free reports whether there are credits.
func (c *Credits) Free() bool { return c.pool.used.Load() < c.pool.limit.Load() }

// Waiting tells how many queue pairs are in the owner's line.
func (c *Credits) Waiting(n int) { c.pool.waiting.Store(int32(n)) }

// scarce reports whether less than half of the credits are left: then requesters ask for
// acknowledgements, which give credits back.
func (c *Credits) scarce() bool {
	limit := c.pool.limit.Load()
	return limit-c.pool.used.Load() < limit/2
}

// packets returns for how many packets there are credits, and how many of those are free.
func (c *Credits) packets() (all, free int) {
	limit := c.pool.limit.Load()
	return int(limit / c.cost), int((limit - c.pool.used.Load()) / c.cost)
}

// leastShare is how many packets a queue pair may have under way while any number of others wait:
// with fewer, each packet would take a system call.
const leastShare = 16

// acquire takes credits for up to want packets, for a queue pair that holds those of held
// packets, and returns for how many. The last packet may cost more than is left: otherwise queue
// pairs with cheap packets could keep those with expensive ones waiting for ever.
func (c *Credits) acquire(want, held int) int {
	p := c.pool
	for {
		used, limit := p.used.Load(), p.limit.Load()
		free := limit - used
		if waiting := p.waiting.Load(); waiting > 0 && p.control != nil {
			// Equal parts for all; or, since others may want less, of what is free for those that wait.
			mine := int64(held) * c.cost
			share := max(limit/int64(max(p.users.Load(), waiting+1)), (free+mine)/int64(waiting+1), leastShare*c.cost)
			free = min(free, share-mine)
		}
		if free <= 0 || want <= 0 {
			return 0
		}
		n := min(int64(want), (free+c.cost-1)/c.cost)
		if !p.used.CompareAndSwap(used, used+n*c.cost) {
			continue
		}
		if held == 0 {
			p.users.Add(1)
		}
		if p.control != nil {
			p.control.used(used + n*c.cost)
		}
		return int(n)
	}
}

// release gives back the credits of n packets, of a queue pair that holds those of left more.
func (c *Credits) release(n, left int) {
	c.pool.used.Add(-int64(n) * c.cost)
	if n > 0 && left == 0 {
		c.pool.users.Add(-1)
	}
}

// StalledOnCredits reports whether the queue pair waits for credits.
func (q *QP) StalledOnCredits() bool { return q.req.stalledOnCredits }

// settle gives back the credits of packets that are no longer under way.
func (q *QP) settle() { q.giveBack(q.req.heldCredits - q.req.flight()) }

// giveBack returns n credits.
func (q *QP) giveBack(n int) {
	r := &q.req
	n = min(n, r.heldCredits)
	if n > 0 && q.path.Credits != nil {
		r.heldCredits -= n
		q.path.Credits.release(n, r.heldCredits)
	}
}

// flight returns how many packets are under way: neither known to have come nor known to be lost.
func (r *requester) flight() int { return max(0, r.nxt.Sub(r.una)-r.settled-r.missing) }
