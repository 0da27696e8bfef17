package link

import (
	"net/netip"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// payloadTap keeps the packets that it is shown.
type payloadTap struct{ sent [][]byte }

func (p *payloadTap) Packet(_ time.Time, _, _ netip.AddrPort, _, _ uint8, _ uint16, b []byte) {
	p.sent = append(p.sent, append([]byte(nil), b...))
}

// A FLUSH that is sent again goes twice: as the specification has it, and with the
// ICRC that Linux's device wants. Our receiver accepts both.
func TestFlushAgain(t *testing.T) {
	for _, noGSO := range []bool{false, true} {
		tap := new(payloadTap)
		from, to := openUDP(t, UDPConfig{Tap: tap, NoGSO: noGSO}), openUDP(t, UDPConfig{})
		f := flow(t, from, to.Addrs()[0], train.Flow{})
		flush := train.Train{Flow: f, Transport: wire.RC, Kind: wire.KindFlush, Start: true, End: true, DestQP: 7, PSN: 9, N: 1, MTU: 1024, AckReq: true,
			RETH: wire.RETH{VA: 0x1234567890, RKey: 5, Len: 77, Flush: wire.FETH{Placement: wire.PlaceGlobal}}}
		again, other := flush, flush
		again.Bounce = true
		other.PSN = 10
		mustSend(t, from, []*train.Train{&flush, &again, &other})
		var rec recorder
		pollUntil(t, to, &rec, 4)
		if len(rec.got) != 4 || rec.dropped() != 0 || len(tap.sent) != 4 {
			t.Fatalf("no GSO %v: %d sent, %d came, %v dropped", noGSO, len(tap.sent), len(rec.got), rec.drops)
		}
		for i, psn := range []wire.PSN{9, 9, 9, 10} {
			if g := &rec.got[i]; g.Kind != wire.KindFlush || g.PSN != psn || g.RETH != flush.RETH {
				t.Errorf("no GSO %v: train %d is %+v", noGSO, i, g.Train)
			}
		}
		for i, same := range []bool{true, true, false, true} {
			p := wire.NewPseudo(f.Src, f.Dst, f.SrcPort, wire.RoCEPort)
			b := tap.sent[i]
			n := len(b) - wire.ICRCLen
			regular := false
			for id := range uint16(4) { // its place in a segmented send
				regular = regular || string(p.Start(id, len(b)).Header(b[:n]).Append(nil)) == string(b[n:])
			}
			if regular != same {
				t.Errorf("no GSO %v: the ICRC of packet %d is as the specification has it: %v", noGSO, i, regular)
			}
		}
	}
}
