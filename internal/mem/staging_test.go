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
		time.Sleep(5 * time.Millisecond) // finalizers run beside
		if is() {
			return
		}
	}
	t.Fatalf("%s is not so after 200 collections", what)
}

// Staging bytes are page-locked for an owner that asks for it: as many as are kept, however often
// they are used. When all are in use, unlocked ones are given out; a locked one that is lost is
// replaced; and after Close nothing is locked.
func TestLockStaging(t *testing.T) {
	e := enginetest.New(enginetest.Config{Locks: true})
	for range 100 {
		for _, n := range []int{1, 4096, 4097, 65536, 65537, mem.Quantum} {
			b := mem.Staging(n)
			if !e.IsLocked(b) {
				t.Errorf("%d staging bytes are not locked", n)
			}
			mem.GiveStaging(b)
		}
	}
	if n := e.Locked(); n != mem.LockedPieces {
		t.Errorf("%d pieces are locked, want %d", n, mem.LockedPieces)
	}
	const many = 100
	use := func() (locked int) {
		var pieces [many][]byte
		for i := range pieces {
			pieces[i] = mem.Staging(mem.Quantum)
			if e.IsLocked(pieces[i]) {
				locked++
			}
		}
		runtime.KeepAlive(&pieces)
		return locked
	}
	if n := use(); n != mem.LockedLargest {
		t.Errorf("%d of %d pieces were locked, want %d", n, many, mem.LockedLargest)
	}
	// The last one may still be on a goroutine's stack.
	collected(t, "that lost pieces are replaced", func() bool { return use() >= mem.LockedLargest-1 && e.Locked() == mem.LockedPieces })
	other := enginetest.New(enginetest.Config{Locks: true})
	collected(t, "that both have locked the same", func() bool { return e.Locked() == mem.LockedPieces && other.Locked() == mem.LockedPieces })
	e.Close()
	if n := e.Locked(); n != 0 {
		t.Errorf("%d pieces are locked by an owner that is closed", n)
	}
	collected(t, "that the other has locked its own", func() bool { return other.Locked() == mem.LockedPieces })
	b := mem.Staging(1)
	other.Close()
	mem.GiveStaging(b)
	if n := other.Locked(); n != 0 {
		t.Errorf("%d pieces are locked by an owner that is closed", n)
	}
	if b := mem.Staging(mem.Quantum); e.Locked()+other.Locked() != 0 {
		t.Errorf("%d bytes were locked for nobody", len(b))
	}
}

// An owner that cannot lock pieces gets them as they are.
func TestLockStagingFails(t *testing.T) {
	calls := 0
	stop := mem.LockStaging(func([]byte) (func(), error) { calls++; return nil, errors.New("no") })
	defer stop()
	if calls != mem.LockedPieces {
		t.Errorf("the owner was asked %d times, want %d", calls, mem.LockedPieces)
	}
	b := mem.Staging(100)
	if len(b) != 100 {
		t.Fatalf("%d bytes, want 100", len(b))
	}
	mem.GiveStaging(b)
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
	for range 10 {
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
