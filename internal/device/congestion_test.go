package device

import (
	"net/netip"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// marking is a link on which packets may bear the mark of a congested router.
type marking struct {
	link.Link
	kind wire.Kind // of the trains that do
}

func (m marking) Poll(s link.Sink, budget int) int { return m.Link.Poll(markSink{s, m.kind}, budget) }

type markSink struct {
	link.Sink
	kind wire.Kind
}

func (m markSink) Deliver(t *train.Train) {
	if t.Kind == m.kind {
		t.Marked = t.N
	}
	m.Sink.Deliver(t)
}

// TestNotifications: the receiver of marked requests tells the sender, and its counters say so. Of
// marked answers nobody needs to be told: the requester decides how many there are.
func TestNotifications(t *testing.T) {
	for _, c := range []struct {
		op   ib.Opcode
		kind wire.Kind
		told bool
	}{{ib.OpRDMAWrite, wire.KindWrite, true}, {ib.OpRDMARead, wire.KindReadResponse, false}} {
		bubble(t, c.op.String(), func(t *testing.T) {
			f := link.NewFabric(link.FaultyConfig{MinDelay: near, MaxDelay: near})
			var devs [2]*Device
			for i := range devs {
				devs[i] = openOn("test", marking{f.Attach(netip.AddrFrom4([4]byte{10, 80, 0, byte(1 + i)})), c.kind}, nil)
				t.Cleanup(func() { closeAll(t, devs[i]) })
			}
			a, b := connected(t, devs[0], devs[1], ib.RC, 64<<10, func(e *end) { e.pause = virtualPause })
			for range 20 {
				a.post(ib.SendWR{Op: c.op, SGL: a.sge(0, 64<<10), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
				a.ok()
				time.Sleep(time.Millisecond)
			}
			receiver, sender := countsOf(devs[1]), countsOf(devs[0])
			if !c.told {
				receiver, sender = sender, receiver
			}
			if receiver["np_ecn_marked_roce_packets"] < 20*16 {
				t.Errorf("%d packets were marked", receiver["np_ecn_marked_roce_packets"])
			}
			// The first answer of the peer shows whose it is; before it, answers are told of, too.
			if n := receiver["np_cnp_sent"]; n != sender["rp_cnp_handled"] || c.told && n < 10 || !c.told && n > 1 {
				t.Errorf("%d notifications sent, %d handled", n, sender["rp_cnp_handled"])
			}
			if again := a.counted()[qp.CntRetransmits]; again != 0 {
				t.Errorf("%d packets sent again", again)
			}
		})
	}
}

// TestCapable: packets of reliable connections may be marked, unless the program has said something
// else; those of UC may not, since it does not slow down.
func TestCapable(t *testing.T) {
	_, devs := simulated(t, 2, link.FaultyConfig{}, nil)
	for _, c := range []struct {
		typ       ib.QPType
		set, want uint8
	}{{ib.RC, 0, wire.ECT0}, {ib.RC, 0x68, 0x68 | wire.ECT0}, {ib.RC, 0x69, 0x69}, {ib.UC, 0, 0}, {ib.UC, 0x68, 0x68}} {
		a, _ := connected(t, devs[0], devs[1], c.typ, 64, func(e *end) { e.tclass = c.set })
		q := a.qp.(*QP)
		q.mu.Lock()
		got := q.core.Flow().TClass
		q.mu.Unlock()
		if got != c.want {
			t.Errorf("%v with class %#x sends class %#x, not %#x", c.typ, c.set, got, c.want)
		}
	}
}
