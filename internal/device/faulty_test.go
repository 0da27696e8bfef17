package device

// Devices on a network that loses, duplicates, reorders, delays and damages
// packets, in virtual time: what reliable connections promise, and the little
// that the others do.
//
// A packet's fate is drawn from the seed, in the order of sending. Goroutines
// that run at the same instant may send in either order, so the same seed leads
// to the same weather, though not always to the very same packets lost.

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// weather is a way in which the network mistreats packets.
type weather struct {
	name string
	cfg  link.FaultyConfig
}

const (
	near    = 5 * time.Microsecond
	distant = 400 * time.Microsecond
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
			weather{"distant", link.FaultyConfig{MinDelay: distant, MaxDelay: distant}},
			weather{"jittery", link.FaultyConfig{MinDelay: near, MaxDelay: distant}},
			weather{"crowded", link.FaultyConfig{MinDelay: near, MaxDelay: near, Buffer: 24}},
		)
	}
	return w
}

func losses() []float64 { return []float64{0, 0.01, 0.05, 0.10} }

// Everything that a reliable connection does, in both directions on several connections at
// once, arrives whole, once and in order, whatever the network does to the packets.
// (internal/qp, TestPair, plays the protocol with every kind of fault and many seeds. Here are
// the device's timers, links and polling or events.)
func TestFaultyRC(t *testing.T) {
	seed := testSeed(t)
	type variant struct {
		mtu      ib.MTU
		maxSize  int
		conns, n int
		events   bool // the sides wait for events, and do not poll
	}
	variants := []variant{
		{ib.MTU256, 64 << 10, 3, 120, false}, {ib.MTU1024, 1 << 20, 2, 80, true}, {ib.MTU4096, 1 << 20, 3, 120, true},
	}
	if !fullMatrix() {
		variants = []variant{{ib.MTU1024, 64 << 10, 2, 42, false}, {ib.MTU4096, 256 << 10, 1, 42, true}}
	}
	for wi, w := range weathers() {
		for li, loss := range losses() {
			if !fullMatrix() && loss != 0 && loss != 0.05 {
				continue
			}
			// Of the variants of a weather and a loss, one, which the seed chooses. Each weather and
			// each loss meets every variant all the same.
			vi := (uint64(wi+li) + seed) % uint64(len(variants))
			v := variants[vi]
			t.Run(fmt.Sprintf("%s/loss%g%%/mtu%v", w.name, 100*loss, v.mtu), func(t *testing.T) {
				if fullMatrix() {
					t.Parallel() // dozens of them, each with a network and a time of its own
				}
				synctest.Test(t, func(t *testing.T) {
					cfg := w.cfg
					cfg.Drop, cfg.Seed = loss, seed
					rng := rand.New(rand.NewPCG(seed, uint64(li)<<32|vi))
					fabric, devs := simulated(t, 2, cfg, nil)
					var sides []*side
					for c := range v.conns {
						two := newSides(t, fmt.Sprint(c), devs[0], devs[1], rng, v.n, v.mtu, v.maxSize, func(e *end) {
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
					time.Sleep(time.Second) // virtual: what is still under way arrives
					for _, s := range sides {
						s.finish(t)
					}
					sent := uint64(0)
					for _, d := range devs {
						c := countsOf(d)
						sent += c["tx_packets"]
						if n := c["local_ack_timeouts"]; n != 0 && w.name == "delayed" && loss == 0 && !t.Failed() {
							t.Errorf("%d timeouts on a network that loses nothing", n)
						}
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

// The memory that a READ reads is deregistered when part of the answer is on its way. The
// requester gets the NAK for the rest.
func TestReadSourceVanishesMidway(t *testing.T) {
	for _, after := range []int{0, 20} {
		bubble(t, fmt.Sprint("after", after), func(t *testing.T) {
			var a, b *end
			var responses int
			_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near, Filter: func(_ link.Hop, pkt []byte) link.Verdict {
				if wire.Opcode(pkt[0]) == rc(wire.KindReadResponse, wire.Middle) {
					if responses == after {
						closeAll(t, b.mr)
					}
					responses++
				}
				return link.Deliver
			}}, nil)
			a, b = connected(t, devs[0], devs[1], ib.RC, 128<<10, func(e *end) { e.pause = virtualPause })
			a.post(a.read(b, 0, len(a.buf)))
			a.status(ib.WCRemAccessErr)
			wantEvent(t, b.dev, ib.AsyncEvent{Type: ib.EventQPAccessErr, QPN: b.qp.Number()})
		})
	}
}

// withChannel gives an end, which is not connected yet, a completion queue that
// raises events.
func withChannel(t testing.TB, e *end) {
	e.channel = must[provider.Channel](t)(e.dev.CreateChannel())
	e.withQueue(1024, e.channel)
}
