package device

// Accidents of the network that random faults meet rarely, one by one: losses
// by script, and a peer that is played by hand, packet by packet.

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// nth makes a filter that discards packets by their place among those of the
// same opcode, counted from 0 and over both directions.
func nth(lost map[wire.Opcode][]int) func(link.Hop, []byte) link.Verdict {
	seen := map[wire.Opcode]int{}
	return func(_ link.Hop, pkt []byte) link.Verdict {
		op := wire.Opcode(pkt[0])
		i := seen[op]
		seen[op]++
		for _, k := range lost[op] {
			if i == k {
				return link.Discard
			}
		}
		return link.Deliver
	}
}

// bubble runs a subtest in virtual time.
func bubble(t *testing.T, name string, run func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, run) })
}

func opcode(t testing.TB, k wire.Kind, p wire.Pos) wire.Opcode {
	t.Helper()
	op, ok := wire.Op(wire.RC, k, p, wire.NoExtra)
	if !ok {
		t.Fatalf("no opcode for kind %d at %d", k, p)
	}
	return op
}

// A READ that is longer than the window goes out in pieces. When the second
// piece's request is lost, and a response of the first one too, the requester
// asks again from the missing response on.
func TestReadInPiecesGoesBack(t *testing.T) {
	for _, script := range []struct{ request, response int }{{1, 60}, {1, 100}, {1, 126}, {2, 190}} {
		bubble(t, fmt.Sprintf("request%d-response%d", script.request, script.response), func(t *testing.T) {
			_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near, Filter: nth(map[wire.Opcode][]int{
				opcode(t, wire.KindReadRequest, wire.Only):    {script.request},
				opcode(t, wire.KindReadResponse, wire.Middle): {script.response},
			})}, nil)
			a, b := connected(t, devs[0], devs[1], ib.RC, 512<<10, func(e *end) { e.pause = virtualPause })
			fill(b.buf, 9)
			a.post(a.read(b, 0, len(a.buf)))
			wc := a.wait()
			if wc.Status != ib.WCSuccess || !bytes.Equal(a.buf, b.buf) {
				t.Errorf("%v, bytes equal: %v", wc.Status, bytes.Equal(a.buf, b.buf))
			}
		})
	}
}

// The memory that a READ reads is deregistered when part of the answer is on its
// way. The requester gets the NAK for the rest.
func TestReadSourceVanishesMidway(t *testing.T) {
	for _, after := range []int{0, 1, 20, 100} {
		bubble(t, fmt.Sprint("after", after), func(t *testing.T) {
			var b *end
			var responses int
			middle := opcode(t, wire.KindReadResponse, wire.Middle)
			_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near, Filter: func(_ link.Hop, pkt []byte) link.Verdict {
				if wire.Opcode(pkt[0]) == middle {
					if responses == after {
						closeAll(t, b.mr)
					}
					responses++
				}
				return link.Deliver
			}}, nil)
			var a *end
			a, b = connected(t, devs[0], devs[1], ib.RC, 128<<10, func(e *end) { e.pause = virtualPause })
			a.post(a.read(b, 0, len(a.buf)))
			if wc := a.wait(); wc.Status != ib.WCRemAccessErr {
				t.Errorf("%v (vendor %#x), want %v", wc.Status, wc.VendorErr, ib.WCRemAccessErr)
			}
			wantEvent(t, b.dev, ib.AsyncEvent{Type: ib.EventQPAccessErr, QPN: b.qp.Number()})
		})
	}
}

// puppet is a peer that is played by hand: an end of a network without a device.
type puppet struct {
	t    testing.TB
	link *link.Faulty
	flow *train.Flow
	qpn  uint32 // the device's queue pair
	got  []answer
}

// answer is what a puppet keeps of a train.
type answer struct {
	kind     wire.Kind
	psn      wire.PSN
	n        int
	syndrome wire.Syndrome
	orig     uint64
	payload  []byte
}

// newPuppet connects an end of a device to a puppet, at 10.77.0.2.
func newPuppet(t testing.TB, typ ib.QPType, size int, tune func(e *end)) (*puppet, *end) {
	f, devs := simulated(t, 1, link.FaultyConfig{}, nil)
	p := &puppet{t: t, link: f.Attach(netip.AddrFrom4([4]byte{10, 77, 0, 2}))}
	p.flow = &train.Flow{Src: p.link.Addrs()[0], Dst: devs[0].addrs[0]}
	if err := p.link.Prepare(p.flow); err != nil {
		t.Fatal(err)
	}
	e := newEnd(t, devs[0], typ, size)
	t.Cleanup(e.close)
	e.pause = virtualPause
	if tune != nil {
		tune(e)
	}
	p.qpn = e.qp.Number()
	e.connectTo(p.link.Addrs()[0], 0x123456, 0, e.rd)
	return p, e
}

// send sends trains at one instant, so that the device reads them together.
func (p *puppet) send(ts ...train.Train) {
	p.t.Helper()
	ptrs := make([]*train.Train, len(ts))
	for i := range ts {
		t := &ts[i]
		t.Flow, t.DestQP, t.N = p.flow, p.qpn, max(t.N, 1)
		if t.MTU == 0 {
			t.MTU = 1024
		}
		ptrs[i] = t
	}
	if _, err := p.link.Send(ptrs); err != nil {
		p.t.Fatal(err)
	}
}

