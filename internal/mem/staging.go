package mem

// Staging bytes: where bytes lie on their way to or from memory that the copy loop cannot
// reach, held pages (pages.go) and memory that the CPU does not address (engine.go).
// They are allocated in three lengths, and kept for the next caller. The collector frees
// those that are not given back.
//
// An engine may move bytes much faster if their pages are locked. Its owner asks for that with
// LockStaging: then so many pieces as are kept are allocated and locked at once, in lengths that
// share no page with anything else. A caller that takes a piece never waits for a page to be
// locked: when all locked pieces are in use it gets one that is not. A locked piece that the
// collector frees is replaced.

import (
	"runtime"
	"slices"
	"sync"
	"weak"
)

// stagingSizes are the lengths of staging bytes, and how many of each are kept.
var stagingSizes = [...]struct{ bytes, kept int }{{4 << 10, 64}, {64 << 10, 128}, {Quantum, 64}}

// lockedClass is the first of them that shares no page with other objects.
const lockedClass = 1

// staging is where all staging bytes come from.
var staging stagingPool

// Staging returns n bytes, a Quantum at most, with anything in them, for bytes on their way
// to or from an engine. The caller gives them back with GiveStaging when it is done with them.
func Staging(n int) []byte { return staging.get(n) }

// GiveStaging takes back what Staging has returned, from its first byte on.
func GiveStaging(b []byte) { staging.put(b) }

// LockStaging has staging bytes page-locked for an owner of engines. lock is called for each
// piece of them, one at a time, and what it returns when the piece is not needed any more; that
// must not refer to the piece, which would never be freed. If lock fails the piece is used as it
// is. After stop has returned none of either is called, and none is locked.
func LockStaging(lock func(b []byte) (unlock func(), err error)) (stop func()) {
	return staging.addLocker(lock)
}

type stagingPool struct {
	mu      sync.Mutex // guards what follows
	idle    [len(stagingSizes)][][]byte
	lockers []*stagingLocker // is replaced, not changed
	changes int              // of lockers
	locked  map[pieceID]lockedPiece
}

// pieceID identifies a piece of staging bytes, and does not keep it alive.
type pieceID = weak.Pointer[byte]

// lockedPiece is a piece that was locked when it was allocated.
type lockedPiece struct {
	class int
	of    lockerSet
}

// lockerSet is the owners that lock pages at a time.
type lockerSet struct {
	lockers []*stagingLocker
	changes int
}

// stagingLocker is an owner that locks pages.
type stagingLocker struct {
	mu      sync.Mutex // guards what follows; it is held while pages are locked or unlocked, so that none are after stop
	lock    func([]byte) (func(), error)
	unlocks map[pieceID]func()
	stopped bool
}

// get returns n bytes with anything in them; n is a Quantum at most.
func (s *stagingPool) get(n int) []byte {
	b, class, _ := s.take(n)
	if b == nil {
		b = newPiece(class)[skew:][:n]
	}
	return b
}

// tryGet is get, but returns nil if pages are locked, and all pieces whose are are in use.
func (s *stagingPool) tryGet(n int) []byte {
	b, class, locks := s.take(n)
	if b == nil && !locks {
		b = newPiece(class)[skew:][:n]
	}
	return b
}

// take returns n bytes of an idle piece, nil if there is none, and the class that they belong to.
// locks says that pieces are locked.
func (s *stagingPool) take(n int) (b []byte, class int, locks bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if locks = len(s.lockers) > 0; locks {
		class = lockedClass
	}
	for stagingSizes[class].bytes < n {
		class++
	}
	k := len(s.idle[class])
	if k == 0 {
		return nil, class, locks
	}
	b = s.idle[class][k-1]
	s.idle[class][k-1] = nil // it may be lost
	s.idle[class] = s.idle[class][:k-1]
	return b[:n], class, locks
}

// newPiece allocates a piece, and eight bytes in front of it: see misaligned, which would make two
// of each Store.
func newPiece(class int) []byte { return make([]byte, skew+stagingSizes[class].bytes) }

// put takes back what get has returned.
func (s *stagingPool) put(b []byte) {
	b = b[:cap(b)]
	for class, size := range stagingSizes {
		if len(b) != size.bytes {
			continue
		}
		s.mu.Lock()
		if len(s.idle[class]) < size.kept && (len(s.lockers) == 0 || s.isLocked(b)) {
			s.idle[class] = append(s.idle[class], b)
		}
		s.mu.Unlock()
		return
	}
}

// isLocked reports whether a piece was locked by the owners that lock pages now.
func (s *stagingPool) isLocked(b []byte) bool {
	p, ok := s.locked[weak.Make(&b[0])]
	return ok && p.of.changes == s.changes
}

func (s *stagingPool) addLocker(lock func([]byte) (func(), error)) (stop func()) {
	l := &stagingLocker{lock: lock, unlocks: make(map[pieceID]func())}
	s.setLockers(func(ls []*stagingLocker) []*stagingLocker { return append(ls, l) })
	return func() {
		s.setLockers(func(ls []*stagingLocker) []*stagingLocker {
			return slices.DeleteFunc(ls, func(o *stagingLocker) bool { return o == l })
		})
		l.stop()
	}
}

// setLockers changes the owners that lock staging bytes. It leaves idle pieces to the collector,
// and makes new ones that are locked for all owners.
func (s *stagingPool) setLockers(change func([]*stagingLocker) []*stagingLocker) {
	s.mu.Lock()
	s.lockers = change(slices.Clone(s.lockers))
	s.changes++
	clear(s.idle[:])
	set := lockerSet{s.lockers, s.changes}
	s.mu.Unlock()
	if len(set.lockers) == 0 {
		return
	}
	for class := lockedClass; class < len(stagingSizes); class++ {
		for range stagingSizes[class].kept {
			s.addLocked(lockedPiece{class, set})
		}
	}
}

// addLocked allocates a piece and locks its pages, until the collector frees it.
func (s *stagingPool) addLocked(p lockedPiece) {
	whole := newPiece(p.class)
	b := whole[skew:]
	id := weak.Make(&b[0])
	for _, l := range p.of.lockers {
		l.lockPiece(whole, id)
	}
	s.mu.Lock()
	if s.locked == nil {
		s.locked = make(map[pieceID]lockedPiece)
	}
	s.locked[id] = p
	s.mu.Unlock()
	// Not a cleanup: that may run when something else lies there.
	runtime.SetFinalizer(&whole[0], func(*byte) { s.lost(id) })
	s.put(b)
}

// lost unlocks the pages of a piece that the collector frees, and replaces it.
func (s *stagingPool) lost(id pieceID) {
	s.mu.Lock()
	p := s.locked[id]
	delete(s.locked, id)
	wanted := p.of.changes == s.changes
	s.mu.Unlock()
	for _, l := range p.of.lockers {
		l.unlockPiece(id)
	}
	if wanted {
		s.addLocked(p)
	}
}

func (l *stagingLocker) lockPiece(b []byte, id pieceID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped {
		return
	}
	if unlock, err := l.lock(b); err == nil && unlock != nil {
		l.unlocks[id] = unlock
	}
}

func (l *stagingLocker) unlockPiece(id pieceID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if unlock, ok := l.unlocks[id]; ok {
		delete(l.unlocks, id)
		unlock()
	}
}

func (l *stagingLocker) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = true
	for _, unlock := range l.unlocks {
		unlock()
	}
	clear(l.unlocks)
}
