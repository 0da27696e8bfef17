// Package netsim judges how queue pairs share a network, in virtual time: the protocol core of
// package qp, as it is, sends over a simulated bottleneck, beside a model of TCP cubic.
//
//  1. sim (sim.go) is the clock and what happens when.
//  2. bottleneck is the network: it drops, marks, delays and reorders packets.
//  3. host (host.go) is a machine with one queue pair, its program, and a network interface that
//     joins packets as Linux does.
//  4. cubic (cubic.go) is the model of a TCP connection.
//  5. cases.go has what is measured and the goals, report.go the tables and plots.
//
// Everything is drawn from a seed: a case runs the same way each time.
package netsim

import (
	"container/heap"
	"math/rand/v2"
	"time"
)

// Time is virtual time since the start.
type Time = time.Duration

// epoch is when a simulation starts: the protocol core takes zero for never.
const epoch = time.Second

type event struct {
	at    Time
	order uint64 // of events at the same time
	do    func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].order < e[j].order
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	old := *e
	x := old[len(old)-1]
	old[len(old)-1] = event{}
	*e = old[:len(old)-1]
	return x
}

// sim is the clock.
type sim struct {
	now    Time
	order  uint64
	events events
	rng    *rand.Rand
}

func newSim(seed uint64) *sim {
	return &sim{now: epoch, rng: rand.New(rand.NewPCG(seed, 27))} //nolint:gosec // G404: it is to be repeatable
}

// at has something happen at a time.
func (s *sim) at(t Time, do func()) {
	s.order++
	heap.Push(&s.events, event{max(t, s.now), s.order, do})
}

// run lets time pass up to a time.
func (s *sim) run(until Time) {
	for len(s.events) > 0 && s.events[0].at <= until {
		e := heap.Pop(&s.events).(event)
		s.now = e.at
		e.do()
	}
	s.now = until
}

// Link says what a bottleneck is like.
type Link struct {
	Rate   float64 // bits a second
	RTT    Time    // without waiting
	Buffer int     // bytes
	Mark   int     // bytes in the buffer from which on packets are marked; 0: none are
	Loss   float64 // of packets, at random, in both directions
	Burst  int     // losses come in bursts of so many on average; 0: singly
	Late   float64 // packets that arrive later than those behind them
}

// bottleneck is one direction of a Link.
type bottleneck struct {
	Link
	s      *sim
	free   Time // when the buffer is empty
	losing bool // a burst of losses goes on
	last   Time // the last packet

	sent, dropped, lost, marked int
	bytes                       int64 // that have passed
	waits                       Time  // of all packets together
	queue                       []sample
}

// sample is how long the queue was at a time.
type sample struct {
	at    Time
	bytes int
}

// packet is what the network carries.
type packet struct {
	size    int
	capable bool // may be marked
	marked  bool
	arrive  func(*packet)

	piece // of a queue pair's train
	tcp   segment
}

// send takes a packet.
func (b *bottleneck) send(p *packet) {
	s := b.s
	b.sent++
	if b.Loss > 0 && b.loses() {
		b.lost++
		return
	}
	wait := max(b.free-s.now, 0)
	queued := int(wait.Seconds() * b.Rate / 8)
	if queued+p.size > b.Buffer {
		b.dropped++
		return
	}
	if b.Mark > 0 && queued > b.Mark && p.capable {
		p.marked = true
		b.marked++
	}
	b.bytes += int64(p.size)
	b.waits += wait
	if n := len(b.queue); n == 0 || s.now-b.queue[n-1].at > b.RTT {
		b.queue = append(b.queue, sample{s.now, queued})
	}
	b.free = s.now + wait + time.Duration(float64(p.size)*8/b.Rate*float64(time.Second))
	at := b.free + b.RTT/2
	if b.Late > 0 && s.rng.Float64() < b.Late {
		at += time.Duration(s.rng.Int64N(int64(b.RTT/2) + 1))
	}
	s.at(at, func() { p.arrive(p) })
}

// loses reports whether a packet gets lost: at random, or in bursts (Gilbert's model).
func (b *bottleneck) loses() bool {
	if b.Burst == 0 {
		return b.s.rng.Float64() < b.Loss
	}
	if b.s.now-b.last > b.RTT {
		b.losing = false // what made it has passed meanwhile
	}
	b.last = b.s.now
	if b.losing {
		b.losing = b.s.rng.Float64() >= 1/float64(b.Burst)
	} else {
		b.losing = b.s.rng.Float64() < b.Loss/(1-b.Loss)/float64(b.Burst)
	}
	return b.losing
}
