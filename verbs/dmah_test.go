package verbs

import (
	"errors"
	"syscall"
	"testing"
)

// What is asked for arrives, and the region returns it.
func TestDMAH(t *testing.T) {
	f := newFake()
	d := &Device{p: f}
	pd := must(d.AllocPD())
	h := must(d.AllocDMAH(DMAHConfig{PH: 2, Steering: &Steering{CPU: 3, MemType: TPHPersistent}}))
	buf := make([]byte, 10)
	mr := must(h.RegMR(pd, buf, AccessLocalWrite))
	fake := h.p.(*fakeDMAH)
	if got := pd.p.(*fakePD); len(got.buf) != 10 || got.access != AccessLocalWrite || fake.pd != pd.p || fake.access != AccessLocalWrite {
		t.Errorf("registered %+v with %+v", got, fake)
	}
	if cfg, ok := mr.DMAH(); !ok || cfg.PH != 2 || *cfg.Steering != (Steering{CPU: 3, MemType: TPHPersistent}) {
		t.Errorf("the region has %+v, %v", cfg, ok)
	}
	if _, ok := must(pd.RegMR(buf, 0)).DMAH(); ok {
		t.Error("a region without a hint has one")
	}
	if err := h.Close(); err != nil || fake.closed != 1 {
		t.Error(err)
	}
	var none *DMAH
	if _, err := none.RegMR(pd, buf, 0); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a nil handle: %v", err)
	}
	if _, err := h.RegMR(nil, buf, 0); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a nil domain: %v", err)
	}
	if _, err := h.RegDMABufMR(pd, DMABuf{FD: -1}, 0); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("a dma-buf: %v", err) // the fake provider has none
	}
	f.err = syscall.ENODEV
	if _, err := d.AllocDMAH(DMAHConfig{}); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("a closed device: %v", err)
	}
	if err := none.Close(); err != nil {
		t.Error(err)
	}
}
