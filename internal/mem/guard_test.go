package mem

import (
	"testing"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// A suspension that falls into an access at any of its steps makes the access count for
// nothing.
func TestGuardSuspendedAtEveryStep(t *testing.T) {
	for step := range 3 {
		g, fd, err := NewGuard()
		if err != nil {
			t.Fatal(err)
		}
		move := func(at int) {
			if at == step {
				g.Suspend()
				g.Resume()
			}
		}
		since := g.suspensions().Load() // as Enter does
		move(0)
		g.word().Add(1)
		move(1)
		// The copy.
		move(2)
		if g.Still(since) {
			t.Errorf("it counts though the memory was suspended at step %d", step)
		}
		g.Leave()
		if since, kind := g.Enter(); kind != FaultNone || !g.Still(since) || !g.Busy() {
			t.Error("an access that nothing disturbs does not count")
		}
		g.Leave()
		_ = g.Close()
		_ = sys.CloseFD(fd)
	}
}
