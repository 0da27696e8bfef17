package verbs

import (
	"errors"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/internal/provider"
)

// What a program asks for reaches the provider.
func TestMW(t *testing.T) {
	d := &Device{p: newFake()}
	pd, cq := must(d.AllocPD()), must(d.CreateCQ(1, nil))
	qp := must(pd.CreateQP(&QPConfig{Type: RC, SendCQ: cq, RecvCQ: cq}))
	mr := must(pd.RegMR(make([]byte, 100), AccessMWBind))
	mw := must(pd.AllocMW(MWType1))
	if mw.Type() != MWType1 || mw.RKey() != 0x12ff || IncRKey(mw.RKey()) != 0x1200 {
		t.Errorf("%v, rkey %#x, next %#x", mw.Type(), mw.RKey(), IncRKey(mw.RKey()))
	}
	b := mw.Bind(mr, 10, 20, AccessRemoteRead)
	if want := (MWBind{MW: 0x12ff, RKey: 0x1200, LKey: 0xaa, Addr: 0x100a, Length: 20, Access: AccessRemoteRead}); b != want {
		t.Errorf("Bind: %+v, want %+v", b, want)
	}
	rkey, err := qp.BindMW(mw, 9, SendSignaled, b)
	if want := (fakeBind{mw.p, 9, SendSignaled, b}); err != nil || rkey != 0x77 || qp.p.(*fakeQP).bound != want {
		t.Errorf("BindMW: %#x, %v; passed on %+v", rkey, err, qp.p.(*fakeQP).bound)
	}
}

func TestRereg(t *testing.T) {
	d := &Device{p: newFake()}
	pd := must(d.AllocPD())
	mr := must(pd.RegMR(make([]byte, 100), 0))
	f := mr.p.(*fakeMR)
	other, access, iova := must(d.AllocPD()), AccessRemoteRead, uint64(5)
	buf := make([]byte, 3)
	if err := mr.Rereg(MRChange{Buf: buf, PD: other, Access: &access}); err != nil || len(f.change.Buf) != 3 || f.change.PD != other.p || f.change.Access != &access || f.change.Range != nil {
		t.Errorf("%v; passed on %+v", err, f.change)
	}
	if err := mr.Rereg(MRChange{Range: &MRRange{Addr: 64, Length: 9}}); err != nil || *f.change.Range != (provider.MRRange{Addr: 64, Length: 9, IOVA: 64}) || f.change.PD != nil {
		t.Errorf("%v; passed on %+v", err, f.change)
	}
	if err := mr.Rereg(MRChange{Range: &MRRange{Addr: 64, Length: 9, IOVA: &iova}}); err != nil || f.change.Range.IOVA != 5 {
		t.Errorf("%v; passed on %+v", err, f.change)
	}
	for name, c := range map[string]MRChange{"slice and range": {Buf: buf, Range: &MRRange{}}, "zero domain": {PD: new(PD)}} {
		var failed *ReregError
		if err := mr.Rereg(c); !errors.As(err, &failed) || failed.State != ReregOldValid || !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSharedMR(t *testing.T) {
	d := &Device{p: newFake()}
	pd := must(d.AllocPD())
	f := pd.p.(*fakePD)
	mr := must(pd.AllocMR(100, AccessRemoteRead))
	if f.length != 100 || f.access != AccessRemoteRead || len(mr.Bytes()) != 100 || must(mr.Share()) != "handle" {
		t.Errorf("passed on %d bytes, %v; got %d", f.length, f.access, len(mr.Bytes()))
	}
	must(pd.OpenSharedMR("x", AccessLocalWrite))
	if f.handle != "x" || f.access != AccessLocalWrite {
		t.Errorf("passed on %q, %v", f.handle, f.access)
	}
	if _, err := pd.AllocMR(-1, 0); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a negative length: %v", err)
	}
}
