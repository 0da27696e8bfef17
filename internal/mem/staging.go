package mem

// Staging bytes: where bytes lie on their way to or from memory that the copy loop cannot
// reach, held pages (pages.go) and memory that the CPU does not address (engine.go).
// They are allocated in three lengths, and kept for the next caller. The collector frees
// those that are not given back.
//
// An engine may move bytes much faster if their pages are locked. Its owner asks for that with
// LockStaging: then so many pieces as are kept are allocated and locked at once, in lengths that
// share no page with anything else. A caller that takes a piece never waits for a page to be
// locked: when all locked pieces are in use it gets one that is not.
//
// Pages stay locked until their owner stops. To unlock some may wait for all that a GPU does, and
// that may be a program that waits for bytes which are to come through a piece. So a locked piece
// that a caller has lost is not freed: its finalizer gives it back.

import (
	"maps"
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
// piece of them, one at a time, and what it returns when the owner stops; that must not refer to the
// piece, which would then not be found when a caller has lost it. If lock fails the piece is used as
// it is. After stop has returned none of either is called, and none is locked.
func LockStaging(lock func(b []byte) (unlock func(), err error)) (stop func()) {
	return staging.addLocker(lock)
}

type stagingPool struct {
	mu      sync.Mutex // guards what follows
	idle    [len(stagingSizes)][][]byte
	lockers []*stagingLocker // is replaced, not changed
	locked  map[pieceID]*lockedPiece
	era     int // how often there was a first locker: the pieces of another era count no more
}

// pieceID identifies a piece of staging bytes by where it begins, and does not keep it alive. A
// piece that was lost and has come back has another one.
type pieceID = weak.Pointer[byte]

// lockedPiece is a piece whose pages are locked.
type lockedPiece struct{ class int }

// stagingLocker is an owner that locks pages.
type stagingLocker struct {
	mu      sync.Mutex // guards what follows; it is held while pages are locked or unlocked, so that none are after stop
	lock    func([]byte) (func(), error)
	unlocks map[*lockedPiece]func()
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

// isLocked reports whether a piece is one of those whose pages are locked.
func (s *stagingPool) isLocked(b []byte) bool { return s.locked[weak.Make(&b[0])] != nil }

// addLocker begins to lock staging bytes for an owner. The first one's are new; the others lock the
// same.
func (s *stagingPool) addLocker(lock func([]byte) (func(), error)) (stop func()) {
	l := &stagingLocker{lock: lock, unlocks: make(map[*lockedPiece]func())}
	s.mu.Lock()
	s.lockers = append(slices.Clone(s.lockers), l)
	first := len(s.lockers) == 1
	if first {
		s.era++
		clear(s.idle[:])
		s.locked = make(map[pieceID]*lockedPiece)
	}
	era, pieces := s.era, maps.Clone(s.locked)
	s.mu.Unlock()
	if first {
		s.fill(era)
	} else {
		l.lockAll(pieces)
	}
	return func() { s.removeLocker(l) }
}

// removeLocker unlocks what an owner has locked. Others lock what they could not while that owner
// had it locked: some drivers lock memory once only.
func (s *stagingPool) removeLocker(l *stagingLocker) {
	s.mu.Lock()
	s.lockers = slices.DeleteFunc(slices.Clone(s.lockers), func(o *stagingLocker) bool { return o == l })
	if len(s.lockers) == 0 {
		clear(s.idle[:])
		s.locked = nil
	}
	others, pieces := s.lockers, maps.Clone(s.locked)
	s.mu.Unlock()
	l.stop()
	for _, o := range others {
		o.lockAll(pieces)
	}
}

// fill makes the pieces of an era.
func (s *stagingPool) fill(era int) {
	for class := lockedClass; class < len(stagingSizes); class++ {
		for range stagingSizes[class].kept {
			s.addLocked(newPiece(class), &lockedPiece{class}, era)
		}
	}
}

// addLocked locks the pages of a piece for all owners, and makes it an idle one. If a caller loses
// it, it comes here again.
func (s *stagingPool) addLocked(whole []byte, p *lockedPiece, era int) {
	b := whole[skew:]
	id := weak.Make(&b[0])
	s.mu.Lock()
	if s.era != era || len(s.lockers) == 0 {
		s.mu.Unlock()
		return // it is left to the collector
	}
	s.locked[id] = p
	lockers := s.lockers // those that come later find the piece
	s.mu.Unlock()
	for _, l := range lockers {
		l.lockPiece(whole, p)
	}
	// Not a cleanup: that could not have the bytes back.
	runtime.SetFinalizer(&whole[0], func(first *byte) { s.lost(id, wholePiece(first, p.class), p, era) })
	s.put(b)
}

// lost takes a piece back that no caller has any more.
func (s *stagingPool) lost(id pieceID, whole []byte, p *lockedPiece, era int) {
	s.mu.Lock()
	if s.era == era {
		delete(s.locked, id)
	}
	s.mu.Unlock()
	s.addLocked(whole, p, era)
}

// lockAll locks the pages of pieces. One that was lost meanwhile is locked when it comes back.
func (l *stagingLocker) lockAll(pieces map[pieceID]*lockedPiece) {
	for id, p := range pieces {
		if first := id.Value(); first != nil {
			l.lockPiece(wholeBehind(first, p.class), p)
		}
	}
}

// lockPiece locks the pages of a piece, unless they are.
func (l *stagingLocker) lockPiece(whole []byte, p *lockedPiece) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped || l.unlocks[p] != nil {
		return
	}
	if unlock, err := l.lock(whole); err == nil && unlock != nil {
		l.unlocks[p] = unlock
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
