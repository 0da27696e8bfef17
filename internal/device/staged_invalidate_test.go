package device

// Memory that the CPU does not address: invalidations of what an engine accesses.

import (
	"fmt"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
)

// An invalidation of memory that an engine accesses, by whatever request, waits for the engine,
// and delays no other queue pair; then it is done.
func TestStagedInvalidateWaitsForEngine(t *testing.T) {
	for _, row := range []struct {
		mode, kind string
		region     bool // a region is invalidated, and not a window
	}{
		{linkLoop, "SEND_INV", false},
		{linkLoop, "SEND_INV", true},
		{linkLoop, "LOCAL_INV", false},
		{linkLoop, "LOCAL_INV", true},
		{linkLoop, "BIND", false},
		{linkRings, "SEND_INV", false},
		{linkRings, "SEND_INV", true},
		{linkUDP, "SEND_INV", false},
		{linkUDP, "SEND_INV", true},
	} {
		t.Run(fmt.Sprintf("%s/%s/region %v", row.mode, row.kind, row.region), func(t *testing.T) {
			g := stoppedEngine()
			a, b := stagedPair(t, row.mode, ib.RC, g, "b")
			c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil) // others
			b.registerAgain(allRemote | ib.AccessMWBind | ib.AccessRemoteInvalidate)
			typ := ib.MWType2
			if row.kind == "BIND" {
				typ = ib.MWType1 // the others cannot be bound again
			}
			w := b.window(typ)
			key := b.bind(w, 0, 64<<10, ib.AccessRemoteWrite)
			if row.region {
				closeAll(t, w)
				key = b.mr.RKey()
			}
			b.recv(ib.RecvWR{ID: 3, SGL: d.sge(0, 64)}) // of another domain: nothing comes there
			wr := a.write(b, 0, 512)                    // one packet, or the rest might find the key dead
			wr.RKey = key
			a.post(wr)
			waitBegun(t, g, 1)
			switch row.kind {
			case "SEND_INV":
				a.post(ib.SendWR{ID: 2, Op: ib.OpSendInv, InvalidateKey: key})
			case "LOCAL_INV":
				b.post(ib.SendWR{ID: 2, Op: ib.OpLocalInv, InvalidateKey: key})
			case "BIND":
				must[uint32](t)(b.qp.BindMW(w, 2, ib.SendSignaled, b.onto(w, 0, 4096, ib.AccessRemoteWrite)))
			}
			b.noCompletion("an engine is at the memory")
			must[ib.QPAttr](t)(b.qp.Query())
			goesOn(t, c, d)
			g.Release()
			a.ok()
			if row.kind == "SEND_INV" {
				a.ok()
			}
			b.ok()
			wr.ID = 9
			a.post(wr)
			a.status(ib.WCRemAccessErr)
		})
	}
}

// A SEND that invalidates what another queue pair's engine is at completes when that is over,
// and a message behind it after it.
func TestStagedSendInvalidates(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} { // by rings a queue pair is not connected with itself
		t.Run(mode, func(t *testing.T) {
			g, h := stoppedEngine(), enginetest.New(enginetest.Config{})
			a, b := stagedPair(t, mode, ib.RC, h, "b") // its receives
			b.registerAgain(allRemote | ib.AccessRemoteInvalidate)
			mr := b.anotherRegion(g, 4096, allRemote|ib.AccessRemoteInvalidate)
			c := b.beside() // works on what is invalidated
			c.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: c.sge(0, 64), RemoteAddr: mr.Addr(), RKey: mr.RKey()})
			waitBegun(t, g, 1)
			b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 4096)})
			b.recv(ib.RecvWR{ID: 2, SGL: b.sge(4096, 4096)})
			a.post(ib.SendWR{ID: 1, Op: ib.OpSendInv, SGL: a.sge(0, 4096), InvalidateKey: mr.RKey()})
			a.post(ib.SendWR{ID: 2, Op: ib.OpSend, SGL: a.sge(0, 4096)})
			waitBegun(t, h, 1)
			b.noCompletion("its key is in use")
			g.Release()
			for id := range uint64(2) {
				if wc := b.ok(); wc.ID != id+1 {
					t.Errorf("%+v", wc)
				}
				a.ok()
			}
			c.ok()
		})
	}
}
