package importer_test

import (
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// A prefetch maps a buffer that has moved, so that no access finds it so.
func TestPrefetch(t *testing.T) {
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: size, Segments: 2})
	check(t, err)
	r := register(t, newTable(), m.Buffer(), all(false))
	prefetch := func(noFault bool) mem.FaultKind {
		p := mem.Prefetch{Parts: []mem.Part{{Region: r.Region, Key: r.Key(), N: size}}, NoFault: noFault}
		_, kind := p.Do(true)
		return kind
	}
	for range 3 {
		check(t, m.Move(t.Context()))
		if kind := prefetch(true); kind != mem.FaultNone || r.backing.Present() != 0 {
			t.Errorf("a prefetch of what is there: %v, %d pages are mapped", kind, r.backing.Present())
		}
		if kind := prefetch(false); kind != mem.FaultNone || r.backing.Present() != 4 {
			t.Errorf("a prefetch: %v, %d pages are mapped", kind, r.backing.Present())
		}
		r.works(t, "after a prefetch", 1)
	}
	if s := r.backing.Stats(); s.PageFaults != 0 || s.Invalidations != 3 || s.Prefetches != 3 || s.PrefetchPages != 12 {
		t.Errorf("%+v", s)
	}
	check(t, m.Revoke(t.Context()))
	if kind := prefetch(false); kind != mem.FaultRevoked {
		t.Errorf("a prefetch of revoked memory: %v", kind)
	}
	check(t, r.Close())
	check(t, m.Close())
}
