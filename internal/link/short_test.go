package link

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// A short record carries a train as a long one does.
func TestShortRecord(t *testing.T) {
	const seed = 9
	rng := rand.New(rand.NewPCG(seed, 0))
	var peer tag
	p := pair{netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("fd00::7")}
	peer.in[5] = p
	for i := range 2000 {
		kind := []wire.Kind{wire.KindWrite, wire.KindSend, wire.KindAck}[i%3]
		in := train.Train{Transport: wire.RC, Kind: kind, Start: true, End: true, N: 1, DestQP: rng.Uint32N(1 << 24), PSN: wire.MakePSN(rng.Uint32()),
			AckReq: rng.IntN(2) == 0, Solicited: rng.IntN(2) == 0,
			Flow: &train.Flow{TClass: uint8(rng.Uint32()), HopLimit: uint8(rng.Uint32())}}
		payload := make([]byte, rng.IntN(100))
		switch kind {
		case wire.KindAck:
			payload = nil
			in.AETH = wire.AETH{Syndrome: wire.Syndrome(rng.Uint32()), MSN: rng.Uint32N(1 << 24)}
		case wire.KindWrite:
			in.RETH = wire.RETH{VA: rng.Uint64(), RKey: rng.Uint32(), Len: uint32(len(payload))}
			fallthrough
		default:
			in.Extra, in.Imm = wire.Extra(rng.IntN(3)), rng.Uint32()
		}
		for k := range payload {
			payload[k] = byte(rng.Uint32())
		}
		in.Len, in.MTU = len(payload), len(payload)
		in.Payload = mem.List{Raw: [][]byte{payload}}
		if !isShort(&in) {
			t.Fatalf("%+v is not short", in)
		}
		b := make([]byte, shortLen(&in))
		if f := packPayload(packShort(b, &in, 5), &in); !f.OK() {
			t.Fatal(f)
		}
		long := make([]byte, trainBytes)
		packTrain(long, &in, p.src, p.dst)
		var want, got train.Train
		if !unpackTrain(long, &want, train.MaxBytes) {
			t.Fatal("the long one is refused")
		}
		rest, ok := peer.unpackShort(b, &got)
		if !ok || !bytes.Equal(rest, payload) {
			t.Fatalf("%+v: %v, %d bytes of %d", in, ok, len(rest), len(payload))
		}
		if g, w := describe(&received{Train: got}), describe(&received{Train: want}); g != w {
			t.Fatalf("got  %s\nwant %s", g, w)
		}
		for n := range shortBytes {
			if _, ok := peer.unpackShort(b[:n], &got); ok {
				t.Fatalf("%d bytes are taken", n)
			}
		}
		b[2] = 6
		if _, ok := peer.unpackShort(b, &got); ok {
			t.Fatal("addresses that nobody told are taken")
		}
	}
	for _, long := range []train.Train{
		{Transport: wire.UD, Kind: wire.KindSend, N: 1, Start: true, End: true},
		{Transport: wire.RC, Kind: wire.KindSend, N: 2, Start: true, End: true},
		{Transport: wire.RC, Kind: wire.KindSend, N: 1, Start: true},
		{Transport: wire.RC, Kind: wire.KindWrite, N: 1, Start: true, End: true, Len: 3, RETH: wire.RETH{Len: 4}},
		{Transport: wire.RC, Kind: wire.KindReadRequest, N: 1, Start: true, End: true},
	} {
		if isShort(&long) {
			t.Errorf("%+v is short", long)
		}
	}
}

// A record of random bytes is refused, or is a train that could have been sent.
func TestShortNonsense(t *testing.T) {
	const seed = 10
	rng := rand.New(rand.NewPCG(seed, 0))
	var peer tag
	for range 20000 {
		b := make([]byte, rng.IntN(80))
		for k := range b {
			b[k] = byte(rng.Uint32())
		}
		if len(b) > 2 && rng.IntN(2) == 0 {
			b[0], b[2] = byte(rng.IntN(20)), byte(rng.IntN(20))
		}
		peer.takePair(b)
		var got train.Train
		if payload, ok := peer.unpackShort(b, &got); ok && (!sensible(&got, train.MaxBytes) || got.Len != len(payload)) {
			t.Fatalf("%+v", got)
		}
	}
}

// An answer and a request that are sent together arrive in one poll. A train whose payload
// cannot be read is reported, and does not keep those before it from leaving.
func TestShortTogether(t *testing.T) {
	a, b := sharedPair(t)
	flow := reached(t, a, b)
	message := func(psn wire.PSN, payload mem.List) *train.Train {
		return &train.Train{Flow: flow, Transport: wire.RC, Kind: wire.KindSend, Start: true, End: true, N: 1, MTU: 4096, DestQP: 9, PSN: psn, Len: 5, Payload: payload}
	}
	good := mem.List{Raw: [][]byte{[]byte("hello")}}
	bad := mem.List{Table: mem.NewTable(mem.TableConfig{}), SGEs: []ib.SGE{{Addr: 1, Length: 5, LKey: 1}}}
	answer := &train.Train{Flow: flow, Transport: wire.RC, Kind: wire.KindAck, Start: true, End: true, N: 1, DestQP: 9, PSN: 1}

	var k taker
	poll := func() { // until a poll has delivered something
		for deadline := time.Now().Add(5 * time.Second); len(k.psns) == 0 && time.Now().Before(deadline); {
			b.Poll(&k, 100)
		}
	}
	if n, err := a.Send([]*train.Train{answer, message(2, good), message(3, good)}); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	if poll(); len(k.psns) != 3 || k.bad != 0 {
		t.Errorf("%v, %d bad", k.psns, k.bad)
	}

	k = taker{}
	const trips = 5000
	go func() {
		for i := range trips {
			for {
				if n, _ := a.Send([]*train.Train{answer, message(wire.PSN(i), good)}); n == 2 {
					break // else the ring was full
				}
			}
		}
	}()
	for seen := 0; seen < 2*trips; seen = len(k.psns) {
		if poll(); len(k.psns)%2 != 0 {
			t.Fatalf("after %d an answer was seen alone", len(k.psns))
		}
		b.Poll(&k, 100)
	}

	k = taker{}
	n, err := a.Send([]*train.Train{answer, message(4, good), message(5, bad), message(6, good)})
	var pe *PayloadError
	if n != 2 || !errors.As(err, &pe) {
		t.Errorf("%d are sent: %v", n, err)
	}
	poll()
	b.Poll(&k, 100)
	if len(k.psns) != 2 || k.psns[1] != 4 || string(k.got) != "hello" || k.bad != 0 {
		t.Errorf("%v, %q, %d bad", k.psns, k.got, k.bad)
	}
}
