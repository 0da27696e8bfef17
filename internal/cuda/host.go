package cuda

// Memory of the host. The engine reads and writes it in place, as fast as the bus is, if its
// pages are locked: by the program (cuMemHostAlloc, cuMemHostRegister), or by this package, which
// locks staging bytes, and memory that the library has allocated (mem.Own) when it is first
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
	if locked, _ := d.holdsLocked(b); locked {
		return true
	}
	if o := mem.OwnAt(b); o != nil {
		d.host.lock(d, m.card.ctx, o)
	}
	return false
}

// Locks reports whether bytes of the program's stay where they are while the engine is at them:
// their pages are locked.
func (m *Memory) Locks(b []byte) bool { return m.Reaches(b) }

// hostMemory is memory of the host that the driver knows.
type hostMemory struct {
	mu       sync.Mutex // guards what follows, but for leaves and known
	own      map[*mem.Own]*lockedOwn
	gone     []goneExtent         // what the program is about to free
	learning bool                 // the driver is being asked about a range
	pageable map[uint64]time.Time // places that were not page-locked, and until when that holds

	leaves atomic.Bool  // gone may have some
	known  lockedRanges // of a watched program
}

// lockedOwn is own memory whose pages are locked, or are about to be.
type lockedOwn struct {
	ctx    uintptr // in which it was locked
	locked bool    // once done is closed: whether it could be
	done   chan struct{}
}

type extent struct{ start, end uint64 }

// goneExtent is a range that is being freed, until some time.
type goneExtent struct {
	extent
	until time.Time
}

// lock has the pages of own memory locked, in the background.
func (h *hostMemory) lock(d *Driver, ctx uintptr, o *mem.Own) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.own[o] != nil {
		return
	}
	if h.own == nil {
		h.own = make(map[*mem.Own]*lockedOwn)
		mem.WatchOwn(func(o *mem.Own) { h.unlock(d, o) }) // for good, as the driver is there for good
	}
	l := &lockedOwn{ctx: ctx, done: make(chan struct{})}
	h.own[o] = l
	go func() {
		defer close(l.done)
		o.Pin()
		base, n := o.Range()
		era := h.known.now()
		if l.locked = d.slow.in(ctx, func() Result { return d.lockHost(base, n) }) == success; l.locked {
			h.known.add(extent{base, base + n}, era)
		}
	}()
}

// forget unlocks what was locked in a context that is about to go.
func (h *hostMemory) forget(d *Driver, ctx uintptr) {
	h.mu.Lock()
	var all []*mem.Own
	for o, l := range h.own {
		if l.ctx == ctx {
			all = append(all, o)
		}
	}
	h.mu.Unlock()
	for _, o := range all {
		h.unlock(d, o)
	}
}

// unlock unlocks the pages of own memory that is about to go.
func (h *hostMemory) unlock(d *Driver, o *mem.Own) {
	h.mu.Lock()
	l := h.own[o]
	delete(h.own, o)
	h.mu.Unlock()
	if l == nil {
		return
	}
	<-l.done
	if l.locked {
		base, n := o.Range()
		h.known.remove(extent{base, base + n})
		d.slow.in(l.ctx, func() Result { return d.unlockHost(base) })
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
	h.known.remove(e)
}

// note notes memory that was page-locked in an era of known.
func (h *hostMemory) note(e extent, era uint64) {
	if !h.leaving(e.start, e.end-e.start) {
		h.known.add(e, era)
	}
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
