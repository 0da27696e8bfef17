package link

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// kindsOfTrains is every combination of transport, kind and extra there is.
func kindsOfTrains() (out []train.Train) {
	for _, tr := range []wire.Transport{wire.RC, wire.UC, wire.UD} {
		for k := wire.Kind(1); k < wire.NumKinds; k++ {
			for _, x := range []wire.Extra{wire.NoExtra, wire.WithImm, wire.WithInv} {
				if _, ok := wire.Op(tr, k, wire.Only, x); ok {
					out = append(out, train.Train{Transport: tr, Kind: k, Extra: x})
				}
			}
		}
	}
	return out
}

// outgoing is a train to send, and the bytes of its payload.
type outgoing struct {
	*train.Train
	payload []byte
}

// maker makes random trains.
type maker struct {
	rng   *rand.Rand
	flows []*train.Flow
	buf   []byte
	table *mem.Table
	key   uint32
}

func newMaker(t testing.TB, rng *rand.Rand, run int, flows ...*train.Flow) *maker {
	m := &maker{rng: rng, flows: flows, buf: make([]byte, 1<<20)}
	for i := 0; i < len(m.buf); i += 8 {
		binary.LittleEndian.PutUint64(m.buf[i:], rng.Uint64())
	}
	m.table, m.key = region(t, m.buf, run)
	return m
}

// train makes a train of the kind, with a payload of n bytes (if it may have one)
// that is a whole message, or some middle part of one if n is a multiple of mtu.
func (m *maker) train(kind train.Train, n, mtu int, start, end bool) outgoing {
	r := m.rng
	t := new(train.Train)
	t.Flow = m.flows[r.IntN(len(m.flows))]
	t.Transport, t.Kind, t.Extra = kind.Transport, kind.Kind, kind.Extra
	t.Start, t.End = start, end
	t.DestQP, t.PSN = r.Uint32N(1<<24), wire.MakePSN(r.Uint32())
	if r.IntN(4) == 0 {
		t.PSN = wire.MakePSN(0).Add(-r.IntN(10)) // about to wrap
	}
	t.AckReq, t.Solicited = r.IntN(2) == 0, r.IntN(2) == 0
	t.RETH = wire.RETH{VA: r.Uint64(), RKey: r.Uint32(), Len: r.Uint32()}
	t.Atomic = wire.AtomicETH{VA: r.Uint64(), RKey: r.Uint32(), SwapAdd: r.Uint64(), Compare: r.Uint64()}
	t.AETH = wire.AETH{Syndrome: wire.Syndrome(r.Uint32()), MSN: r.Uint32N(1 << 24)}
	t.Orig, t.Imm = r.Uint64(), r.Uint32()
	t.DETH = wire.DETH{QKey: r.Uint32(), SrcQP: r.Uint32N(1 << 24)}
	t.Bounce = r.IntN(3) == 0 && t.Kind != wire.KindFlush // which goes twice then: TestFlushAgain

	op, _ := wire.Op(t.Transport, t.Kind, wire.Only, t.Extra)
	if !op.Info().Payload {
		n = 0
	}
	t.MTU, t.N = mtu, packets(n, mtu)
	var payload []byte
	switch {
	case n == 0:
		t.SetNone()
	case n <= train.MaxInline && r.IntN(3) == 0:
		at := r.IntN(len(m.buf) - n)
		payload = m.buf[at : at+n]
		t.SetInline(payload)
	case r.IntN(3) == 0:
		at := r.IntN(len(m.buf) - n)
		payload = m.buf[at : at+n]
		t.SetRange(m.table, actor, 0, m.key, iova+uint64(at), n)
	default:
		payload = m.sges(t, n)
	}
	return outgoing{t, payload}
}

