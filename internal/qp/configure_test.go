package qp

import (
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/train"
)

// TestConfigureAllocs: configuring an indirect key, again and again, allocates
// nothing, nor does the queue of pieces grow.
func TestConfigureAllocs(t *testing.T) {
	w := newPair(t, usual(), usual())
	a := w.a
	m, err := a.table.CreateMKey(testPD, 16)
	if err != nil {
		t.Fatal(err)
	}
	c := &ib.MKeyConfig{MKey: m.Key(), Access: ib.AccessLocalWrite}
	for i := range 16 {
		c.List = append(c.List, a.regions["mem"].at(uint64(i)*100, 64))
	}
	wrs := []ib.SendWR{{Op: ib.OpLocalInv, InvalidateKey: m.Key()}, {Op: ib.OpConfigureMKey, Flags: ib.SendSignaled, Configure: c}}
	var tr train.Train
	var wcs [4]ib.WC
	if n := testing.AllocsPerRun(1000, func() {
		if _, err := a.q.PostSend(wrs); err != nil {
			t.Fatal(err)
		}
		if a.q.Pull(&tr, w.now) {
			t.Fatal("a packet for nothing")
		}
		if a.sendCQ.Poll(wcs[:]) != 1 || wcs[0].Status != ib.WCSuccess || wcs[0].Op != ib.WCConfigureMKey {
			t.Fatalf("%+v", wcs[0])
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if n := cap(a.q.sq.pieces.list); n > 64 {
		t.Errorf("the queue of pieces has grown to %d", n)
	}
}
