package sys

// The notifier: the kernel reports changes of this process's mappings.
//
// Memory is watched by registering it with a userfaultfd (userfault_unsafe.go). A thread
// that then unmaps it, moves it or gives its pages back sleeps in the kernel until the
// event has been read. The reader must not be a goroutine. The Go runtime itself gives
// memory back, sometimes while the world is stopped; and a goroutine that sleeps in a
// page fault or a raw system call cannot be stopped. In both cases no other goroutine
// runs until the event is read, so a goroutine would never read it. So a C thread reads
// (notifier.c), and leaves what it read in a ring outside Go memory.
//
// Stages:
//
//  1. The thread announces that there are events, waits for accesses that are under way,
//     reads the events, and publishes them in the ring.
//  2. Changed and Enter see the announcement.
//  3. Take waits until what was announced is published, and takes it.
//
// Before some system calls a preloaded library closes a range of addresses
// (notifier_close.c), which is announced and published in the same way. The brackets of
// accesses are in notifier_access.go.
//
// The child of a fork has no notifier. It has no such thread, and its copy of the
// ring reads as zeros (MADV_WIPEONFORK), by which every method here notices that it
// is in a child and does not use the parent's descriptor.
//
// Why this is sound. The ring is mapped once, never unmapped, and has the layout of
// the C side. Both sides use shared words atomically. A slot is written before head moves
// over it and read before tail does, so no slot is read while it is being written.

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MapChangeKind is what happened to a range of addresses.
type MapChangeKind uint8

// The kinds of change.
const (
	// Unmapped: nothing is mapped there any more (munmap, a shrinking mremap), or
	// something else is (mmap over it). It is reported after the change.
	Unmapped MapChangeKind = iota + 1
	// Discarded: the content of the pages is given up, the mapping stays (MADV_DONTNEED,
	// MADV_FREE, MADV_REMOVE). It is reported before the change: the pages may still be
	// present for a moment.
	Discarded
	// Moved: the mapping is at another address, as long as before (mremap). Nothing is
	// mapped at the old address; that is also reported as Unmapped, before or after.
	Moved
)

func (k MapChangeKind) String() string {
	switch k {
	case Unmapped:
		return "unmapped"
	case Discarded:
		return "discarded"
	case Moved:
		return "moved"
	}
	return fmt.Sprintf("MapChangeKind(%d)", uint8(k))
}

// MapChange is one change of the mappings of this process. The range is that of the
// call that made the change (of Discarded, its part in one mapping), so it may reach
// beyond what is watched.
type MapChange struct {
	Kind       MapChangeKind
	Start, End uintptr
	To         uintptr // Moved: where Start is now
}

const (
	ringSlots    = 4096
	closedSlots  = 64
	accessShards = 64
	ticketSlots  = 256

	unitBits  = 21
	unitWords = 1 << (48 - unitBits - 6)
)

type slot struct{ kind, a, b, c uint64 }

// accessCount counts the accesses under way of one shard, and those that have ended, on
// a cache line of its own.
type accessCount struct {
	word atomic.Uint64
	_    [7]uint64
}

// ring has the layout of struct vn_ring of notifier.h, which documents its fields.
type ring struct {
	moved    atomic.Uint64
	consumed atomic.Uint64
	_        [6]uint64

	announced atomic.Uint64
	published atomic.Uint64
	head      atomic.Uint64
	lost      atomic.Uint64
	dead      atomic.Uint64
	overruns  atomic.Uint64
	_         [2]uint64

	lock       uint64
	begun      atomic.Uint64
	done       atomic.Uint64
	closedHead atomic.Uint64
	closings   atomic.Uint64
	held       atomic.Uint64
	owner      uint64
	_          uint64

	tail       atomic.Uint64
	closedTail atomic.Uint64
	open       atomic.Uint64
	low, high  atomic.Uint64
	_          [3]uint64

	tickets  [ticketSlots]atomic.Uint64
	moving   atomic.Uint64
	_        [7]uint64
	accesses [accessShards]accessCount
	closed   [closedSlots]slot
	slots    [ringSlots]slot
	units    [unitWords]atomic.Uint64
}

// Notifier reports changes of mappings that are watched. There is at most one
// in a process at a time: two could not watch the same memory. All methods may be
// called from any goroutine.
//
// One consumer at a time takes events: it holds a lock of its own from before Take until
// it has applied what it took.
type Notifier struct {
	r *ring

	watching sync.RWMutex // guards closed, and fd against being closed in use
	closed   bool
	fd       int

	taking sync.Mutex // guards the ring's Go side: the tails, consumed, lost
}

var notifier struct {
	mu   sync.Mutex // guards the fields below, and the order of opening and closing
	ring *ring      // mapped by the first open, and kept for Changed
	open bool
}

