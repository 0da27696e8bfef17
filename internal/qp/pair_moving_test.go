package qp

// Games with memory that moves: regions are suspended at any time, mostly for less than
// HoldTime, for which the responder keeps a request, and sometimes for longer.

import (
	"bytes"
	"container/heap"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/train"
)

// mover suspends and resumes the regions of a game.
type mover struct {
	g       *game
	regions []*region // in an order that does not change
	until   []Time    // 0: not suspended
	briefly bool      // never longer than HoldTime
}

func (g *game) startMoving() {
	m := &mover{g: g}
	for _, s := range g.sides {
		for _, name := range slices.Sorted(maps.Keys(s.regions)) {
			m.regions = append(m.regions, s.regions[name])
		}
	}
	m.until = make([]Time, len(m.regions))
	g.mover = m
}

// step suspends and resumes regions, and returns when the next one is to be resumed.
func (m *mover) step() (next Time) {
	next = 1 << 62
	if m == nil {
		return next
	}
	rng := m.g.rng
	for i, r := range m.regions {
		switch {
		case m.until[i] != 0 && m.until[i] <= m.g.w.now:
			r.Resume()
			m.until[i] = 0
		case m.until[i] == 0 && rng.IntN(40) == 0 && !(m.briefly && slices.ContainsFunc(m.until, func(at Time) bool { return at != 0 })):
			if !r.Suspend() {
				m.g.w.t.Fatal("not suspended")
			}
			m.until[i] = m.g.w.now + time.Duration(rng.IntN(300))*time.Microsecond
			if rng.IntN(8) == 0 && !m.briefly {
				m.until[i] += time.Duration(rng.IntN(5)) * time.Millisecond
			}
		}
		if m.until[i] != 0 {
			next = min(next, m.until[i])
		}
	}
	return next
}

// takeBackAnswers takes back the answers behind one that could not be read when it
// arrived, as a device does.
func (g *game) takeBackAnswers(to *end, t *train.Train) {
	var behind []*train.Train
	g.net = slices.DeleteFunc(g.net, func(p parcel) bool {
		is := p.to.end == to && p.t.IsAnswer() && !p.t.PSN.Less(t.PSN)
		if is {
			behind = append(behind, p.t)
		}
		return is
	})
	heap.Init(&g.net)
	slices.SortFunc(behind, func(a, b *train.Train) int { return a.PSN.Sub(b.PSN) })
	behind = append(behind, slices.DeleteFunc(slices.Clone(to.wire), func(x *train.Train) bool { return !x.IsAnswer() })...)
	to.wire = slices.DeleteFunc(to.wire, (*train.Train).IsAnswer)
	for _, x := range behind {
		to.peer.q.NotSent(x)
	}
}

// suspended reports whether work waits for a region that is suspended.
func (w *Work) suspended() bool { return w.Suspended() != nil }

// TestPairMoving: whatever is suspended whenever, every request is done once, in order.
func TestPairMoving(t *testing.T) { testPairMoving(t) }

// TestPairMovingSelective is the same where only what is lost is sent again.
func TestPairMovingSelective(t *testing.T) { testPairMoving(t, true, true) }

func testPairMoving(t *testing.T, selective ...bool) {
	var sum Counters
	for seed := range pairSeeds() {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			g := newGameOf(t, seed, 150, ib.RC, ib.RC, seed%4 == 3, selective...)
			g.startMoving()
			g.trace()
			if err := g.play(); err != nil {
				t.Fatal(err)
			}
			for _, s := range g.sides {
				if s.failed || s.q.State() != ib.QPRTS || s.completed != 150 || len(s.events) != 0 {
					t.Errorf("%s: %v, %d completed, events %v", s.name, s.q.State(), s.completed, s.events)
				}
				if !bytes.Equal(s.peer.reg("dst").buf, s.dst) {
					t.Errorf("%s's WRITEs have left other bytes", s.name)
				}
				if h := s.q.resp.held; h != nil && (len(h.requests) > 0 || h.bytes != 0) {
					t.Errorf("%s holds %d requests, %d bytes", s.name, len(h.requests), h.bytes)
				}
				sum.Sum(&s.q.Counters)
			}
		})
	}
	if n := heldAll.Load(); n != 0 {
		t.Errorf("%d bytes are still counted as held", n)
	}
	if sum[CntHeld] < 10*pairSeeds() || sum[CntFaultRNR] < pairSeeds() {
		t.Errorf("%d were held and %d put off: too few to show anything", sum[CntHeld], sum[CntFaultRNR])
	}
}

// TestPairMovingBriefly: memory that is always back within HoldTime costs no RNR NAK.
func TestPairMovingBriefly(t *testing.T) {
	for seed := range pairSeeds() {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			g := newGameOf(t, seed, 100, ib.RC, ib.RC, false)
			g.lose, g.late, g.repeat, g.prompt = 0, 0, 0, true
			g.startMoving()
			g.mover.briefly = true
			g.trace()
			if err := g.play(); err != nil {
				t.Fatal(err)
			}
			for _, s := range g.sides {
				if c := &s.q.Counters; s.failed || c[CntFaultRNR] != 0 {
					t.Errorf("%s: failed: %v, %d RNR NAKs for memory", s.name, s.failed, c[CntFaultRNR])
				}
			}
		})
	}
}

// A responder whose memory comes back later than it holds requests waits longer the next time, but
// for no longer than maxHoldTime, nor than half of the timeout; and less again when the memory comes
// back soon.
func TestHoldLearns(t *testing.T) {
	us := func(n int) Time { return Time(n) * time.Microsecond }
	for _, tt := range []struct {
		timeout Time
		took    []Time // how long the memory is out of reach, one time after the other
		want    Time   // how long requests are kept then
	}{
		{0, nil, HoldTime},
		{0, []Time{us(100), us(400)}, HoldTime},
		{0, []Time{us(800)}, us(1600)},
		{0, []Time{us(1500)}, us(3000)},
		{0, []Time{us(3000)}, maxHoldTime},
		{0, []Time{us(1500), us(1400)}, us(3000)},
		{0, []Time{us(1500), us(100), us(100), us(100)}, HoldTime},
		{0, []Time{us(1500), us(5000)}, HoldTime},
		{us(4000), []Time{us(1500)}, us(2000)},
		{us(500), []Time{us(900)}, HoldTime},
	} {
		q := &QP{}
		q.req.timeout = tt.timeout
		q.resp.held = &heldRequests{answers: true}
		now := Time(1)
		for _, took := range tt.took {
			q.HoldFrom(now)
			now += took
			q.holdTick(now) // it may be given up before the memory is back
			q.cameBack(now)
			q.resp.held.answers, q.resp.held.until = true, 0
		}
		q.HoldFrom(now)
		if got := q.holdDeadline() - now; got != tt.want {
			t.Errorf("timeout %v, out of reach for %v: requests are kept for %v, want %v", tt.timeout, tt.took, got, tt.want)
		}
	}
}
