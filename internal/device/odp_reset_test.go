package device

import (
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// vanishing is memory that is gone when it is first read, and something happens
// just before.
type vanishing struct {
	before func()
	once   atomic.Bool
}

func (v *vanishing) Kind() mem.Kind { return mem.KindPinned }
func (v *vanishing) Len() uint64    { return 4096 }
func (v *vanishing) Close() error   { return nil }

func (v *vanishing) Run(uint64, uint64, ib.Access) ([]byte, mem.FaultKind) {
	if v.once.CompareAndSwap(false, true) {
		v.before()
	}
	return nil, mem.FaultStale
}

// The answer to a READ is being sent, and its memory turns out to be gone, when the
// queue pair is reset and connected again: the new connection does not suffer.
func TestAnswerFailsAfterReset(t *testing.T) {
	x, y := openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP})
	a, b := connected(t, x, y, ib.RC, 4096, nil)
	done := make(chan struct{})
	v := &vanishing{before: func() {
		defer close(done)
		a.psn, b.psn = 0x111111, 0x222222
		for _, e := range []*end{a, b} {
			e.modify(ib.QPAttr{State: ib.QPReset}, 0)
		}
		a.connect(b)
		b.connect(a)
	}}
	r, err := y.table.Register(mem.RegionConfig{PD: b.pd.(*PD).id, Access: allRemote, Length: 4096, Backing: v})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	a.post(ib.SendWR{ID: 1, Op: ib.OpRDMARead, SGL: a.sge(0, 4096), RKey: r.Key()})
	<-done
	a.post(a.write(b, 0, 64))
	a.ok()
	if got := b.state(); got != ib.QPRTS {
		t.Errorf("the new connection is in %v", got)
	}
}
