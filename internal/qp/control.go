package qp

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// control decides how many bytes may be under way to one peer, from all queue pairs of a device:
// the window. It hears of round trips, of losses, and of packets that a router has marked instead
// of dropping them (ECN).
//
//   - It begins small, and doubles the window with every round trip, until something is lost or
//     marked, or round trips take three times as long as the shortest.
//   - Then the window grows with its square root: quickly where it is small, so that it
//     recovers from random losses, and slowly where it is large, so that queues stay short.
//   - A loss takes its packet off the window, and once in a round trip a quarter of the rest.
//   - Marks shrink it by half of the share of packets that are marked (DCTCP, RFC 8257).
//   - If the peer is not heard of at all, the window begins anew, and doubles up to half of what
//     it was.
//
// The window is at most what the peer's socket buffer holds. On long paths the network holds more,
// which comes on top (length).
type control struct {
	pool  *creditPool
	scale float64 // credits of a byte
	most  float64 // bytes that the peer's socket buffer holds
	mtu   float64

	peak   atomic.Int64 // the most credits in use since the last round
	acked  atomic.Int64 // packets acknowledged since then
	next   atomic.Int64 // Time of the next round
	inPipe atomic.Int64 // bytes that the network holds, for the windows of queue pairs

	mu        sync.Mutex // guards the fields below, and setting the limit
	window    float64    // bytes
	starting  bool       // it doubles, up to enough
	enough    float64
	floor     Time // the shortest round trip
	floorAt   Time
	smooth    Time    // the usual round trip
	cutAt     Time    // when losses last shrank the window
	length    float64 // bytes that a long path holds
	marked    int     // packets marked since the last round
	fraction  float64
	lastRound Time
	heardAt   Time // when packets were last acknowledged
}

const (
	firstWindow = 64 << 10
	lossCut     = 0.25 // of the window
	growth      = 0.5  // packets in a round trip, times the square root of the window in packets
	slowAt      = 3    // round trips of so many times the shortest end the start
	maxPipe     = 16 << 20
	floorAge    = time.Minute           // the shortest round trip is measured again
	longDelay   = 50 * time.Millisecond // packets that wait longer in queues count as marked
	markGain    = 1.0 / 16
	minRound    = 50 * time.Microsecond
	// shortPath is the round trip of paths that hold little beside a socket buffer: most of it is the
	// hosts' own time.
	shortPath = 500 * time.Microsecond
	hostTime  = 30 * time.Microsecond // what a round trip takes without any network
)

func newControl(p *creditPool, n, bytes, mtu int) *control {
	c := &control{pool: p, scale: float64(n) / float64(max(bytes, 1)), most: float64(bytes), mtu: float64(max(mtu, 1)), starting: true, enough: math.Inf(1), fraction: 1}
	c.window = min(max(firstWindow, 2*c.mtu), c.most)
	c.setLimit()
	return c
}

// used notes how many credits are in use.
func (c *control) used(n int64) {
	if n > c.peak.Load() {
		c.peak.Store(n)
	}
}

// pipe returns how many bytes the network holds. A queue pair may have so many more under way than its
// own window.
func (c *control) pipe() int { return int(c.inPipe.Load()) }

// sample takes a round trip.
func (c *control) sample(rtt, now Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.smooth == 0 {
		c.smooth = rtt
	}
	c.smooth += (rtt - c.smooth) / 8
	switch {
	case c.floor == 0 || rtt <= c.floor:
		c.floor, c.floorAt = max(rtt, 1), now
	case now-c.floorAt > floorAge:
		c.floor, c.floorAt = c.smooth, now
	}
}

// ackedPackets notes that packets have arrived. Once in a round trip the window is set anew.
func (c *control) ackedPackets(n int, now Time) {
	c.acked.Add(int64(n))
	if int64(now) >= c.next.Load() {
		c.round(now)
	}
}

// round sets the window anew.
func (c *control) round(now Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if int64(now) < c.next.Load() || c.smooth == 0 {
		return
	}
	c.next.Store(int64(now + max(c.smooth, minRound)))
	acked, peak := int(c.acked.Swap(0)), c.peak.Swap(c.pool.used.Load())
	busy := float64(peak) >= float64(c.pool.limit.Load())/4
	took := now - c.lastRound
	c.lastRound, c.heardAt = now, now

	queued := c.smooth - c.floor
	if queued > longDelay {
		c.marked = max(c.marked, acked)
	}
	share := 0.0
	if acked > 0 {
		share = min(1, float64(c.marked)/float64(acked))
	}
	c.fraction += (share - c.fraction) * markGain
	if c.marked > 0 {
		c.starting, c.marked = false, 0
		c.window *= 1 - c.fraction/2
	}
	switch {
	case !busy:
	case c.starting && (c.smooth >= slowAt*c.floor && c.window > 2*firstWindow || c.window >= c.enough):
		c.starting = false
	case c.starting:
		c.window = min(2*c.window, c.window+float64(acked)*c.mtu)
	default:
		// After a pause, or where acknowledgements are rare, a round is longer than a round trip.
		trips := min(2, max(1, float64(took)/float64(max(c.smooth, minRound))))
		c.window += trips * growth * math.Sqrt(c.window/c.mtu) * c.mtu
	}
	rate := float64(peak) / c.scale / float64(max(c.smooth, 1))
	c.inPipe.Store(int64(min(maxPipe, rate*float64(max(0, c.floor-hostTime)))))
	c.length = min(maxPipe, 2*rate*float64(max(0, c.floor-shortPath)))
	c.setLimit()
}

// lost notes that packets are lost.
func (c *control) lost(n int, now Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.starting = false
	c.window -= float64(n) * c.mtu
	if c.cutAt == 0 || now-c.cutAt >= c.smooth { // once in a round trip
		c.cutAt = now
		c.window *= 1 - lossCut
	}
	c.setLimit()
}

// sawMarks notes that packets were marked.
func (c *control) sawMarks(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.marked += n
}

// timedOut notes that a queue pair has had no answer since a time. If others have, it is not the
// network.
func (c *control) timedOut(since, now Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.heardAt > since {
		return
	}
	c.starting, c.enough = true, max(c.window/2, firstWindow)
	c.window, c.cutAt = 0, now
	c.setLimit()
}

// setLimit makes the window what queue pairs may use.
func (c *control) setLimit() {
	c.window = max(2*c.mtu, min(c.window, c.most+c.length))
	c.pool.limit.Store(int64(c.window * c.scale))
}
