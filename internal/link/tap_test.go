package link

import (
	"bytes"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

type discardTap struct{}

func (discardTap) Packet(time.Time, netip.AddrPort, netip.AddrPort, uint8, uint8, uint16, []byte) {}

// tapped is a packet that a tap was shown.
type tapped struct {
	src, dst         netip.AddrPort
	tclass, hopLimit uint8
	id               uint16
	b                string
}

func (p tapped) String() string {
	return fmt.Sprintf("%v→%v class %#x hops %d id %d %x", p.src, p.dst, p.tclass, p.hopLimit, p.id, p.b)
}

type recordTap struct {
	mu  sync.Mutex // guards got
	got []tapped
}

func (r *recordTap) Packet(ts time.Time, src, dst netip.AddrPort, tclass, hopLimit uint8, id uint16, b []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.got = append(r.got, tapped{src, dst, tclass, hopLimit, id, string(b)})
}

// Both ends' taps see the same packets, with the checksum that belongs to their
// identification.
func TestTap(t *testing.T) {
	var tx, rx recordTap
	from, to := openUDP(t, UDPConfig{Tap: &tx}), openUDP(t, UDPConfig{Tap: &rx})
	rng, _ := newRand(t)
	f := flow(t, from, to.Addrs()[0], train.Flow{TClass: 0x20, HopLimit: 9})
	m := newMaker(t, rng, 1<<20, f)
	var out []outgoing
	for range 30 {
		out = append(out, m.any(kindsOfTrains()))
	}
	exchange(t, from, to, out)
	if len(tx.got) != len(rx.got) {
		t.Fatalf("sent %d, received %d", len(tx.got), len(rx.got))
	}
	for i, p := range tx.got {
		if p != rx.got[i] {
			t.Errorf("packet %d: sent %v, received %v", i, p, rx.got[i])
		}
		if p.src != netip.AddrPortFrom(f.Src, f.SrcPort) || p.dst != netip.AddrPortFrom(f.Dst, 4791) ||
			p.tclass != 0x20 || p.hopLimit != 9 {
			t.Errorf("packet %d: %v", i, p)
		}
		ps := wire.NewPseudo(p.src.Addr(), p.dst.Addr(), p.src.Port(), p.dst.Port())
		if id, ok := ps.Check([]byte(p.b), p.id); !ok || id != p.id {
			t.Errorf("packet %d: identification %d, checksum for %d (%v)", i, p.id, id, ok)
		}
	}
}

// What Capture shows is what is sent, but for the identification.
func TestCapture(t *testing.T) {
	var tx, shown recordTap
	from, to := openUDP(t, UDPConfig{Tap: &tx, NoGSO: true}), openUDP(t, UDPConfig{})
	rng, _ := newRand(t)
	f := flow(t, from, to.Addrs()[0], train.Flow{})
	m := newMaker(t, rng, 1<<20, f)
	for range 30 {
		o := m.any(kindsOfTrains())
		if _, err := from.Send([]*train.Train{o.Train}); err != nil {
			t.Fatal(err)
		}
		if err := Capture(o.Train, &shown, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	if len(tx.got) != len(shown.got) {
		t.Fatalf("sent %d, shown %d", len(tx.got), len(shown.got))
	}
	for i := range tx.got {
		if tx.got[i] != shown.got[i] {
			t.Errorf("packet %d: sent %v, shown %v", i, tx.got[i], shown.got[i])
		}
	}

	// A flow that no link has prepared.
	o := m.train(train.Train{Transport: wire.RC, Kind: wire.KindSend}, 10, 1024, true, true)
	o.Flow = &train.Flow{Src: netip.MustParseAddr("10.0.0.1"), Dst: netip.MustParseAddr("10.0.0.2")}
	shown.got = nil
	if err := Capture(o.Train, &shown, time.Now()); err != nil {
		t.Fatal(err)
	}
	if len(shown.got) != 1 || shown.got[0].src.String() != "10.0.0.1:49152" || shown.got[0].hopLimit != 64 ||
		!bytes.Contains([]byte(shown.got[0].b), o.payload) {
		t.Errorf("shown: %v", shown.got)
	}
	o.Flow = nil
	if err := Capture(o.Train, &shown, time.Now()); err != ErrTrain {
		t.Errorf("without a flow: %v", err)
	}
}
