package cuda

// Memory of the host. The engine reads and writes it in place, as fast as the bus is, if its
// pages are locked: by the program (cuMemHostAlloc, cuMemHostRegister), or by this package, which
// locks staging bytes, and memory that the device has allocated (mem.Segment) when it is first
// used.

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
)

// Reaches reports whether the engine can read and write bytes of the host in place.
func (m *Memory) Reaches(b []byte) bool {
	d := m.card.drv
	if d.holdsLocked(b) {
		return true
	}
	if s := mem.SegmentAt(b); s != nil {
		return d.host.lock(d, m.card.ctx, s)
	}
	return false
}

// Locks reports whether bytes of the program's stay where they are while the engine is at them:
// their pages are locked.
func (m *Memory) Locks(b []byte) bool { return m.card.drv.holdsLocked(b) }

// holdsLocked reports whether bytes lie in page-locked memory. The driver only looks into its
// table, so any thread may ask.
func (d *Driver) holdsLocked(b []byte) bool {
	if len(b) == 0 || d.host.leaving(addrOf(b), uint64(len(b))) {
		return false
	}
	at := addrOf(b)
	return d.isLocked(at) && d.isLocked(at+uint64(len(b))-1)
}

// hostMemory is memory of the host that the driver knows.
type hostMemory struct {
	mu       sync.Mutex                // guards what follows, but for leaves
	segments map[uint64]*lockedSegment // by their numbers
	watch    func()                    // ends the watching of segments
	gone     []goneExtent              // what the program is about to free

	leaves atomic.Bool // gone may have some
}

type lockedSegment struct {
	base   uint64
	ctx    uintptr // in which it was locked
	locked bool    // false: not yet, or it could not be
	done   chan struct{}
}

type extent struct{ start, end uint64 }

// goneExtent is a range that is being freed, until some time.
type goneExtent struct {
	extent
	until time.Time
}

// lock has the pages of a segment locked, in the background, and reports whether they are.
func (h *hostMemory) lock(d *Driver, ctx uintptr, s *mem.Segment) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l := h.segments[s.ID()]; l != nil {
		return l.locked
	}
	if h.segments == nil {
		h.segments = make(map[uint64]*lockedSegment)
		h.watch = mem.WatchSegments(func(id uint64) { h.unlock(d, id) })
	}
	base, n := s.Range()
	l := &lockedSegment{base: base, ctx: ctx, done: make(chan struct{})}
	h.segments[s.ID()] = l
	go func() {
		defer close(l.done)
		r := d.slow.in(ctx, func() Result { return d.lockHost(base, n) })
		h.mu.Lock()
		l.locked = r == success
		h.mu.Unlock()
	}()
	return false
}

// unlock unlocks the pages of a segment that is about to go.
func (h *hostMemory) unlock(d *Driver, id uint64) {
	h.mu.Lock()
	l := h.segments[id]
	delete(h.segments, id)
	h.mu.Unlock()
	if l == nil {
		return
	}
	<-l.done
	if l.locked {
		d.slow.in(l.ctx, func() Result { return d.unlockHost(l.base) })
	}
}

// leave keeps the cards from using bytes in place while the program frees them. It cannot be seen
// when that is done; an address that is locked again later may be used again.
func (h *hostMemory) leave(e extent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	h.gone = slices.DeleteFunc(h.gone, func(g goneExtent) bool { return now.After(g.until) })
	h.gone = append(h.gone, goneExtent{e, now.Add(freeing)})
	h.leaves.Store(true)
}

// freeing is how long a call that frees memory may take; most take microseconds.
const freeing = 5 * time.Second

// leaving reports whether the program is about to free some of the bytes.
func (h *hostMemory) leaving(at, n uint64) bool {
	if !h.leaves.Load() {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	any := false
	for _, g := range h.gone {
		if now.Before(g.until) {
			any = true
			if at < g.end && g.start < at+n {
				return true
			}
		}
	}
	h.leaves.Store(any)
	return false
}

// lockStaging locks the pages of a piece of staging bytes.
func (c *card) lockStaging(b []byte) (unlock func(), err error) {
	d, addr, n := c.drv, addrOf(b), uint64(len(b))
	var r Result
	if r = d.slow.in(c.ctx, func() Result { return d.lockHost(addr, n) }); r != success {
		return nil, d.check("lock_staging", fnMemHostRegister, r)
	}
	return func() { d.slow.in(c.ctx, func() Result { return d.unlockHost(addr) }) }, nil
}
