//go:build !race

package perf

// The race detector allocates on its own account, so this cannot be tested
// under it.

import (
	"runtime"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

// The measuring loops allocate nothing: more messages, not more allocations.
func TestLoopsAllocateNothing(t *testing.T) {
	a, b := openPair(t, verbs.LinkLoop)
	mallocs := func(p Params) uint64 {
		if err := p.Complete(); err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := Local(t.Context(), a, b, p, nil); err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		return after.Mallocs - before.Mallocs
	}
	for _, p := range []Params{
		{Op: OpWrite, Size: 8}, {Op: OpRead, Size: 4096}, {Op: OpSend, Size: 4096, QPs: 2}, {Op: OpWrite, Size: 8, Threads: 3}, {Op: OpSend, Size: 8, Threads: 2, QPs: 3}, {Op: OpAtomic}, {Op: OpWriteImm, Size: 64, Inline: true},
		{Lat: true}, {Lat: true, Op: OpSend}, {Lat: true, Op: OpRead}, {Lat: true, Poll: PollCQ},
	} {
		few, many := p, p
		few.Iters, many.Iters = 200, 10_200
		mallocs(few) // what is allocated once and kept
		base := mallocs(few)
		// The device's own timers and the test's side channel may allocate now
		// and then; one allocation for each message would be five times this.
		if n := mallocs(many); n > base+2000 {
			t.Errorf("%s, latency %v, threads %d: 10,000 more messages take %d more allocations", p.Op, p.Lat, p.Threads, int64(n-base))
		}
	}
}
