package device

// Memory that the CPU does not address: packets of a message are acknowledged when their bytes are in
// staging memory, the last one when all bytes are in place.

import (
	"fmt"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// earlyPair makes a connection by packets with a small window, and b's memory on an engine.
func earlyPair(t *testing.T, g *enginetest.Engine, size int) (a, b *end) {
	t.Helper()
	cfg := provider.Config{Link: linkUDP, Window: earlyWindow}
	a, b = connected(t, openDevice(t, cfg), openDevice(t, cfg), ib.RC, size, nil)
	a.makeMoving(size, false)
	b.onEngine(g)
	t.Cleanup(g.Release)
	a.ackTimeout(0, 7) // nothing is sent again: each packet that comes is another one
	return a, b
}

const earlyWindow = 16

// While the engine stands still, all of a message arrives that is longer than the window; and it
// completes, on either side, when its bytes are there.
func TestStagedEarly(t *testing.T) {
	for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMAWriteImm, ib.OpSend} {
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			g := stoppedEngine()
			a, b := earlyPair(t, g, stagedSize)
			mtu := a.mtu.Bytes()
			n := 60 * mtu
			b.recv(ib.RecvWR{ID: 9, SGL: b.sge(0, n)})
			fill(a.buf[:n], 7)
			wr := a.write(b, 0, n)
			wr.ID, wr.Op = 1, op
			if op == ib.OpSend {
				wr.RemoteAddr, wr.RKey = 0, 0
			}
			a.post(wr)
			eventually(t, "all packets have come", func() bool { return b.counted()[qp.CntRxPackets] >= 60 })
			if c := b.counted(); c[qp.CntDuplicates] != 0 || c[qp.CntRNRNaksSent] != 0 {
				t.Errorf("%d packets came again, %d RNR NAKs", c[qp.CntDuplicates], c[qp.CntRNRNaksSent])
			}
			a.noCompletion("before its bytes are there")
			b.noCompletion("before its bytes are there")
			g.Release()
			if wc := a.ok(); wc.ID != 1 {
				t.Fatalf("%d completes", wc.ID)
			}
			a.same("after its completion", 0, b, 0, n)
			if op != ib.OpRDMAWrite {
				b.ok()
			}
		})
	}
}

// An engine that stands still lets a sender go on in bounds: without RNR NAKs, which a program may
// not expect.
func TestStagedEarlyBounds(t *testing.T) {
	const size = 24 << 20 // more than what may wait
	g := stoppedEngine()
	a, b := earlyPair(t, g, size)
	fill(a.buf, 3)
	a.post(a.write(b, 0, size))
	eventually(t, "more than a window has come", func() bool { return b.counted()[qp.CntRxPackets] > 2*earlyWindow })
	a.noCompletion("before its bytes are there") // the sender goes on as long as it may
	g.Release()
	a.ok()
	if c := b.counted(); c[qp.CntRNRNaksSent] != 0 {
		t.Errorf("%d RNR NAKs", c[qp.CntRNRNaksSent])
	}
	a.same("in the end", 0, b, 0, size)
}

// If bytes that were acknowledged cannot be put in place, their message fails with the reason, and so
// does none before it.
func TestStagedEarlyFails(t *testing.T) {
	for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpSend} {
		for _, when := range []string{"all has come", "at once"} {
			t.Run(fmt.Sprintf("%v/%s", op, when), func(t *testing.T) {
				g := stoppedEngine()
				a, b := earlyPair(t, g, stagedSize)
				mtu := a.mtu.Bytes()
				n := 60 * mtu
				b.recv(ib.RecvWR{ID: 8, SGL: b.sge(0, 64)})
				b.recv(ib.RecvWR{ID: 9, SGL: b.sge(0, n)})
				write := func(id uint64, n int) {
					wr := a.write(b, 0, n)
					wr.ID, wr.Op = id, op
					if op == ib.OpSend {
						wr.RemoteAddr, wr.RKey = 0, 0
					}
					a.post(wr)
				}
				g.Release()
				write(1, 64)
				a.ok()
				if when == "all has come" {
					g.Hold()
				} else {
					b.memory().Fail(mem.FaultStale)
				}
				write(2, n)
				if when == "all has come" {
					eventually(t, "all packets have come", func() bool { return b.counted()[qp.CntRxPackets] >= 61 })
					b.memory().Fail(mem.FaultStale)
					g.Release()
				}
				want := ib.WCRemAccessErr
				if op == ib.OpSend {
					want = ib.WCRemOpErr
				}
				if wc := a.status(want); wc.ID != 2 {
					t.Errorf("%d has failed", wc.ID)
				}
				if op == ib.OpSend {
					if wc := b.ok(); wc.ID != 8 {
						t.Errorf("receive %d completes first", wc.ID)
					}
					if wc := b.status(ib.WCLocProtErr); wc.ID != 9 {
						t.Errorf("receive %d has failed", wc.ID)
					}
				}
			})
		}
	}
}
