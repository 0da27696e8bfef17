package queue

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
)

// poll takes up to n completions and returns their IDs.
func poll(c *CQ, n int) (ids []uint64) {
	wcs := make([]ib.WC, n)
	for _, wc := range wcs[:c.Poll(wcs)] {
		ids = append(ids, wc.ID)
	}
	return ids
}

func push(c *CQ, id uint64, qpn uint32) bool { return c.Push(&ib.WC{ID: id, QPN: qpn}, false) }

// TestCQModel: pushing, polling, resizing and removing at random, against a
// plain list. First in, first out, also around the end of the ring.
func TestCQModel(t *testing.T) {
	for seed := range uint64(50) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			size := 1 + rng.IntN(9)
			c := NewCQ(size)
			var model []ib.WC
			id := uint64(0)
			for step := range 2000 {
				switch k := rng.IntN(20); {
				case k < 9:
					wc := ib.WC{ID: id, QPN: rng.Uint32N(3), ByteLen: rng.Uint32()}
					id++
					if len(model) == size {
						continue // it would overflow: see TestCQOverflow
					}
					if !c.Push(&wc, false) {
						t.Fatalf("step %d: refused with %d of %d entries", step, len(model), size)
					}
					model = append(model, wc)
				case k < 17:
					out := make([]ib.WC, rng.IntN(5))
					n := c.Poll(out)
					if n != min(len(out), len(model)) || !slices.Equal(out[:n], model[:n]) {
						t.Fatalf("step %d: polled %+v of %+v", step, out[:n], model)
					}
					model = model[n:]
				case k < 18:
					to := 1 + rng.IntN(9)
					ok := c.Resize(to)
					if ok != (to >= len(model)) {
						t.Fatalf("step %d: resize to %d with %d entries: %v", step, to, len(model), ok)
					}
					if ok {
						size = to
					}
				default:
					qpn := rng.Uint32N(4)
					c.Remove(qpn)
					model = slices.DeleteFunc(slices.Clone(model), func(wc ib.WC) bool { return wc.QPN == qpn })
				}
				if c.Cap() != size || c.Len() != len(model) || c.Overflowed() {
					t.Fatalf("step %d: cap %d, len %d, overflowed %v; the model has %d of %d", step, c.Cap(), c.Len(), c.Overflowed(), len(model), size)
				}
			}
			if got := poll(c, size+1); len(got) != len(model) {
				t.Fatalf("%d entries are left, the model has %d", len(got), len(model))
			}
		})
	}
}

// TestCQOverflow: what does not fit is lost, the event comes once, what is there
// can still be polled, and nothing mends the queue (IBA 10.10.2.3).
func TestCQOverflow(t *testing.T) {
	c := NewCQ(2)
	events := 0
	c.OnOverflow = func() {
		events++
		_ = c.Cap() // no lock is held
	}
	if !push(c, 1, 1) || !push(c, 2, 1) || c.Overflowed() || events != 0 {
		t.Fatal("refused too early")
	}
	for range 3 {
		if push(c, 3, 1) || !c.Overflowed() || events != 1 {
			t.Fatalf("overflowed %v, %d events", c.Overflowed(), events)
		}
	}
	if got := poll(c, 4); !slices.Equal(got, []uint64{1, 2}) {
		t.Errorf("polled %v", got)
	}
	if push(c, 4, 1) || c.PushSend(&ib.WC{ID: 5}, new(Freed), 1) || c.Len() != 0 {
		t.Error("it takes completions again")
	}
	if c.Resize(10); push(c, 6, 1) {
		t.Error("resizing has mended it")
	}
	c = NewCQ(1) // without OnOverflow
	push(c, 1, 1)
	push(c, 2, 1)
}

