package sys

// Locking pages in memory.
//
// mlock(2) does not count: two mlocks and one munlock leave a page unlocked. So
// lockCounts counts the locks of this process, by runs of pages, and unlocks a page
// when the last range that covers it is unlocked.
//
// The runs are kept in buckets of the address space, so that adding one moves
// at most the runs of its bucket.

import (
	"math"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

var pageSize = uintptr(os.Getpagesize())

// PageAlign widens a range to whole pages. The range must not reach beyond the end of
// the address space.
func PageAlign(addr, n uintptr) (start, end uintptr) {
	start = addr &^ (pageSize - 1)
	return start, start + (addr-start+n+pageSize-1)&^(pageSize-1)
}

// locked are the locks of this process.
var locked = lockCounts{mlock: mlock, munlock: munlock}

// LockPages keeps the pages of a range in memory until UnlockPages is called
// for the same range. The error is mlock's errno.
func LockPages(addr, n uintptr) error { return locked.lock(PageAlign(addr, n)) }

// UnlockPages undoes a LockPages that succeeded.
func UnlockPages(addr, n uintptr) { locked.unlock(PageAlign(addr, n)) }

// MemlockLimit returns how many bytes this process may lock, RLIMIT_MEMLOCK;
// math.MaxUint64 if there is no limit.
func MemlockLimit() uint64 {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit) != nil || limit.Cur == unix.RLIM_INFINITY {
		return math.MaxUint64
	}
	return limit.Cur
}

const lockBucket = 64 << 20

// lockRun is a run of pages that the same number of ranges cover.
type lockRun struct {
	start, end uintptr
	count      int
}

type lockCounts struct {
	mlock, munlock func(start, end uintptr) error

	mu      sync.Mutex            // guards buckets, and the order of system calls about the same pages
	buckets map[uintptr][]lockRun // by address / lockBucket; sorted, disjoint, counts above zero
}

func (c *lockCounts) lock(start, end uintptr) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	// All pages are locked, also those that are counted as locked: the program may
	// have unmapped them and mapped others at the same place.
	err := c.mlock(start, end)
	c.changeLocked(start, end, 1)
	if err != nil {
		c.unlockLocked(start, end) // what mlock did before it failed
	}
	return err
}

func (c *lockCounts) unlock(start, end uintptr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unlockLocked(start, end)
}

func (c *lockCounts) unlockLocked(start, end uintptr) {
	for _, r := range c.changeLocked(start, end, -1) {
		_ = c.munlock(r.start, r.end) // fails if they are not mapped any more: then they are not locked either
	}
}

// changeLocked adds to the counts of a range, bucket by bucket, and returns the
// runs whose count fell to zero.
func (c *lockCounts) changeLocked(start, end uintptr, by int) (zero []lockRun) {
	if c.buckets == nil {
		c.buckets = make(map[uintptr][]lockRun)
	}
	for start < end {
		number := start / lockBucket
		stop := min(end, (number+1)*lockBucket)
		runs, gone := changeRuns(c.buckets[number], start, stop, by)
		zero = append(zero, gone...)
		if c.buckets[number] = runs; len(runs) == 0 {
			delete(c.buckets, number)
		}
		start = stop
	}
	return zero
}

// changeRuns returns the runs with the counts in [start, end) changed, and those
// whose count fell to zero, which it leaves out.
func changeRuns(old []lockRun, start, end uintptr, by int) (runs, zero []lockRun) {
	runs = make([]lockRun, 0, len(old)+2)
	put := func(s, e uintptr, count int) {
		last := len(runs) - 1
		switch {
		case s >= e:
		case count == 0:
			zero = append(zero, lockRun{s, e, 0})
		case last >= 0 && runs[last].end == s && runs[last].count == count:
			runs[last].end = e
		default:
			runs = append(runs, lockRun{s, e, count})
		}
	}
	at := start // how far the range has been dealt with
	for _, r := range old {
		if r.start >= end && at < end {
			put(at, end, by) // the rest of the range, where no run was
			at = end
		}
		put(r.start, min(r.end, start), r.count)
		if s, e := max(r.start, start), min(r.end, end); s < e {
			put(at, s, by)
			put(s, e, r.count+by)
			at = e
		}
		put(max(r.start, end), r.end, r.count)
	}
	if at < end {
		put(at, end, by)
	}
	return runs, zero
}
