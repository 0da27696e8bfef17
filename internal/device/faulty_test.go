package device

// Devices on a network that loses, duplicates, reorders, delays and damages
// packets, in virtual time: what reliable connections promise, and the little
// that the others do.
//
// A packet's fate is drawn from the seed, in the order of sending. Goroutines
// that run at the same instant may send in either order, so the same seed leads
// to the same weather, though not always to the very same packets lost.

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// weather is a way in which the network mistreats packets.
type weather struct {
	name string
	cfg  link.FaultyConfig
}

const (
	near = 5 * time.Microsecond
	far  = 400 * time.Microsecond
)

// weathers are the faults that are tested, with every loss rate: together, and
// in the full matrix each by itself too.
func weathers() []weather {
	w := []weather{
		{"delayed", link.FaultyConfig{MinDelay: near, MaxDelay: near}},
		{"stormy", link.FaultyConfig{Duplicate: 0.02, Reorder: 0.02, Corrupt: 0.01, MinDelay: near, MaxDelay: 8 * near}},
	}
	if fullMatrix() {
		w = append(w,
			weather{"instant", link.FaultyConfig{}},
			weather{"duplicated", link.FaultyConfig{Duplicate: 0.1, MinDelay: near, MaxDelay: near}},
			weather{"reordered", link.FaultyConfig{Reorder: 0.1, MinDelay: near, MaxDelay: near}},
			weather{"corrupted", link.FaultyConfig{Corrupt: 0.05, MinDelay: near, MaxDelay: near}},
			weather{"distant", link.FaultyConfig{MinDelay: far, MaxDelay: far}},
			weather{"jittery", link.FaultyConfig{MinDelay: near, MaxDelay: far}},
			weather{"crowded", link.FaultyConfig{MinDelay: near, MaxDelay: near, Buffer: 24}},
		)
	}
	return w
}

func losses() []float64 { return []float64{0, 0.01, 0.05, 0.10} }

// Everything that a reliable connection does, in both directions on several
// connections at once, arrives whole, once and in order, whatever the network
// does to the packets.
func TestFaultyRC(t *testing.T) {
	seed := testSeed(t)
	type variant struct {
		mtu      ib.MTU
		maxSize  int
		conns, n int
		events   bool // the sides wait for events, nobody polls
	}
	variants := []variant{{ib.MTU1024, 1 << 20, 2, 42, false}}
	if fullMatrix() {
		variants = []variant{
			{ib.MTU256, 64 << 10, 3, 120, false}, {ib.MTU1024, 1 << 20, 2, 80, true}, {ib.MTU4096, 1 << 20, 3, 120, true},
		}
	}
	for wi, w := range weathers() {
		for li, loss := range losses() {
			for vi, v := range variants {
				// Of the variants of a weather and a loss, one: which, the seed says. Each
				// weather and each loss meets every variant all the same.
				if (uint64(wi+li)+seed)%uint64(len(variants)) != uint64(vi) {
					continue
				}
				t.Run(fmt.Sprintf("%s/loss%g%%/mtu%v", w.name, 100*loss, v.mtu), func(t *testing.T) {
					if fullMatrix() {
						t.Parallel() // dozens of them, each with a network and a time of its own
					}
					synctest.Test(t, func(t *testing.T) {
						cfg := w.cfg
						cfg.Drop, cfg.Seed = loss, seed
						rng := rand.New(rand.NewPCG(seed, uint64(li)<<32|uint64(vi)))
						fabric, devs := simulated(t, 2, cfg, nil)
						if !fullMatrix() {
							v.events = li >= 1 // polling through seconds of virtual time takes long
						}
						var sides []*side
						for c := range v.conns {
							maxSize, n := v.maxSize, v.n
							if !fullMatrix() { // long messages take long: a few, on one connection
								if c > 0 {
									maxSize = 64 << 10
								} else if w.name != "delayed" {
									n /= 3
								}
							}
							two := newSides(t, fmt.Sprint(c), devs[0], devs[1], rng, n, v.mtu, maxSize, func(e *end) {
								e.rd = uint8(1 + rng.IntN(16))
								e.pause = virtualPause
								if v.events {
									withChannel(t, e)
								}
							})
							sides = append(sides, two[:]...)
						}
						start := time.Now()
						exchange(t, sides, 5*time.Minute)
						took := time.Since(start)
						time.Sleep(time.Second) // what is still under way arrives
						for _, s := range sides {
							s.finish(t)
						}
						if !t.Failed() && w.name == "delayed" && loss == 0 {
							for _, d := range devs {
								if n := countsOf(d)["local_ack_timeouts"]; n != 0 {
									t.Errorf("%d timeouts on a network that loses nothing", n)
								}
							}
						}
						sent := uint64(0)
						for _, d := range devs {
							sent += countsOf(d)["tx_packets"]
						}
						if n := fabric.Stats().Packets; sent != n {
							t.Errorf("the devices count %d packets handed to the link, which has had %d", sent, n)
						}
						t.Logf("%v of virtual time, %+v", took, fabric.Stats())
						if t.Failed() {
							for _, d := range devs {
								t.Logf("%v", countsOf(d).since(nil))
							}
						}
					})
				})
			}
		}
	}
}

