package mem_test

// The ends of on-demand regions: closing with faults, sweeps and prefetches under
// way, and what is left afterwards.

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// lasting is how long a test of endurance runs.
func lasting(short, long time.Duration) time.Duration {
	if os.Getenv("VERBENA_FULL") != "" {
		return long
	}
	return short
}

func mustBeWatched(t *testing.T, addr uintptr, want bool) {
	t.Helper()
	if got, err := mem.Watched(addr); err != nil || got != want {
		t.Fatalf("%#x is watched: %v (%v), want %v", addr, got, err, want)
	}
}

// on makes another region on the same table.
func (o *odp) on(addr uintptr, n uint64) *odp {
	o.tb.Helper()
	other := &odp{tb: o.tb, table: o.table, addr: addr, size: n}
	var err error
	if other.backing, err = mem.NewOnDemand(addr, n, odpAccess, o.table.Paging()); err != nil {
		o.tb.Fatal(err)
	}
	other.region, err = o.table.Register(mem.RegionConfig{PD: 1, Access: odpAccess, IOVA: uint64(addr), Length: n, Backing: other.backing})
	if err != nil {
		o.tb.Fatal(err)
	}
	return other
}

// The kernel reports changes of memory while a region that has it is open, and no
// longer.
func TestOnDemandWatches(t *testing.T) {
	needNotifier(t)
	const n = 8 << 20
	o := newODP(t, 2*n)
	o.mapAt(0, 2*n, readWrite, anonPages, -1)
	half, rest := o.on(o.addr, n), o.on(o.addr+n, n)
	mustBeWatched(t, o.addr, false)
	half.mustWrite(0, pattern(64, 1))
	mustBeWatched(t, o.addr, true)
	mustBeWatched(t, o.addr+n/2, false) // not more than a unit
	rest.mustWrite(0, pattern(64, 1))
	o.mustWrite(n-page, pattern(page, 1)) // another region, another part of the first
	if err := half.region.Close(); err != nil {
		t.Fatal(err)
	}
	mustBeWatched(t, o.addr, true) // the large region has it, too
	mustBeWatched(t, o.addr+n-page, true)
	if err := o.region.Close(); err != nil {
		t.Fatal(err)
	}
	mustBeWatched(t, o.addr, false)
	mustBeWatched(t, o.addr+n-page, false)
	mustBeWatched(t, o.addr+n, true)
	if err := rest.region.Close(); err != nil {
		t.Fatal(err)
	}
	mustBeWatched(t, o.addr+n, false)
}

// A region that had the whole address space takes nothing from the others when it
// is closed, nor they from it; and closing does not take time by size.
func TestOnDemandWatchesImplicit(t *testing.T) {
	needNotifier(t)
	const n = 1 << 42
	o := newODP(t, n)
	o.mapAt(0, n, readWrite, anonPages, -1)
	all := implicitOver(o)
	o.mustWrite(0, pattern(64, 1))
	all.mustWrite(n/2, pattern(64, 2))
	for range 20 {
		huge := o.on(o.addr, n)
		huge.mustWrite(n/4, pattern(64, 3))
		if err := huge.region.Close(); err != nil {
			t.Fatal(err)
		}
	}
	mustBeWatched(t, o.addr+n/4, true) // both that are left have it
	if err := all.region.Close(); err != nil {
		t.Fatal(err)
	}
	mustBeWatched(t, o.addr, true)
	if err := o.region.Close(); err != nil {
		t.Fatal(err)
	}
	for _, off := range []uintptr{0, n / 4, n / 2} {
		mustBeWatched(t, o.addr+off, false)
	}
}

