package mem

// The address space of this process, and the backings that have cached something about
// its mappings.
//
//  1. A backing whose memory may be unmapped or discarded under it becomes a member,
//     with the range of addresses that it caches something about (join, leave).
//  2. Before memory in the range is used, cover asks the kernel to report changes of
//     mappings there, where it can (sys.Notifier).
//  3. An access that is about to rely on what a backing has cached calls
//     applyChangesSoon, which takes the pending changes from the notifier and applies
//     them to the members, if that takes no time. It costs two loads while there are
//     none. A caller with no lock and no read section may call applyChanges, which waits.
//  4. The kernel does not report every change, and in some places none. So a sweep
//     looks from time to time whether present pages are still present.
//
// A process has one address space, so there is one space, whatever the number of devices.

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/btree"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// member is a backing that has cached something about a range of addresses.
type member interface {
	// changed applies a change of mappings in a part of the member's range. The space
	// calls it under its lock: it must be quick, and call nothing that takes the lock.
	changed(start, end uintptr)
	// missed is called when a report was lost: any mapping may have changed. The space
	// does not hold its lock, so missed may make system calls; changed may be called
	// meanwhile.
	missed()
	// sweep looks for pages that are gone. The space does not hold its lock.
	sweep()
}

type space struct {
	notifier atomic.Pointer[sys.Notifier] // nil: there is none

	mu      sync.Mutex // guards what follows
	opened  bool       // openLocked has tried to open the notifier
	members rangeIndex
	tickets []*atomic.Uint64 // see AddTicket
	swept   int              // how many members are swept
	buf     [64]sys.MapChange
	lost    bool          // a report was lost, and missed has not been called for all members since
	stop    chan struct{} // ends the sweeper; nil while there is none

	changes atomic.Uint64            // how many there were; written under mu
	recent  [recentChanges]addrRange // where the last of them were

	// vanished counts how often pages were found to be gone that the kernel had not
	// reported. doubtful is set from then until a sweep finds no more: meanwhile each
	// access asks the kernel whether its pages are present.
	vanished atomic.Uint64
	doubtful atomic.Bool

	recovering sync.Mutex // held while missed is called for all members: one at a time

	covering sync.Mutex // guards the order of cover and uncover
	sweeping sync.Mutex // held for a sweep: one at a time; guards found
	found    uint64     // vanished, after the last sweep
}

var theSpace space

// applyChanges applies the pending changes of mappings. When it returns, the members have
// seen all changes that were made before the call, where the notifier covers them. It may
// wait for the notifier's thread, or for a thread of the program that is mapping something
// over watched memory: the caller holds no lock, and has no section open.
func (s *space) applyChanges() {
	for n := s.notifier.Load(); n != nil && n.Changed(); n = s.notifier.Load() {
		s.mu.Lock()
		all, missed := s.applyChangesLocked(n, true)
		s.mu.Unlock()
		switch {
		case missed:
			s.missed(n)
		case all:
			return
		}
	}
}

// applySoonTime is how long applyChangesSoon looks for changes that are announced and that
// the notifier's thread has not handed over yet: a few times what it takes to wake that
// thread.
const applySoonTime = 20 * time.Microsecond

// applyChangesSoon is applyChanges for callers that must not wait: inside sections, under
// locks. It reports whether all changes have been applied.
func (s *space) applyChangesSoon() bool {
	n := s.notifier.Load()
	if n == nil || !n.Changed() {
		return true
	}
	for begun := time.Now(); ; {
		if s.mu.TryLock() {
			_, missed := s.applyChangesLocked(n, false)
			s.mu.Unlock()
			if missed {
				return false // applyChanges has the members look for themselves
			}
		}
		if !n.Changed() {
			return true
		}
		if time.Since(begun) > applySoonTime {
			return false
		}
	}
}

// applyChangesLocked applies the changes that the notifier has; with wait, all that were
// announced before the call, unless that takes very long: then all is false. If missed, a
// report was lost: the caller is to call space.missed, and Changed stays true until then.
func (s *space) applyChangesLocked(n *sys.Notifier, wait bool) (all, missed bool) {
	for rounds := 0; !s.lost; rounds++ {
		k, lost, more := n.Take(s.buf[:], wait)
		s.lost = lost
		for _, c := range s.buf[:k] {
			s.noteLocked(c.Start, c.End)
			s.members.overlapping(c.Start, c.End, func(m *membership) bool {
				m.who.changed(max(c.Start, m.start), min(c.End, m.end))
				return true
			})
		}
		if lost {
			break
		}
		if k == 0 {
			return !more, false // Changed becomes false only now, when all has been applied
		}
		if !more && rounds >= applyRounds {
			return true, false // all that was pending at the call is applied; later callers apply the rest
		}
	}
	return false, true
}

