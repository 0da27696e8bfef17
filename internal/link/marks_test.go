package link

import (
	"net/netip"
	"testing"

	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// TestMarks: packets that bear the mark of a congested router are counted, packet by packet, and
// hints are of whole trains. A flow that routers may mark has a socket of that class.
func TestMarks(t *testing.T) {
	for _, addr := range []string{"", "::1"} {
		var cfg UDPConfig
		if addr != "" {
			cfg.Addrs = []netip.Addr{netip.MustParseAddr(addr)}
		}
		to := openUDP(t, cfg)
		from := to
		table, key := region(t, make([]byte, 1<<16), 4096)
		var rec recorder
		for i, c := range []struct {
			class uint8
			hints uint8
			want  int // marks
		}{{0, 0, 0}, {wire.ECT0, wire.HintOurs, 0}, {wire.ECNMark, wire.HintOurs, 20}, {0x68 | wire.ECNMark, 0, 20}, {0x68 | wire.ECT0, wire.HintOurs | wire.HintAlone, 0}} {
			tr := simple(flow(t, from, to.Addrs()[0], train.Flow{TClass: c.class}), table, key, 20_000)
			tr.Hints = c.hints
			mustSend(t, from, []*train.Train{tr})
			rec.got = nil
			pollUntil(t, to, &rec, tr.N)
			got := merge(t, rec.got)
			marks := 0
			for _, r := range rec.got {
				marks += r.Marked
			}
			if len(got) != 1 || got[0].TClass != c.class || got[0].Hints != c.hints || marks != c.want || tr.N != 20 {
				t.Errorf("%v, case %d: %d trains of class %#x with hints %#x, %d of %d packets marked; want class %#x, hints %#x, %d marked",
					to.Addrs()[0], i, len(got), got[0].TClass, got[0].Hints, marks, tr.N, c.class, c.hints, c.want)
			}
		}
		plain, capable := flow(t, from, to.Addrs()[0], train.Flow{}), flow(t, from, to.Addrs()[0], train.Flow{TClass: wire.ECT0})
		if a, b := plain.Link.(*udpFlow), capable.Link.(*udpFlow); a.sock == b.sock || !a.plain || !b.plain {
			t.Error("a flow of the usual class has no socket of its own")
		}
	}
}

// TestNotification: a congestion notification arrives, with the bit that says so and its 16 bytes.
func TestNotification(t *testing.T) {
	var tap recordTap
	to := openUDP(t, UDPConfig{Tap: &tap})
	tr := &train.Train{Flow: flow(t, to, to.Addrs()[0], train.Flow{}), Transport: wire.CNP, Kind: wire.KindCNP, Start: true, End: true, N: 1, DestQP: 0x123}
	tr.SetInline(make([]byte, 16))
	mustSend(t, to, []*train.Train{tr})
	var rec recorder
	pollUntil(t, to, &rec, 1)
	if len(rec.got) != 1 || rec.got[0].Kind != wire.KindCNP || rec.got[0].DestQP != 0x123 || rec.got[0].Len != 16 {
		t.Fatalf("%+v, dropped %v", rec.got, rec.drops)
	}
	var h wire.Header
	for _, p := range tap.got {
		if _, err := h.Parse([]byte(p.b)); err != nil || !h.BECN || h.Opcode != wire.OpCNP {
			t.Errorf("%+v: %v", h, err)
		}
	}
}
