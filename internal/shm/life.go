package shm

// The end of a peer process, as the kernel tells it. A connection that has broken proves
// nothing: a process that lives may have closed it, or somebody may have shut it down. A
// process that has ended stores nothing any more, so whoever must know that, before memory
// is used for something else, asks here:
//
//   - by a descriptor of the process (pidfd), where its number is known for sure;
//   - otherwise, as between PID namespaces, by a pipe whose write end the process never
//     closes: the kernel does, when the process has ended. (A child that the process has
//     forked keeps the write end open too. Then the end is noticed late, never early.)
//
// The descriptor outlives the channel that brought it: lanes use it until they are freed.

import (
	"sync"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// life is the life of a peer process.
type life struct {
	mu   sync.Mutex // guards what follows; nobody waits under it
	fd   int        // a pidfd, or the read end of the peer's pipe
	uses int        // the channel, its lanes, and those who wait for one; the last one closes fd
}

func newLife(fd int) *life { return &life{fd: fd, uses: 1} }

// hold keeps the descriptor open until drop. It reports false if the descriptor is closed.
func (l *life) hold() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.uses == 0 {
		return false
	}
	l.uses++
	return true
}

// drop gives up one use.
func (l *life) drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.uses--; l.uses == 0 {
		_ = sys.CloseFD(l.fd) // it was open: it cannot fail
	}
}

// ended reports whether the process has ended. The caller holds the life.
func (l *life) ended() bool { return sys.Exited(l.fd) }

// own is this process's pipe.
var own struct {
	mu   sync.Mutex // guards read
	read int        // 0: it was not made yet
}

// ownLife returns the read end of this process's pipe, which every peer gets a copy of. It
// is made once; if that fails, as for want of descriptors, the next one tries again. Nobody
// ever closes the write end, nor writes to it.
func ownLife() (int, error) {
	own.mu.Lock()
	defer own.mu.Unlock()
	if own.read != 0 {
		return own.read, nil
	}
	read, _, err := sys.NewPipe()
	if err != nil {
		return -1, err
	}
	own.read = read
	return read, nil
}