// implicitOver is the whole address space, looked at as if it were another
// region's part of it.
func implicitOver(o *odp) *odp {
	o.tb.Helper()
	all := &odp{tb: o.tb, table: o.table, addr: o.addr, size: o.size}
	var err error
	if all.backing, err = mem.NewImplicit(odpAccess, o.table.Paging()); err != nil {
		o.tb.Fatal(err)
	}
	all.region, err = o.table.Register(mem.RegionConfig{PD: 1, Access: odpAccess, Length: all.backing.Len(), Backing: all.backing})
	if err != nil {
		o.tb.Fatal(err)
	}
	return all
}

// An Await that is under way when the region is closed does no harm, and is counted: the
// pages that it has brought in are in no table, and the kernel does not watch them.
func TestOnDemandAwaitAfterClose(t *testing.T) {
	needNotifier(t)
	const n = 16 * page
	o := newODP(t, n)
	o.mapAt(0, n, readWrite, anonPages, -1)
	r := o.on(o.addr, n)
	r.mustWrite(0, pattern(64, 1))
	if err := r.region.Close(); err != nil {
		t.Fatal(err)
	}
	before := o.table.Paging().Stats()
	if kind := r.backing.Await(4*page, 4*page, ib.AccessRemoteWrite); kind != mem.FaultNone {
		t.Errorf("after Close: %v", kind)
	}
	mustBeWatched(t, o.addr, false)
	if got := o.table.Paging().Stats().MRsNotFound - before.MRsNotFound; got != 1 {
		t.Errorf("%d regions were not found, want 1", got)
	}
	if got := r.prefetch(0, n, false, false); got != mem.FaultDead {
		t.Errorf("Prefetch after Close: %v", got)
	}
	heap := make([]byte, 4*page)
	b, err := mem.NewOnDemandBytes(heap, odpAccess, o.table.Paging())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	b.Run(0, 1, 0)
	wg.Go(func() { b.Await(0, 4*page, ib.AccessRemoteWrite) })
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
}

// Regions are closed while others access them, wait for them, prefetch, sweep and
// ask for counters. Nothing of them is left.
func TestOnDemandCloseRace(t *testing.T) {
	needNotifier(t)
	const n = 64 * page
	o := newODP(t, n) // holds the counters
	o.mapAt(0, n, readWrite, anonPages, -1)
	rounds := 60
	if os.Getenv("VERBENA_FULL") != "" {
		rounds = 500
	}
	for round := range rounds {
		r := o.on(o.addr, n)
		var stop atomic.Bool
		var dead atomic.Int64
		var wg sync.WaitGroup
		run := func(do func(i uint64) mem.FaultKind) {
			wg.Go(func() {
				for i := uint64(round); !stop.Load(); i++ {
					switch kind := do(i); kind {
					case mem.FaultNone, mem.FaultPending:
					case mem.FaultDead, mem.FaultKey:
						dead.Add(1)
						return
					default:
						t.Errorf("%v", kind)
						return
					}
				}
			})
		}
		run(func(i uint64) mem.FaultKind { return r.write(i%60*page, pattern(100, byte(i))).Kind })
		run(func(i uint64) mem.FaultKind { _, f := r.read(i%60*page, 100); return f.Kind })
		run(func(i uint64) mem.FaultKind {
			return r.prefetch(i%32*page, 32*page, i%2 == 0, i%3 == 0)
		})
		wg.Go(func() {
			for i := uint64(0); !stop.Load(); i++ {
				r.backing.Await(i%32*page, 16*page, ib.AccessRemoteWrite)
			}
		})
		wg.Go(func() {
			for !stop.Load() {
				unix.Syscall(unix.SYS_MADVISE, o.addr, n, unix.MADV_DONTNEED)
				mem.Sweep()
				r.backing.Stats()
				r.backing.Present()
			}
		})
		time.Sleep(time.Duration(round%5) * 200 * time.Microsecond)
		if err := r.region.Close(); err != nil {
			t.Fatal(err)
		}
		for dead.Load() < 3 && !t.Failed() {
			time.Sleep(50 * time.Microsecond)
		}
		stop.Store(true)
		wg.Wait()
		if t.Failed() {
			return
		}
		mustBeWatched(t, o.addr, false)
	}
	if s := o.table.Paging().Stats(); s.MRs != 1 || s.MRPages != n/page {
		t.Errorf("%+v: want one region of %d pages", s, n/page)
	}
}