// withChannel gives an end, which is not connected yet, a completion queue that
// raises events.
func withChannel(t testing.TB, e *end) {
	ch := must[provider.Channel](t)(e.dev.CreateChannel())
	cq := must[provider.CQ](t)(e.dev.CreateCQ(1024, ch))
	qp := must[provider.QP](t)(e.pd.CreateQP(provider.QPConfig{Type: e.qp.Type(), SendCQ: cq, RecvCQ: cq,
		Cap: must[ib.QPAttr](t)(e.qp.Query()).Cap}))
	closeAll(t, e.qp, e.cq)
	e.qp, e.cq, e.channel = qp, cq, ch
}

// Three devices, each connected to the other two; two of them add to one word of
// the third. It counts each addition once: each found what the ones before it
// had made.
func TestFaultyTriangle(t *testing.T) {
	seed := testSeed(t)
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(seed, 3))
		_, devs := simulated(t, 3, link.FaultyConfig{Seed: seed, Drop: 0.03, Duplicate: 0.02, Reorder: 0.02,
			MinDelay: near, MaxDelay: 4 * near}, nil)
		owner := newEnd(t, devs[0], ib.RC, 64)
		t.Cleanup(owner.close)
		var sides []*side
		for i := range devs {
			two := newSides(t, fmt.Sprint(i), devs[i], devs[(i+1)%3], rng, lastingOps(30, 100), ib.MTU512, 8<<10, func(e *end) {
				e.pause = virtualPause
			})
			for _, s := range two {
				if s.peer.dev == owner.dev {
					// Keys belong to a domain: share the owner's memory in the target's.
					mr := must[provider.MR](t)(s.peer.pd.RegMR(owner.buf, allRemote))
					t.Cleanup(func() { closeAll(t, mr) })
					s.shared = &end{dev: owner.dev, mr: mr, buf: owner.buf}
				}
			}
			sides = append(sides, two[:]...)
		}
		exchange(t, sides, 5*time.Minute)
		time.Sleep(time.Second)
		var all []addition
		for _, s := range sides {
			s.finish(t)
			all = append(all, s.sharedAdds...)
		}
		slices.SortFunc(all, func(a, b addition) int { return cmp.Compare(a.found, b.found) })
		var sum uint64
		for i, a := range all {
			if a.found != sum {
				t.Fatalf("addition %d of %d found %d, want %d: one was done twice, or not at all", i, len(all), a.found, sum)
			}
			sum += a.add
		}
		if got := wordOf(owner.buf); got != sum || sum == 0 {
			t.Errorf("the shared word counts %d, want %d", got, sum)
		}
	})
}

func lastingOps(short, long int) int {
	if fullMatrix() {
		return long
	}
	return short
}
