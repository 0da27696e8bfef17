package memtest

import (
	"bytes"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Tests of the end of regions: nothing may be accessed afterwards.

// dead reports whether a fault is one that a closed region gives.
func dead(kind mem.FaultKind) bool { return kind == mem.FaultDead || kind == mem.FaultKey }

// testCloseWaits closes and invalidates a region while sections are open.
func testCloseWaits(t *testing.T, e *env) {
	for _, kill := range []struct {
		name string
		run  func(r *region)
	}{
		{"Close", func(r *region) { r.Close() }},
		{"Invalidate", func(r *region) {
			if f := e.kill(r.Key(), self); !f.OK() {
				t.Errorf("Invalidate: %v", f)
			}
		}},
	} {
		if kill.name == "Invalidate" && e.mk.Window == ib.MWType1 {
			continue // there is no such thing
		}
		r := e.register(page, mem.RegionConfig{Access: allAccess, Invalidatable: true})
		bytes, release, f := Hold(e.table, r.Key(), iova, 64, e.acc(ib.AccessLocalWrite), self)
		if !f.OK() {
			t.Fatal(f)
		}
		second := e.section(r.at(0, 64), 64)
		var done atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() { kill.run(r); done.Store(true) })
		// The key dies first.
		for r.Alive() {
			runtime.Gosched()
		}
		if got := e.access(r.at(0, 8), 8, 0, self); got != mem.FaultDead {
			t.Fatalf("access during %s: %v", kill.name, got)
		}
		time.Sleep(time.Millisecond) // by now it sleeps
		if done.Load() {
			t.Fatalf("%s did not wait for the open sections", kill.name)
		}
		b, f := bytes()
		if !f.Staged() && (!f.OK() || len(b) == 0) {
			t.Fatalf("an open section gave %d bytes, %v", len(b), f)
		}
		release()
		release() // does nothing
		time.Sleep(time.Millisecond)
		if done.Load() || r.watch.closes != 0 {
			t.Fatalf("%s did not wait for the second section", kill.name)
		}
		second()
		wg.Wait()
	}
}

// testCloseRevokes closes a region under fire: from raw bytes, from another
// region and through atomics. When Close returns, no byte changes any more.
func testCloseRevokes(t *testing.T, e *env) {
	for round := range e.revocations() {
		e.revoke(t, round, func(r *region) { r.Close() })
	}
}

// testInvalidateRevokes is the same for Invalidate.
func testInvalidateRevokes(t *testing.T, e *env) {
	for round := range e.revocations() {
		e.revoke(t, round, func(r *region) {
			if f := e.kill(r.Key(), self); !f.OK() {
				t.Errorf("Invalidate: %v", f)
			}
		})
	}
}

// revocations is how often a region is revoked under fire. The combinations of
// indirect keys are many.
func (e *env) revocations() int {
	if e.mk.Shape != 0 {
		return 2
	}
	return 8
}

func (e *env) revoke(t *testing.T, round int, kill func(r *region)) {
	const size = 2*mem.Quantum + 776 // whole words, however it is cut
	r := e.register(size, mem.RegionConfig{Access: allAccess, Invalidatable: true})
	other := e.all(size)
	var running, wg sync.WaitGroup
	fire := func(shoot func(n byte) mem.Fault) {
		running.Add(1)
		started := sync.OnceFunc(running.Done)
		wg.Go(func() {
			for n := byte(0); ; n++ {
				f := shoot(n)
				started()
				if f.OK() {
					continue
				}
				if !dead(f.Kind) && f.Kind != mem.FaultRevoked || f.Key != r.Key() {
					t.Errorf("round %d: %v", round, f)
				}
				return
			}
		})
	}
	small, big := make([]byte, 100), make([]byte, size)
	fire(func(n byte) mem.Fault {
		small[0] = n
		f, _ := moveBytes(e.list(ib.AccessRemoteWrite, r.at(page-50, 100)), raw(small), 100, true)
		return f
	})
	fire(func(n byte) mem.Fault {
		repeat(big, n)
		f, _ := moveBytes(e.list(ib.AccessLocalWrite, r.at(0, size)), raw(big), size, true)
		return f
	})
	fire(func(byte) mem.Fault {
		f, _ := moveBytes(e.list(ib.AccessLocalWrite, other.at(0, 300)), e.list(0, r.at(5, 300)), 300, false)
		return f
	})
	if !e.mk.NoAtomics {
		fire(func(byte) mem.Fault {
			_, f := changeWord(e.table, self, r.Key(), iova, mem.FetchAdd, 0, 1)
			return f
		})
	}
	running.Wait()
	time.Sleep(time.Duration(e.rng.IntN(300)) * time.Microsecond)
	kill(r)
	before := r.contents()
	wg.Wait() // all have run into the dead key
	if !bytes.Equal(before, r.contents()) {
		t.Fatalf("round %d: bytes changed after the region was dead", round)
	}
}

