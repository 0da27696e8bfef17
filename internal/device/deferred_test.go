package device

// Workers that wait for memory whose owner does not answer (deferred.go).

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// hangingExporter is a dma-buf whose exporter does not answer from hang on, until goOn.
type hangingExporter struct {
	buffer *dmabuf.Buffer
	memory []byte
	hangs  atomic.Bool
	asked  atomic.Int64 // calls that hang
	answer chan struct{}
}

func newHangingExporter(t *testing.T, size int) *hangingExporter {
	t.Helper()
	e := &hangingExporter{memory: make([]byte, size), answer: make(chan struct{})}
	e.buffer = must[*dmabuf.Buffer](t)(dmabuf.Export(dmabuf.Config{Size: uint64(size), Exporter: "test", Ops: dmabuf.Ops{
		Map: func(*dmabuf.Attachment, dmabuf.Direction) (*dmabuf.Table, error) {
			if e.hangs.Load() {
				e.asked.Add(1)
				<-e.answer
			}
			return dmabuf.NewTable(e.memory), nil
		},
		Unmap:   func(*dmabuf.Attachment, *dmabuf.Table, dmabuf.Direction) {},
		Release: func(*dmabuf.Buffer) {},
	}}))
	return e
}

// hang tells the importers that the buffer moves, and does not answer from then on.
func (e *hangingExporter) hang() {
	e.hangs.Store(true)
	e.buffer.Reservation().Lock()
	defer e.buffer.Reservation().Unlock()
	e.buffer.InvalidateMappings()
}

// More queue pairs than there are workers wait for a buffer whose exporter hangs, with one region
// for all of them and with one for each: other buffers that have moved are mapped again meanwhile,
// and pages are fetched. When the exporter answers, all requests are done.
func TestHangingExporterHoldsFewWorkers(t *testing.T) {
	for name, oneRegion := range map[string]bool{"one region": true, "many regions": false} {
		t.Run(name, func(t *testing.T) {
			const many = maxWorkers + 8
			x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
			e := newHangingExporter(t, 4096)
			t.Cleanup(e.buffer.Put)
			goOn := sync.OnceFunc(func() { close(e.answer) })
			t.Cleanup(goOn)
			var as, bs [many]*end
			var writes [many]ib.SendWR
			for i := range as {
				as[i], bs[i] = connected(t, x, y, ib.RC, 4096, nil)
				if oneRegion && i > 0 {
					bs[i].inDomainOf(bs[0], as[i])
					closeAll(t, bs[i].mr)
					bs[i].mr = bs[0].mr
				} else {
					bs[i].registerBuffer(e.buffer)
				}
				writes[i] = as[i].write(bs[i], 0, 64)
			}
			free, other := connected(t, x, y, ib.RC, 4096, nil)
			m := other.makeDMABuf(4096, 1)
			e.hang()
			for i, a := range as {
				a.post(writes[i])
			}
			eventually(t, "all of them wait", func() bool { return countsOf(y)["page_fault_rnr_naks"] >= many })
			if n := e.asked.Load(); n != 1 { // the lock of the reservation is taken
				t.Errorf("the exporter is asked %d times at once", n)
			}
			eventually(t, "few workers wait for the exporter", func() bool {
				y.work.mu.Lock()
				defer y.work.mu.Unlock()
				return y.work.running <= maxOwnerWorkers
			})
			for range 20 {
				must0(t, m.dma.Move(t.Context()))
				free.post(free.write(other, 0, 64))
				free.ok()
			}
			s := newSlowMemory(t, other.pd, 64<<10)
			free.post(ib.SendWR{Op: ib.OpRDMARead, SGL: free.sge(0, 4096), RemoteAddr: uint64(s.addr), RKey: s.mr.RKey()})
			free.ok()
			goOn()
			for _, a := range as {
				a.ok()
			}
			eventually(t, "no owner is waited for", func() bool {
				y.work.mu.Lock()
				defer y.work.mu.Unlock()
				return len(y.work.waits) == 0
			})
		})
	}
}
