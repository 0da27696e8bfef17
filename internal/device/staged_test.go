package device

// Memory that the CPU does not address, on every link. The model's memory can be looked at
// all the same, so that traffic checks itself as in any other.
//
// staged_kinds_test.go has the places where memory is named, staged_order_test.go the order
// of what is seen, staged_end_test.go the end of queue pairs and memory,
// staged_invalidate_test.go invalidations, staged_bounds_test.go how much may wait.

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// slowEngine is what a GPU's copy engine is like.
var slowEngine = enginetest.Config{Latency: 7 * time.Microsecond, Bandwidth: 50e9, Width: 4}

// stoppedEngine is an engine that does nothing before Release.
func stoppedEngine() *enginetest.Engine {
	g := enginetest.New(enginetest.Config{})
	g.Hold()
	return g
}

// waitBegun waits until an engine has begun n operations.
func waitBegun(t testing.TB, g *enginetest.Engine, n int64) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d operations", n), func() bool { return g.Begun() >= n })
}

// onEngine puts an end's memory on an engine.
func (e *end) onEngine(g *enginetest.Engine) *enginetest.Memory {
	e.t.Helper()
	m := g.Alloc(uint64(len(e.buf)))
	closeAll(e.t, e.mr)
	e.buf = m.Bytes
	e.t.Cleanup(func() { // what is registered last is closed first: the region is still there
		closeAll(e.t, e.qp, e.mr)
		m.Free()
	})
	e.mr = must[provider.MR](e.t)(e.pd.(*PD).RegBacking(m, 0x7000_0000, allRemote))
	return m
}

// memory returns the memory of an end that is on an engine.
func (e *end) memory() *enginetest.Memory { return e.mr.(*MR).region.Backing().(*enginetest.Memory) }

// registerAgain registers the memory of an end, which is on an engine, with other rights.
func (e *end) registerAgain(access ib.Access) {
	e.t.Helper()
	m := e.memory()
	closeAll(e.t, e.mr)
	e.mr = must[provider.MR](e.t)(e.pd.(*PD).RegBacking(m, 0x7000_0000, access))
}

// anotherRegion registers another n bytes of an engine in the domain of an end.
func (e *end) anotherRegion(g *enginetest.Engine, n uint64, access ib.Access) provider.MR {
	e.t.Helper()
	m := g.Alloc(n)
	mr := must[provider.MR](e.t)(e.pd.(*PD).RegBacking(m, 0x100_0000, access))
	e.t.Cleanup(func() {
		g.Release()
		closeAll(e.t, e.qp, mr)
		m.Free()
	})
	return mr
}

const stagedSize = 1 << 20

// stagedPair makes a connection. The memory of the ends that are named in on, a and b, is on
// engine g, which is released when the test ends.
func stagedPair(t testing.TB, mode string, typ ib.QPType, g *enginetest.Engine, on string) (a, b *end) {
	t.Helper()
	a, b = connected(t, openFor(t, mode), openFor(t, mode), typ, stagedSize, nil)
	for name, e := range map[string]*end{"a": a, "b": b} {
		if strings.Contains(on, name) {
			e.onEngine(g)
		} else {
			e.makeMoving(stagedSize, false) // outside the Go heap: the race detector sees no order between devices
		}
	}
	t.Cleanup(g.Release)
	return a, b
}

// onAllLinks runs a test on every link.
func onAllLinks(t *testing.T, test func(t *testing.T, mode string)) {
	for _, mode := range allLinks {
		t.Run(mode, func(t *testing.T) { test(t, mode) })
	}
}

// newEngine makes an engine, whose memory other processes open if way is "named".
func newEngine(tb testing.TB, way string, cfg enginetest.Config) *enginetest.Engine {
	if way == "named" {
		cfg.Name = fmt.Sprintf("%s %d", tb.Name(), engineNumber.Add(1))
	}
	g := enginetest.New(cfg)
	tb.Cleanup(g.Close)
	return g
}

var engineNumber atomic.Int64

// openWay opens a device for one way of the bytes: a link, rings by which the peer opens the
// memory ("named"), or the loop link with a capture ("captured").
func openWay(tb testing.TB, way string) *Device {
	tb.Helper()
	switch way {
	case "named":
		return openFor(tb, linkRings)
	case "captured":
		return openDevice(tb, provider.Config{Link: linkLoop, PCAP: tb.TempDir() + "/packets"})
	}
	return openFor(tb, way)
}

