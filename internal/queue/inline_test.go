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

// memory registers n bytes and returns them with a function that makes inline data for them.
func memory(t testing.TB, n int) ([]byte, func(at, id int) *InlineData, *mem.Region) {
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
	return b, func(at, id int) *InlineData {
		l := &InlineData{Table: table, Waiting: new(Waiting), Actor: mem.Actor{PD: 1}, SGE: ib.SGE{Addr: uint64(at), Length: 8, LKey: r.Key()}, N: 8}
		copy(l.Data[:], fmt.Sprintf("%08d", id))
		l.Failed = func(f mem.Fault) uint16 { return 0x100 + uint16(f.Kind) }
		return l
	}, r
}

// Inline data are written when their completion is polled, not before: also after resizing, the
// removal of other completions, and around the end of the ring. Inline data of a removed
// completion are not written, and their place is used again.
func TestInlineData(t *testing.T) {
	b, late, region := memory(t, 800)
	c := NewCQ(8)
	var freed Freed
	for round := range 20 {
		clear(b)
		for i := range 3 {
			if !c.PushInline(&ib.WC{ID: uint64(i), QPN: uint32(i)}, false, late(8*i, round*10+i)) {
				t.Fatal("refused")
			}
			push(c, 100, 9)
		}
		c.PushInlineSend(&ib.WC{ID: 3, QPN: 3}, &freed, uint32(round), late(24, round*10+3))
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
	if len(c.inline) > 4 {
		t.Errorf("%d places for at most 4", len(c.inline))
	}
	// Memory that is deregistered before the poll.
	c.PushInline(&ib.WC{ID: 7}, false, late(0, 1))
	if err := region.Close(); err != nil {
		t.Fatal(err)
	}
	var wc [1]ib.WC
	if c.Poll(wc[:]) != 1 || wc[0].Status != ib.WCLocProtErr || wc[0].VendorErr != 0x101 || wc[0].ID != 7 {
		t.Errorf("%+v", wc[0])
	}
}

// Several goroutines push and poll at once: every completion comes once, with its inline data.
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
					c.PushInline(&ib.WC{ID: uint64(id)}, false, late(8*id, id))
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

// Writing inline data allocates nothing.
func TestLateAllocs(t *testing.T) {
	_, late, _ := memory(t, 64)
	c, l := NewCQ(4), late(0, 5)
	var wcs [4]ib.WC
	if n := testing.AllocsPerRun(100, func() {
		c.PushInline(&ib.WC{}, false, l)
		c.PushInline(&ib.WC{}, false, l)
		if c.Poll(wcs[:]) != 2 {
			t.Fatal("not two")
		}
	}); n > 0.1 { // the pool may be emptied
		t.Errorf("%v allocations", n)
	}
}

// absent is memory that has to be fetched first.
type absent struct {
	mem.Backing
	there   atomic.Bool
	fetches atomic.Int32
	fetch   func() (there bool)
}

func (a *absent) NeverFaults() bool { return false }

func (a *absent) Run(off, n uint64, acc ib.Access) ([]byte, mem.FaultKind) {
	if !a.there.Load() {
		return nil, mem.FaultPending
	}
	return a.Backing.Run(off, n, acc)
}

func (a *absent) Gone(uint64, uint64, ib.Access) mem.FaultKind { return mem.FaultStale }

func (a *absent) Await(uint64, uint64, ib.Access) mem.FaultKind {
	a.fetches.Add(1)
	a.there.Store(a.fetch())
	return mem.FaultNone
}

// absentMemory is memory that is not there.
func absentMemory(t testing.TB, fetch func() bool) (*absent, []byte, func(at, id int, w *Waiting) *InlineData) {
	t.Helper()
	table := mem.NewTable(mem.TableConfig{})
	b := make([]byte, 64)
	h, err := mem.NewHostBytes(b, ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		t.Fatal(err)
	}
	a := &absent{Backing: h, fetch: fetch}
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Length: 64, Backing: a})
	if err != nil {
		t.Fatal(err)
	}
	return a, b, func(at, id int, w *Waiting) *InlineData {
		l := &InlineData{Table: table, Waiting: w, Actor: mem.Actor{PD: 1}, SGE: ib.SGE{Addr: uint64(at), Length: 8, LKey: r.Key()}, N: 8}
		copy(l.Data[:], fmt.Sprintf("%08d", id))
		l.Failed = func(f mem.Fault) uint16 { return uint16(f.Kind) }
		return l
	}
}

