package qp

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// TestArbitraryTrains does what FuzzReceive does, with trains that come closer:
// PSNs near the expected ones, lengths near multiples of the MTU, addresses near
// the edges of regions. Each seed is a conversation of its own.
func TestArbitraryTrains(t *testing.T) {
	seeds := uint64(400)
	if longMatrix() {
		seeds = 40000
	}
	reached := map[ib.QPState]int{}
	var where func() string
	done := false
	defer func() {
		if !done {
			t.Log(where())
		}
	}()
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 2))
		v := newVictim(t, byte(rng.IntN(int(fuzzTypes)*8)))
		for i := range 100 {
			r := v.near(rng)
			where = func() string { return fmt.Sprintf("seed %d, step %d: %+v", seed, i, r) }
			v.step(t, r)
		}
		reached[v.q.State()]++
	}
	done = true
	for _, st := range []ib.QPState{ib.QPRTS, ib.QPErr, ib.QPSQE, ib.QPRTR, ib.QPSQD} {
		if reached[st] == 0 {
			t.Errorf("no conversation ended in %v: %v", st, reached)
		}
	}
}

// near draws something that is almost right, and often is.
func (v *victim) near(rng *rand.Rand) *record {
	r := &record{Op: uint8(rng.IntN(numOps + 4)), ID: rng.Uint64()}
	if r.Op >= numOps {
		r.Op = opTrain
	}
	oneOf := func(xs ...uint64) uint64 { return xs[rng.IntN(len(xs))] }
	memory := v.regions["mem"]
	r.Kind = uint8(rng.IntN(int(wire.NumKinds) + 1))
	r.Extra = uint8(oneOf(0, 0, 0, 1, 2, 3))
	r.Flags = uint8(oneOf(flagStart|flagEnd, flagStart|flagEnd|flagAckReq, flagStart, flagEnd|flagAckReq, 0, rng.Uint64()&0xf))
	r.Syndrome = uint8(oneOf(0x1f, 0x1f, 0x60, 0x61, 0x62, 0x63, 0x2c, rng.Uint64()))
	base := uint64(v.q.resp.epsn)
	if k := wire.Kind(r.Kind); k == wire.KindAck || k == wire.KindReadResponse || k == wire.KindAtomicAck {
		base = oneOf(uint64(v.q.req.una), uint64(v.q.req.nxt), uint64(v.q.req.max))
	}
	r.PSN = uint32(base) + uint32(oneOf(0, 0, 0, 0, 1, 2, 3, ^uint64(0), ^uint64(1), ^uint64(5), rng.Uint64()))
	r.N = uint16(oneOf(1, 1, 1, 2, 3, 5, rng.Uint64()))
	mtu := uint64(v.q.mtu)
	r.Len = uint32(oneOf(0, 1, mtu, mtu-1, mtu+1, 2*mtu, 2*mtu+7, uint64(r.N)*mtu, uint64(r.N)*mtu-1, rng.Uint64()%(1<<18)))
	if rng.IntN(2) == 0 {
		switch wire.Kind(r.Kind) {
		case wire.KindAtomicWrite:
			r.N, r.Len = 1, 8
		case wire.KindFlush:
			r.N, r.Len = 1, 0
			r.Syndrome = uint8(oneOf(1, 2, 3, 0x11, 0x12, 0x13, 0x22, 4, 0))
		}
	}
	r.MTU = uint32(oneOf(mtu, mtu, mtu, uint64(r.Len), rng.Uint64()))
	r.Payload = uint32(oneOf(uint64(r.Len), uint64(r.Len), uint64(r.Len), rng.Uint64()))
	r.DMALen = uint32(oneOf(uint64(r.Len), uint64(r.Len), uint64(r.Len)+mtu, 0, 3*mtu, 1<<30, 1<<30+1, 1<<31, rng.Uint64()))
	r.VA = memory.IOVA() + oneOf(0, 0, 8, 100, uint64(len(memory.buf))-uint64(r.Len), uint64(len(memory.buf)), ^uint64(0), rng.Uint64())
	r.RKey = uint32(oneOf(uint64(memory.Key()), uint64(memory.Key()), uint64(v.private.Key()), uint64(v.regions["other"].Key()), rng.Uint64()))
	r.Imm = uint32(oneOf(uint64(v.private.Key()), uint64(memory.Key()), rng.Uint64()))
	r.SrcQP = uint32(oneOf(testSRQ, testSRQ, testSRQ, 0x52, rng.Uint64()))
	r.QKey, r.SwapAdd, r.Compare = uint32(oneOf(0x1234, 0x1234, rng.Uint64())), rng.Uint64(), 0
	if r.Op == opSend {
		r.Opcode, r.Flags = uint8(rng.IntN(ib.NumOpcodes+1)), flagSignaled
		r.Syndrome, r.Extra = uint8(rng.IntN(8)), uint8(rng.IntN(4))
		r.Len = uint32(oneOf(0, 8, 8, mtu, 3*mtu, rng.Uint64()%(victimSize-1)))
		if rng.IntN(30) == 0 {
			r.Len = uint32(len(memory.buf)) - 1 // more than some QPs take
		}
	}
	if r.Op == opRecv {
		r.Len = uint32(oneOf(0, 40+mtu, 4*mtu, rng.Uint64()%(victimSize-1)))
	}
	if r.Op == opTick {
		r.PSN = uint32(oneOf(1000, 1e6, 9e6, 7e7))
	}
	return r
}