// namedTrains returns how many trains came whose payload was named.
func namedTrains(ds ...*Device) (n uint64) {
	for _, d := range ds {
		n += d.link.(*link.Shared).Named()
	}
	return n
}

// Random traffic of every kind in both directions, in memory of an engine on one side or on
// both, of the same engine or of two: all of it is done and right. Every other row has an
// engine that takes its time.
func TestStagedTraffic(t *testing.T) {
	seed := testSeed(t)
	for i, way := range []string{linkLoop, linkRings, "named", linkUDP, "captured"} {
		for j, where := range []string{"ab", "a-", "-b", "ac"} {
			if way == "captured" && where != "ab" && !fullMatrix() {
				continue
			}
			slow := (i+j)%2 == 0
			t.Run(fmt.Sprintf("%s/%s/slow %v", way, where, slow), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 0))
				x, y := openWay(t, way), openWay(t, way)
				config := enginetest.Config{}
				if slow {
					config = slowEngine
				}
				engines := map[byte]*enginetest.Engine{'a': newEngine(t, way, config), 'c': newEngine(t, way, config)}
				engines['b'] = engines['a']
				k := 0
				sides := newSides(t, way, x, y, rng, lastingOps(42, 400), ib.MTU1024, lastingOps(128<<10, 1<<20), func(e *end) {
					if g := engines[where[k]]; g != nil {
						e.onEngine(g)
					} else {
						e.makeMoving(len(e.buf), false) // outside the Go heap, as the race detector sees no order between processes
					}
					k++
				})
				for k, s := range sides {
					if way == "named" && where[k] != '-' {
						s.getOpened(s.peer.end)
					}
				}
				exchange(t, sides[:], time.Minute)
				for _, s := range sides {
					s.finish(t)
				}
			})
		}
	}
}

// The same while the memory is suspended at random. The pauses only make it random: what is
// checked does not depend on them.
func TestStagedTrafficSuspended(t *testing.T) {
	seed := testSeed(t)
	for _, way := range []string{linkLoop, linkRings, "named", linkUDP} {
		t.Run(way, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			x, y := openWay(t, way), openWay(t, way)
			g := newEngine(t, way, slowEngine)
			var regions []*mem.Region
			sides := newSides(t, way, x, y, rng, lastingOps(42, 400), ib.MTU1024, lastingOps(64<<10, 256<<10), func(e *end) {
				e.onEngine(g)
				regions = append(regions, e.mr.(*MR).region)
			})
			var stop atomic.Bool
			var wg sync.WaitGroup
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(seed, 1))
				for !stop.Load() {
					r := regions[rng.IntN(len(regions))]
					if !r.Suspend() {
						t.Error("not suspended")
						return
					}
					if rng.IntN(4) == 0 {
						time.Sleep(time.Duration(rng.IntN(3000)) * time.Microsecond)
					}
					r.Resume()
					for range rng.IntN(400) {
						runtime.Gosched()
					}
				}
			})
			exchange(t, sides[:], time.Minute)
			stop.Store(true)
			wg.Wait()
			for _, s := range sides {
				s.finish(t)
			}
		})
	}
}

// The same on a network that loses, doubles and reorders, in virtual time.
func TestStagedFaulty(t *testing.T) {
	seed := testSeed(t)
	for i := range lastingOps(3, 30) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			_, devs := simulated(t, 2, link.FaultyConfig{Seed: seed + uint64(i), Drop: 0.03, Duplicate: 0.02, Reorder: 0.02,
				MinDelay: near, MaxDelay: 4 * near}, nil)
			g := enginetest.New(enginetest.Config{})
			sides := newSides(t, "faulty", devs[0], devs[1], rng, lastingOps(60, 100), ib.MTU512, 8<<10, func(e *end) {
				e.pause = virtualPause
				e.onEngine(g)
			})
			exchange(t, sides[:], 5*time.Minute)
			time.Sleep(time.Second) // virtual: what is still under way arrives
			for _, s := range sides {
				s.finish(t)
			}
		})
	}
}