// Taker is not called while the caller of PollNotes has not yet stored what it got: not even for
// a completion that is pushed before PollNotes returns.
func TestCQHold(t *testing.T) {
	_, late, region := memory(t, 8)
	c := NewCQ(8)
	var taken []uint64
	c.Taker = func(wc *ib.WC, _ *Note) bool { taken = append(taken, wc.ID); return true }
	l := late(0, 1)
	l.Failed = func(mem.Fault) uint16 { push(c, 2, 0); return 9 }
	c.PushInline(&ib.WC{ID: 1}, false, l)
	region.Close()
	wcs, notes := make([]ib.WC, 1), make([]Note, 1)
	if n := c.PollNotes(wcs, notes); n != 1 || wcs[0].ID != 1 || wcs[0].VendorErr != 9 {
		t.Errorf("%d, %+v", n, wcs)
	}
	if n := c.PollNotes(wcs, notes); n != 1 || wcs[0].ID != 2 || len(taken) != 0 {
		t.Errorf("%d, %+v, taken %v", n, wcs, taken)
	}
	push(c, 3, 0)
	if n := c.PollNotes(wcs, notes); n != 1 || wcs[0].ID != 3 || len(taken) != 0 {
		t.Errorf("%d, %+v, taken %v", n, wcs, taken)
	}
	c.Hold(false)
	if n := c.PollNotes(wcs, notes); n != 0 {
		t.Errorf("%d, %+v", n, wcs)
	}
	push(c, 4, 0)
	c.Hold(true)
	push(c, 5, 0)
	if len(taken) != 1 || taken[0] != 4 || c.Len() != 1 {
		t.Errorf("taken %v, %d wait", taken, c.Len())
	}
}

// A poll returns the completions before one for whose inline data pages have to be fetched. The
// first poll that finds that one in front fetches them, and other polls wait meanwhile:
// completions behind it do not overtake it.
func TestLateAbsent(t *testing.T) {
	fetching, goOn := make(chan bool), make(chan bool)
	a, b, late := absentMemory(t, func() bool { fetching <- true; return <-goOn })
	c, w := NewCQ(8), new(Waiting)
	push(c, 1, 1)
	c.PushInlineSend(&ib.WC{ID: 2}, new(Freed), 1, late(0, 2, w))
	push(c, 3, 1)
	if got := poll(c, 8); fmt.Sprint(got) != "[1]" || a.fetches.Load() != 0 {
		t.Fatalf("%v, %d fetches", got, a.fetches.Load())
	}
	polled := make(chan []uint64)
	one := func() { polled <- poll(c, 1) }
	go one()
	<-fetching
	go one()
	// While a poll fetches, the inline data may be written back, or the completions of the
	// queue pair removed.
	if f := c.WriteBack(w); f.Kind != mem.FaultPending || w.None() {
		t.Fatalf("%v", f)
	}
	if n := c.Len(); n != 2 {
		t.Fatalf("%d completions while the first is fetched", n)
	}
	a.there.Store(true)
	if f := c.WriteBack(w); !f.OK() || !w.None() || string(b[:8]) != "00000002" {
		t.Fatalf("%v, %q", f, b)
	}
	goOn <- false
	if x, y := <-polled, <-polled; len(x) != 1 || len(y) != 1 || x[0]+y[0] != 5 || a.fetches.Load() != 1 {
		t.Fatalf("%v and %v", x, y)
	}
	c.PushInline(&ib.WC{ID: 4, QPN: 4}, false, late(8, 4, w))
	push(c, 5, 5)
	go one()
	<-fetching
	c.Remove(4)
	goOn <- true
	if got := <-polled; fmt.Sprint(got) != "[5]" || !w.None() || b[8] != 0 {
		t.Fatalf("%v, %q", got, b)
	}
}

// If the pages are gone again after every fetch, the inline data are given up, however many
// goroutines poll.
func TestLateNeverThere(t *testing.T) {
	a, _, late := absentMemory(t, func() bool { return false })
	c := NewCQ(8)
	c.PushInline(&ib.WC{ID: 1}, false, late(0, 1, new(Waiting)))
	var got atomic.Int32
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			var wcs [1]ib.WC
			for got.Load() == 0 {
				if c.Poll(wcs[:]) == 1 {
					got.Add(1)
					if wcs[0].Status != ib.WCLocProtErr || wcs[0].VendorErr != uint16(mem.FaultPending) {
						t.Errorf("%+v", wcs[0])
					}
				}
			}
		})
	}
	wg.Wait()
	if n := a.fetches.Load(); n != maxFetches || got.Load() != 1 {
		t.Errorf("%d fetches, %d completions", n, got.Load())
	}
}

