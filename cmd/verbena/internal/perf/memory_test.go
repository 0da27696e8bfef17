package perf

import (
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

// Every kind of memory carries every operation, and is what it says: on-demand
// buffers fault, pinned ones do not, and only those of dma-bufs count as such.
func TestMemKinds(t *testing.T) {
	for _, kind := range MemKinds() {
		onDemand := kind == "odp" || kind == "implicit"
		for _, p := range []Params{
			{Op: OpWrite, Size: 10_001, Depth: 4}, {Op: OpRead, Size: 10_001}, {Op: OpSend, Size: 10_001}, {Op: OpWriteImm, QPs: 2, Size: 4096}, {Op: OpRead, Threads: 2, QPs: 3, Size: 4096},
			{Op: OpAtomic}, {Op: OpWrite, Lat: true}, {Op: OpSend, Lat: true, Size: 5000},
		} {
			name := kind + "/" + string(p.Op)
			if p.Lat {
				name += "-lat"
			}
			if p.Threads > 1 {
				name += "-threads"
			}
			t.Run(name, func(t *testing.T) {
				a, b := openPair(t, verbs.LinkLoop)
				p := p
				p.Mem, p.Iters, p.Check, p.Link = kind, 40, true, string(verbs.LinkLoop)
				if err := p.Complete(); err != nil {
					t.Fatal(err)
				}
				res, err := Local(t.Context(), a, b, p, nil)
				if err != nil || res.Mem != kind || !res.Checked {
					t.Fatalf("%+v, %v", res, err)
				}
				for _, dev := range []*verbs.Device{a, b} {
					s, err := dev.PagingStats()
					if err != nil || s.PageFaults > 0 != onDemand || s.FailedResolutions != 0 || s.MRs != 0 {
						t.Errorf("%+v, %v", s, err)
					}
					for _, c := range dev.Counters() {
						want := uint64(0)
						if kind == "dmabuf" {
							want = uint64(2 * p.Threads) // each thread has two buffers, which are mapped once
						}
						if (c.Name == "dmabuf_regions" || c.Name == "dmabuf_mappings") && c.Value != want {
							t.Errorf("%s is %d", c.Name, c.Value)
						}
					}
				}
			})
		}
	}
}
