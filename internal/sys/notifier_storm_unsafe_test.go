//go:build cgo

package sys

import (
	"bytes"
	"errors"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys/forktest"
)

// consumer uses the notifier as it is meant to be used: a goroutine that finds something
// changed locks mu, then takes and applies changes until nothing is left. To apply a change
// is to count it, by the page that it begins with.
type consumer struct {
	n    *Notifier
	mu   sync.Mutex
	seen map[uintptr]int
	lost int
	buf  [16]MapChange
}

func (c *consumer) settle() {
	if !c.n.Changed() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		k, lost, _ := c.n.Take(c.buf[:], true)
		for _, change := range c.buf[:k] {
			c.seen[change.Start]++
		}
		if lost {
			c.lost++
		}
		if k == 0 && !lost {
			return
		}
	}
}

func (c *consumer) count(start uintptr) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen[start]
}

// TestNotifierStorm: many goroutines unmap and map at once. When a goroutine has unmapped
// something and then applied all changes, if Changed reports any, its own change is applied,
// every time: by this goroutine, or by another that was faster.
func TestNotifierStorm(t *testing.T) {
	n := openTestNotifier(t)
	c := &consumer{n: n, seen: make(map[uintptr]int)}
	rounds := 400
	if testing.Short() {
		rounds = 50
	}
	const workers = 6
	stop := make(chan struct{})
	var gcs sync.WaitGroup
	gcs.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	})
	var wg sync.WaitGroup
	var bad atomic.Int64
	for w := range workers {
		// Each has addresses of its own, and unmaps a hole in the middle of them.
		area := mapPages(t, 8, unix.PROT_NONE, unix.MAP_PRIVATE)
		a := area + 2*pageSize
		wg.Go(func() {
			for i := range rounds {
				var errno unix.Errno
				_, _, errno = unix.Syscall6(unix.SYS_MMAP, a, 4*pageSize, readWrite,
					unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, ^uintptr(0), 0)
				if errno != 0 {
					t.Error(errno)
					return
				}
				if err := n.Watch(a, a+4*pageSize); err != nil {
					t.Error(err)
					return
				}
				PopulateRange(a, a+4*pageSize, true)
				_, _, errno = unix.Syscall(unix.SYS_MUNMAP, a, 4*pageSize, 0)
				if errno != 0 {
					t.Error(errno)
					return
				}
				c.settle()
				if got := c.count(a); got != i+1 && bad.Add(1) < 10 {
					t.Errorf("worker %d has unmapped %d times, %d were told", w, i+1, got)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	gcs.Wait()
	if c.lost != 0 || n.Changed() {
		t.Errorf("lost %d times, changed %v", c.lost, n.Changed())
	}
}

// TestNotifierCollector: everything in the process is watched that can be, also the
// Go heap and the stacks of threads, the notifier's too, while the collector runs,
// gives memory back, and threads end. If the reader were a goroutine, or the thread waited
// for one, this would stand still. For a part of the time no goroutine takes events.
func TestNotifierCollector(t *testing.T) {
	n := openTestNotifier(t)
	watchEverything := func() {
		Mappings(0, ^uintptr(0), func(m *Mapping) bool {
			n.Watch(m.Start, m.End) // some refuse
			return true
		})
	}
	watchEverything()
	c := &consumer{n: n, seen: make(map[uintptr]int)}
	rounds := 30
	if testing.Short() {
		rounds = 10
	}
	var wg sync.WaitGroup
	stop := make(chan struct{})
	during := func(do func()) {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					do()
				}
			}
		})
	}
	var taking atomic.Bool
	var discarded atomic.Int64
	during(func() {
		if taking.Load() {
			c.settle()
		}
		time.Sleep(time.Millisecond)
	})
	during(runtime.GC)
	during(watchEverything)
	for range 2 {
		during(func() {
			p, err := unix.MmapPtr(-1, 0, nil, 16*pageSize, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			if err != nil {
				t.Error(err)
				return
			}
			n.Watch(uintptr(p), uintptr(p)+16*pageSize)
			*(*byte)(p) = 1
			unix.MunmapPtr(p, 16*pageSize)
			discarded.Add(1)
		})
	}
	during(func() { // a thread that ends
		done := make(chan struct{})
		go func() {
			runtime.LockOSThread() // and never unlocks, so the thread goes with the goroutine
			close(done)
		}()
		<-done
	})
	for i := range rounds {
		taking.Store(i > rounds/2)
		litter(byte(i))
		debug.FreeOSMemory() // MADV_DONTNEED in the runtime, some of it in the stopped world
	}
	close(stop)
	wg.Wait()
	c.settle()
	if discarded.Load() == 0 || len(c.seen) == 0 {
		t.Errorf("%d were unmapped, %d told", discarded.Load(), len(c.seen))
	}
}

// litter uses 8 MiB of the heap and forgets them.
func litter(with byte) {
	var b [32][]byte
	for j := range b {
		b[j] = bytes.Repeat([]byte{with}, 256<<10)
	}
	runtime.KeepAlive(&b)
}

// TestNotifierCloseStorm: the notifier is closed while other goroutines unmap, watch and
// take. None hangs, and nothing stays watched.
func TestNotifierCloseStorm(t *testing.T) {
	rounds := 30
	if testing.Short() {
		rounds = 5
	}
	for range rounds {
		n := openTestNotifier(t)
		var wg sync.WaitGroup
		var started atomic.Int64
		for range 3 {
			wg.Go(func() {
				buf := make([]MapChange, 4)
				for i := 0; i < 200; i++ {
					p, err := unix.MmapPtr(-1, 0, nil, 4*pageSize, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
					if err != nil {
						t.Error(err)
						return
					}
					err = n.Watch(uintptr(p), uintptr(p)+4*pageSize)
					if err != nil && !errors.Is(err, unix.EBADF) {
						t.Error(err)
					}
					unix.MunmapPtr(p, 4*pageSize)
					n.Take(buf, true)
					started.Add(1)
				}
			})
		}
		for started.Load() < 20 {
			runtime.Gosched()
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if n.Changed() {
			t.Error("changed after the end")
		}
	}
}

// TestNotifierFork: the child of a fork has no notifier and does not hold the
// parent's descriptors; the parent's goes on while the child lives, and ends.
func TestNotifierFork(t *testing.T) {
	n := openTestNotifier(t)
	p := pageSize
	a := mapPages(t, 16, readWrite, unix.MAP_PRIVATE)
	if err := n.Watch(a, a+8*p); err != nil {
		t.Fatal(err)
	}
	words := (*uint64)(unsafe.Pointer(&n.r.open))
	child, err := forktest.Fork(words, n.fd, threadStopDescriptor(t, n.fd))
	if err != nil {
		t.Fatal(err)
	}
	defer child.End()
	if child.Word != 0 {
		t.Errorf("the child believes that it has a notifier: %d", child.Word)
	}
	if child.Open != 0 {
		t.Errorf("the child holds %d of the notifier's descriptors", child.Open)
	}
	takeAll(t, n)
	munmapRange(t, a, a+2*p)
	if got, lost := takeAll(t, n); len(got) != 1 || got[0] != (MapChange{Unmapped, a, a + 2*p, 0}) || lost {
		t.Error(got, lost)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	munmapRange(t, a+2*p, a+4*p) // would hang if it were still watched
	if k, lost, more := n.Take(make([]MapChange, 4), true); k != 0 || lost || more {
		t.Error(k, lost, more)
	}
}

// threadStopDescriptor finds the eventfd: it was opened right after the userfaultfd.
func threadStopDescriptor(t *testing.T, userfault int) int {
	t.Helper()
	for fd := userfault + 1; fd < userfault+64; fd++ {
		if name, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)); err == nil && name == "anon_inode:[eventfd]" {
			return fd
		}
	}
	t.Fatal("no eventfd")
	return -1
}

// TestNotifierHeldDescriptor: another process has a copy of the descriptor, as the child of
// a bare clone(2) has until it calls exec. Closing ends the watching nevertheless.
func TestNotifierHeldDescriptor(t *testing.T) {
	n := openTestNotifier(t)
	a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
	if err := n.Watch(a, a+8*pageSize); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.FcntlInt(uintptr(n.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	munmapRange(t, a, a+8*pageSize)
}

// TestNotifierDead: a program closes descriptors that are not its own. Err reports that the
// notifier is dead, and no call waits for it.
func TestNotifierDead(t *testing.T) {
	n := openTestNotifier(t)
	a := mapPages(t, 8, readWrite, unix.MAP_PRIVATE)
	if err := n.Watch(a, a+8*pageSize); err != nil {
		t.Fatal(err)
	}
	if err := n.Err(); err != nil {
		t.Fatal(err)
	}
	unix.Close(n.fd)
	munmapRange(t, a, a+pageSize) // wakes the thread, which finds its descriptor gone
	for n.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if err := n.Err(); !errors.Is(err, unix.EBADF) {
		t.Error(err)
	}
	if err := n.Watch(a+pageSize, a+8*pageSize); !errors.Is(err, unix.EBADF) {
		t.Error(err)
	}
	for range 3 {
		if _, lost, _ := n.Take(make([]MapChange, 4), true); !lost || !n.Changed() {
			t.Error("nothing is lost")
		}
	}
	munmapRange(t, a, a+8*pageSize)
}

// TestNotifierForeign: a program has a userfaultfd of its own. What it watches we
// cannot, and closing ours leaves it alone.
func TestNotifierForeign(t *testing.T) {
	n := openTestNotifier(t)
	theirs, err := openUserfault()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(theirs)
	a := mapPages(t, 4, readWrite, unix.MAP_PRIVATE)
	if err := userfaultRegister(theirs, a, a+4*pageSize); err != nil {
		t.Fatal(err)
	}
	if err := n.Watch(a, a+4*pageSize); !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EINVAL) {
		t.Errorf("watched by two: %v", err)
	} else {
		t.Log(err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if err := userfaultUnregister(theirs, a, a+4*pageSize); err != nil {
		t.Errorf("it was taken away: %v", err)
	}
}
