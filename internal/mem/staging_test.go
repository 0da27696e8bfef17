package mem_test

import (
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/sys"
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
// they are used. When all are in use, unlocked ones are given out; a locked one that is lost comes
// back; and after Close nothing is locked.
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
	collected(t, "that lost pieces come back", func() bool { return use() >= mem.LockedLargest-1 && e.Locked() == mem.LockedPieces })
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

// Pages that are locked stay so until the owner stops, also if their pieces are lost, and if another
// owner comes and goes: on a GPU, to unlock pages waits for kernels, which may wait for bytes.
func TestLockStagingStays(t *testing.T) {
	var mu sync.Mutex // guards the counts
	var locks, unlocks [2]int
	owner := func(i int) (stop func()) {
		return mem.LockStaging(func([]byte) (func(), error) {
			mu.Lock()
			defer mu.Unlock()
			locks[i]++
			return func() {
				mu.Lock()
				defer mu.Unlock()
				unlocks[i]++
			}, nil
		})
	}
	counts := func(what string, wantLocks, wantUnlocks [2]int) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		if locks != wantLocks || unlocks != wantUnlocks {
			t.Errorf("%s: pieces were locked %d times, unlocked %d times, want %d and %d", what, locks, unlocks, wantLocks, wantUnlocks)
		}
	}
	lose := func() (n int) {
		for n < 2*mem.LockedLargest {
			if mem.TryStaging(mem.Quantum) == nil {
				break
			}
			n++
		}
		return n
	}
	all := mem.LockedPieces
	stop := owner(0)
	for range 3 {
		// The last one may still be on a goroutine's stack.
		collected(t, "that lost pieces come back", func() bool { return lose() >= mem.LockedLargest-1 })
	}
	counts("after losses", [2]int{all, 0}, [2]int{})
	collected(t, "that lost pieces come back", func() bool { b := mem.TryStaging(mem.Quantum); return b != nil })
	other := owner(1)
	collected(t, "that lost pieces come back to both", func() bool {
		n := lose()
		mu.Lock()
		defer mu.Unlock()
		return n >= mem.LockedLargest-1 && locks[1] == all
	})
	counts("with another owner", [2]int{all, all}, [2]int{})
	stop()
	counts("without the first", [2]int{all, all}, [2]int{all, 0})
	collected(t, "that lost pieces come back to the other", func() bool { return lose() >= mem.LockedLargest-1 })
	other()
	counts("in the end", [2]int{all, all}, [2]int{all, all})
}

// A driver that locks memory once only refuses the second owner. When the first one goes, the
// second has what it was refused.
func TestLockStagingOnce(t *testing.T) {
	var mu sync.Mutex // guards by
	by := make(map[uint64]int)
	owner := func(i int) (stop func()) {
		return mem.LockStaging(func(b []byte) (func(), error) {
			at := sys.AddrOf(b)
			mu.Lock()
			defer mu.Unlock()
			if by[at] != 0 {
				return nil, errors.New("it is locked")
			}
			by[at] = i
			return func() {
				mu.Lock()
				defer mu.Unlock()
				delete(by, at)
			}, nil
		})
	}
	count := func(i int) (n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, o := range by {
			if o == i {
				n++
			}
		}
		return n
	}
	first, second := owner(1), owner(2)
	if a, b := count(1), count(2); a != mem.LockedPieces || b != 0 {
		t.Errorf("%d and %d pieces are locked, want %d and none", a, b, mem.LockedPieces)
	}
	first()
	collected(t, "that the second owner has locked all", func() bool { return count(1) == 0 && count(2) == mem.LockedPieces })
	second()
	if n := count(2); n != 0 {
		t.Errorf("%d pieces are locked in the end", n)
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
