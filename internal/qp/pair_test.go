package qp

// Two queue pairs that talk at random over a network that loses, repeats,
// reorders and splits trains, under virtual time. Everything is drawn from a seed
// that is in the name of the test:
//
//	go test ./internal/qp -run 'TestPair/seed=7$'
//
//  1. side (pair_side_test.go): one end's program.
//  2. network: what is under way, and when it arrives.
//  3. run: time goes from one thing that happens to the next.
//  4. TestPair: everything succeeds, in order, exactly once; memory is as the
//     model says. TestPairRevoked: memory goes away in the middle.

import (
	"bytes"
	"container/heap"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// parcel is a train with its time of arrival.
type parcel struct {
	at    Time
	order int
	to    *side
	t     *train.Train
}

type parcels []parcel

func (p parcels) Len() int { return len(p) }
func (p parcels) Less(i, j int) bool {
	return p[i].at < p[j].at || p[i].at == p[j].at && p[i].order < p[j].order
}
func (p parcels) Swap(i, j int) { p[i], p[j] = p[j], p[i] }
func (p *parcels) Push(x any)   { *p = append(*p, x.(parcel)) }
func (p *parcels) Pop() any {
	old := *p
	x := old[len(old)-1]
	*p = old[:len(old)-1]
	return x
}

// game is one run.
type game struct {
	w     *world
	rng   *rand.Rand
	sides [2]*side
	net   parcels
	order int
	store [2 * NumWorkKinds]storage

	lose, repeat, late float64 // how often
	prompt             bool    // answers do not wait for more, receives are there, storage is quick
	revoke             func()  // what happens when this many requests are left, if anything
	revokeAt           int
	mover              *mover // nil: memory lies still
}

// storage is a side's, for one kind of deferred work: what it is at, and until when.
type storage struct {
	busy  bool
	until Time
	work  Work
}

// storage lets the storage of both sides begin and end, at random times.
func (g *game) storage() (next Time) {
	next = 1 << 62
	for k := range g.store {
		l, s := WorkKind(k%int(NumWorkKinds)), g.sides[k/int(NumWorkKinds)]
		st := &g.store[k]
		if st.busy && st.until <= g.w.now && !st.work.suspended() {
			st.busy = false
			st.work.Do(s.table)
			s.q.Finished(&st.work, g.w.now)
		}
		if !st.busy && s.q.NextWork(l, &st.work) {
			st.busy, st.until = true, g.w.now+time.Duration(g.rng.IntN(50))*time.Microsecond
			if g.rng.IntN(16) == 0 && !g.prompt { // longer than the peer waits before it asks again
				st.until += time.Duration(g.rng.IntN(80)) * time.Millisecond
			}
		}
		if st.busy && !st.work.suspended() {
			next = min(next, st.until)
		}
	}
	return next
}

func newGameOf(t *testing.T, seed uint64, requests int, typeA, typeB ib.QPType, lazy bool, selective ...bool) *game {
	rng := rand.New(rand.NewPCG(seed, 1))
	draw := func() setup {
		s := usual()
		s.window = []int{4, 8, 16, 64}[rng.IntN(4)]
		s.psn = rng.Uint32N(1<<24-1) + 1
		if rng.IntN(2) == 0 {
			s.psn = 0xffffff - rng.Uint32N(100) // it soon wraps
		}
		if rng.IntN(3) == 0 {
			s.credits = 2 + rng.IntN(20)
		}
		s.timer = uint8(1 + rng.IntN(12))
		s.cq, s.sq, s.rq = 256, 1+rng.IntN(slots), slots/2
		return s
	}
	a, b := draw(), draw()
	a.mtu = []ib.MTU{ib.MTU256, ib.MTU512, ib.MTU1024}[rng.IntN(3)]
	b.mtu = a.mtu
	a.typ, b.typ = typeA, typeB
	a.scatter, b.scatter = rng.IntN(2) == 0, rng.IntN(2) == 0 && typeB != ib.XRCRecv
	a.rd, b.rd = uint8(1+rng.IntN(MaxRDAtomic)), uint8(1+rng.IntN(MaxRDAtomic))
	a.destRD, b.destRD = b.rd, a.rd // no more than the peer sends
	g := &game{rng: rng, w: newWorld(t)}
	g.w.byRef, g.w.lazy = rng.IntN(4) == 0, lazy
	g.lose, g.repeat, g.late = rng.Float64()*0.1, rng.Float64()*0.1, rng.Float64()*0.1
	switch rng.IntN(4) {
	case 0:
		g.lose = 0
	case 1:
		g.lose, g.repeat, g.late = 0, 0, 0
	}
	if len(selective) == 2 {
		g.w.byRef, g.w.selective = false, [2]bool{selective[0], selective[1]}
	}
	g.w.lossless = g.w.byRef && g.lose == 0
	g.w.pair(a, b)
	for i, e := range g.w.ends() {
		g.sides[i] = newSide(e, rng, requests)
		for _, r := range e.regions {
			if lazy {
				r.lazy.drop(0, uint64(len(r.buf)))
				r.lazy.evict = func() int { return rng.IntN(4 * len(r.lazy.there)) }
			}
		}
	}
	g.sides[0].peer, g.sides[1].peer = g.sides[1], g.sides[0]
	g.w.failed = g.takeBack
	if typeB == ib.XRCRecv {
		g.sides[1].left = 0 // a target sends nothing
	}
	return g
}

// trace logs what is sent and what arrives, if VERBENA_TRACE is set. Thousands of games
// are too many to log: a seed that fails, played again, fails again.
func (g *game) trace() {
	if os.Getenv("VERBENA_TRACE") == "" {
		g.w.t.Cleanup(func() {
			if g.w.t.Failed() {
				g.w.t.Log("VERBENA_TRACE=1 and -run with this seed show every train")
			}
		})
		return
	}
	g.w.seen = func(to *end, t *train.Train) { g.w.t.Logf("[%v] %s", g.w.now-epoch, describe(to, t)) }
	g.w.log = func(format string, args ...any) { g.w.t.Logf("[%v] %s", g.w.now-epoch, fmt.Sprintf(format, args...)) }
}

// ship takes what the ends have put on the wires into the network.
func (g *game) ship() {
	for _, s := range g.sides {
		trains := s.wire
		s.wire = nil
		for _, t := range trains {
			for !g.w.byRef && t.N > 1 && g.rng.IntN(3) == 0 { // the train is split on the way
				k := 1 + g.rng.IntN(t.N-1)
				g.carry(s, cut(t, 0, k))
				t = cut(t, k, t.N-k)
			}
			g.carry(s, t)
		}
	}
}

// takeBack takes back the requests behind one that could not be read when it
// arrived: a link that sends payloads by reference delivers while it sends, and sends
// nothing behind such a request.
func (g *game) takeBack(to *end, t *train.Train) {
	behind := func(x *train.Train) bool {
		return t.Kind != wire.KindReadResponse && x.Kind != wire.KindReadResponse && x.Kind != wire.KindAck &&
			x.Kind != wire.KindAtomicAck && !x.PSN.Less(t.PSN)
	}
	if g.mover != nil && t.IsAnswer() {
		g.takeBackAnswers(to, t)
		return
	}
	to.wire = slices.DeleteFunc(to.wire, behind)
	g.net = slices.DeleteFunc(g.net, func(p parcel) bool { return p.to.end == to && behind(p.t) })
	heap.Init(&g.net)
}

func (g *game) carry(to *side, t *train.Train) {
	if g.rng.Float64() < g.lose {
		return
	}
	at := g.w.now + 5*time.Microsecond
	if g.rng.Float64() < g.late {
		at += time.Duration(g.rng.IntN(100)) * time.Microsecond
	}
	copies := 1
	if g.rng.Float64() < g.repeat {
		copies = 2
	}
	for range copies {
		g.order++
		heap.Push(&g.net, parcel{at, g.order, to, copyTrain(t)})
		at += time.Duration(g.rng.IntN(50)) * time.Microsecond
	}
}

// step lets the programs act, and then the next thing happen.
func (g *game) step() error {
	for _, s := range g.sides {
		for s.left > 0 && g.rng.IntN(3) > 0 && (!g.prompt || s.peer.hasRoom()) && s.post() {
			for g.prompt && s.peer.recvLeft > 0 {
				s.peer.postRecv()
			}
		}
		for s.recvLeft > 0 && g.rng.IntN(4) > 0 && s.hasRoom() {
			s.postRecv()
		}
	}
	if g.revoke != nil && g.sides[0].left+g.sides[1].left <= g.revokeAt {
		g.revoke()
		g.revoke = nil
	}
	g.pull()
	next := min(g.w.now+100*time.Microsecond, max(g.w.now, g.storage()), max(g.w.now, g.mover.step())) // programs run again
	if len(g.net) > 0 {
		next = min(next, g.net[0].at)
	}
	for _, s := range g.sides {
		if d := s.q.Deadline(); d != 0 {
			next = min(next, max(d, g.w.now))
		}
	}
	g.w.now = next
	for _, s := range g.sides {
		if d := s.q.Deadline(); d != 0 && d <= g.w.now {
			s.q.Tick(g.w.now)
		}
	}
	g.storage()
	if g.prompt {
		g.pull()
	}
	for len(g.net) > 0 && g.net[0].at <= g.w.now {
		p := heap.Pop(&g.net).(parcel)
		g.w.log("%s takes psn=%06x n=%d of %s", p.to.name, p.t.PSN, p.t.N, kindNames[p.t.Kind])
		p.to.receive(p.t)
		if g.prompt || g.rng.IntN(2) == 0 { // otherwise the answer waits for more
			g.pull()
		}
	}
	g.pull()
	for _, s := range g.sides {
		if err := s.poll(); err != nil {
			return err
		}
	}
	return nil
}

func (g *game) pull() {
	g.w.pullAll()
	g.ship()
}

// play runs until all is done.
func (g *game) play() error {
	for steps := 0; !g.sides[0].done() || !g.sides[1].done(); steps++ {
		if steps > 200000 {
			return fmt.Errorf("it hangs at %v: %s; %s; %d and %d requests outstanding", g.w.now,
				describeQP(g.sides[0].end), describeQP(g.sides[1].end), len(g.sides[0].posted), len(g.sides[1].posted))
		}
		if err := g.step(); err != nil {
			return err
		}
	}
	return nil
}

// longMatrix reports whether thousands of seeds are tried.
func longMatrix() bool { return os.Getenv("VERBENA_FULL") != "" && !raceEnabled }

// pairSeeds is how many seeds are tried. The race detector has nothing to find here, where
// there are no goroutines, and takes ten times as long: make test plays on without it.
func pairSeeds() uint64 {
	switch {
	case longMatrix():
		return 1500
	case raceEnabled:
		return 12
	default:
		return 60
	}
}

func TestPair(t *testing.T) { testPair(t, ib.RC, ib.RC, false, false) }

// TestPairSelective is the same where only what is lost is sent again.
func TestPairSelective(t *testing.T) { testPair(t, ib.RC, ib.RC, false, false, true, true) }

// TestPairOther is the same where one of the two can only go back.
func TestPairOther(t *testing.T) { testPair(t, ib.RC, ib.RC, false, false, true, false) }

func TestPairSelectivePending(t *testing.T) { testPair(t, ib.RC, ib.RC, true, false, true, true) }

func TestPairSelectiveXRC(t *testing.T) {
	testPair(t, ib.XRCSend, ib.XRCRecv, false, false, true, true)
}

// TestPairShortcut is the same where WRITEs and READs may take a shortcut, now and then.
func TestPairShortcut(t *testing.T) { testPair(t, ib.RC, ib.RC, false, true) }

func TestPairShortcutPending(t *testing.T) { testPair(t, ib.RC, ib.RC, true, true) }

// TestPairXRC is the same for an initiator and a target.
func TestPairXRC(t *testing.T) { testPair(t, ib.XRCSend, ib.XRCRecv, false, false) }

// TestPairPending is the same with memory, on both sides, that has to be fetched
// first, and goes again at any time.
func TestPairPending(t *testing.T) { testPair(t, ib.RC, ib.RC, true, false) }

func TestPairPendingXRC(t *testing.T) { testPair(t, ib.XRCSend, ib.XRCRecv, true, false) }

func testPair(t *testing.T, typeA, typeB ib.QPType, lazy, shortcut bool, selective ...bool) {
	var sum Counters
	ran, seeds := uint64(0), pairSeeds()
	if lazy {
		seeds /= 3 // waiting takes long, also in virtual time
	}
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			ran++
			g := newGameOf(t, seed, 150, typeA, typeB, lazy, selective...)
			if shortcut {
				g.shortcuts(seed)
			}
			g.trace()
			if err := g.play(); err != nil {
				t.Fatal(err)
			}
			for _, s := range g.sides {
				if s.failed || s.q.State() != ib.QPRTS {
					t.Errorf("%s has failed", s.name)
				}
				if s.completed != 150 && s.q.half != target || len(s.events) != 0 {
					t.Errorf("%s: %d completed, events %v", s.name, s.completed, s.events)
				}
				if !bytes.Equal(s.peer.reg("dst").buf, s.dst) {
					t.Errorf("%s's WRITEs have left other bytes", s.name)
				}
				for i, want := range s.counters {
					if got := binary.NativeEndian.Uint64(s.peer.reg("ctr").buf[8*i:]); got != want {
						t.Errorf("%s's atomics have left %d, not %d", s.name, got, want)
					}
				}
				if s.credits != nil && s.q.req.heldCredits != 0 {
					t.Errorf("%s holds %d credits", s.name, s.q.req.heldCredits)
				}
				if shortcut {
					g.w.tap(s.peer.end, nil)
					if s.q.req.max != s.peer.q.resp.epsn {
						t.Errorf("%s sends %06x next, its peer expects %06x", s.name, s.q.req.max, s.peer.q.resp.epsn)
					}
				}
				sum.Sum(&s.q.Counters)
			}
		})
	}
	if len(selective) == 2 && selective[1] && (sum[CntGapsReceived] < ran || sum[CntRetransmits] < ran) {
		t.Errorf("%d reports came, %d packets were sent again: too few to show anything", sum[CntGapsReceived], sum[CntRetransmits])
	}
	if shortcut && sum[CntByGrant] < 2*ran {
		t.Errorf("%d WRITEs took the shortcut: too few to show anything", sum[CntByGrant])
	}
	if lazy && (sum[CntFaultRNR] < ran || sum[CntFaultWaits] < ran) {
		t.Errorf("%d requests were put off and %d waited: too few to show anything", sum[CntFaultRNR], sum[CntFaultWaits])
	}
}

