package memtest

import (
	"bytes"
	"errors"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// The suite through windows: every region that a test registers is a window into
// a region with margins around it, which grants peers nothing itself. What the
// tests do with local rights is done with remote ones, as a window has no others.
// Whatever a test does, the margins stay as they are.

// window is what stands behind a region of the suite that is a window.
type window struct {
	*mem.Window
	parent *mem.Region
	whole  Memory
	before []byte // all of the memory at first
	lo     uint64 // where the window begins in it
}

// throughWindows tells whether a test of the suite makes sense through windows.
func throughWindows(name string, typ ib.MWType) bool {
	switch name {
	case "Rights", "Invalidate", "CloseRace": // windows have their own
		return false
	case "ZeroBased", "InvalidateRevokes":
		return typ == ib.MWType2
	}
	return true
}

var windowTests = []test{
	{"WindowRights", testWindowRights},
	{"WindowQP", testWindowQP},
	{"WindowBusy", testWindowBusy},
	{"WindowInvalidate", testWindowInvalidate},
	{"WindowRebind", testWindowRebind},
	{"WindowRace", testWindowRace},
}

// acc is a right as a test can have it.
func (e *env) acc(a ib.Access) ib.Access {
	if e.mk.Window == 0 {
		return a
	}
	if a&ib.AccessLocalWrite != 0 {
		a = a&^ib.AccessLocalWrite | ib.AccessRemoteWrite
	}
	if a == 0 {
		a = ib.AccessRemoteRead
	}
	return a
}

const margin = 2 * page

// registerWindow makes a window of n bytes, in a region that has more.
func (e *env) registerWindow(n uint64, cfg mem.RegionConfig) *region {
	e.t.Helper()
	if cfg.IOVA == 0 {
		cfg.IOVA = iova
	}
	lo, hi := uint64(margin), uint64(margin)
	if cfg.IOVA < lo {
		lo = 0
	}
	if math.MaxUint64-cfg.IOVA-n < hi {
		hi = 0
	}
	access := cfg.Access & (ib.AccessRemote | ib.AccessZeroBased)
	cfg.IOVA, cfg.Access = cfg.IOVA-lo, cfg.Access&ib.AccessLocalWrite|ib.AccessMWBind
	parent, m, watch := e.registerRegion(lo+n+hi, cfg)
	is, _ := parent.Snapshot()
	w, err := e.table.AllocWindow(is.PD, e.mk.Window)
	if err != nil {
		e.t.Fatal(err)
	}
	r := &region{Region: e.table.Lookup(w.Key()), Memory: m, watch: watch, window: &window{Window: w, parent: parent, whole: m, lo: lo}}
	r.Read = func(off uint64, b []byte) { m.Read(lo+off, b) }
	r.Write = func(off uint64, b []byte) { m.Write(lo+off, b) }
	if m.Bytes != nil {
		r.Bytes = m.Bytes[lo:][:n:n]
	}
	around := make([]byte, lo+n+hi)
	randomise(e.rng, around)
	clear(around[lo:][:n])
	m.Write(0, around)
	r.window.before = around
	if f := e.bind(r, access, n); !f.OK() {
		e.t.Fatal(f)
	}
	e.regions = append(e.regions, r)
	return r
}

// bind binds the window to n bytes where it was made to be, in the way of its
// type.
func (e *env) bind(r *region, access ib.Access, n uint64) mem.Fault {
	w := r.window
	b := ib.MWBind{MW: w.Key(), RKey: w.Key() + 1, LKey: w.parent.Key(), Addr: w.parent.IOVA() + w.lo, Length: n, Access: access}
	verb := w.Type() == ib.MWType1
	if verb {
		b.RKey = w.NextKey()
	}
	return insist(func() mem.Fault { return e.table.Bind(&b, verb, self) })
}

// Close closes a region of the suite, and what is behind it.
func (r *region) Close() error {
	if r.indirect != nil {
		return r.indirect.close()
	}
	if r.window == nil {
		return r.Region.Close()
	}
	return errors.Join(r.window.Close(), r.window.parent.Close())
}

// checkMargins compares what lies around a window with what was there.
func (r *region) checkMargins(t *testing.T) {
	t.Helper()
	if r.window == nil {
		return
	}
	w := r.window
	now := make([]byte, len(w.before))
	w.whole.Read(0, now)
	clear(now[w.lo:][:r.Length()])
	clear(w.before[w.lo:][:r.Length()])
	if !bytes.Equal(now, w.before) {
		t.Error("bytes around the window have changed")
	}
}

// testWindowRights binds with every set of rights, on regions with and without
// the right to write, and tries every right.
func testWindowRights(t *testing.T, e *env) {
	const remote = ib.AccessRemote
	for _, local := range []ib.Access{0, ib.AccessLocalWrite} {
		for granted := ib.Access(0); granted <= remote; granted += ib.AccessRemoteWrite {
			r := e.registerWindow(page, mem.RegionConfig{Access: local})
			e.mustFree(r)
			want := mem.FaultNone
			if local == 0 && granted&(ib.AccessRemoteWrite|ib.AccessRemoteAtomic) != 0 {
				want = mem.FaultAccess
			}
			if f := e.bind(r, granted, page); f.Kind != want {
				t.Fatalf("binding %v to a region with %v: %v, should be %v", granted, local, f, want)
			}
			if want != mem.FaultNone {
				continue
			}
			for right := range ib.Access(16) {
				want := mem.FaultNone
				if right == 0 || right&^granted != 0 {
					want = mem.FaultAccess // a local right, which it never has, or one that was not granted
				}
				_, release, f := Hold(e.table, r.Key(), r.IOVA(), 64, right, self)
				if f.Kind != want {
					t.Fatalf("%v on a window with %v: %v, should be %v", right, granted, f, want)
				}
				release()
			}
		}
	}
	r := e.all(page)
	e.mustFree(r)
	for _, access := range []ib.Access{ib.AccessLocalWrite, ib.AccessMWBind, ib.AccessOnDemand, 1 << 31} {
		if f := e.bind(r, access, page); f.Kind != mem.FaultAccess {
			t.Errorf("binding %v: %v", access, f)
		}
	}
}

// mustFree frees the window.
func (e *env) mustFree(r *region) {
	e.t.Helper()
	var f mem.Fault
	if e.mk.Window == ib.MWType1 {
		f = e.bind(r, 0, 0)
	} else {
		f = e.kill(r.Key(), self)
	}
	if !f.OK() || r.Alive() {
		e.t.Fatalf("%v, alive: %v", f, r.Alive())
	}
}

// testWindowQP uses a window from another queue pair of its domain: type 1
// answers, type 2 does not, until it is bound there.
func testWindowQP(t *testing.T, e *env) {
	r := e.all(page)
	other := mem.Actor{PD: self.PD, QPN: self.QPN + 1}
	want := mem.FaultNone
	if e.mk.Window == ib.MWType2 {
		want = mem.FaultDomain
	}
	for range 2 {
		if got := e.access(r.at(0, 8), 8, 0, other); got != want {
			t.Errorf("another queue pair: %v, should be %v", got, want)
		}
		if want == mem.FaultNone {
			return
		}
		if f := e.kill(r.Key(), other); f.Kind != mem.FaultDomain {
			t.Errorf("Invalidate by another queue pair: %v", f)
		}
		e.table.ReleaseQP(other.QPN)
		if !r.Alive() {
			t.Error("the end of another queue pair frees the window")
		}
	}
	e.table.ReleaseQP(self.QPN)
	if r.Alive() {
		t.Error("the window outlives its queue pair")
	}
	if got := e.access(r.at(0, 8), 8, 0, self); got != mem.FaultDead {
		t.Errorf("access after the queue pair is gone: %v", got)
	}
}

// testWindowBusy closes and changes regions with windows on them, and closes them
// when there are none.
func testWindowBusy(t *testing.T, e *env) {
	r := e.all(page)
	w := r.window
	same := mem.RegionConfig{PD: domain, Access: w.parent.Access(), IOVA: w.parent.IOVA(), Length: w.parent.Length(), Backing: w.parent.Backing()}
	for range 2 {
		if err := w.parent.Close(); !errors.Is(err, syscall.EBUSY) || w.parent.Closed() {
			t.Fatalf("Close of a region with a window: %v", err)
		}
		var state *ib.ReregError
		if err := w.parent.Rereg(same); !errors.Is(err, syscall.EBUSY) || !errors.As(err, &state) || state.State != ib.ReregOldValid {
			t.Fatalf("Rereg of a region with a window: %v", err)
		}
		if got := e.access(r.at(0, 8), 8, 0, self); got != mem.FaultNone {
			t.Fatalf("access after that: %v", got)
		}
	}
	e.mustFree(r)
	if err := w.parent.Rereg(same); err != nil {
		t.Fatal(err)
	}
	if f := e.bind(r, ib.AccessRemote, page); !f.OK() {
		t.Fatal(f)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := w.parent.Close(); err != nil {
		t.Fatal(err)
	}
	if f := e.bind(r, ib.AccessRemote, page); f.OK() {
		t.Error("a closed window was bound")
	}
}

// testWindowInvalidate checks which keys of a window can be invalidated, and how
// often.
func testWindowInvalidate(t *testing.T, e *env) {
	r := e.all(page)
	if e.mk.Window == ib.MWType1 {
		if f := e.kill(r.Key(), self); f.Kind != mem.FaultNotInvalidatable || !r.Alive() {
			t.Errorf("a window of type 1: %v", f)
		}
		return
	}
	for _, c := range []struct {
		name string
		key  uint32
		who  mem.Actor
		want mem.FaultKind
	}{
		{"another domain", r.Key(), mem.Actor{PD: domain + 1, QPN: self.QPN}, mem.FaultDomain},
		{"another tag", r.Key() ^ 1, self, mem.FaultKey},
		{"the right key", r.Key(), self, mem.FaultNone},
		{"once more", r.Key(), self, mem.FaultNone},
	} {
		if f := e.kill(c.key, c.who); f.Kind != c.want {
			t.Errorf("%s: %v", c.name, f)
		}
	}
	if got := e.access(r.at(0, 8), 8, 0, self); got != mem.FaultDead {
		t.Errorf("access to a free window: %v", got)
	}
	if f := e.bind(r, ib.AccessRemote, 0); f.Kind != mem.FaultWindow {
		t.Errorf("a bind to nothing: %v", f)
	}
	if f := e.bind(r, ib.AccessRemote, page); !f.OK() {
		t.Error(f)
	}
	if f := e.bind(r, ib.AccessRemote, page); f.Kind != mem.FaultWindow {
		t.Errorf("a bind of a bound window: %v", f)
	}
}

// testWindowRebind binds a window again and again: only the last key works, and
// no key comes again soon.
func testWindowRebind(t *testing.T, e *env) {
	r := e.all(page)
	keys := []uint32{r.Key()}
	for range 255 {
		if e.mk.Window == ib.MWType2 {
			e.mustFree(r)
		}
		if f := e.bind(r, ib.AccessRemote, page); !f.OK() {
			t.Fatal(f)
		}
		for _, old := range keys {
			if old == r.Key() {
				t.Fatalf("key %#x came again after %d binds", old, len(keys))
			}
			if got := e.access(ib.SGE{Addr: r.IOVA(), Length: 8, LKey: old}, 8, 0, self); got != mem.FaultKey {
				t.Fatalf("an old key: %v", got)
			}
		}
		if got := e.access(r.at(0, 8), 8, 0, self); got != mem.FaultNone {
			t.Fatal(got)
		}
		keys = append(keys, r.Key())
	}
}

// testWindowRace binds and frees a window, many times, while somebody uses the
// key that he was told last: a section never is open when the key is dead.
func testWindowRace(t *testing.T, e *env) {
	const rounds, enough = 20_000, 500 * time.Millisecond
	type target struct {
		key  uint32
		dead atomic.Bool
	}
	r := e.all(64)
	var current atomic.Pointer[target]
	var opened, late atomic.Int64
	current.Store(&target{key: r.Key()})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			at := current.Load()
			if at == nil {
				return
			}
			was := at.dead.Load()
			_, release, f := Hold(e.table, at.key, iova, 8, ib.AccessRemoteWrite, self)
			if !f.OK() {
				if !dead(f.Kind) {
					t.Errorf("%v", f)
					return
				}
				runtime.Gosched()
				continue
			}
			for range 50 {
				if was || at.dead.Load() {
					late.Add(1)
					break
				}
			}
			release()
			if opened.Add(1)%16 == 0 {
				runtime.Gosched() // there may be one core only
			}
		}
	})
	start := time.Now()
	for round := 0; round < 200 || round < rounds && time.Since(start) < enough; round++ {
		at := current.Load()
		before := opened.Load()
		for opened.Load() < before+3 {
			runtime.Gosched()
		}
		if e.mk.Window == ib.MWType2 {
			e.mustFree(r)
			at.dead.Store(true)
		}
		if f := e.bind(r, ib.AccessRemote, 64); !f.OK() {
			t.Fatal(f)
		}
		at.dead.Store(true)
		current.Store(&target{key: r.Key()})
	}
	current.Store(nil)
	wg.Wait()
	if late.Load() != 0 {
		t.Errorf("%d of %d sections were open on a dead key", late.Load(), opened.Load())
	}
}
