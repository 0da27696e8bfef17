package qp

import "sync/atomic"

// Credits bound the packets under way from all queue pairs of a device to one
// peer, because they all end in one socket buffer there. A queue pair that gets none is
// stalled on credits (StalledOnCredits); the owner runs it again when there are some.
type Credits struct {
	pool *creditPool
	cost int64 // of a packet
}

// creditPool is the credits that several queue pairs take from.
type creditPool struct {
	free atomic.Int64
	all  int64
}

// NewCredits makes n credits, of which a packet costs one.
func NewCredits(n int) *Credits {
	c := &Credits{pool: &creditPool{all: int64(n)}, cost: 1}
	c.pool.free.Store(int64(n))
	return c
}

// Costing returns the same credits for a queue pair whose packets cost each credits.
func (c *Credits) Costing(each int) *Credits { return &Credits{c.pool, int64(each)} }

// Free reports whether there are credits.
func (c *Credits) Free() bool { return c.pool.free.Load() > 0 }

// scarce reports whether less than half of the credits are left: then requesters ask for
// acknowledgements, which give credits back.
func (c *Credits) scarce() bool { return c.pool.free.Load() < c.pool.all/2 }

// acquire takes credits for up to want packets, and returns for how many. The last packet may
// cost more than is left: otherwise queue pairs with cheap packets could keep those with
// expensive ones waiting for ever.
func (c *Credits) acquire(want int) int {
	for {
		free := c.pool.free.Load()
		if free <= 0 || want <= 0 {
			return 0
		}
		n := min(int64(want), (free+c.cost-1)/c.cost)
		if c.pool.free.CompareAndSwap(free, free-n*c.cost) {
			return int(n)
		}
	}
}

// release gives back the credits of n packets.
func (c *Credits) release(n int) { c.pool.free.Add(int64(n) * c.cost) }

// StalledOnCredits reports whether the queue pair waits for credits.
func (q *QP) StalledOnCredits() bool { return q.req.stalledOnCredits }