// TestCQArm: which completions raise the event of a queue that is armed in which
// way (IBA 11.4.2.2).
func TestCQArm(t *testing.T) {
	const next, solicited = false, true
	const (
		plain = iota
		marked
		failed
	)
	for _, c := range []struct {
		name string
		arm  []bool
		what []int
		want []int // events after each
	}{
		{"not armed", nil, []int{plain, marked, failed}, []int{0, 0, 0}},
		{"next", []bool{next}, []int{plain, plain, marked}, []int{1, 1, 1}},
		{"solicited, plain", []bool{solicited}, []int{plain, plain, marked, marked}, []int{0, 0, 1, 1}},
		{"solicited, failed", []bool{solicited}, []int{plain, failed, failed}, []int{0, 1, 1}},
		{"next is not weakened", []bool{next, solicited}, []int{plain, marked}, []int{1, 1}},
		{"solicited is strengthened", []bool{solicited, next}, []int{plain, marked}, []int{1, 1}},
		{"twice is once", []bool{next, next}, []int{plain, plain}, []int{1, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cq := NewCQ(8)
			events := 0
			cq.OnEvent = func() {
				events++
				_ = cq.Cap() // no lock is held
			}
			push(cq, 100, 1) // what is there already raises nothing
			for _, a := range c.arm {
				cq.Arm(a)
			}
			for i, what := range c.what {
				wc := ib.WC{ID: uint64(i)}
				if what == failed {
					wc.Status = ib.WCWRFlushErr
				}
				if !cq.Push(&wc, what == marked) {
					t.Fatal("refused")
				}
				if events != c.want[i] {
					t.Errorf("%d events after completion %d", events, i)
				}
			}
			// It can be armed again, and resizing keeps it armed.
			cq.Arm(next)
			before := events
			if !cq.Resize(16) {
				t.Fatal("resize")
			}
			push(cq, 200, 1)
			if events != before+1 {
				t.Errorf("%d events instead of %d after arming again", events, before+1)
			}
		})
	}
	cq := NewCQ(1) // without OnEvent
	cq.Arm(next)
	push(cq, 1, 1)
}

// TestCQArmEarlier: with Earlier, arming raises the event of the first completion that is
// there and has raised none: whether Taker took it, PollNotes has just returned it, or it is in
// the queue.
func TestCQArmEarlier(t *testing.T) {
	const next, solicited = false, true
	for _, c := range []struct {
		name string
		what string // completions: p(lain), s(olicited), f(ailed); n and o arm for the next or the solicited ones
		want []uint32
	}{
		{"nothing there", "np", []uint32{1}},
		{"one there", "pnp", []uint32{1, 0}},
		{"the first of several", "ppn", []uint32{1, 0}},
		{"each arming the next one", "ppnnn", []uint32{1, 2}},
		{"its own event was before", "npn", []uint32{1}},
		{"behind one that had its event", "nppn", []uint32{1, 2}},
		{"plain for solicited", "ppo", []uint32{0, 0}},
		{"and the next solicited one", "pops", []uint32{0, 0, 1}},
		{"solicited behind plain", "pspso", []uint32{0, 1, 0, 0}},
		{"failed behind plain", "pfo", []uint32{0, 1}},
		{"solicited, then all", "pson", []uint32{2, 1}},
		{"a wider arming", "pon", []uint32{1}},
		{"an arming that stays wider", "nop", []uint32{1}},
	} {
		for _, taken := range []int{0, 1, 8} { // how many Taker takes
			t.Run(fmt.Sprintf("%s, %d taken", c.name, taken), func(t *testing.T) {
				cq, seen, events := takerCQ(8, taken)
				for i, what := range c.what {
					switch wc := (ib.WC{ID: uint64(i)}); what {
					case 'n', 'o':
						cq.Arm(what == 'o')
					case 'f':
						wc.Status = ib.WCWRFlushErr
						fallthrough
					default:
						cq.Push(&wc, what == 's')
					}
				}
				var notes [8]Note
				n := cq.PollNotes(make([]ib.WC, 8), notes[:])
				var got []uint32
				for _, e := range append(*seen, notes[:n]...) {
					got = append(got, e.Event)
				}
				if !slices.Equal(got, c.want) || *events != slices.Max(c.want) {
					t.Errorf("events %v of %d, want %v", got, *events, c.want)
				}
			})
		}
	}

	for _, how := range []bool{next, solicited} { // armed between PollNotes and Hold(false)
		cq, seen, events := takerCQ(8, 0)
		cq.Push(&ib.WC{ID: 1}, true)
		var notes [8]Note
		n := cq.PollNotes(make([]ib.WC, 8), notes[:])
		cq.Arm(how)
		if *events != 0 {
			t.Errorf("%d events when nobody can see the completion", *events)
		}
		*seen = append(*seen, notes[:n]...)
		if cq.Hold(false); *events != 1 || (*seen)[0].Event != 1 {
			t.Errorf("%d events when it is there, %v", *events, *seen)
		}
		if cq.Hold(false); *events != 1 {
			t.Errorf("%d events of one arming", *events)
		}
	}
}

// takerCQ is a queue with a taker that takes so many, and then sees no more; and its events.
func takerCQ(entries, takes int) (c *CQ, seen *[]Note, events *uint32) {
	c, seen, events = NewCQ(entries), new([]Note), new(uint32)
	c.OnEvent = func() {
		*events++
		_ = c.Cap() // no lock is held
	}
	c.Taker = func(_ *ib.WC, n *Note) bool {
		if len(*seen) == takes {
			return false
		}
		*seen = append(*seen, *n)
		return true
	}
	c.Earlier = func(event uint32, solicitedOnly bool) bool {
		i := slices.IndexFunc(*seen, func(n Note) bool { return n.Event == 0 && (n.Solicited || !solicitedOnly) })
		if i >= 0 {
			(*seen)[i].Event = event
		}
		return i >= 0
	}
	return c, seen, events
}