// applyRounds bounds how long one call applies changes while the program goes on making them.
const applyRounds = 16

// missed deals with a lost report: it calls each member's missed, which may make system
// calls, so s.mu is not held. Until all have returned nothing is taken from the notifier, so
// that Changed stays true and no access relies on what is cached. A notifier that has ended
// is given up.
func (s *space) missed(n *sys.Notifier) {
	s.recovering.Lock()
	defer s.recovering.Unlock()
	s.mu.Lock()
	lost := s.lost
	if lost {
		s.noteLocked(0, ^uintptr(0))
	}
	s.mu.Unlock()
	if !lost {
		return // another goroutine has just done it
	}
	if n.Err() != nil {
		s.notifier.Store(nil)
	}
	s.eachMember(func(m *membership) bool { m.who.missed(); return true })
	s.mu.Lock()
	s.lost = false
	s.mu.Unlock()
}

// eachMember calls f with all members, without the lock, until f returns false. It may or
// may not visit those that join or leave meanwhile.
func (s *space) eachMember(f func(m *membership) bool) {
	var batch [64]*membership
	var after *membership
	for {
		s.mu.Lock()
		n := s.members.next(after, batch[:])
		s.mu.Unlock()
		if n == 0 {
			return
		}
		for _, m := range batch[:n] {
			if !f(m) {
				return
			}
		}
		after = batch[n-1]
	}
}

// recentChanges is how many changes are remembered.
const recentChanges = 256

type addrRange struct{ start, end uintptr }

// noteLocked remembers a change, before the members see it: a backing that has put pages
// into its table meanwhile finds the change with changedSince.
func (s *space) noteLocked(start, end uintptr) {
	s.recent[s.changes.Load()%recentChanges] = addrRange{start, end}
	s.changes.Add(1)
}

