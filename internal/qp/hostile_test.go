package qp

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// TestHostilePeer: a peer that is taken for one of this library sends anything: reports with any
// numbers, requests that come early and overlap, answers to parts of READs, notifications, with any
// hints. Nothing is written outside the region (victim.verify), no credits and no memory are lost,
// and the queue pair can be reset.
func TestHostilePeer(t *testing.T) {
	seeds := uint64(40)
	if longMatrix() {
		seeds = 2000
	}
	before := aheadAll.Load()
	var sum Counters
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 77))
		v := newVictim(t, 0)
		p := &v.q.path
		p.Selective, p.Window = true, []int{4, 64, 1000}[rng.IntN(3)]
		v.q.req.congestion.begin(p)
		c := NewControlled(4<<24, 4*p.Window*v.q.mtu, v.q.mtu).Costing((1<<24 + p.Window - 1) / p.Window)
		v.credits, p.Credits = c, c
		v.q.attr.RetryCnt, v.q.attr.RNRRetry, v.q.attr.MaxRDAtomic, v.q.attr.MaxDestRDAtomic = 7, 7, 16, 16
		v.q.req.timeout = 10 * time.Second
		for range 500 {
			r := v.likely(rng)
			if r.Op != opTrain {
				v.step(t, r)
				continue
			}
			tr := r.train(v.q, v.peer)
			tr.Hints = []uint8{wire.HintOurs, wire.HintOurs | wire.HintAlone, wire.HintOurs | wire.HintProbe, 0, uint8(rng.IntN(128))}[rng.IntN(5)]
			v.twist(tr, rng)
			v.q.Receive(tr, v.w.now)
			v.verify(t)
		}
		sum.Sum(&v.q.Counters)
		if err := v.q.Modify(&ib.QPAttr{State: ib.QPReset}, ib.QPMaskState, nil, v.w.now); err != nil {
			t.Fatal(err)
		}
		if c.pool.used.Load() != 0 || c.pool.users.Load() != 0 {
			t.Fatalf("seed %d: %d credits are used by %d queue pairs after the reset", seed, c.pool.used.Load(), c.pool.users.Load())
		}
	}
	if n := aheadAll.Load() - before; n != 0 {
		t.Errorf("%d bytes are still counted as kept", n)
	}
	for _, c := range []Counter{CntGapsSent, CntGapsReceived, CntRetransmits, CntOutOfSequence, CntNotices, CntGhostAcks} {
		if sum[c] < seeds {
			t.Errorf("%v is %d after %d conversations: too few to show anything", c, sum[c], seeds)
		}
	}
}

// likely returns something for the victim to do, or a train that it may well accept.
func (v *victim) likely(rng *rand.Rand) *record {
	r := &record{Op: []uint8{opTrain, opTrain, opTrain, opTrain, opSend, opPull, opPull, opTick, opRecv, opSync}[rng.IntN(10)], ID: rng.Uint64()}
	m := v.regions["mem"]
	r.RKey, r.VA = m.Key(), m.IOVA()+uint64(rng.IntN(64))*8
	switch r.Op {
	case opSend:
		r.Flags = uint8(rng.IntN(2)) * flagSignaled
		r.Opcode = uint8([]ib.Opcode{ib.OpSend, ib.OpRDMAWrite, ib.OpRDMARead, ib.OpRDMARead, ib.OpAtomicFetchAdd}[rng.IntN(5)])
		if r.Len = uint32(rng.IntN(8000)); ib.Opcode(r.Opcode) == ib.OpAtomicFetchAdd {
			r.Len = 8
		}
	case opTick:
		r.PSN = rng.Uint32N(2_000_000)
	case opRecv:
		r.Len = 8000
	case opTrain:
		r.Flags = flagStart | flagEnd | uint8(rng.IntN(2))*flagAckReq
		r.PSN, r.Syndrome, r.N, r.MTU = uint32(v.q.resp.epsn), uint8(wire.AckNoCredits), 1, uint32(v.q.mtu)
		if rng.IntN(4) == 0 {
			r.PSN -= rng.Uint32N(8)
		}
		switch rng.IntN(5) {
		case 0:
			r.Kind, r.DMALen = uint8(wire.KindReadRequest), rng.Uint32N(8000)
		case 1:
			r.Kind = uint8(wire.KindFetchAdd)
		case 2, 3:
			r.Kind, r.N = uint8([]wire.Kind{wire.KindSend, wire.KindWrite}[rng.IntN(2)]), uint16(1+rng.IntN(5))
			r.Len = uint32(r.N) * uint32(v.q.mtu)
			r.DMALen = r.Len
		case 4:
			r.Kind = uint8(wire.KindAck)
			r.PSN = uint32(v.q.req.una) + rng.Uint32N(8) - 2
			if rng.IntN(4) == 0 {
				r.Syndrome = uint8(rng.IntN(256))
			}
		}
		r.Payload = r.Len
	}
	return r
}