// Poll until there is nothing, arm, wait: with Earlier no completion is missed, though another
// goroutine polls too, and may not have stored yet what it got.
func TestCQArmEarlierConcurrent(t *testing.T) {
	const rounds = 5000
	c := NewCQ(8)
	event := make(chan struct{}, 2*rounds)
	c.OnEvent = func() { event <- struct{}{} }
	var mu sync.Mutex // guards the completions that wait to be seen
	var waiting []Note
	c.Taker = func(wc *ib.WC, n *Note) bool {
		mu.Lock()
		defer mu.Unlock()
		if wc.ID%3 == 0 {
			waiting = append(waiting, *n)
		}
		return wc.ID%3 == 0
	}
	c.Earlier = func(event uint32, _ bool) bool {
		mu.Lock()
		defer mu.Unlock()
		i := slices.IndexFunc(waiting, func(n Note) bool { return n.Event == 0 })
		if i >= 0 {
			waiting[i].Event = event
		}
		return i >= 0
	}
	var polling sync.Mutex
	poll := func() {
		polling.Lock()
		defer polling.Unlock()
		var notes [8]Note
		if n := c.PollNotes(make([]ib.WC, 8), notes[:]); n > 0 {
			runtime.Gosched() // the other goroutine may arm now,
			mu.Lock()
			waiting = append(waiting, notes[:n]...)
			mu.Unlock()
			c.Hold(false)
		}
	}
	see := func() int {
		poll()
		mu.Lock()
		defer mu.Unlock()
		n := len(waiting)
		waiting = nil
		return n
	}

	var seen atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := int64(0); i < rounds; i++ {
			push(c, uint64(i), 1)
			for seen.Load() <= i && !stop.Load() { // no later completion could make up for a missed event
				runtime.Gosched()
			}
		}
	})
	wg.Go(func() {
		for !stop.Load() {
			poll()
			runtime.Gosched()
		}
	})
	for seen.Load() < rounds {
		if n := see(); n > 0 {
			seen.Add(int64(n))
			continue
		}
		runtime.Gosched() // and the pusher push
		c.Arm(false)
		select {
		case <-event:
		case <-time.After(10 * time.Second):
			t.Errorf("no event after %d of %d", seen.Load(), rounds)
			seen.Store(rounds)
		}
	}
	stop.Store(true)
	wg.Wait()
}

// TestCQFreed: polling the completion of a send request frees the send queue up to that
// request; removing the completion does not.
func TestCQFreed(t *testing.T) {
	c := NewCQ(4)
	var freed, other Freed
	c.PushSend(&ib.WC{ID: 1, QPN: 1}, &freed, 3)
	c.PushSend(&ib.WC{ID: 2, QPN: 2}, &other, 7)
	c.PushSend(&ib.WC{ID: 3, QPN: 1}, &freed, 9)
	if freed.Load() != 0 {
		t.Fatal("freed before it was polled")
	}
	if poll(c, 1); freed.Load() != 3 || other.Load() != 0 {
		t.Errorf("freed %d, %d", freed.Load(), other.Load())
	}
	c.Resize(3)
	c.Remove(2)
	if poll(c, 4); freed.Load() != 9 || other.Load() != 0 {
		t.Errorf("freed %d, %d", freed.Load(), other.Load())
	}
}

// TestCQConcurrent: pushers and pollers at the same time; nothing is lost, and
// each pusher's completions keep their order.
func TestCQConcurrent(t *testing.T) {
	const pushers, each = 3, 2000
	c := NewCQ(pushers * each)
	var events atomic.Int64
	c.OnEvent = func() { events.Add(1) }
	var wg sync.WaitGroup
	for p := range pushers {
		wg.Go(func() {
			for i := range each {
				if !push(c, uint64(i), uint32(p)) {
					t.Error("overflow")
					return
				}
			}
		})
	}
	var mu sync.Mutex
	seen := 0
	for range 2 {
		wg.Go(func() {
			wcs := make([]ib.WC, 7)
			last := map[uint32]uint64{}
			for {
				mu.Lock()
				if seen == pushers*each {
					mu.Unlock()
					return
				}
				n := c.Poll(wcs)
				if seen += n; n == 0 {
					runtime.Gosched()
				}
				for _, wc := range wcs[:n] {
					if l, ok := last[wc.QPN]; ok && wc.ID <= l {
						t.Errorf("completion %d of %d after %d", wc.ID, wc.QPN, l)
					}
					last[wc.QPN] = wc.ID
				}
				mu.Unlock()
				c.Arm(n%2 == 0)
				c.Resize(pushers * each)
				c.Remove(99)
			}
		})
	}
	wg.Wait()
	if c.Len() != 0 || c.Overflowed() {
		t.Errorf("len %d, overflowed %v", c.Len(), c.Overflowed())
	}
}

