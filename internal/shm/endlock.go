package shm

import (
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// gate guards one end of a ring: one goroutine at a time is inside, and when
// the gate has been shut and nobody is inside any more, the ring is unmapped. To
// shut it waits for nobody: then whoever is inside unmaps when he leaves.
type endLock struct {
	mu   sync.Mutex // guards the end of the ring, and mem
	mem  []byte     // the segment; nil when it is unmapped
	shut atomic.Bool
	bell *bell // dropped with the segment
}

// enter waits its turn. It reports false, and is not inside, if the gate is
// shut.
func (g *endLock) enter() bool {
	g.mu.Lock()
	return g.stay()
}

// tryEnter does not wait.
func (g *endLock) tryEnter() bool { return g.mu.TryLock() && g.stay() }

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

// close shuts the gate. It is idempotent.
func (g *endLock) close() {
	g.shut.Store(true)
	g.clean()
}

// clean unmaps the segment, unless somebody is inside: he cleans when he leaves,
// since he looks at shut after he has let go.
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
