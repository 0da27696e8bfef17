package shm

import (
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// endLock is the lock of a ring's end: one goroutine at a time holds it. Once it is closed
// and no goroutine holds it, the ring is unmapped. close does not wait for the holder: a
// holder that leaves a closed lock unmaps the ring.
type endLock struct {
	mu   sync.Mutex // guards the end of the ring, and mem
	mem  []byte     // the segment; nil when it is unmapped
	shut atomic.Bool
	bell *bell // dropped with the segment
}

// enter waits for the lock and takes it. It reports false, and does not hold it, if it is
// closed.
func (g *endLock) enter() bool {
	g.mu.Lock()
	return g.stay()
}

// tryEnter is enter, but reports false if another goroutine holds the lock.
func (g *endLock) tryEnter() bool { return g.mu.TryLock() && g.stay() }

// stay gives the lock, which was just taken, back if it is closed.
func (g *endLock) stay() bool {
	if g.shut.Load() {
		g.leave()
		return false
	}
	return true
}

func (g *endLock) leave() {
	g.mu.Unlock()
	if g.shut.Load() {
		g.clean()
	}
}

// close closes the lock for good. It is idempotent.
func (g *endLock) close() {
	g.shut.Store(true)
	g.clean()
}

// clean unmaps the segment, unless a goroutine holds the lock: that one cleans when it
// leaves, since it looks at shut after it has released the mutex.
func (g *endLock) clean() {
	if !g.mu.TryLock() {
		return
	}
	mem := g.mem
	g.mem = nil
	g.mu.Unlock()
	if mem != nil {
		_ = sys.Unmap(mem) // it was mapped: it cannot fail
		g.bell.drop()
	}
}