// testCloseRace closes small regions, many times, while somebody opens and
// closes sections on them as fast as can be: a section that opens must keep Close
// from returning, however close the race.
func testCloseRace(t *testing.T, e *env) {
	const rounds, enough = 20_000, 500 * time.Millisecond
	type target struct {
		key    uint32
		closed atomic.Bool
	}
	var current atomic.Pointer[target]
	var opened, late atomic.Int64
	var wg sync.WaitGroup
	current.Store(&target{key: e.all(8).Key()})
	// One goroutine, so that two cores are enough for it and for Close.
	wg.Go(func() {
		for {
			at := current.Load()
			if at == nil {
				return
			}
			_, release, f := Hold(e.table, at.key, iova, 8, 0, self)
			if !f.OK() {
				if !dead(f.Kind) {
					t.Errorf("%v", f)
					return
				}
				runtime.Gosched()
				continue
			}
			for range 50 { // long enough for a Close that does not wait
				if at.closed.Load() {
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
	m := e.mk.New(t, 8, allAccess|e.mk.Access)
	start := time.Now()
	for round := 0; round < 200 || round < rounds && time.Since(start) < enough; round++ {
		// A backing that stays: making memory takes longer than the race.
		r, err := e.table.Register(mem.RegionConfig{PD: domain, Access: allAccess | e.mk.Access, IOVA: iova, Length: 8, Backing: lasting{m.Backing}})
		if err != nil {
			t.Fatal(err)
		}
		at := &target{key: r.Key()}
		current.Store(at)
		before := opened.Load()
		for opened.Load() < before+3 {
			runtime.Gosched()
		}
		r.Close()
		at.closed.Store(true)
	}
	current.Store(nil)
	wg.Wait()
	if late.Load() != 0 {
		t.Errorf("%d of %d sections were open when Close had returned", late.Load(), opened.Load())
	}
	m.Backing.Close()
	if m.Free != nil {
		m.Free()
	}
}

// lasting is a backing that outlives its regions.
type lasting struct{ mem.Backing }

func (lasting) Close() error { return nil }

// testInvalidate checks who may invalidate what, and what is left of it.
func testInvalidate(t *testing.T, e *env) {
	plain := e.all(page)
	if f := e.kill(plain.Key(), self); f.Kind != mem.FaultNotInvalidatable {
		t.Errorf("an ordinary region: %v", f)
	}
	if got := e.access(plain.at(0, 8), 8, 0, self); got != mem.FaultNone {
		t.Errorf("an ordinary region, after the attempt: %v", got)
	}
	for _, cfg := range []mem.RegionConfig{
		{Access: allAccess, Invalidatable: true}, {Access: allAccess | ib.AccessRemoteInvalidate},
	} {
		r := e.register(page, cfg)
		e.invalidate(t, r, func() {})
		if e.table.Lookup(r.Key()) != r.Region {
			t.Error("the key is gone before Close")
		}
		r.Close()
		if f := e.kill(r.Key(), self); f.Kind != mem.FaultKey {
			t.Errorf("Invalidate after Close: %v", f)
		}
	}
}

// invalidate tries to invalidate a key as those would who must not, and then as its
// owner does; before is called ahead of each.
func (e *env) invalidate(t *testing.T, r *region, before func()) {
	for _, c := range []struct {
		name string
		key  uint32
		who  mem.Actor
		want mem.FaultKind
	}{
		{"another domain", r.Key(), mem.Actor{PD: domain + 1}, mem.FaultDomain},
		{"another tag", r.Key() ^ 1, self, mem.FaultKey},
		{"the right key", r.Key(), self, mem.FaultNone},
		{"once more", r.Key(), self, mem.FaultNone},
	} {
		before()
		if f := e.kill(c.key, c.who); f.Kind != c.want {
			t.Errorf("Invalidate, %s: %v", c.name, f)
		}
		want := mem.FaultNone
		if !r.Alive() {
			want = mem.FaultDead
		}
		if got := e.access(r.at(0, 8), 8, 0, self); got != want {
			t.Errorf("access after %s: %v, should be %v", c.name, got, want)
		}
	}
	if r.Alive() {
		t.Error("alive after Invalidate")
	}
}

// testAfterClose uses closed keys, while new regions come and go: none of the
// old keys may mean anything again soon.
func testAfterClose(t *testing.T, e *env) {
	const regions = 300
	keys := make(map[uint32]bool)
	for range regions {
		r := e.all(64)
		if keys[r.Key()] || r.Key() == 0 {
			t.Fatalf("key %#x was given out again", r.Key())
		}
		for key := range keys {
			if got := e.access(ib.SGE{Addr: iova, Length: 8, LKey: key}, 8, 0, self); got != mem.FaultKey {
				t.Fatalf("the closed key %#x: %v", key, got)
			}
			if len(keys) > 20 && e.rng.IntN(10) == 0 {
				break
			}
		}
		keys[r.Key()] = true
		r.Close()
	}
}
