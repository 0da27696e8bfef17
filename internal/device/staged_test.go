package device

// Memory that the CPU does not address, on every link. The model's memory can be looked at
// all the same, so that traffic checks itself as in any other.

import (
	"fmt"
	"math/rand/v2"
	"runtime"
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

// inRings has two devices of this process talk by rings, if the way is one.
func inRings(way string, ds ...*Device) bool {
	if way != "rings" && way != "named" {
		return false
	}
	for _, d := range ds {
		d.loopback = false
	}
	return true
}

// linkOf is the link of a way.
func linkOf(way string) string {
	return map[string]string{"loop": linkLoop, "rings": linkLocal, "named": linkLocal, "udp": linkUDP}[way]
}

// namedTrains returns how many trains came whose payload was named.
func namedTrains(ds ...*Device) (n uint64) {
	for _, d := range ds {
		n += d.link.(*link.Shared).Named()
	}
	return n
}

// Random traffic of every kind in both directions, in memory of an engine on one side or on
// both, of the same engine or of two: all of it is done and right.
func TestStagedTraffic(t *testing.T) {
	seed := testSeed(t)
	for _, way := range []string{"loop", "rings", "named", "udp", "captured"} {
		for _, where := range []string{"ab", "a-", "-b", "ac"} {
			for _, slow := range []bool{false, true} {
				if way == "captured" && (where != "ab" || slow) && !fullMatrix() {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/slow %v", way, where, slow), func(t *testing.T) {
					rng := rand.New(rand.NewPCG(seed, 0))
					cfg := provider.Config{Link: linkOf(way)}
					if way == "captured" {
						cfg.Link, cfg.PCAP = linkLoop, t.TempDir()+"/packets"
					}
					x, y := openDevice(t, cfg), openDevice(t, cfg)
					inRings(way, x, y)
					config := enginetest.Config{}
					if slow {
						config = slowEngine
					}
					engines := map[byte]*enginetest.Engine{'a': newEngine(t, way, config), 'c': newEngine(t, way, config)}
					engines['b'] = engines['a']
					i := 0
					sides := newSides(t, way, x, y, rng, lastingOps(100, 400), ib.MTU1024, 1<<20, func(e *end) {
						e.pause = func() { runtime.Gosched() }
						if g := engines[where[i]]; g != nil {
							e.onEngine(g)
						} else {
							e.makeMoving(len(e.buf), false) // outside the Go heap, as the race detector sees no order between processes
						}
						i++
					})
					exchange(t, sides[:], time.Minute)
					for _, s := range sides {
						s.finish(t)
					}
					if way == "named" && namedTrains(x, y) == 0 {
						t.Error("nothing was named")
					}
				})
			}
		}
	}
}

// The same while the memory is suspended at random.
func TestStagedTrafficSuspended(t *testing.T) {
	seed := testSeed(t)
	for _, way := range []string{"loop", "rings", "named", "udp"} {
		t.Run(way, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			cfg := provider.Config{Link: linkOf(way)}
			x, y := openDevice(t, cfg), openDevice(t, cfg)
			inRings(way, x, y)
			g := newEngine(t, way, slowEngine)
			var regions []*mem.Region
			sides := newSides(t, way, x, y, rng, lastingOps(100, 400), ib.MTU1024, 256<<10, func(e *end) {
				e.pause = func() { runtime.Gosched() }
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
					for until := time.Now().Add(time.Duration(rng.IntN(200)) * time.Microsecond); time.Now().Before(until); {
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
			time.Sleep(time.Second)
			for _, s := range sides {
				s.finish(t)
			}
		})
	}
}
