//go:build cgo

package sys

// Tests of accesses that are bracketed by Enter and Leave. The unsafe code uses memory
// that the test has mapped and unmaps itself.

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys/closetest"
)

// changes are the ways to change watched memory that wait for accesses.
var changes = []struct {
	name string
	do   func(a uintptr) error
}{
	{"munmap", func(a uintptr) error {
		_, _, e := unix.Syscall(unix.SYS_MUNMAP, a, pageSize, 0)
		return errnoOrNil(0, 0, e)
	}},
	{"MADV_DONTNEED", func(a uintptr) error { return madvise(a, a+pageSize, unix.MADV_DONTNEED) }},
	{"MADV_FREE", func(a uintptr) error { return madvise(a, a+pageSize, unix.MADV_FREE) }},
	{"mmap over it, closed", func(a uintptr) error {
		closed, err := closetest.MapOver(a, a+pageSize)
		if err == nil && !closed {
			return errors.New("not closed")
		}
		return err
	}},
}

// TestNotifierAccess: while an access is under way no change of watched memory returns;
// Enter lets no other access in until the announced change is applied.
func TestNotifierAccess(t *testing.T) {
	n := openTestNotifier(t)
	for _, c := range changes {
		t.Run(c.name, func(t *testing.T) {
			a := mapPages(t, 4, readWrite, unix.MAP_PRIVATE)
			if err := n.Watch(a, a+4*pageSize); err != nil {
				t.Fatal(err)
			}
			takeAll(t, n)
			before := n.Overruns()
			if !n.Enter(3) {
				t.Fatal("refused, and nothing has changed")
			}
			var left atomic.Bool
			returned := make(chan bool)
			go func() {
				if err := c.do(a + pageSize); err != nil {
					t.Error(err)
				}
				returned <- left.Load()
			}()
			for !n.Changed() {
				runtime.Gosched()
			}
			for _, shard := range []uint32{3, 4, 1 << 31} {
				if n.Enter(shard) {
					t.Errorf("shard %d is let in while a change is announced", shard)
					n.Leave(shard)
				}
			}
			select { // it must not return; a wrong one does so in microseconds
			case <-returned:
				t.Fatal("it has returned while an access was under way")
			case <-time.After(5 * time.Millisecond):
			}
			left.Store(true)
			n.Leave(3)
			if !<-returned {
				t.Error("it has returned before the access was over")
			}
			if got, lost := takeAll(t, n); len(got) == 0 || lost {
				t.Errorf("told: %v, lost %v", got, lost)
			}
			if !n.Enter(3) {
				t.Fatal("refused after all was applied")
			}
			n.Leave(3)
			if got := n.Overruns() - before; got != 0 {
				t.Errorf("%d overruns", got)
			}
		})
	}
}

// TestNotifierOverrun: an access that does not end is waited for for a while, which is
// counted.
func TestNotifierOverrun(t *testing.T) {
	n := openTestNotifier(t)
	for i, c := range changes {
		const more = 5
		a := mapPages(t, 1+more+2, readWrite, unix.MAP_PRIVATE)
		if err := n.Watch(a, a+(1+more+2)*pageSize); err != nil {
			t.Fatal(err)
		}
		takeAll(t, n)
		before := n.Overruns()
		if !n.Enter(uint32(i)) {
			t.Fatal("refused")
		}
		began := time.Now()
		if err := c.do(a); err != nil {
			t.Error(c.name, err)
		}
		// Mapping over it, closed, also raises an event of the kernel, for which the thread
		// does not wait a second time.
		if took := time.Since(began); took < 90*time.Millisecond {
			t.Errorf("%s: it took %v", c.name, took)
		}
		// The same access is not waited for again; that it goes on is counted all the same.
		// (Any one of them may take long on a busy machine, but not all of them.)
		shortest := time.Hour
		for k := range uintptr(more) {
			began = time.Now()
			if err := c.do(a + (1+k)*pageSize); err != nil {
				t.Error(c.name, err)
			}
			shortest = min(shortest, time.Since(began))
		}
		if shortest > 80*time.Millisecond {
			t.Errorf("%s: waited again, %v at least", c.name, shortest)
		}
		n.Leave(uint32(i))
		if got := n.Overruns() - before; got < 1 || got > 1+more { // the thread may read several changes at once
			t.Errorf("%s: %d overruns", c.name, got)
		}
		if _, lost := takeAll(t, n); lost {
			t.Errorf("%s: lost", c.name)
		}
	}
}