// WriteBack writes the inline data of one Waiting list, in their order, and no others; it does
// not look through what other queue pairs have in the queue. Inline data that it could not write
// fail the poll of their completion, even if they could be written by then.
func TestWriteBack(t *testing.T) {
	b, late, _ := memory(t, 80)
	c := NewCQ(100)
	var ours, others Waiting
	add := func(w *Waiting, at, id int) {
		l := late(at, id)
		l.Waiting = w
		c.PushInline(&ib.WC{ID: uint64(id)}, false, l)
	}
	for i := range 10 {
		add(&others, 8, i)
		add(&ours, 0, 100+i) // all at one place: the last one stays
		push(c, 50, 1)
	}
	if f := c.WriteBack(&ours); !f.OK() || string(b[:16]) != "00000109"+string(make([]byte, 8)) || !ours.None() || others.None() {
		t.Fatalf("%v, %q", f, b[:16])
	}
	copy(b, "a program")
	if got := poll(c, 6); len(got) != 6 || string(b[:8]) != "a progra" || string(b[8:16]) != "00000001" {
		t.Fatalf("%v, %q: written twice", got, b[:16])
	}
	c.Resize(60)
	add(&ours, 16, 200)
	if f := c.WriteBack(&others); !f.OK() || string(b[8:16]) != "00000009" || b[16] != 0 {
		t.Fatalf("%v, %q", f, b[:24])
	}
	if got := poll(c, 100); len(got) != 25 || string(b[16:24]) != "00000200" || !ours.None() {
		t.Fatalf("%v, %q", got, b[:24])
	}
	if len(c.inline) > 20 {
		t.Errorf("%d places for 20", len(c.inline))
	}

	a, _, late2 := absentMemory(t, func() bool { return true })
	bad := late2(60, 1, &ours) // beyond the end
	a.there.Store(true)
	c.PushInline(&ib.WC{ID: 7}, false, bad)
	if f := c.WriteBack(&ours); f.Kind != mem.FaultBounds {
		t.Fatal(f)
	}
	var wcs [2]ib.WC
	if n := c.Poll(wcs[:]); n != 1 || wcs[0].Status != ib.WCLocProtErr || wcs[0].VendorErr != uint16(mem.FaultBounds) || !ours.None() {
		t.Fatalf("%+v", wcs[0])
	}
}

// After a poll that returns nothing because memory is suspended, an armed queue raises its event
// when the memory is open again: a program that waits for the event wakes up.
func TestSuspendedRaisesEvent(t *testing.T) {
	for _, earlier := range []bool{false, true} {
		c := NewCQ(4)
		events := make(chan struct{}, 4)
		c.OnEvent = func() { events <- struct{}{} }
		if earlier {
			c.Earlier = func(uint32, bool) bool { return false }
		}
		table := mem.NewTable(mem.TableConfig{})
		b := make([]byte, 64)
		h, err := mem.NewHostBytes(b, ib.AccessLocalWrite, ib.LockOff)
		if err != nil {
			t.Fatal(err)
		}
		r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Length: 64, Backing: h})
		if err != nil {
			t.Fatal(err)
		}
		c.Arm(false)
		var waiting Waiting
		l := InlineData{Table: table, Actor: mem.Actor{PD: 1}, SGE: ib.SGE{Length: 8, LKey: r.Key()}, Waiting: &waiting, N: 8}
		copy(l.Data[:], "8 bytes.")
		if !r.Suspend() {
			t.Fatal("not suspended")
		}
		c.PushInline(&ib.WC{ID: 5}, false, &l)
		<-events
		var wc [1]ib.WC
		c.Arm(false)
		if n := c.Poll(wc[:]); n != 0 {
			t.Fatalf("%d completions", n)
		}
		c.Arm(false) // as a program does whose poll found nothing after an event
		select {
		case <-events:
			t.Fatal("an event though nothing can be had")
		default:
		}
		r.Resume()
		<-events
		if n := c.Poll(wc[:]); n != 1 || wc[0].ID != 5 || string(b[:8]) != "8 bytes." {
			t.Fatalf("%d completions, %+v, %q", n, wc[0], b[:8])
		}
		// End does not wait for memory that is suspended.
		if !r.Suspend() {
			t.Fatal("not suspended")
		}
		c.PushInline(&ib.WC{ID: 6}, false, &l)
		c.Poll(wc[:])
		c.End()
		c.End()
		r.Resume()
	}
}
