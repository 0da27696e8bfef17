package mem

// Staging bytes: where bytes lie on their way to or from memory that nobody can copy to
// directly, held pages (pages.go) and memory that the CPU does not address (engine.go).
// They are allocated in three lengths, and kept for the next one who needs some. Whoever
// does not give them back leaves them to the collector.
//
// An engine may move bytes much faster if their pages are locked. Its owner says so with
// LockStaging. From then on staging bytes are allocated in lengths that share no page with
// anything else, and so many as are kept are locked when they are allocated, and unlocked
// before they are freed.

import (
	"runtime"
	"slices"
	"sync"
	"weak"
)

// stagingSizes are the lengths of staging bytes, and how many of each are kept.
var stagingSizes = [...]struct{ bytes, kept int }{{4 << 10, 64}, {64 << 10, 32}, {Quantum, 16}}

// lockedClass is the first of them that shares no page with other objects.
const lockedClass = 1

// staging is where all staging bytes come from.
var staging stagingPool

// Staging returns n bytes, a Quantum at most, with anything in them, for bytes on their way
// to or from an engine. GiveStaging takes them back, when nobody uses them any more.
func Staging(n int) []byte { return staging.get(n) }

// GiveStaging takes back what Staging has returned, from its first byte on.
func GiveStaging(b []byte) { staging.put(b) }

// LockStaging has staging bytes page-locked for an owner of engines. lock is called for each
// piece of them, one at a time, and what it returns when the piece is not needed any more. If
// it fails the piece is used as it is. After stop has returned none of either is called, and
// none is locked.
func LockStaging(lock func(b []byte) (unlock func(), err error)) (stop func()) {
	return staging.addLocker(lock)
}

type stagingPool struct {
	mu      sync.Mutex // guards what follows
	idle    [len(stagingSizes)][][]byte
	lockers []*stagingLocker // is replaced, not changed
	locked  map[pieceID]lockedPiece
	alive   [len(stagingSizes)]int // pieces that are locked
}

// pieceID tells a piece of staging bytes from all others, and does not keep it.
type pieceID = weak.Pointer[byte]

// lockedPiece is a piece that was locked when it was allocated.
type lockedPiece struct {
	class int
	by    []*stagingLocker
}

// stagingLocker is an owner who locks pages.
type stagingLocker struct {
	// mu guards what follows, and is held while pages are locked or unlocked, so that none
	// are after stop. Nobody who holds another lock waits for it.
	mu      sync.Mutex
	lock    func([]byte) (func(), error)
	unlocks map[pieceID]func()
	stopped bool
}

// get returns n bytes with anything in them; n is a Quantum at most.
func (s *stagingPool) get(n int) []byte {
	s.mu.Lock()
	lockers := s.lockers
	class := 0
	if len(lockers) > 0 {
		class = lockedClass
	}
	for stagingSizes[class].bytes < n {
		class++
	}
	if k := len(s.idle[class]); k > 0 {
		b := s.idle[class][k-1]
		s.idle[class] = s.idle[class][:k-1]
		s.mu.Unlock()
		return b[:n]
	}
	lock := len(lockers) > 0 && s.alive[class] < stagingSizes[class].kept
	if lock {
		s.alive[class]++
	}
	s.mu.Unlock()
	// Eight bytes off a vector's alignment: see crooked, which would make two of each Store.
	whole := make([]byte, skew+stagingSizes[class].bytes)
	b := whole[skew:]
	if lock {
		s.lock(whole, weak.Make(&b[0]), lockedPiece{class, lockers})
	}
	return b[:n]
}

// lock locks the pages of a piece that was just allocated, until the collector frees it.
func (s *stagingPool) lock(whole []byte, id pieceID, p lockedPiece) {
	for _, l := range p.by {
		l.lockPiece(whole, id)
	}
	s.mu.Lock()
	if s.locked == nil {
		s.locked = make(map[pieceID]lockedPiece)
	}
	s.locked[id] = p
	s.mu.Unlock()
	// Not a cleanup: that may run when something else lies there.
	runtime.SetFinalizer(&whole[0], func(*byte) { s.unlock(id) })
}

// unlock unlocks the pages of a piece that nobody uses any more.
func (s *stagingPool) unlock(id pieceID) {
	s.mu.Lock()
	p := s.locked[id]
	delete(s.locked, id)
	s.alive[p.class]--
	s.mu.Unlock()
	for _, l := range p.by {
		l.unlockPiece(id)
	}
}

// put takes back what get has returned.
func (s *stagingPool) put(b []byte) {
	b = b[:cap(b)]
	for class, size := range stagingSizes {
		if len(b) != size.bytes {
			continue
		}
		s.mu.Lock()
		if len(s.idle[class]) < size.kept && (len(s.lockers) == 0 || slices.Equal(s.locked[weak.Make(&b[0])].by, s.lockers)) {
			s.idle[class] = append(s.idle[class], b)
		}
		s.mu.Unlock()
		return
	}
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

// setLockers changes who locks staging bytes. Those that are idle are left to the collector.
func (s *stagingPool) setLockers(change func([]*stagingLocker) []*stagingLocker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lockers = change(slices.Clone(s.lockers))
	clear(s.idle[:])
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