// TestNotifierClosing: when a range is closed, and which changes are reported for it.
func TestNotifierClosing(t *testing.T) {
	n := openTestNotifier(t)
	if !closetest.Offered() {
		t.Fatal("the functions are not offered")
	}
	const unit = 1 << unitBits
	// A range of units of its own, of which the middle one is watched in part. Units stay
	// noted, so it is one where no other test has been.
	noted := func(at uintptr) bool { return n.r.units[at>>unitBits/64].Load()>>(at>>unitBits%64)&1 != 0 }
	var a uintptr
	for tries := 0; a == 0 || noted(a-unit) || noted(a) || noted(a+unit); tries++ {
		if tries == 100 {
			t.Fatal("all units are noted")
		}
		area := mapPages(t, 4*unit/pageSize, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
		a = (area + 2*unit - 1) &^ (unit - 1)
	}
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, a, unit, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, ^uintptr(0), 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	p := pageSize
	if err := n.Watch(a+8*p, a+16*p); err != nil {
		t.Fatal(err)
	}
	takeAll(t, n)
	for _, c := range []struct {
		name       string
		start, end uintptr
		fail       bool
		closed     bool
		told       int // at least so many, and 0 means none
	}{
		{"the unit before", a - 2*p, a, false, false, 0},
		{"the unit behind", a + unit, a + unit + 2*p, false, false, 0},
		{"beside it, in the unit", a, a + p, false, true, 1},
		{"fails", a + 8*p, a + 9*p, true, true, 0},
		{"a part", a + 8*p, a + 9*p, false, true, 2},
		{"across three units", a - p, a + unit + p, false, true, 2},
	} {
		before := n.Closings()
		do := closetest.MapOver
		if c.fail {
			do = closetest.FailToMapOver
		}
		closed, err := do(c.start, c.end)
		if closed != c.closed || (err != nil) != c.fail || (n.Closings() != before) != c.closed {
			t.Errorf("%s: closed %v, %v, %d closings", c.name, closed, err, n.Closings()-before)
		}
		if n.Changed() != c.closed {
			t.Errorf("%s: changed %v", c.name, n.Changed())
		}
		got, lost := takeAll(t, n)
		for _, g := range got {
			if g != (MapChange{Unmapped, c.start, c.end, 0}) {
				t.Errorf("%s: %v", c.name, g)
			}
		}
		if len(got) < c.told || c.told == 0 && len(got) != 0 || lost {
			t.Errorf("%s: told %v, lost %v", c.name, got, lost)
		}
	}
	if closetest.OfferedInChild() {
		t.Error("the child of a fork would close ranges of its parent")
	}
	// More changes than there are slots: Take reports that some were lost.
	for range closedSlots + 1 {
		if _, err := closetest.MapOver(a, a+p); err != nil {
			t.Fatal(err)
		}
	}
	if got, lost := takeAll(t, n); len(got) != closedSlots || !lost || n.Changed() {
		t.Errorf("%d told, lost %v", len(got), lost)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if closed, err := closetest.MapOver(a, a+p); closed || err != nil {
		t.Errorf("without a notifier: closed %v, %v", closed, err)
	}
}

// TestNotifierTicket: tickets change before a change of mappings returns, and are not
// touched after RemoveTicket, whatever happens meanwhile.
func TestNotifierTicket(t *testing.T) {
	n := openTestNotifier(t)
	a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
	if err := n.Watch(a, a+8*pageSize); err != nil {
		t.Fatal(err)
	}
	home := mapPages(t, 1, readWrite, unix.MAP_PRIVATE)
	w := *(**atomic.Uint64)(unsafe.Pointer(&home))
	if err := n.AddTicket(w); err != nil {
		t.Fatal(err)
	}
	for i, c := range changes {
		takeAll(t, n)
		before := w.Load()
		if err := c.do(a + uintptr(i)*pageSize); err != nil {
			t.Fatal(c.name, err)
		}
		if w.Load() == before {
			t.Errorf("%s: the word has not moved", c.name)
		}
	}
	n.RemoveTicket(w)
	before := w.Load()
	if err := madvise(a+4*pageSize, a+5*pageSize, unix.MADV_DONTNEED); err != nil || w.Load() != before {
		t.Errorf("%v; the word went from %d to %d after it was removed", err, before, w.Load())
	}
	// Tickets that come and go, with their memory, while mappings change.
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if err := madvise(a+4*pageSize, a+5*pageSize, unix.MADV_DONTNEED); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	for range 2000 {
		p, err := unix.MmapPtr(-1, 0, nil, pageSize, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			t.Fatal(err)
		}
		w := (*atomic.Uint64)(p)
		if err := n.AddTicket(w); err != nil {
			t.Fatal(err)
		}
		n.RemoveTicket(w)
		if err := unix.MunmapPtr(p, pageSize); err != nil { // to touch it afterwards would end the process
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
	full := make([]atomic.Uint64, ticketSlots+1)
	for i := range full {
		if err := n.AddTicket(&full[i]); (err != nil) != (i == ticketSlots) {
			t.Errorf("ticket %d: %v", i, err)
		}
	}
	for i := range full {
		n.RemoveTicket(&full[i])
	}
	runtime.KeepAlive(full)
}

func fill(b []byte, with byte) {
	for i := range b {
		b[i] = with
	}
}

// seed is VERBENA_SEED, or another one each time; it is printed when a test fails.
func seed(t *testing.T) uint64 {
	t.Helper()
	s, err := strconv.ParseUint(os.Getenv("VERBENA_SEED"), 10, 64)
	if err != nil {
		s = rand.Uint64()
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("VERBENA_SEED=%d", s)
		}
	})
	return s
}

// victim is memory that is accessed in a loop until it is stale.
type victim struct {
	start, end uintptr
	stale      atomic.Bool
}

// victims are the consumer's side: a goroutine that finds something changed makes victims
// stale.
type victims struct {
	n   *Notifier
	mu  sync.Mutex // guards what follows, and applying
	all []*victim
	buf [16]MapChange
}

func (v *victims) settle(t *testing.T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for {
		k, lost, _ := v.n.Take(v.buf[:], true)
		if lost {
			t.Error("lost")
			return
		}
		for _, c := range v.buf[:k] {
			for _, one := range v.all {
				if c.Start < one.end && one.start < c.End {
					one.stale.Store(true)
				}
			}
		}
		if k == 0 {
			return
		}
	}
}

// TestNotifierMapOver: memory is accessed by several, as fast as they can, while it is
// mapped over, closed. Nothing is ever written to what is mapped there then, and what is
// read is never from there: except by an access that took too long, which is counted.
func TestNotifierMapOver(t *testing.T) {
	const workers, pages = 3, 4
	rng := rand.New(rand.NewPCG(seed(t), 1))
	rounds := 300
	if testing.Short() {
		rounds = 50
	}
	n := openTestNotifier(t)
	v := &victims{n: n}
	for range workers {
		a := mapPages(t, pages, readWrite, unix.MAP_PRIVATE)
		v.all = append(v.all, &victim{start: a, end: a + pages*pageSize})
	}
	peers := bytes.Repeat([]byte{0xee}, pages*int(pageSize))
	overruns := 0
	for round := range rounds {
		before := n.Overruns()
		var hits atomic.Int64
		var wg sync.WaitGroup
		var inside atomic.Int64
		for _, one := range v.all {
			if err := n.Watch(one.start, one.end); err != nil {
				t.Fatal(err)
			}
			b := bytesAt(one.start, one.end)
			fill(b, 0x11)
			v.settle(t)
			one.stale.Store(false)
			for w := range 2 {
				shard := rng.Uint32()
				wg.Go(func() {
					got := bytes.Repeat([]byte{1}, len(b))
					for !one.stale.Load() {
						if !n.Enter(shard) {
							v.settle(t)
							continue
						}
						if !one.stale.Load() {
							inside.Add(1)
							if w == 0 {
								copy(b, peers)
							} else {
								copy(got, b)
							}
						}
						n.Leave(shard)
						if bytes.IndexByte(got, 0) >= 0 {
							hits.Add(1)
							return
						}
					}
				})
			}
		}
		for inside.Load() < int64(1+rng.IntN(20)) {
			runtime.Gosched()
		}
		for _, one := range v.all {
			if closed, err := closetest.MapOver(one.start, one.end); !closed || err != nil {
				t.Fatal(closed, err)
			}
		}
		wg.Wait()
		for _, one := range v.all {
			if bytes.IndexByte(bytesAt(one.start, one.end), peers[0]) >= 0 {
				hits.Add(1)
			}
		}
		switch {
		case n.Overruns() != before:
			overruns++ // on a machine that is busy
		case hits.Load() != 0:
			t.Fatalf("round %d: what is mapped there now was written to, or read", round)
		}
	}
	if overruns > rounds/10 {
		t.Errorf("overruns in %d of %d rounds", overruns, rounds)
	}
}

// What a bracket costs the access, and what it costs a thread that unmaps: without
// accesses, and with accesses all the time.
func BenchmarkNotifierAccess(b *testing.B) {
	n := openTestNotifier(b)
	b.Run("enter, leave", func(b *testing.B) {
		for b.Loop() {
			if n.Enter(7) {
				n.Leave(7)
			}
		}
	})
	a := mapPages(b, 2, readWrite, unix.MAP_PRIVATE)
	if err := n.Watch(a, a+2*pageSize); err != nil {
		b.Fatal(err)
	}
	buf := make([]MapChange, 16)
	var taking sync.Mutex
	apply := func() {
		taking.Lock()
		for k := 1; k != 0; {
			k, _, _ = n.Take(buf, true)
		}
		taking.Unlock()
	}
	for _, size := range []int{0, 64, 4096, 256 << 10} {
		b.Run("discard beside copies of "+strconv.Itoa(size), func(b *testing.B) {
			var wg sync.WaitGroup
			var stop atomic.Bool
			if size > 0 {
				wg.Go(func() {
					from, to := make([]byte, size), make([]byte, size)
					for !stop.Load() {
						if !n.Enter(1) {
							apply()
							continue
						}
						copy(to, from)
						n.Leave(1)
					}
				})
			}
			longest := time.Duration(0)
			for b.Loop() {
				began := time.Now()
				madvise(a, a+2*pageSize, unix.MADV_DONTNEED)
				longest = max(longest, time.Since(began))
				apply()
			}
			stop.Store(true)
			wg.Wait()
			b.ReportMetric(float64(longest.Microseconds()), "longest-µs")
		})
	}
	b.Run("map over, closed", func(b *testing.B) {
		for b.Loop() {
			if _, err := closetest.MapOver(a, a+pageSize); err != nil {
				b.Fatal(err)
			}
			apply()
		}
	})
}
