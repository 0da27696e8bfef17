package importer_test

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// pause is payload that comes when the test lets it: a copy of it keeps the target's section open.
type pause struct {
	entered, goOn chan struct{}
	value         byte
}

func (p *pause) Mapped(uint64, uint64) []byte { return nil }
func (p *pause) Still() bool                  { return true }
func (p *pause) ReadRef(b []byte, _ uint64) (ok, own bool) {
	p.entered <- struct{}{}
	<-p.goOn
	for i := range b {
		b[i] = p.value
	}
	return true, false
}

// The exporter's calls wait for an access under way, and its bytes are not lost. Accesses that come
// meanwhile wait until the call is over.
func TestMoveWaitsForAccess(t *testing.T) {
	defer watchdog(t)()
	for _, name := range []string{"Move", "Evict", "Revoke", "Revoke of pinned memory"} {
		c := newCrowd(t, 1)
		pinned := name == "Revoke of pinned memory"
		r := register(t, c.table, c.memory.Buffer(), importer.Config{Length: c.size, Pinned: pinned})
		call := map[string]func(context.Context) error{"Move": c.memory.Move, "Evict": c.memory.Evict}[name]
		if call == nil {
			call = c.memory.Revoke
		}
		p := &pause{make(chan struct{}), make(chan struct{}), 0x77}
		var access sync.WaitGroup
		access.Go(func() {
			if f, _ := mem.Copy(r.list(r.Key(), 10, 100), &mem.List{Ref: p, RefLen: 100}, 100, true); !f.OK() {
				t.Errorf("%s: the access under way: %v", name, f)
			}
		})
		<-p.entered
		done := make(chan error, 1)
		go func() { done <- call(context.Background()) }()
		eventually(t, "the region is shut", func() bool { return !r.Open() })
		if c.memory.Buffer().Reservation().TryLock() {
			t.Errorf("%s: the exporter does not hold the reservation lock", name)
		}
		var later mem.Fault
		access.Go(func() { later = r.write(110, bytes.Repeat([]byte{0x88}, 50)) })
		select {
		case err := <-done:
			t.Errorf("%s has not waited for the access: %v", name, err)
		default:
		}
		close(p.goOn)
		check(t, <-done)
		access.Wait()
		got := make([]byte, 150)
		_, err := c.memory.ReadAt(got, 10)
		if call := name[:4]; call == "Revo" {
			if !errors.Is(err, syscall.ENODEV) || later.Kind != mem.FaultRevoked {
				t.Errorf("%s: %v, and the later access: %v", name, err, later)
			}
		} else if want := append(bytes.Repeat([]byte{0x77}, 100), bytes.Repeat([]byte{0x88}, 50)...); err != nil || !later.OK() || !bytes.Equal(got, want) {
			t.Errorf("%s: %v, the later access: %v, bytes %x", name, err, later, got)
		}
		check(t, r.Close())
		for _, p := range c.regions {
			check(t, p.Close())
		}
		c.gone()
	}
}

// Copies into and out of a region of a buffer allocate nothing, whatever its segments are.
func TestCopyAlloc(t *testing.T) {
	if raceEnabled {
		t.Skip("race: the detector allocates")
	}
	for _, segments := range []int{1, 3} {
		m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: 1 << 16, Segments: segments})
		check(t, err)
		r := register(t, newTable(), m.Buffer(), importer.Config{Length: 1 << 16})
		in, out := r.list(r.Key(), 100, 60000), &mem.List{Raw: [][]byte{make([]byte, 60000)}}
		if n := testing.AllocsPerRun(100, func() {
			for _, way := range [][2]*mem.List{{in, out}, {out, in}} {
				if f, _ := mem.Copy(way[0], way[1], 60000, true); !f.OK() {
					t.Error(f)
				}
			}
		}); n != 0 {
			t.Errorf("%d segments: %v allocations", segments, n)
		}
		check(t, r.Close())
		check(t, m.Close())
	}
}
