package device

// Memory that the CPU does not address, when things go wrong: engines that stand still or
// fail, queue pairs that end, and memory that is taken away, while bytes are on their way.

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
)

// heldEngine is an engine that stands still, until the test ends at the latest.
func heldEngine() *enginetest.Engine {
	g := enginetest.New(enginetest.Config{})
	g.Hold()
	return g
}

// stagedPair makes a connection. The memory of the ends that are named, a and b, is on
// engine g.
func stagedPair(t testing.TB, way string, typ ib.QPType, g *enginetest.Engine, on string) (a, b *end) {
	t.Helper()
	const size = 1 << 20
	if way == "rings" {
		a, b = byRings(t, typ, size)
	} else {
		a, b = pair(t, map[string]string{"loop": linkLoop, "udp": linkUDP}[way], typ, size)
	}
	for _, e := range []*end{a, b} {
		if name := map[*end]rune{a: 'a', b: 'b'}[e]; strings.ContainsRune(on, name) {
			e.onEngine(g)
		} else {
			e.makeMoving(size, false) // outside the Go heap: the race detector sees no order between devices
		}
	}
	t.Cleanup(g.Release)
	return a, b
}

var stagedWays = []string{"loop", "rings", "udp"}

// onStagedWays runs a test on every link.
func onStagedWays(t *testing.T, test func(t *testing.T, way string)) {
	for _, way := range stagedWays {
		t.Run(way, func(t *testing.T) { test(t, way) })
	}
}

// silent wants no completion for a while.
func (e *end) silent(what string) {
	e.t.Helper()
	var wc [1]ib.WC
	for until := time.Now().Add(20 * time.Millisecond); time.Now().Before(until); time.Sleep(time.Millisecond) {
		if n := must[int](e.t)(e.cq.Poll(wc[:])); n != 0 {
			e.t.Fatalf("%s: request %d has completed, %v", what, wc[0].ID, wc[0].Status)
		}
	}
}

// waitBegun waits until an engine has been told of n operations.
func waitBegun(t testing.TB, g *enginetest.Engine, n int64) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d operations", n), func() bool { return g.Begun() >= n })
}

// Nobody hears of a message before its bytes are there: neither the sender nor the receiver,
// nor does a READ or an atomic behind it overtake it.
func TestStagedAcknowledgedBehindBytes(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMAWriteImm, ib.OpSend, ib.OpAtomicFetchAdd, ib.OpAtomicWrite} {
			t.Run(fmt.Sprint(op), func(t *testing.T) {
				g := heldEngine()
				a, b := stagedPair(t, way, ib.RC, g, "b")
				b.recv(ib.RecvWR{ID: 9, SGL: b.sge(4096, 4096)})
				fill(a.buf, 7)
				wr := a.write(b, 0, 4096)
				wr.ID, wr.Op = 1, op
				switch op {
				case ib.OpSend:
					wr.RemoteAddr, wr.RKey = 0, 0
				case ib.OpAtomicFetchAdd, ib.OpAtomicWrite:
					wr.SGL = a.sge(0, 8)
				}
				a.post(wr)
				a.post(ib.SendWR{ID: 2, Op: ib.OpRDMARead, SGL: a.sge(8192, 8), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
				waitBegun(t, g, 1)
				a.silent("before its bytes are there")
				b.silent("before its bytes are there")
				if way == "udp" { // where the sender asks again soon
					for range 2 {
						a.silent("asked again")
					}
				}
				g.Release()
				for id := range uint64(2) {
					if wc := a.ok(); wc.ID != id+1 {
						t.Fatalf("%d completes, want %d", wc.ID, id+1)
					}
				}
				if op == ib.OpSend || op == ib.OpRDMAWriteImm {
					b.ok()
				}
			})
		}
	})
}