// OpenNotifier starts the process's notifier. The error says what is missing and wraps
// an errno: ENOTSUP, the program was built without cgo; ENOSYS or EPERM, the kernel or
// seccomp refuses userfaultfd; EINVAL, the kernel's userfaultfd is too old; EBUSY, the
// process has a notifier already.
func OpenNotifier() (*Notifier, error) {
	notifier.mu.Lock()
	defer notifier.mu.Unlock()
	if notifier.open {
		return nil, fmt.Errorf("a notifier is open in this process: %w", unix.EBUSY)
	}
	if err := notifierPossible(); err != nil {
		return nil, err
	}
	r, err := theRingLocked()
	if err != nil {
		return nil, fmt.Errorf("memory for the notifier: %w", err)
	}
	fd, err := openUserfault()
	if err != nil {
		return nil, err
	}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	r.beginLocked()
	if err := startThread(fd, stop, r); err != nil {
		_ = unix.Close(fd)
		_ = unix.Close(stop)
		return nil, fmt.Errorf("a thread for the notifier: %w", err)
	}
	r.open.Store(1)
	notifier.open = true
	return &Notifier{r: r, fd: fd}, nil
}

func notifierPossible() error {
	if !haveCgo {
		return fmt.Errorf("built without cgo, which the thread that reads a userfaultfd needs: %w", unix.ENOTSUP)
	}
	return nil
}

// theRingLocked maps the ring, the first time.
func theRingLocked() (*ring, error) {
	if notifier.ring != nil {
		return notifier.ring, nil
	}
	size := unsafe.Sizeof(ring{})
	// Most of the ring is the bits of units, of which few pages are ever used.
	p, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	_, end := PageAlign(uintptr(p), size)
	if err := madvise(uintptr(p), end, unix.MADV_WIPEONFORK); err != nil {
		_ = unix.MunmapPtr(p, size)
		return nil, err
	}
	_ = madvise(uintptr(p), end, unix.MADV_NOHUGEPAGE) // a kernel without huge pages refuses
	notifier.ring = (*ring)(p)
	notifier.ring.low.Store(unitWords)
	return notifier.ring, nil
}

// beginLocked makes the ring ready for another notifier, and drops what the previous one
// left in it. The other words only grow: an access or a closing may still be under way.
func (r *ring) beginLocked() {
	r.lost.Store(0)
	r.dead.Store(0)
	r.tail.Store(r.head.Load())
	r.closedTail.Store(r.closedHead.Load())
	r.consumed.Store(r.moved.Load())
}

// Changed reports whether there is something to Take. A goroutine that runs after an
// munmap, mremap or madvise of watched memory has returned sees true, until the change
// was taken and applied.
func (n *Notifier) Changed() bool { return n.r.moved.Load() != n.r.consumed.Load() }

// How often await looks for what the thread has announced: first in a loop, then after
// letting other threads run (the thread may need this processor), then after naps. All
// that takes about a fifth of a second, since the thread itself may wait for accesses for
// half of that.
const (
	takeSpins  = 64
	takeYields = 256
	takeNaps   = 1500
	takeNap    = 100 * time.Microsecond
)

// Take takes events in the order in which they were published, and returns how many.
//
//   - If lost is set, events are missing, and everything may have changed. That is also
//     so if the thread did not run for long, or is dead (Err).
//   - If more is set, there are or will be more events: buf was too small, or a range is
//     still being closed.
//   - If neither is set, everything that was announced before the call has been taken.
//
// Without wait, Take does not wait for events that are announced and not published, but
// sets more.
//
// A call of Take that returns nothing means that the caller has applied all that earlier
// calls returned. Only then Changed becomes false: no goroutine gets past Changed between
// taking and applying.
func (n *Notifier) Take(buf []MapChange, wait bool) (k int, lost, more bool) {
	n.taking.Lock()
	defer n.taking.Unlock()
	r := n.r
	if r.open.Load() == 0 {
		return 0, false, false // closed, or the child of a fork
	}
	// In this order: the thread and the closers add to announced and begun before moved.
	moved := r.moved.Load()
	announced, begun := r.announced.Load(), r.begun.Load()
	late, closing := false, false
	if wait {
		late, closing = !await(&r.published, announced), !await(&r.done, begun)
	} else {
		closing = r.published.Load() < announced || r.done.Load() < begun
	}
	dead := r.dead.Load() != 0
	lost = r.lost.Swap(0) != 0 || late || dead
	taken := false
	for _, q := range [...]struct {
		head, tail *atomic.Uint64
		slots      []slot
	}{{&r.closedHead, &r.closedTail, r.closed[:]}, {&r.head, &r.tail, r.slots[:]}} {
		head, tail := q.head.Load(), q.tail.Load()
		taken = taken || head != tail
		for ; tail != head && k < len(buf); tail++ {
			if c, ok := q.slots[tail%uint64(len(q.slots))].change(); ok {
				buf[k] = c
				k++
			}
		}
		q.tail.Store(tail)
		more = more || tail != head
	}
	if !taken && !lost && !closing {
		r.consumed.Store(moved)
	}
	return k, lost, more || closing
}

