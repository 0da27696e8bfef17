package qp

import "sync/atomic"

// Credits bound the packets under way from all queue pairs of a device to one
// peer, because they all end in one socket buffer there. Who gets none is
// Stalled; the owner runs it again when there are credits.
type Credits struct {
	free atomic.Int64
	all  int64
}

// NewCredits makes n credits.
func NewCredits(n int) *Credits {
	c := &Credits{all: int64(n)}
	c.free.Store(int64(n))
	return c
}

// Free reports whether there are credits.
func (c *Credits) Free() bool { return c.free.Load() > 0 }

// scarce reports whether less than half of the credits are left: then their
// holders should see to it that they come back.
func (c *Credits) scarce() bool { return c.free.Load() < c.all/2 }

// acquire takes up to want credits.
func (c *Credits) acquire(want int) int {
	for {
		free := c.free.Load()
		n := min(int64(want), free)
		if n <= 0 {
			return 0
		}
		if c.free.CompareAndSwap(free, free-n) {
			return int(n)
		}
	}
}

func (c *Credits) release(n int) { c.free.Add(int64(n)) }

// Stalled reports whether the queue pair waits for credits.
func (q *QP) Stalled() bool { return q.req.stalled }
