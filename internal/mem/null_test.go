package mem_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Memory that is not there: zeros come out, wherever and whatever went in.
func TestNull(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{MaxRegions: 4})
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Length: math.MaxUint64, Backing: mem.NewNull()})
	if err != nil {
		t.Fatal(err)
	}
	noise := bytes.Repeat([]byte("noise"), 40000)
	for _, addr := range []uint64{0, 1, 65535, 1 << 47, math.MaxUint64 - 300000} {
		for _, acc := range []ib.Access{ib.AccessLocalWrite, 0} {
			span, fault := table.Resolve(r.Key(), addr, uint64(len(noise)), acc, mem.Actor{PD: 1})
			if !fault.OK() {
				t.Fatalf("%#x: %v", addr, fault)
			}
			for got := 0; span.Left() > 0; {
				run, fault := span.Next()
				if !fault.OK() || len(run) == 0 {
					t.Fatalf("%#x, %d bytes further: %v", addr, got, fault)
				}
				if acc == 0 && !bytes.Equal(run, make([]byte, len(run))) {
					t.Errorf("%#x, %d bytes further: not zero", addr, got)
				}
				if acc != 0 {
					copy(run, noise)
				}
				got += len(run)
			}
			span.Release()
		}
	}
	for _, remote := range []ib.Access{ib.AccessRemoteRead, ib.AccessRemoteWrite} {
		if _, fault := table.Resolve(r.Key(), 0, 8, remote, mem.Actor{PD: 1}); fault.Kind != mem.FaultAccess {
			t.Errorf("a peer gets %v", fault)
		}
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}