// changedSince reports whether a range has changed since the count of changes was before. It
// returns true also if there were more changes since than are remembered.
func (s *space) changedSince(before uint64, start, end uintptr) bool {
	if s.changes.Load() == before {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.changes.Load()
	if now-before > recentChanges {
		return true
	}
	for ; before != now; before++ {
		if r := s.recent[before%recentChanges]; r.start < end && start < r.end {
			return true
		}
	}
	return false
}

// membership is a member's range.
type membership struct {
	start, end uintptr
	id         uint64
	who        member
	swept      bool
	left       atomic.Bool
}

// join makes who a member with a range. From now on the space calls its changed for changes
// in what is covered, and has it swept if swept is set.
func (s *space) join(start, end uintptr, who member, swept bool) *membership {
	s.lockUpToDate()
	defer s.mu.Unlock()
	m := &membership{start: start, end: end, who: who, swept: swept}
	s.members.add(m)
	if swept {
		s.swept++
	}
	if s.swept > 0 && s.stop == nil {
		s.stop = make(chan struct{})
		go s.sweeper(s.stop)
	}
	return m
}

// lockUpToDate takes the lock at a moment when all earlier changes of mappings have been
// applied, so that a member that joins now sees none of them.
func (s *space) lockUpToDate() {
	s.mu.Lock()
	s.openLocked()
	for n := s.notifier.Load(); n != nil; n = s.notifier.Load() {
		all, missed := s.applyChangesLocked(n, true)
		if all {
			return
		}
		s.mu.Unlock()
		if missed {
			s.missed(n)
		}
		s.mu.Lock()
	}
}

// leave ends a membership. When it returns, the member's changed is not called any more; a
// call of its sweep or missed may still be under way.
func (s *space) leave(m *membership) {
	s.mu.Lock()
	s.members.remove(m)
	if m.swept {
		s.swept--
	}
	if s.swept == 0 && s.stop != nil {
		close(s.stop)
		s.stop = nil
	}
	s.mu.Unlock()
	m.left.Store(true)
	s.uncover(m.start, m.end)
}

// openLocked opens the notifier, which then lives as long as the process.
func (s *space) openLocked() {
	if s.opened {
		return
	}
	s.opened = true
	n, err := sys.OpenNotifier()
	if err != nil {
		return
	}
	for _, word := range s.tickets {
		_ = n.AddTicket(word) // there is room: AddTicket takes no more than MaxTickets
	}
	s.notifier.Store(n)
}

// coverUnit is the least that is covered at a time, within one mapping: each boundary splits
// a mapping, of which a process can have 65,530.
const coverUnit = 2 << 20

// units widens a range to whole units.
func units(start, end uintptr) (uintptr, uintptr) {
	start &^= coverUnit - 1
	if over := end % coverUnit; over != 0 {
		end += min(coverUnit-over, ^uintptr(0)-end)
	}
	return start, end
}

// cover asks the kernel to report changes of a range inside a mapping, on behalf of a member,
// and reports whether it does. Where the kernel refuses, only the sweep finds changes. For a
// member that has left nothing is covered, since nothing would uncover it.
func (s *space) cover(who *membership, start, end uintptr, m *sys.Mapping) bool {
	n := s.notifier.Load()
	if n == nil {
		return false
	}
	start, end = units(start, end)
	start, end = m.Clip(start, end)
	s.covering.Lock()
	defer s.covering.Unlock()
	return !who.left.Load() && n.Watch(start, end) == nil
}

// uncover ends the covering of a range, except for what lies in the range of a member.
func (s *space) uncover(start, end uintptr) {
	n := s.notifier.Load()
	if n == nil {
		return
	}
	start, end = units(start, end)
	s.covering.Lock()
	defer s.covering.Unlock()
	_ = sys.Mappings(start, end, func(m *sys.Mapping) bool {
		s.unused(max(start, m.Start), min(end, m.End), func(from, to uintptr) { _ = n.Unwatch(m.Clip(from, to)) })
		return true
	})
}

// unused visits the parts of a range that no member's range, widened to whole units, has.
// It leaves out each member's range in one step, however large: it may be the whole address
// space.
func (s *space) unused(start, end uintptr, visit func(start, end uintptr)) {
	for start < end {
		m := s.memberIn(start, end)
		if m == nil {
			visit(start, end)
			return
		}
		from, to := units(m.start, m.end)
		// memberIn finds, among members of about one size, the first, so the
		// recursion is no deeper than there are sizes.
		s.unused(start, min(from, end), visit)
		start = max(start, to)
	}
}

// memberIn returns a membership that overlaps the range, or nil.
func (s *space) memberIn(start, end uintptr) (found *membership) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.members.overlapping(start, end, func(m *membership) bool { found = m; return false })
	return found
}

// The rest between two sweeps is so long that sweeps take less than a thousandth of a core,
// but within these bounds.
const (
	sweepRest      = time.Second            // with a notifier
	sweepRestAlone = 100 * time.Millisecond // without
	sweepRestMost  = 20 * time.Second
	sweepShare     = 1000
)

// sweeper sweeps until it is stopped.
func (s *space) sweeper(stop chan struct{}) {
	timer := time.NewTimer(s.sweepRest())
	defer timer.Stop()
	for {
		select {
		case <-stop:
			return
		case <-timer.C:
		}
		began := time.Now()
		s.sweep(stop)
		timer.Reset(min(max(s.sweepRest(), time.Since(began)*sweepShare), sweepRestMost))
	}
}

// sweepRest returns the shortest rest, which depends on whether there is a notifier now: it
// may end before the process does.
func (s *space) sweepRest() time.Duration {
	if s.notifier.Load() == nil {
		return sweepRestAlone
	}
	return sweepRest
}

// sweep has all members look for pages that are gone.
func (s *space) sweep(stop chan struct{}) {
	s.sweeping.Lock()
	defer s.sweeping.Unlock()
	s.sweepLocked(stop)
}

func (s *space) sweepLocked(stop chan struct{}) {
	s.applyChanges()
	stopped := false
	s.eachMember(func(m *membership) bool {
		select {
		case <-stop:
			stopped = true
		default:
			m.who.sweep()
		}
		return !stopped
	})
	if stopped {
		return
	}
	if now := s.vanished.Load(); now != s.found {
		s.found = now
		return
	}
	s.doubtful.Store(false)
	if s.vanished.Load() != s.found { // foundGone may have set it just before
		s.doubtful.Store(true)
	}
}

