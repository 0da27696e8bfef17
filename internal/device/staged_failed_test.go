package device

// Memory that the CPU does not address, and that fails under requests.

import (
	"fmt"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// A flag behind a WRITE whose memory has failed is never seen, though the engine had been
// handed both before that: neither in the engine's memory nor in that of the host, whether the
// engine reaches it or not.
func TestStagedFailedThenFlag(t *testing.T) {
	onStagedWays(t, func(t *testing.T, way string) {
		for _, on := range []string{"a", "b"} {
			for _, reaches := range []bool{false, true} {
				if way != "loop" && on == "a" {
					continue // what is loaded before it is sent is not in a chain
				}
				t.Run(fmt.Sprintf("%s/reaches %v", on, reaches), func(t *testing.T) { failThenFlag(t, way, on, reaches) })
			}
		}
	})
}

func failThenFlag(t *testing.T, way, on string, reaches bool) {
	g := enginetest.New(enginetest.Config{Reaches: reaches})
	a, b := stagedPair(t, way, ib.RC, g, on)
	own := map[string]*end{"a": a, "b": b}[on]
	data := g.Alloc(4096)
	mr := must[provider.MR](t)(own.pd.(*PD).RegBacking(data, 0x1000, allRemote))
	t.Cleanup(func() {
		g.Release()
		closeAll(t, a.qp, b.qp, mr)
		data.Free()
	})
	clear(b.buf)
	fill(a.buf, 1)
	first := a.write(b, 8192, 4096)
	if on == "b" {
		first.RemoteAddr, first.RKey = mr.Addr(), mr.RKey()
	} else {
		first.SGL = []ib.SGE{{Addr: mr.Addr(), Length: 4096, LKey: mr.LKey()}}
	}
	wrs := []ib.SendWR{first}
	for i := range 2 {
		wrs = append(wrs, a.write(b, 4096*i, 4096))
	}
	g.Hold()
	begun := g.Begun()
	if n, err := a.qp.PostSend(wrs); err != nil {
		t.Fatalf("%d were posted: %v", n, err)
	}
	waitBegun(t, g, begun+1)
	data.Fail(mem.FaultStale)
	g.Release()
	if on == "b" {
		a.status(ib.WCRemAccessErr)
	} else {
		a.status(ib.WCLocProtErr)
	}
	a.status(ib.WCWRFlushErr)
	a.status(ib.WCWRFlushErr)
	for _, e := range []*end{a, b} {
		e.modify(ib.QPAttr{State: ib.QPReset}, 0) // no engine is at its memory any more
	}
	if k := firstDifference(b.buf, make([]byte, len(b.buf))); k >= 0 {
		t.Errorf("byte %d was written", k)
	}
	data.Fail(mem.FaultNone)
	a.connect(b)
	b.connect(a)
	a.post(a.write(b, 0, 4096))
	a.ok()
	a.same("a WRITE after that", 0, b, 0, 4096)
}
