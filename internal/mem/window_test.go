package mem

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
)

// bound makes a region with a window bound to all of it.
func bound(t *testing.T) (*Table, *Region, *Window, *ib.MWBind) {
	t.Helper()
	table := NewTable(TableConfig{})
	h, err := NewHostBytes(make([]byte, 100), ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		t.Fatal(err)
	}
	r, err := table.Register(RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessMWBind, Length: 100, Backing: h})
	if err != nil {
		t.Fatal(err)
	}
	w, err := table.AllocWindow(1, ib.MWType1)
	if err != nil {
		t.Fatal(err)
	}
	b := &ib.MWBind{MW: w.Key(), RKey: w.NextKey(), LKey: r.Key(), Length: 100, Access: ib.AccessRemote}
	if f := table.Bind(b, true, Actor{PD: 1}); !f.OK() {
		t.Fatal(f)
	}
	return table, r, w, b
}

// Whatever ends a region waits for accesses under way through a window, and later ones
// end in a fault.
func TestWindowHoldsRegion(t *testing.T) {
	table, r, w, _ := bound(t)
	_, release, f := Hold(table, w.Key(), 0, 8, ib.AccessRemoteRead, Actor{PD: 1})
	if !f.OK() {
		t.Fatal(f)
	}
	var done atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		r.mu.Lock()
		r.killLocked(stateInvalidated) // as if a peer's invalidation had come with the bind
		r.mu.Unlock()
		done.Store(true)
	})
	for r.Alive() {
		runtime.Gosched()
	}
	time.Sleep(time.Millisecond)
	if done.Load() {
		t.Error("the region did not wait for the section on the window")
	}
	if _, _, f := Hold(table, w.Key(), 0, 8, ib.AccessRemoteRead, Actor{PD: 1}); f.Kind != FaultDead {
		t.Errorf("an access behind which the region is dead: %v", f)
	}
	release()
	wg.Wait()
	if n, m := r.state.Load()&stateCount, w.r.state.Load()&stateCount; n != 0 || m != 0 {
		t.Errorf("%d sections are open on the region, %d on the window", n, m)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

// A region that is being closed, or changed, takes no windows.
func TestNoWindowOnTakenRegion(t *testing.T) {
	table, r, w, b := bound(t)
	free := *b
	free.Length = 0
	if f := table.Bind(&free, true, Actor{PD: 1}); !f.OK() {
		t.Fatal(f)
	}
	if err := r.takeLocked("test"); err != nil {
		t.Fatal(err)
	}
	if f := table.Bind(b, true, Actor{PD: 1}); f.Kind != FaultDead || r.bound.Load() != taken {
		t.Errorf("%v, %d windows", f, r.bound.Load())
	}
	r.giveLocked()
	if f := table.Bind(b, true, Actor{PD: 1}); !f.OK() || r.bound.Load() != 1 {
		t.Errorf("%v, %d windows", f, r.bound.Load())
	}
	if err := w.Close(); err != nil || r.bound.Load() != 0 {
		t.Errorf("%v, %d windows", err, r.bound.Load())
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

// Windows come and go while the region is closed, again and again: either the
// window is bound and the region stays, or the region goes and the bind fails.
func TestBindAgainstClose(t *testing.T) {
	table := NewTable(TableConfig{})
	who := Actor{PD: 1}
	w, err := table.AllocWindow(1, ib.MWType1)
	if err != nil {
		t.Fatal(err)
	}
	seen := [2]int{}
	for round := 0; round < 3000; round++ {
		h, err := NewHostBytes(make([]byte, 8), ib.AccessLocalWrite, ib.LockOff)
		if err != nil {
			t.Fatal(err)
		}
		r, err := table.Register(RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessMWBind, Length: 8, Backing: h})
		if err != nil {
			t.Fatal(err)
		}
		b := &ib.MWBind{MW: w.Key(), RKey: w.NextKey(), LKey: r.Key(), Length: 8, Access: ib.AccessRemote}
		var f Fault
		var wg sync.WaitGroup
		wg.Go(func() { f = table.Bind(b, true, who) })
		if round%2 == 0 {
			runtime.Gosched()
		}
		closeErr := r.Close()
		wg.Wait()
		if f.OK() == (closeErr == nil) {
			t.Fatalf("round %d: the bind says %v, the region %v", round, f, closeErr)
		}
		if f.OK() {
			seen[0]++
			b.Length = 0
			if f := table.Bind(b, true, who); !f.OK() {
				t.Fatal(f)
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
		} else {
			seen[1]++
		}
	}
	t.Logf("the window was first %d times, the region %d times", seen[0], seen[1])
	if err := w.Close(); err != nil || table.Len() != 0 {
		t.Fatalf("%v, %d are left", err, table.Len())
	}
}

// A peer invalidates a key while the program does so itself and binds the window
// anew: the peer does not have the new key, and does it no harm.
func TestInvalidateOldKey(t *testing.T) {
	table, r, old, _ := bound(t)
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	w, err := table.AllocWindow(1, ib.MWType2)
	if err != nil {
		t.Fatal(err)
	}
	who := Actor{PD: 1, QPN: 7}
	b := ib.MWBind{MW: w.Key(), RKey: w.Key(), LKey: r.Key(), Length: 100, Access: ib.AccessRemote}
	for round := range 20000 {
		key := b.RKey
		if f := table.Bind(&b, false, who); !f.OK() {
			t.Fatal(f)
		}
		var wg sync.WaitGroup
		wg.Go(func() { table.Invalidate(key, who) }) // too late perhaps, and then a fault
		if round%2 == 0 {
			runtime.Gosched()
		}
		if f := table.InvalidateOwn(key, who); !f.OK() {
			t.Fatal(f)
		}
		b.RKey = w.r.after(key)
		if f := table.Bind(&b, false, who); !f.OK() {
			t.Fatal(f)
		}
		wg.Wait()
		_, release, f := Hold(table, b.RKey, 0, 8, ib.AccessRemoteRead, who)
		if !f.OK() {
			t.Fatalf("round %d: the new key is dead too: %v", round, f)
		}
		release()
		if f := table.InvalidateOwn(b.RKey, who); !f.OK() {
			t.Fatal(f)
		}
		b.RKey = w.r.after(b.RKey)
	}
}

// far is memory that always has to be fetched first, and notes how much of it was.
type far struct {
	*Host
	off, n uint64
}

func (*far) Run(uint64, uint64, ib.Access) ([]byte, FaultKind) { return nil, FaultPending }

func (*far) Gone(uint64, uint64, ib.Access) FaultKind { return FaultPending }

func (m *far) Await(off, n uint64, _ ib.Access) FaultKind {
	m.off, m.n = off, n
	return FaultNone
}

// What is fetched ahead ends with the window, wherever in the region that lies.
func TestFetchAheadInWindow(t *testing.T) {
	h, err := NewHostBytes(make([]byte, 1000), ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		t.Fatal(err)
	}
	table, m, who := NewTable(TableConfig{}), &far{Host: h}, Actor{PD: 1}
	r, err := table.Register(RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessMWBind, Length: 1000, Backing: m})
	if err != nil {
		t.Fatal(err)
	}
	w, err := table.AllocWindow(1, ib.MWType1)
	if err != nil {
		t.Fatal(err)
	}
	if f := table.Bind(&ib.MWBind{MW: w.Key(), RKey: w.NextKey(), LKey: r.Key(), Addr: 500, Length: 100, Access: ib.AccessRemote}, true, who); !f.OK() {
		t.Fatal(f)
	}
	bytes, release, f := Hold(table, w.Key(), 520, 4, ib.AccessRemoteRead, who)
	if !f.OK() {
		t.Fatal(f)
	}
	_, f = bytes()
	release()
	for ahead, want := range map[uint64]uint64{0: 4, 50: 50, 80: 80, 1000: 80} {
		f.Ahead(ahead).Await()
		if m.off != 520 || m.n != want {
			t.Errorf("%d bytes ahead: %d at %d were fetched, want %d", ahead, m.n, m.off, want)
		}
	}
}