// foundGone notes that pages were found to be gone that the kernel had not reported.
func (s *space) foundGone() {
	s.vanished.Add(1)
	s.doubtful.Store(true)
}

// rangeIndex finds the ranges that overlap one. Ranges are kept by size: in a
// tree of ranges that are all shorter than twice the shortest, those which
// overlap a range begin in it or shortly before it.
type rangeIndex struct {
	trees [bits.UintSize + 1]*btree.BTreeG[*membership] // by the bits of their length
	ids   uint64
}

func (x *rangeIndex) tree(m *membership) **btree.BTreeG[*membership] {
	return &x.trees[bits.Len(uint(m.end-m.start))]
}

func lessMembership(a, b *membership) bool {
	return a.start < b.start || a.start == b.start && a.id < b.id
}

func (x *rangeIndex) add(m *membership) {
	x.ids++
	m.id = x.ids
	t := x.tree(m)
	if *t == nil {
		*t = btree.NewG(16, lessMembership)
	}
	(*t).ReplaceOrInsert(m)
}

func (x *rangeIndex) remove(m *membership) {
	t := x.tree(m)
	(*t).Delete(m)
	if (*t).Len() == 0 {
		*t = nil
	}
}

// overlapping visits the ranges that overlap one, until visit returns false.
func (x *rangeIndex) overlapping(start, end uintptr, visit func(*membership) bool) {
	stopped := false
	for size, t := range x.trees {
		if t == nil || stopped {
			continue
		}
		var from membership
		if longest := uintptr(1)<<size - 1; start > longest {
			from.start = start - longest
		}
		t.AscendGreaterOrEqual(&from, func(m *membership) bool {
			if m.start >= end {
				return false
			}
			stopped = m.end > start && !visit(m)
			return !stopped
		})
	}
}

// next fills into with the ranges that come after one, or with the first ones for
// nil, and returns how many. The range after may have been removed meanwhile.
func (x *rangeIndex) next(after *membership, into []*membership) (n int) {
	first := 0
	if after != nil {
		first = bits.Len(uint(after.end - after.start))
	}
	for size := first; size < len(x.trees) && n < len(into); size++ {
		t := x.trees[size]
		if t == nil {
			continue
		}
		var from membership
		if after != nil && size == first {
			from = membership{start: after.start, id: after.id + 1}
		}
		t.AscendGreaterOrEqual(&from, func(m *membership) bool {
			into[n] = m
			n++
			return n < len(into)
		})
	}
	return n
}

// AddTicket has the notifier count a word up whenever watched memory is about to be unmapped,
// moved or discarded. A process that reads this one's memory by its address looks at the word
// before and after; what it has read is good only if the word has not changed. The word is
// not Go memory, and stays until RemoveTicket.
//
// It returns false if there are too many tickets: then no process may rely on the word.
func AddTicket(word *atomic.Uint64) bool {
	theSpace.mu.Lock()
	defer theSpace.mu.Unlock()
	if len(theSpace.tickets) == sys.MaxTickets {
		return false
	}
	if n := theSpace.notifier.Load(); n != nil && n.AddTicket(word) != nil {
		return false
	}
	theSpace.tickets = append(theSpace.tickets, word)
	return true
}

// RemoveTicket ends AddTicket. When it returns the notifier does not use the word any more.
func RemoveTicket(word *atomic.Uint64) {
	theSpace.mu.Lock()
	defer theSpace.mu.Unlock()
	theSpace.tickets = slices.DeleteFunc(theSpace.tickets, func(w *atomic.Uint64) bool { return w == word })
	if n := theSpace.notifier.Load(); n != nil {
		n.RemoveTicket(word)
	}
}

// Remapped returns how often a range was closed to accesses before something was mapped over
// it, and how often a change of mappings went on although an access was still under way.
func Remapped() (closed, overruns uint64) {
	if n := theSpace.notifier.Load(); n != nil {
		return n.Closings(), n.Overruns()
	}
	return 0, 0
}

// PagingMeans returns what on-demand paging runs on here.
func PagingMeans() sys.PagingSupport { return sys.FindPagingSupport() }