// sges makes the payload n bytes out of the middle of a random list.
func (m *maker) sges(t *train.Train, n int) (payload []byte) {
	r := m.rng
	skip, behind := r.IntN(5000), r.IntN(5000)
	total := skip + n + behind
	var list []ib.SGE
	var all []byte
	for left := total; left > 0; {
		k := left
		if len(list) < train.MaxSGE-1 {
			k = 1 + r.IntN(left)
			if r.IntN(3) == 0 {
				k = min(k, 1+r.IntN(8))
			}
		}
		at := r.IntN(len(m.buf) - k)
		list = append(list, ib.SGE{Addr: iova + uint64(at), Length: uint32(k), LKey: m.key})
		all = append(all, m.buf[at:at+k]...)
		left -= k
	}
	t.SetSGEs(m.table, actor, 0, list, uint64(skip), n)
	return all[skip : skip+n]
}

// any makes a train of any kind and length. UD messages are one packet.
func (m *maker) any(kinds []train.Train) outgoing {
	r := m.rng
	k := kinds[r.IntN(len(kinds))]
	mtu := 256 << r.IntN(5)
	_, long := wire.Op(k.Transport, k.Kind, wire.First, wire.NoExtra)
	switch {
	case !long:
		return m.train(k, r.IntN(mtu+1), mtu, true, true)
	case r.IntN(4) == 0: // not a whole message
		n := mtu * (1 + r.IntN(min(40, train.MaxBytes/mtu)))
		start := r.IntN(2) == 0
		k.Extra = wire.NoExtra
		return m.train(k, n, mtu, start, false)
	case r.IntN(4) == 0:
		return m.train(k, 1+r.IntN(50_000), mtu, false, true)
	case r.IntN(20) == 0:
		return m.train(k, train.MaxBytes-r.IntN(5), mtu, true, true)
	case r.IntN(2) == 0:
		return m.train(k, r.IntN(5*mtu), mtu, true, true)
	}
	return m.train(k, r.IntN(200), mtu, true, true)
}

// exchange sends trains and checks that they arrive as they are.
func exchange(t *testing.T, from, to Link, out []outgoing) {
	t.Helper()
	var rec recorder
	var want []received
	for len(out) > 0 {
		// Not more at once than a socket's buffer holds.
		k, n := 0, 0
		for k < len(out) && (k == 0 || n+out[k].N <= 100) {
			n += out[k].N
			k++
		}
		ts := make([]*train.Train, k)
		for i, o := range out[:k] {
			ts[i] = o.Train
			want = append(want, expect(o.Train, o.payload))
		}
		sent, err := from.Send(ts)
		if sent != k || err != nil {
			t.Fatalf("sent %d of %d trains: %v", sent, k, err)
		}
		pollUntil(t, to, &rec, n)
		out = out[k:]
	}
	if d := rec.dropped(); d != 0 {
		t.Errorf("%d packets dropped: %v", d, rec.drops)
	}
	if err := diff(merge(t, rec.got), want); err != nil {
		t.Error(err)
	}
}

// links are the links that all must do the same.
func links(t *testing.T) map[string]func(t *testing.T) (from, to Link) {
	udp := func(cfg UDPConfig) func(t *testing.T) (Link, Link) {
		return func(t *testing.T) (Link, Link) { return openUDP(t, cfg), openUDP(t, cfg) }
	}
	return map[string]func(t *testing.T) (from, to Link){
		"udp":           udp(UDPConfig{}),
		"udp-one":       udp(UDPConfig{RecvBuffers: 1}),
		"udp-nogso":     udp(UDPConfig{NoGSO: true}),
		"udp-nogro":     udp(UDPConfig{NoGRO: true}),
		"udp-nooffload": udp(UDPConfig{NoGSO: true, NoGRO: true}),
		"udp-tap":       udp(UDPConfig{Tap: discardTap{}}),
		"udp6": func(t *testing.T) (Link, Link) {
			u := openUDP(t, UDPConfig{Addrs: []netip.Addr{netip.IPv6Loopback()}})
			return u, u
		},
		"faulty": func(t *testing.T) (Link, Link) {
			a, b := newPair(FaultyConfig{})
			t.Cleanup(func() { a.Close(); b.Close() })
			return a, b
		},
	}
}

