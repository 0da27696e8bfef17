package verbs

import (
	"slices"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// The fake provider's part of on-demand paging.

type fakeAdvice struct {
	advice ib.Advice
	flush  bool
	sgl    []ib.SGE
}

func (d *fakeDevice) ODPCaps() ib.ODPCaps         { return ib.ODPCaps{Supported: true, RC: ib.ODPSend} }
func (d *fakeDevice) PagingStats() ib.PagingStats { return ib.PagingStats{PageFaults: 11, MRs: 2} }
func (m *fakeMR) PagingStats() ib.PagingStats     { return ib.PagingStats{PageFaults: 7} }

func (p *fakePD) RegImplicitMR(access ib.Access) (provider.MR, error) {
	p.access = access
	if p.dev.err != nil {
		return nil, p.dev.err
	}
	return &fakeMR{length: 1 << 47, access: access}, nil
}

func (p *fakePD) Advise(advice ib.Advice, flush bool, sgl []ib.SGE) error {
	p.advice = fakeAdvice{advice, flush, sgl}
	return p.dev.err
}

func TestPaging(t *testing.T) {
	f := newFake()
	d := &Device{p: f}
	if caps := must(d.QueryODPCaps()); !caps.Supported || caps.RC != ODPSend {
		t.Errorf("capabilities %+v", caps)
	}
	if s := must(d.PagingStats()); s.PageFaults != 11 || s.MRs != 2 {
		t.Errorf("counters %+v", s)
	}
	pd := must(d.AllocPD())
	mr := must(pd.RegImplicitMR(AccessOnDemand | AccessLocalWrite))
	if got := pd.p.(*fakePD).access; got != AccessOnDemand|AccessLocalWrite {
		t.Errorf("RegImplicitMR passed %v", got)
	}
	if s := mr.PagingStats(); s.PageFaults != 7 {
		t.Errorf("the region's counters %+v", s)
	}
	sgl := []SGE{{Addr: 1, Length: 2, LKey: 3}, {Addr: 4, Length: 5, LKey: 6}}
	for _, flags := range []AdviseFlags{0, AdviseFlush} {
		if err := pd.AdviseMR(AdvisePrefetchWrite, flags, sgl...); err != nil {
			t.Error(err)
		}
		got := pd.p.(*fakePD).advice
		if got.advice != ib.AdvisePrefetchWrite || got.flush != (flags != 0) || !slices.Equal(got.sgl, sgl) {
			t.Errorf("AdviseMR passed %+v", got)
		}
	}
	wantErrno(t, "flags", pd.AdviseMR(AdvisePrefetch, 2, sgl...), syscall.EINVAL)
	var none *PD
	_, err := none.RegImplicitMR(0)
	wantErrno(t, "nil domain", err, syscall.EINVAL)
	wantErrno(t, "nil domain", none.AdviseMR(AdvisePrefetch, 0, sgl...), syscall.EINVAL)
	var nobody *Device
	_, err = nobody.QueryODPCaps()
	wantErrno(t, "nil device", err, syscall.EINVAL)
	_, err = nobody.PagingStats()
	wantErrno(t, "nil device", err, syscall.EINVAL)
}