// TestPairRepeated: a network that repeats packets, and does nothing else to them,
// uses up no retry: the requester takes no answer to a repetition for a loss.
func TestPairRepeated(t *testing.T) {
	for seed := range pairSeeds() {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			g := newGameOf(t, seed, 150, ib.RC, ib.RC, false)
			g.lose, g.late, g.repeat, g.prompt = 0, 0, 0.3, true
			for _, s := range g.sides {
				s.q.attr.RetryCnt = 0
			}
			g.trace()
			if err := g.play(); err != nil {
				t.Fatal(err)
			}
			for _, s := range g.sides {
				if s.failed {
					t.Errorf("%s has failed: %v", s.name, s.first)
				}
			}
		})
	}
}

// TestPairRevoked: a region goes away while requests use it. The request that it hits gets
// the right error, everything else is flushed, no request waits for ever, and the memory
// is not touched any more.
func TestPairRevoked(t *testing.T) {
	hit, ran := 0, 0
	for seed := range pairSeeds() {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			var selective []bool
			if seed%4 == 2 {
				selective = []bool{true, true}
			}
			g := newGameOf(t, seed, 150, ib.RC, ib.RC, seed%3 == 0, selective...)
			if seed%2 == 1 {
				g.shortcuts(seed)
			}
			victim := g.sides[g.rng.IntN(2)]
			name := []string{"src", "dst", "rcv", "res", "ctr"}[g.rng.IntN(5)]
			var frozen []byte
			g.revokeAt = 100 + g.rng.IntN(150)
			g.revoke = func() {
				if err := victim.reg(name).Close(); err != nil {
					t.Fatal(err)
				}
				frozen = bytes.Clone(victim.reg(name).buf)
			}
			g.trace()
			if err := g.play(); err != nil {
				t.Fatalf("%s of %s: %v", name, victim.name, err)
			}
			if !bytes.Equal(victim.reg(name).buf, frozen) {
				t.Errorf("%s of %s was changed after it was closed", name, victim.name)
			}
			// The region's owner meets the fault itself, or is in the error state because
			// it refused the peer's request; the peer gets a NAK, or no answer any more.
			own := map[string][]ib.WCStatus{"src": {ib.WCLocProtErr}, "res": {ib.WCLocProtErr}}[name]
			theirs := map[string][]ib.WCStatus{"src": {ib.WCRemAccessErr}, "dst": {ib.WCRemAccessErr},
				"ctr": {ib.WCRemAccessErr}, "rcv": {ib.WCRemOpErr}}[name]
			if s := victim; s.flushing && !slices.Contains(append(own, ib.WCWRFlushErr), s.first) {
				t.Errorf("%s of %s was closed, its own requests ended with %v", name, s.name, s.first)
			}
			if s := victim.peer; s.flushing && !slices.Contains(append(theirs, ib.WCRetryExcErr), s.first) {
				t.Errorf("%s of %s was closed, the peer's requests ended with %v", name, victim.name, s.first)
			}
			ran++
			if g.sides[0].failed || g.sides[1].failed {
				hit++
			}
		})
	}
	if hit < ran*9/10 {
		t.Errorf("only %d regions of %d were missed by anybody", hit, ran)
	}
}