// Every kind of train, of characteristic lengths, over every link.
func TestEveryKind(t *testing.T) {
	for name, open := range links(t) {
		t.Run(name, func(t *testing.T) {
			rng, _ := newRand(t)
			from, to := open(t)
			f := flow(t, from, to.Addrs()[0], train.Flow{})
			m := newMaker(t, rng, 1<<20, f)
			for _, k := range kindsOfTrains() {
				t.Run(fmt.Sprintf("%v-%d-%d", k.Transport, k.Kind, k.Extra), func(t *testing.T) {
					var out []outgoing
					for _, n := range []int{0, 1, 2, 3, 4, 255, 1024, 1025, 4096} {
						out = append(out, m.train(k, n, 4096, true, true))
					}
					if _, long := wire.Op(k.Transport, k.Kind, wire.First, wire.NoExtra); long {
						for _, n := range []int{1025, 4097, 8192, 65536, 65537, 100_000, train.MaxBytes - 1, train.MaxBytes} {
							out = append(out, m.train(k, n, 1024, true, true), m.train(k, n, 4096, true, true))
						}
						out = append(out, m.train(k, 5000, 4096, false, true))
						k.Extra = wire.NoExtra
						out = append(out, m.train(k, 8192, 4096, true, false), m.train(k, 16384, 4096, false, false))
					}
					exchange(t, from, to, out)
				})
			}
		})
	}
}

// Random trains, on flows that differ in all they may differ in.
func TestRandomTrains(t *testing.T) {
	for name, open := range links(t) {
		for _, run := range []int{1 << 20, 4096, 100} {
			t.Run(fmt.Sprintf("%s/runs of %d", name, run), func(t *testing.T) {
				rng, _ := newRand(t)
				from, to := open(t)
				dst := to.Addrs()[0]
				m := newMaker(t, rng, run,
					flow(t, from, dst, train.Flow{}),
					flow(t, from, dst, train.Flow{TClass: 0x6a, HopLimit: 3}),
				)
				kinds := kindsOfTrains()
				var out []outgoing
				for range 150 {
					out = append(out, m.any(kinds))
				}
				exchange(t, from, to, out)
			})
		}
	}
}

// Flows with different ports arrive in any order among each other, but each in
// its own.
func TestSeveralPorts(t *testing.T) {
	from, to := openUDP(t, UDPConfig{}), openUDP(t, UDPConfig{})
	rng, _ := newRand(t)
	ports := map[uint16]bool{}
	var flows []*train.Flow
	for i := range uint32(64) {
		f := flow(t, from, to.Addrs()[0], train.Flow{Label: i})
		if f.SrcPort < firstSrcPort {
			t.Errorf("source port %#x", f.SrcPort)
		}
		ports[f.SrcPort] = true
		flows = append(flows, f)
	}
	if len(ports) != txSockets {
		t.Errorf("64 flows use %d ports, want %d", len(ports), txSockets)
	}
	m := newMaker(t, rng, 1<<20, flows...)
	var ts []*train.Train
	const n = 500
	for i := range n {
		o := m.train(train.Train{Transport: wire.RC, Kind: wire.KindSend}, 20, 1024, true, true)
		o.Imm, o.Extra = uint32(i), wire.WithImm
		ts = append(ts, o.Train)
	}
	if k, err := from.Send(ts); k != n || err != nil {
		t.Fatal(k, err)
	}
	var rec recorder
	pollUntil(t, to, &rec, n)
	if rec.dropped() != 0 {
		t.Errorf("dropped: %v", rec.drops)
	}
	seen := map[uint32]bool{}
	for i := range rec.got {
		seen[rec.got[i].Imm] = true
	}
	if len(seen) != n {
		t.Errorf("%d of %d came", len(seen), n)
	}
}