// twist makes a train what only peers of this library send, now and then, or moves it.
func (v *victim) twist(t *train.Train, rng *rand.Rand) {
	q := v.q
	if rng.IntN(10) == 0 {
		t.Marked = 1 + rng.IntN(t.N)
	}
	switch rng.IntN(6) {
	case 0: // a report
		t.Kind, t.Transport, t.N, t.Start, t.End = wire.KindGaps, wire.Own, 1, true, true
		t.AETH.Syndrome = wire.AckNoCredits
		var g wire.Gaps
		number := func() int {
			switch rng.IntN(8) {
			case 0:
				return rng.IntN(1 << 16)
			case 1:
				return 0
			}
			return 1 + rng.IntN(6)
		}
		for range []int{1, 2, 3, 128}[rng.IntN(4)] {
			g = g.Append(number(), number())
		}
		t.PSN = []wire.PSN{q.req.una, q.req.nxt, q.req.max, q.req.executed}[rng.IntN(4)].Add(rng.IntN(8) - 4)
		t.Len, t.Payload = len(g), mem.List{Raw: [][]byte{g}}
	case 1: // an answer to something under way
		d := q.req.max.Sub(q.req.una)
		if d <= 0 {
			return
		}
		psn := q.req.una.Add(rng.IntN(d))
		_, w := q.requestOf(psn)
		if w == nil || !w.facts().rd {
			return
		}
		done := psn.Sub(w.first)
		t.PSN, t.N, t.Kind, t.MTU = psn, min(1+rng.IntN(4), int(w.n)-done, q.req.max.Sub(psn)), wire.KindReadResponse, q.mtu
		t.AETH.Syndrome = wire.AckNoCredits
		t.Start, t.End = rng.IntN(2) == 0, rng.IntN(2) == 0 || done+t.N == int(w.n)
		if t.Len = q.answerLen(w, done, t.N); w.facts().atomic {
			t.Kind, t.Len = wire.KindAtomicAck, 0
		}
		t.Payload = mem.List{Raw: [][]byte{garbage[:t.Len]}}
	case 2:
		t.Kind, t.Transport, t.N, t.Len = wire.KindCNP, wire.CNP, 1, 16
		t.Payload = mem.List{Raw: [][]byte{garbage[:16]}}
	case 3, 4: // a request that comes early
		if !t.IsAnswer() {
			t.PSN = q.resp.epsn.Add([]int{1, 2, 3, 5, 8, 60_000, 65_535}[rng.IntN(7)] + rng.IntN(3))
		}
	}
}

// TestShares: queue pairs that wait for credits get what is free, also where many others have little
// under way; and where all want more than there is, each gets its share.
func TestShares(t *testing.T) {
	c := NewControlled(4<<24, 4*1000*1024, 1024)
	c.pool.limit.Store(4 << 24)
	c = c.Costing((1<<24 + 999) / 1000)
	for range 98 {
		c.acquire(1, 0)
	}
	c.Waiting(1)
	if a, b := c.acquire(10_000, 0), c.acquire(10_000, 0); a < 1900 || b < 900 {
		t.Errorf("%d and %d packets of 4000, with 98 under way beside", a, b)
	}
	c = NewControlled(4<<24, 4*1000*1024, 1024)
	c.pool.limit.Store(4 << 24)
	c = c.Costing((1<<24 + 999) / 1000)
	c.Waiting(3)
	for i := range 4 {
		held := 0
		for range 100 {
			held += c.acquire(10_000, held)
		}
		if held < 700 || held > 1001 {
			t.Errorf("queue pair %d of 4 holds %d packets of 4000", i, held)
		}
	}
}
