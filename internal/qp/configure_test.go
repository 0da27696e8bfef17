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

// TestConfigureLong: the send queue does not keep the room that a very long list has
// taken.
func TestConfigureLong(t *testing.T) {
	w := newPair(t, usual(), usual())
	a := w.a
	for _, n := range []int{keptPieces + 1, 1} {
		m, err := a.table.CreateMKey(testPD, n)
		if err != nil {
			t.Fatal(err)
		}
		c := &ib.MKeyConfig{MKey: m.Key()}
		for i := range n {
			c.List = append(c.List, a.regions["mem"].at(uint64(i%100), 1))
		}
		if _, err := a.q.PostSend([]ib.SendWR{{Op: ib.OpConfigureMKey, Flags: ib.SendSignaled, Configure: c}}); err != nil {
			t.Fatal(err)
		}
		var tr train.Train
		var wcs [1]ib.WC
		if a.q.Pull(&tr, w.now) || a.sendCQ.Poll(wcs[:]) != 1 || wcs[0].Status != ib.WCSuccess || a.table.Lookup(m.Key()).Length() != uint64(n) {
			t.Fatalf("%d pieces: %+v", n, wcs[0])
		}
	}
	if n := cap(a.q.sq.pieces.list); n > 64 {
		t.Errorf("the queue of pieces has kept room for %d", n)
	}
}

// TestConfigureInPlace: a key is configured anew while it is in use, in the order of
// the send queue, and keeps what the request's Update names.
func TestConfigureInPlace(t *testing.T) {
	w := newPair(t, usual(), usual())
	a := w.a
	m, err := a.table.CreateMKey(testPD, 2)
	if err != nil {
		t.Fatal(err)
	}
	region := a.regions["mem"]
	short, long := []ib.SGE{region.at(0, 8)}, []ib.SGE{region.at(64, 32), region.at(256, 32)}
	post := func(c ib.MKeyConfig) error {
		c.MKey = m.Key()
		_, err := a.q.PostSend([]ib.SendWR{{Op: ib.OpConfigureMKey, Flags: ib.SendSignaled, Configure: &c}})
		return err
	}
	for _, c := range []ib.MKeyConfig{
		{Update: ib.MKeyKeepLayout}, {Update: ib.MKeyInPlace << 3}, {Update: ib.MKeyInPlace | ib.MKeyKeepLayout, List: short},
	} {
		if err := post(c); err == nil {
			t.Errorf("%+v is taken", c)
		}
	}
	var tr train.Train
	var wcs [4]ib.WC
	for _, c := range []struct {
		config ib.MKeyConfig
		access ib.Access
		length uint64
	}{
		{ib.MKeyConfig{Access: ib.AccessLocalWrite, List: short}, ib.AccessLocalWrite, 8},
		{ib.MKeyConfig{Access: ib.AccessRemoteRead, List: long, Update: ib.MKeyInPlace}, ib.AccessRemoteRead, 64},
		{ib.MKeyConfig{Access: ib.AccessLocalWrite, Update: ib.MKeyInPlace | ib.MKeyKeepLayout}, ib.AccessLocalWrite, 64},
		{ib.MKeyConfig{List: short, Update: ib.MKeyInPlace | ib.MKeyKeepAccess}, ib.AccessLocalWrite, 8},
	} {
		if err := post(c.config); err != nil {
			t.Fatal(err)
		}
		if a.q.Pull(&tr, w.now) {
			t.Fatal("a packet for nothing")
		}
		if a.sendCQ.Poll(wcs[:]) != 1 || wcs[0].Status != ib.WCSuccess {
			t.Fatalf("%+v: %+v", c.config, wcs[0])
		}
		if r := a.table.Lookup(m.Key()); !r.Alive() || r.Access() != c.access || r.Length() != c.length {
			t.Errorf("%+v: %d bytes, rights %v", c.config, r.Length(), r.Access())
		}
	}
}