// Changes of mappings that a region has nothing to do with do not make its faults
// begin again, though it has the whole address space.
func TestOnDemandUndisturbed(t *testing.T) {
	needNotifier(t)
	const n = 32 << 20
	o := newODP(t, n)
	o.mapAt(0, n, readWrite, anonPages, -1)
	all := implicitOver(o)
	defer func() {
		if err := all.region.Close(); err != nil {
			t.Error(err)
		}
	}()
	// Not more than are remembered during one fault, however long that is made to
	// wait for the processor.
	turn := make(chan struct{}, 32)
	var wg sync.WaitGroup
	all.mustWrite(n-page, pattern(8, 1))
	wg.Go(func() {
		for range turn {
			for range 4 {
				unix.Syscall(unix.SYS_MADVISE, o.addr+n-page, page, unix.MADV_DONTNEED)
			}
		}
	})
	for off := uint64(0); off < n/2; off += page {
		turn <- struct{}{}
		all.mustWrite(off, pattern(8, byte(off)))
	}
	close(turn)
	wg.Wait()
	s := all.backing.Stats()
	if s.Contentions != 0 {
		t.Errorf("%d contentions of faults with changes elsewhere", s.Contentions)
	}
	if want := uint64(n/2/page + 1); s.PageFaults != want || s.PageFaultPages != want || s.Invalidations != 1 {
		t.Errorf("%+v, want %d faults of a page each and one invalidation", s, want)
	}
}

// A program that ends its threads leaves none of ours: there is one, for all
// regions there ever were.
func TestNotifierThreads(t *testing.T) {
	needNotifier(t)
	for range 3 {
		o := newODP(t, page)
		o.mapAt(0, page, readWrite, anonPages, -1)
		o.mustWrite(0, pattern(8, 1))
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, task := range tasks {
		name, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%s/comm", task.Name()))
		if err == nil && string(name) == "verbena-notify\n" {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d threads of the notifier", n)
	}
}

// Behind the end of a file there are no pages, though MayBlock takes them for pages that
// have to be read from the disk: after an Await that has failed, the access ends in a fault.
func TestOnDemandBehindEnd(t *testing.T) {
	name := t.TempDir() + "/file"
	if err := os.WriteFile(name, pattern(page+100, 1), 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	const n = 8 * page
	o := newODP(t, n)
	o.mapAt(0, n, readWrite, unix.MAP_SHARED, fd)
	for _, off := range []uint64{2 * page, 5 * page, 0, page} {
		b := make([]byte, 2*page)
		l := mem.List{Table: o.table, Actor: mem.Actor{PD: 1}, Access: ib.AccessRemoteRead,
			SGEs: []ib.SGE{{Addr: uint64(o.addr) + off, Length: uint32(len(b)), LKey: o.region.Key()}}}
		want := mem.FaultNone
		if off > 0 {
			want = mem.FaultUnmapped
		}
		// As queue pairs do: whatever came of the waiting, the access is tried again.
		f := mem.Fault{Kind: mem.FaultPending}
		for tries := 0; f.Kind == mem.FaultPending; tries++ {
			if f.Await(); tries == 10 {
				t.Fatalf("%d: it always has to be fetched first", off)
			}
			f, _ = mem.Copy(&mem.List{Raw: [][]byte{b}}, &l, uint64(len(b)), false)
		}
		if f.Kind != want {
			t.Errorf("%d: %v, want %v", off, f, want)
		}
	}
	// When the file has grown, it is there.
	if err := unix.Ftruncate(fd, n); err != nil {
		t.Fatal(err)
	}
	o.mustRead(5*page, make([]byte, page))
	o.mustWrite(5*page, pattern(page, 2))
}