// Deliver keeps a train; it makes a puppet a sink.
func (p *puppet) Deliver(t *train.Train) {
	kept := answer{kind: t.Kind, psn: t.PSN, n: t.N, syndrome: t.AETH.Syndrome, orig: t.Orig, payload: make([]byte, t.Len)}
	mem.Copy(&mem.List{Raw: [][]byte{kept.payload}}, &t.Payload, uint64(t.Len), false)
	p.got = append(p.got, kept)
}

func (p *puppet) Drop(r link.Reason) { p.t.Errorf("the device sent a packet that is dropped: %v", r) }

// answers waits until nothing moves any more and returns what came.
func (p *puppet) answers() []answer {
	time.Sleep(time.Millisecond)
	p.got = nil
	for p.link.Poll(p, 64) > 0 {
	}
	return p.got
}

func only(k wire.Kind, psn int) train.Train {
	return train.Train{Transport: wire.RC, Kind: k, PSN: wire.PSN(0).Add(psn), N: 1, Start: true, End: true, AckReq: true}
}

// readAt is a READ of 16 bytes whose address follows from its PSN.
func (p *puppet) readAt(e *end, psn int) train.Train {
	r := only(wire.KindReadRequest, psn)
	r.RETH = wire.RETH{VA: e.mr.Addr() + uint64(psn), RKey: e.mr.RKey(), Len: 16}
	return r
}

// checkRead checks that an answer is the one to readAt.
func checkRead(t testing.TB, a answer, e *end) {
	t.Helper()
	if a.kind != wire.KindReadResponse || !bytes.Equal(a.payload, e.buf[a.psn:][:16]) {
		t.Errorf("not the answer to the READ: %+v", a)
	}
}

// A repetition of a READ that is answered already may be overtaken by the next
// READ. Both are answered: the repetition does not count against the number of
// READs that the requester may have outstanding.
func TestRepeatedReadBesidesTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, e := newPuppet(t, ib.RC, 4096, func(e *end) { e.rd = 1 })
		fill(e.buf, 1)
		p.send(p.readAt(e, 0))
		got := p.answers()
		if len(got) != 1 {
			t.Fatalf("answers to the first READ: %+v", got)
		}
		checkRead(t, got[0], e)
		p.send(p.readAt(e, 0), p.readAt(e, 1))
		got = p.answers()
		if s := e.state(); s != ib.QPRTS {
			t.Errorf("the queue pair is in %v", s)
		}
		if last := got[len(got)-1]; last.psn != 1 {
			t.Errorf("answers: %+v, the last should be the second READ's", got)
		}
		for _, a := range got {
			checkRead(t, a, e)
		}
	})
}

// More repetitions at once than a requester may have READs outstanding: whatever
// of them is answered is answered right, and the next READ too.
func TestRepeatedReadsBeyondTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, e := newPuppet(t, ib.RC, 4096, func(e *end) { e.rd = 16 })
		fill(e.buf, 1)
		const n = 40
		var again []train.Train
		for i := range n {
			p.send(p.readAt(e, i))
			got := p.answers()
			if len(got) != 1 {
				t.Fatalf("answers to READ %d: %+v", i, got)
			}
			checkRead(t, got[0], e)
			again = append(again, p.readAt(e, i))
		}
		before := countsOf(e.dev)
		p.send(again...)
		got := p.answers()
		for _, a := range got {
			checkRead(t, a, e)
		}
		if grown := countsOf(e.dev).since(before); grown["tx_packets"] != uint64(len(got)) {
			t.Errorf("%d packets sent, %d came", grown["tx_packets"], len(got))
		}
		p.send(p.readAt(e, n))
		if got = p.answers(); len(got) != 1 || got[0].psn != n {
			t.Fatalf("answers to the next READ: %+v", got)
		}
		checkRead(t, got[0], e)
		if s := e.state(); s != ib.QPRTS {
			t.Errorf("the queue pair is in %v", s)
		}
	})
}

// An atomic whose answer is lost is repeated: its result comes again, and it is
// not done again, also when later ones have been done since.
func TestRepeatedAtomics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, e := newPuppet(t, ib.RC, 4096, func(e *end) { e.rd = 16 })
		add := func(psn int) train.Train {
			r := only(wire.KindFetchAdd, psn)
			r.Atomic = wire.AtomicETH{VA: e.mr.Addr(), RKey: e.mr.RKey(), SwapAdd: 10}
			return r
		}
		var all []train.Train
		for i := range 16 {
			all = append(all, add(i))
		}
		p.send(all...)
		for round := range 3 {
			got := p.answers()
			if len(got) != len(all) {
				t.Fatalf("round %d: %d answers", round, len(got))
			}
			for i, a := range got {
				if a.kind != wire.KindAtomicAck || a.psn != wire.PSN(i) || a.orig != uint64(10*i) {
					t.Errorf("round %d: answer %d: %+v", round, i, a)
				}
			}
			p.send(all...)
		}
		if got := wordOf(e.buf); got != 160 {
			t.Errorf("the word is %d, want 160", got)
		}
	})
}