func TestAllocs(t *testing.T) {
	c, r := NewCQ(4), NewRecv(4, 2)
	c.OnEvent = func() {}
	wc, wcs := ib.WC{ID: 1}, make([]ib.WC, 2)
	wrs := []ib.RecvWR{{ID: 1, SGL: []ib.SGE{{Length: 3}, {Length: 4}}}}
	var taken Taken
	var freed Freed
	if n := testing.AllocsPerRun(100, func() {
		c.Arm(false)
		c.Push(&wc, true)
		c.PushSend(&wc, &freed, 1)
		if c.Poll(wcs) != 2 {
			t.Fatal("poll")
		}
		if r.Post(wrs) != 1 || !r.Take(&taken) {
			t.Fatal("take")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A queue with a clock remembers when each completion was pushed, whenever it is
// polled and wherever the ring wraps.
func TestCQTimes(t *testing.T) {
	c := NewCQ(3)
	now := int64(100)
	c.Clock = func() int64 { now++; return now }
	wcs, notes := make([]ib.WC, 2), make([]Note, 2)
	for round := range int64(5) {
		push(c, 1, 1)
		push(c, 2, 1)
		now += 50
		if c.PollNotes(wcs, notes) != 2 || notes[0].At != 101+52*round || notes[1].At != 102+52*round {
			t.Errorf("round %d: %v", round, notes)
		}
	}
	push(c, 3, 1)
	if c.Poll(wcs) != 1 || wcs[0].ID != 3 {
		t.Errorf("a poll without times: %+v", wcs[0])
	}
}

// The Note of a completion that raises an event has the event's number; the others have 0.
func TestCQEventNotes(t *testing.T) {
	c := NewCQ(8)
	events := uint32(0)
	c.OnEvent = func() { events++ }
	push(c, 1, 1)
	for range 2 {
		c.Arm(false)
		push(c, 2, 1)
		push(c, 3, 1)
	}
	wcs, notes := make([]ib.WC, 8), make([]Note, 8)
	n := c.PollNotes(wcs, notes)
	var got []uint32
	for _, e := range notes[:n] {
		got = append(got, e.Event)
	}
	if want := []uint32{0, 1, 0, 2, 0}; !slices.Equal(got, want) || events != 2 {
		t.Errorf("events %v of %d, want %v of 2", got, events, want)
	}
}

// Taker gets completions while the queue is empty, in order and with their notes. A completion
// that it refuses, and those behind, wait for a poll. A completion that it takes frees the
// request's place in the send queue, and raises events as others do.
func TestCQTaker(t *testing.T) {
	c := NewCQ(4)
	var freed Freed
	var taken []uint64
	var events []uint32
	willing, fired := true, 0
	c.OnEvent = func() { fired++ }
	c.Taker = func(wc *ib.WC, n *Note) bool {
		if willing {
			taken, events = append(taken, wc.ID), append(events, n.Event)
		}
		return willing
	}
	c.PushSend(&ib.WC{ID: 1}, &freed, 7)
	if freed.Load() != 7 || c.Len() != 0 {
		t.Errorf("freed %d, %d wait", freed.Load(), c.Len())
	}
	willing = false
	c.PushSend(&ib.WC{ID: 2}, &freed, 8)
	willing = true
	c.Arm(false)
	push(c, 3, 0) // behind one that waits
	if got := poll(c, 4); !slices.Equal(got, []uint64{2, 3}) || freed.Load() != 8 || fired != 1 {
		t.Errorf("polled %v, freed %d, %d events", got, freed.Load(), fired)
	}
	c.Arm(false)
	push(c, 4, 0)
	if !slices.Equal(taken, []uint64{1, 4}) || !slices.Equal(events, []uint32{0, 2}) || fired != 2 {
		t.Errorf("taken %v with events %v, %d events", taken, events, fired)
	}
	// Taker is not called for a completion with inline data.
	c.PushInline(&ib.WC{ID: 5}, false, &InlineData{Waiting: new(Waiting)})
	if len(taken) != 2 || c.Len() != 1 {
		t.Errorf("taken %v, %d wait", taken, c.Len())
	}
	c.Remove(0)
	for id := range uint64(100) { // more than the queue has room for
		if !push(c, id, 0) {
			t.Fatalf("completion %d was refused", id)
		}
	}
}
