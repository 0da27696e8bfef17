package device

// Memory that the CPU does not address: how much may wait for an engine that stands still.

import (
	"bytes"
	"fmt"
	"runtime"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// While an engine stands still, many WRITEs wait in bounds, and other queue pairs go on; then
// all of them arrive.
func TestStagedPushback(t *testing.T) {
	for _, typ := range []ib.QPType{ib.RC, ib.UC} {
		onAllLinks(t, func(t *testing.T, mode string) {
			t.Run(typ.String(), func(t *testing.T) {
				n, size := lastingOps(300, 1000), 1000
				g, h := stoppedEngine(), enginetest.New(enginetest.Config{})
				a, b := stagedPair(t, mode, typ, g, "b")
				c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
				d.onEngine(h)
				posted, ok := 0, 0
				goOn := func() { // posts what fits, and takes completions
					for posted < n {
						wr := a.write(b, posted*size, size)
						wr.Flags, wr.ID = ib.SendSignaled, uint64(posted)
						if k, _ := a.qp.PostSend([]ib.SendWR{wr}); k == 0 {
							break
						}
						posted++
					}
					ok += pollOK(a)
				}
				for range looks {
					goOn()
				}
				waitBegun(t, g, 1)
				goesOn(t, c, d)
				if most := g.Begun(); most > 256 {
					t.Errorf("%d operations under way", most)
				}
				g.Release()
				eventually(t, "all have completed", func() bool {
					goOn()
					return ok == n
				})
				goesOn(t, c, d)
			})
		})
	}
}

// pollOK polls what there is and returns how many were successful.
func pollOK(e *end) (ok int) {
	var wcs [16]ib.WC
	n, err := e.cq.Poll(wcs[:])
	if err != nil {
		e.t.Error(err)
	}
	for _, wc := range wcs[:n] {
		if wc.Status == ib.WCSuccess {
			ok++
		} else {
			e.t.Errorf("request %d: %v, vendor %#x", wc.ID, wc.Status, wc.VendorErr)
		}
	}
	return ok
}

// What is loaded ahead of many short WRITEs does not count as what a peer has sent.
func TestStagedLoadsDoNotPushBack(t *testing.T) {
	g, h := stoppedEngine(), enginetest.New(enginetest.Config{})
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	a, b := connected(t, x, y, ib.RC, 4096, func(e *end) {
		closeAll(t, e.qp)
		e.qp = must[provider.QP](t)(e.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: e.cq, RecvCQ: e.cq,
			Cap: ib.QPCap{MaxSendWR: 1024, MaxRecvWR: 16, MaxSendSGE: 1, MaxRecvSGE: 1}}))
	})
	a.onEngine(g)
	b.onEngine(h)
	t.Cleanup(g.Release)
	for range 500 {
		a.post(a.write(b, 0, 64))
	}
	waitBegun(t, g, 1)
	b.post(b.write(a, 128, 64))
	eventually(t, "it has come", func() bool { return a.counted()[qp.CntRxPackets] > 0 })
	if n := a.counted()[qp.CntFaultRNR]; n != 0 {
		t.Errorf("pushed back %d times", n)
	}
	g.Release()
	for range 500 {
		a.ok()
	}
	b.ok()
}

// arrive gives a request of a peer to the end's queue pair, as if it had come by its link.
func (e *end) arrive(from *end, t train.Train) {
	q := e.qp.(*QP)
	t.Transport, t.From, t.To, t.N, t.Start, t.End, t.MTU = wire.RC, from.dev.addrs[0], e.dev.addrs[0], 1, true, true, 1024
	now := e.dev.now()
	q.receive(&t, now)
	e.dev.answer(q, now)
}

// A peer that asks for a READ again and again, while its bytes are loaded, takes no more room
// and no more time than one that asks once. It asks for all of it, or each time for another
// part.
func TestStagedReadAskedAgain(t *testing.T) {
	const n = 512 << 10
	for _, whole := range []bool{true, false} {
		t.Run(fmt.Sprintf("whole %v", whole), func(t *testing.T) {
			g := stoppedEngine()
			a, b := stagedPair(t, linkUDP, ib.RC, g, "b")
			fill(b.buf[:n], 3)
			a.post(a.read(b, 0, n))
			waitBegun(t, g, 1)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for i := range 1000 {
				again := train.Train{Kind: wire.KindReadRequest, PSN: wire.MakePSN(a.psn), AckReq: true,
					RETH: wire.RETH{VA: b.mr.Addr(), RKey: b.mr.RKey(), Len: n}}
				if !whole {
					again.RETH.Len -= uint32(1 + i)
				}
				b.arrive(a, again)
			}
			runtime.ReadMemStats(&after)
			if grown := after.TotalAlloc - before.TotalAlloc; grown > 32<<20 {
				t.Errorf("%d bytes", grown)
			}
			g.Release()
			if whole { // the answer to another READ than its own may fail a's
				if wc := a.ok(); wc.ByteLen != n || !bytes.Equal(a.buf[:n], b.buf[:n]) {
					t.Error("other bytes have come")
				}
			}
			c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
			goesOn(t, c, d)
		})
	}
}
