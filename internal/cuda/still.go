package cuda

// Whether the memory of a request is still what it was.
//
// If the program is watched (Driver.Watch), it says what it frees beforehand: then requests look at what is known here, and
// the driver is not asked. It may not answer: a thread of the program that waits for a kernel may have a lock of the
// driver's, and the kernel may wait for the bytes of the request.
//
// If the program is not watched, the driver is asked before each copy, by a thread that does nothing else. If it does not
// answer in time, requests go on as if nothing had changed, until it does.

import (
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
)

// patience is how long the driver may take to answer a question that a request has.
const patience = 2 * time.Second

// askInTime has the driver asked, and reports whether it has answered in time.
func (d *Driver) askInTime(f func()) bool {
	if d.checks.try(patience, f) {
		return true
	}
	if !d.saidNoAnswer.Swap(true) {
		slog.Warn("verbena: CUDA's driver does not say whether memory is still there: meanwhile requests go on as if it were. Under verbena exec it need not be asked")
	}
	return false
}

// current reports whether bytes are those that were registered: the driver gives each allocation
// another number, so that an address that was freed and is used again is told from the old one.
func (m *Memory) current(off, n uint64) mem.FaultKind {
	d := m.card.drv
	if m.gone.Load() {
		return mem.FaultRevoked
	}
	if len(m.pieces) == 0 || d.watched.Load() {
		return mem.FaultNone
	}
	start, end := m.addr+off, m.addr+off+n
	first, _ := slices.BinarySearchFunc(m.pieces, start, func(p piece, at uint64) int {
		if p.end <= at {
			return -1
		}
		return 1
	})
	stale := new(bool)
	answered := d.askInTime(func() {
		for i := first; i < len(m.pieces) && m.pieces[i].start < end; i++ {
			var id uint64
			if r := d.bufferID(max(start, m.pieces[i].start), &id); r != success || id != m.pieces[i].id {
				*stale = true
				return
			}
		}
	})
	if answered && *stale {
		return mem.FaultStale
	}
	return mem.FaultNone
}

// holdsLocked reports whether bytes lie in page-locked memory. answered is false if the driver was asked, and does not say.
func (d *Driver) holdsLocked(b []byte) (locked, answered bool) {
	if len(b) == 0 || d.host.leaving(addrOf(b), uint64(len(b))) {
		return false, true
	}
	e := extent{addrOf(b), addrOf(b) + uint64(len(b))}
	if d.watched.Load() {
		return d.host.known.holds(e) || d.host.learn(d, e), true
	}
	is := new(bool)
	if answered = d.askInTime(func() { *is = d.isLockedRange(e) }); !answered {
		return false, false
	}
	return *is, true
}

// isLockedRange asks the driver whether a range is page-locked memory of the host.
func (d *Driver) isLockedRange(e extent) bool { return d.isLocked(e.start) && d.isLocked(e.end-1) }

// lockedRanges are ranges of the host's memory that are known to be page-locked. Any goroutine may look.
type lockedRanges struct {
	mu     sync.Mutex               // guards changes
	sorted atomic.Pointer[[]extent] // by start; is replaced, not changed
	era    uint64                   // how often something was taken out
	shut   time.Time                // nothing is added before
}

// holds reports whether a range is known to be page-locked.
func (k *lockedRanges) holds(e extent) bool {
	all := k.sorted.Load()
	if all == nil {
		return false
	}
	i, _ := slices.BinarySearchFunc(*all, e.start, func(x extent, at uint64) int {
		if x.end <= at {
			return -1
		}
		return 1
	})
	return i < len(*all) && (*all)[i].start <= e.start && e.end <= (*all)[i].end
}

// now returns the era, for add.
func (k *lockedRanges) now() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.era
}

// add adds what was page-locked in an era, unless something was taken out since. It is one range with what it overlaps.
func (k *lockedRanges) add(e extent, era uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.era != era || time.Now().Before(k.shut) {
		return
	}
	if all := k.sorted.Load(); all != nil {
		for _, x := range *all {
			if x.start < e.end && e.start < x.end {
				e = extent{min(x.start, e.start), max(x.end, e.end)}
			}
		}
	}
	kept := k.without(e)
	i, _ := slices.BinarySearchFunc(kept, e.start, func(x extent, at uint64) int {
		if x.start < at {
			return -1
		}
		return 1
	})
	kept = slices.Insert(kept, i, e)
	k.sorted.Store(&kept)
}

// remove takes out all that a range touches.
func (k *lockedRanges) remove(e extent) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.era++
	kept := k.without(e)
	k.sorted.Store(&kept)
}

// clear takes out everything, before a context is destroyed, and with it the page-locked memory that was allocated there.
// It cannot be seen when that is done, so for a while nothing is added.
func (k *lockedRanges) clear() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.era++
	k.sorted.Store(nil)
	k.shut = time.Now().Add(freeing)
}

// without returns a copy without what a range touches. The caller holds mu.
func (k *lockedRanges) without(e extent) []extent {
	all := k.sorted.Load()
	if all == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(*all), func(x extent) bool { return x.start < e.end && e.start < x.end })
}

// learn has the driver asked about a range in the background, and returns false: it is not known to be page-locked yet. A
// place that is not is asked about again after a while, since the program may lock it.
func (h *hostMemory) learn(d *Driver, e extent) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	place := e.start / learnPlace
	if h.learning || now.Before(h.pageable[place]) {
		return false
	}
	h.learning = true
	go func() {
		d.use()
		defer d.Close()
		era := h.known.now()
		var whole extent
		locked := false
		d.asks.do(func() {
			if locked = d.isLockedRange(e); locked {
				whole = d.lockedAround(e)
			}
		})
		if locked {
			h.note(whole, era)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.learning = false
		if locked {
			return
		}
		if h.pageable == nil || len(h.pageable) > maxPageable {
			h.pageable = make(map[uint64]time.Time)
		}
		h.pageable[place] = time.Now().Add(learnAgain)
	}()
	return false
}

const (
	learnPlace  = 2 << 20     // what one answer is about if memory is not page-locked
	learnAgain  = time.Second // how long it holds
	maxPageable = 4096        // how many of them are kept
)

// lockedAround returns the whole range that page-locked bytes lie in, as far as the driver says it.
func (d *Driver) lockedAround(e extent) extent {
	p, r := d.lookup(e.start)
	if r != success || p.memoryType != typeHost || p.start > e.start || p.start+p.size < e.end {
		return e
	}
	return extent{p.start, p.start + p.size}
}
