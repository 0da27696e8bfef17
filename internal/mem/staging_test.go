package mem_test

import (
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
)

// collected runs the collector until something is so.
func collected(t *testing.T, what string, is func() bool) {
	t.Helper()
	for range 200 {
		runtime.GC()
		if is() {
			return
		}
		time.Sleep(5 * time.Millisecond) // finalizers run beside
	}
	t.Fatalf("%s is not so after 200 collections", what)
}

// Staging bytes are page-locked for an owner who wants that: each piece once, however often
// it is used, up to a bound; what nobody has given back is unlocked when it is collected; and
// after Close nothing is locked.
func TestLockStaging(t *testing.T) {
	e := enginetest.New(enginetest.Config{Locks: true})
	m := e.Alloc(1 << 20)
	defer m.Free()
	op := func(b []byte) {
		t.Helper()
		was := e.Unlocked()
		if mem.Store1(m, b); e.Unlocked() != was {
			t.Errorf("%d staging bytes are not locked", len(b))
		}
	}
	for range 100 {
		for _, n := range []int{1, 4096, 4097, 65536, 65537, mem.Quantum} {
			b := mem.Staging(n)
			op(b)
			mem.GiveStaging(b)
		}
	}
	if n := e.Locked(); n != 2 {
		t.Errorf("%d pieces were locked for 600 uses, one at a time, of two lengths", n)
	}
	var many [][]byte
	for range 100 {
		many = append(many, mem.Staging(mem.Quantum))
	}
	if n := e.Locked(); n != 1+mem.LockedMost {
		t.Errorf("%d pieces are locked, while 100 of the largest are used: want %d of those", n, mem.LockedMost)
	}
	op(many[0])
	other := enginetest.New(enginetest.Config{Locks: true})
	for _, b := range many {
		mem.GiveStaging(b) // none is kept: the other has not locked it
	}
	clear(many)
	collected(t, "that the pieces are unlocked", func() bool { return e.Locked() == 0 })
	b := mem.Staging(1)
	if e.Locked() != 1 || other.Locked() != 1 {
		t.Errorf("%d and %d pieces are locked by two owners, want one", e.Locked(), other.Locked())
	}
	e.Close()
	if e.Locked() != 0 || other.Locked() != 1 {
		t.Errorf("%d and %d pieces are locked by an owner that is closed, and another", e.Locked(), other.Locked())
	}
	other.Close()
	if mem.GiveStaging(b); other.Locked() != 0 {
		t.Error("a piece is locked by an owner that is closed")
	}
	if b := mem.Staging(mem.Quantum); e.Locked()+other.Locked() != 0 {
		t.Errorf("%d bytes were locked for nobody", len(b))
	}
}

// An owner that cannot lock a piece gets it as it is.
func TestLockStagingFails(t *testing.T) {
	calls := 0
	stop := mem.LockStaging(func([]byte) (func(), error) { calls++; return nil, errors.New("no") })
	defer stop()
	for range 3 {
		b := mem.Staging(100)
		if len(b) != 100 {
			t.Fatalf("%d bytes, want 100", len(b))
		}
		mem.GiveStaging(b)
	}
	if calls != 1 {
		t.Errorf("the owner was asked %d times for one piece", calls)
	}
}

// Owners come and go while staging bytes are used and lost: whatever was locked is unlocked
// once, and nothing afterwards.
func TestLockStagingRaces(t *testing.T) {
	var wg sync.WaitGroup
	done := make(chan struct{})
	for range 4 {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-done:
					return
				default:
				}
				b := mem.Staging(1 + i*9973%mem.Quantum)
				if i%5 != 0 {
					mem.GiveStaging(b)
				}
			}
		})
	}
	for range 50 {
		var mu sync.Mutex // guards the rest
		locked, stopped := 0, false
		stop := mem.LockStaging(func([]byte) (func(), error) {
			mu.Lock()
			defer mu.Unlock()
			if stopped {
				t.Error("a piece is locked after stop")
			}
			locked++
			var once bool
			return func() {
				mu.Lock()
				defer mu.Unlock()
				if once || stopped {
					t.Errorf("a piece is unlocked twice (%v), or after stop (%v)", once, stopped)
				}
				once = true
				locked--
			}, nil
		})
		for range 3 {
			runtime.GC()
		}
		stop()
		mu.Lock()
		stopped = true
		if locked != 0 {
			t.Errorf("%d pieces are locked after stop", locked)
		}
		mu.Unlock()
	}
	close(done)
	wg.Wait()
}