// await waits until a word has reached a value, and reports whether it has. The thread
// never waits for long, so that takes as long as it takes the kernel to run the thread; a
// closer takes as long as its system call. It does not use time.Sleep, which takes a
// millisecond in an idle process.
func await(word *atomic.Uint64, value uint64) bool {
	nap := unix.NsecToTimespec(int64(takeNap))
	for i := range takeSpins + takeYields + takeNaps {
		if word.Load() >= value {
			return true
		}
		switch {
		case i >= takeSpins+takeYields:
			_ = unix.Nanosleep(&nap, nil)
		case i >= takeSpins:
			_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	}
	return false
}

// change converts an event of the kernel.
func (s *slot) change() (MapChange, bool) {
	switch s.kind {
	case eventUnmap:
		return MapChange{Kind: Unmapped, Start: uintptr(s.a), End: uintptr(s.b)}, true
	case eventRemove:
		return MapChange{Kind: Discarded, Start: uintptr(s.a), End: uintptr(s.b)}, true
	case eventRemap:
		return MapChange{Kind: Moved, Start: uintptr(s.a), End: uintptr(s.a + s.c), To: uintptr(s.b)}, true
	}
	return MapChange{}, false // a page fault: nothing is protected, so there is none
}

// Watch asks for the events of a range: whole pages of one mapping, of its PageSize
// (Mapping.Clip). It may be watched already. A mapping that is made there later is
// not watched. The errors:
//
//   - EINVAL: nothing is mapped there, or nothing that can be watched;
//   - ENOMEM: there would be too many mappings;
//   - EBUSY: the program has the range in a userfaultfd of its own, and making its pages
//     present may wait for the program;
//   - EBADF: the notifier is closed or dead, or this is the child of a fork.
func (n *Notifier) Watch(start, end uintptr) error {
	if start < end {
		n.r.noteWatched(start, end) // first: the preloaded library must not miss it
	}
	return n.withDescriptor(start, end, userfaultRegister)
}

// Unwatch ends Watch for a range. It takes time for each page that is present.
func (n *Notifier) Unwatch(start, end uintptr) error {
	return n.withDescriptor(start, end, userfaultUnregister)
}

func (n *Notifier) withDescriptor(start, end uintptr, do func(fd int, start, end uintptr) error) error {
	if start >= end {
		return unix.EINVAL
	}
	n.watching.RLock()
	defer n.watching.RUnlock()
	if n.closed || n.r.open.Load() == 0 || n.r.dead.Load() != 0 {
		return unix.EBADF
	}
	return do(n.fd, start, end)
}

// Err returns why the thread has ended by itself, or nil. The thread ends only if reading
// fails, as when the program closes descriptors that are not its own. Nothing is watched
// then, and Take always sets lost.
func (n *Notifier) Err() error {
	if e := n.r.dead.Load(); e != 0 {
		return fmt.Errorf("the notifier's userfaultfd: %w", unix.Errno(e))
	}
	return nil
}

// Close ends the notifier. When it returns nothing is watched and the thread has
// ended; Changed may go on being called.
func (n *Notifier) Close() error {
	notifier.mu.Lock()
	defer notifier.mu.Unlock()
	n.watching.Lock()
	closed := n.closed
	n.closed = true
	n.watching.Unlock()
	if closed || n.r.open.Load() == 0 {
		return nil
	}
	// The child of a fork may have inherited the descriptor, and the kernel would go on
	// watching after this process has closed it. So everything is unregistered first.
	if n.r.dead.Load() == 0 {
		unwatchAll(n.fd)
	}
	stopThread()
	n.taking.Lock()
	defer n.taking.Unlock()
	n.r.open.Store(0)
	n.r.consumed.Store(n.r.moved.Load())
	notifier.open = false
	return nil
}

// unwatchAll unregisters all mappings; the calls for those that were not watched fail.
func unwatchAll(fd int) {
	for m, err := NextMapping(0); err == nil; m, err = NextMapping(m.End) {
		_ = userfaultUnregister(fd, m.Start, m.End)
	}
}

// addressOf returns where a word lies. This is sound because the caller of AddTicket
// ensures that the word is outside the Go heap: the collector neither moves nor frees it.
func addressOf(word *atomic.Uint64) uint64 { return uint64(uintptr(unsafe.Pointer(word))) }
