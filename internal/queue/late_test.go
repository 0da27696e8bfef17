package queue

import (
	"bytes"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// memory registers n bytes and returns them with a Late that puts bytes there.
func memory(t testing.TB, n int) ([]byte, func(at, id int) *Late, *mem.Region) {
	t.Helper()
	table := mem.NewTable(mem.TableConfig{})
	b := make([]byte, n)
	h, err := mem.NewHostBytes(b, ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		t.Fatal(err)
	}
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Length: uint64(n), Backing: h})
	if err != nil {
		t.Fatal(err)
	}
	return b, func(at, id int) *Late {
		l := &Late{Table: table, Actor: mem.Actor{PD: 1}, SGE: ib.SGE{Addr: uint64(at), Length: 8, LKey: r.Key()}, N: 8}
		copy(l.Data[:], fmt.Sprintf("%08d", id))
		l.Failed = func(f mem.Fault) uint16 { return 0x100 + uint16(f.Kind) }
		return l
	}, r
}

// Bytes are placed when their completion is polled, not before: through resizing,
// removal of others, and around the end of the ring. What is removed is not placed,
// and its place is used again.
func TestLate(t *testing.T) {
	b, late, region := memory(t, 800)
	c := NewCQ(8)
	var freed atomic.Uint32
	for round := range 20 {
		clear(b)
		for i := range 3 {
			if !c.PushLate(&ib.WC{ID: uint64(i), QPN: uint32(i)}, false, late(8*i, round*10+i)) {
				t.Fatal("refused")
			}
			push(c, 100, 9)
		}
		c.PushLateSend(&ib.WC{ID: 3, QPN: 3}, &freed, uint32(round), late(24, round*10+3))
		if !c.Resize(7+round%3) || !bytes.Equal(b, make([]byte, 800)) {
			t.Fatal("placed too early")
		}
		c.Remove(1)
		if got := poll(c, 2); len(got) != 2 || string(b[:8]) != fmt.Sprintf("%08d", round*10) || b[16] != 0 {
			t.Fatalf("%v, %q", got, b[:32])
		}
		if got := fmt.Sprint(poll(c, 9)); got != "[100 2 100 3]" || freed.Load() != uint32(round) {
			t.Fatal(got, freed.Load())
		}
		if b[8] != 0 || string(b[16:32]) != fmt.Sprintf("%08d%08d", round*10+2, round*10+3) {
			t.Fatalf("%q", b[:32])
		}
	}
	if len(c.late) > 4 {
		t.Errorf("%d places for at most 4", len(c.late))
	}
	// Memory that is gone by then.
	c.PushLate(&ib.WC{ID: 7}, false, late(0, 1))
	if err := region.Close(); err != nil {
		t.Fatal(err)
	}
	var wc [1]ib.WC
	if c.Poll(wc[:]) != 1 || wc[0].Status != ib.WCLocProtErr || wc[0].VendorErr != 0x101 || wc[0].ID != 7 {
		t.Errorf("%+v", wc[0])
	}
}

// Several push and poll at once: every completion comes once, with its bytes.
func TestLateTogether(t *testing.T) {
	const each, pushers = 2000, 2
	b, late, _ := memory(t, 8*each*pushers)
	c := NewCQ(each * pushers)
	var wg sync.WaitGroup
	for p := range pushers {
		wg.Go(func() {
			for i := range each {
				id := p*each + i
				if i%3 == 0 {
					c.Push(&ib.WC{ID: uint64(id)}, false)
				} else {
					c.PushLate(&ib.WC{ID: uint64(id)}, false, late(8*id, id))
				}
			}
		})
	}
	var seen [each * pushers]atomic.Int32
	var total atomic.Int32
	for range 2 {
		wg.Go(func() {
			var wcs [7]ib.WC
			for total.Load() < each*pushers {
				n := c.Poll(wcs[:])
				for i := range n {
					id := int(wcs[i].ID)
					seen[id].Add(1)
					if want := fmt.Sprintf("%08d", id); id%each%3 != 0 && string(b[8*id:][:8]) != want {
						t.Errorf("completion %d without its bytes", id)
					}
				}
				total.Add(int32(n))
			}
		})
	}
	wg.Wait()
	for id := range seen {
		if n := seen[id].Load(); n != 1 {
			t.Fatalf("completion %d came %d times", id, n)
		}
	}
}

// Placing allocates nothing.
func TestLateAllocs(t *testing.T) {
	_, late, _ := memory(t, 64)
	c, l := NewCQ(4), late(0, 5)
	var wcs [4]ib.WC
	if n := testing.AllocsPerRun(100, func() {
		c.PushLate(&ib.WC{}, false, l)
		c.PushLate(&ib.WC{}, false, l)
		if c.Poll(wcs[:]) != 2 {
			t.Fatal("not two")
		}
	}); n > 0.1 { // the pool may be emptied
		t.Errorf("%v allocations", n)
	}
}
