package mem

// Memory of an engine that engines of other processes reach too, as one reaches CUDA's by
// its handles: its bytes go from one process to another without passing through the host.
//
//  1. The sender from such memory to a process of this host names it by a number (HoldShared).
//  2. The receiving process sends the number back, gets what its engine needs (PassShared), and
//     opens the memory (OpenShared): an Engine of its own, by which transfers reach the bytes.
//  3. When the region is closed, the processes that have opened its memory give it up, as they
//     do with segments (WatchSegments).

import (
	"bytes"
	"fmt"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Sharing is an Engine whose memory can be opened in other processes.
type Sharing interface {
	Engine
	// Share returns what an opener needs, the name of the opener (AddOpener), and a
	// descriptor, which is the caller's to close; -1 if there is none. It does not take long.
	Share() (opener string, what []byte, fd int, err error)
}

// Opener opens memory that another process shares. It closes the descriptor, -1 if there is
// none. Its arguments come from another process of the same user, and may be nonsense.
type Opener func(what []byte, fd int) (Engine, error)

// maxShared is how long what Share returns may be, with the name.
const maxShared = 1024

// shares are the memories of this process that other processes may open, and the openers of
// theirs.
var shares struct {
	ids sync.Map // from Sharing to its number

	mu      sync.Mutex // guards what follows
	byID    map[uint64]Sharing
	openers map[string]Opener
}

// AddOpener has memory that other processes share under a name opened by an opener, until stop
// is called.
func AddOpener(name string, open Opener) (stop func()) {
	shares.mu.Lock()
	defer shares.mu.Unlock()
	if shares.openers == nil {
		shares.openers = make(map[string]Opener)
	}
	shares.openers[name] = open
	return func() {
		shares.mu.Lock()
		defer shares.mu.Unlock()
		delete(shares.openers, name)
	}
}

// SharedHold is memory that is shared, with sections that stay open: closing or suspending its
// region waits for Release. The zero value is none.
type SharedHold struct {
	ID, Off uint64 // its number, and where in it
	Len     uint64 // bytes that lie together there
	at      place
}

// HoldShared opens sections on the first of n bytes of a list, as many as lie together in
// memory that others can open. If they do not, the fault is that of memory which the CPU does
// not address.
func HoldShared(l *List, n uint64) (SharedHold, Fault) {
	r, n, f := l.reach(0, n)
	if !f.OK() {
		return SharedHold{}, f
	}
	if s, ok := r.engine.(Sharing); ok {
		return SharedHold{shareID(s), r.at, n, r.place}, Fault{}
	}
	r.close()
	return SharedHold{}, StagedFault()
}

// Release closes the sections. It is idempotent.
func (h *SharedHold) Release() {
	h.at.close()
	h.at = place{}
}

// shareID returns the number of memory. A section on it is open, so that its region is not
// closed meanwhile.
func shareID(s Sharing) uint64 {
	if id, ok := shares.ids.Load(s); ok {
		return id.(uint64)
	}
	segments.mu.Lock() // the numbers are those of segments, too
	segments.last++
	id := segments.last
	segments.mu.Unlock()
	shares.mu.Lock()
	defer shares.mu.Unlock()
	if old, had := shares.ids.LoadOrStore(s, id); had {
		return old.(uint64)
	}
	if shares.byID == nil {
		shares.byID = make(map[uint64]Sharing)
	}
	shares.byID[id] = s
	return id
}

// closeBacking closes the backing of a region, which no access uses any more, after it has called
// the functions of WatchSegments, by which other processes give the memory up.
func closeBacking(b Backing) error {
	if s, ok := b.(Sharing); ok {
		Unshare(s)
	}
	return b.Close()
}

// Unshare has other processes give up memory that they have opened: it is revoked, or its region
// is closed. No access uses it any more.
func Unshare(s Sharing) {
	if id, had := shares.ids.LoadAndDelete(s); had {
		shares.mu.Lock()
		delete(shares.byID, id.(uint64))
		shares.mu.Unlock()
		tellSegmentGone(id.(uint64))
	}
}

// PassShared returns what another process needs to open the memory with a number (OpenShared),
// and a descriptor, which is the caller's to close, -1 if there is none.
func PassShared(id uint64) (what []byte, fd int, err error) {
	shares.mu.Lock() // the memory is not closed meanwhile: see closeBacking
	defer shares.mu.Unlock()
	s := shares.byID[id]
	if s == nil {
		return nil, -1, ErrNoSegment
	}
	opener, more, fd, err := s.Share()
	if err != nil {
		return nil, -1, err
	}
	return append(append([]byte(opener), 0), more...), fd, nil
}

// OpenShared opens memory that another process shares. It takes the descriptor over, also if it
// fails.
func OpenShared(what []byte, fd int) (Engine, error) {
	name, more, ok := bytes.Cut(what, []byte{0})
	if !ok || len(what) > maxShared {
		closeIfOpen(fd)
		return nil, fmt.Errorf("mem: what was said of shared memory is nonsense: %w", syscall.EINVAL)
	}
	shares.mu.Lock()
	open := shares.openers[string(name)]
	shares.mu.Unlock()
	if open == nil {
		closeIfOpen(fd)
		return nil, fmt.Errorf("mem: nobody here opens memory of %q: %w", name, syscall.ENODEV)
	}
	return open(more, fd)
}

func closeIfOpen(fd int) {
	if fd >= 0 {
		_ = sys.CloseFD(fd) // it was open: it cannot fail
	}
}
