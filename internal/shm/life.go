package shm

// The end of a peer process, as the kernel reports it. A broken connection proves nothing: a
// process that lives may have closed it or shut it down. Only a process that has ended is
// certain to store nothing any more. Before the owner of a grant uses the memory for something
// else, it has to be certain of that, by one of two descriptors:
//
//   - a pidfd of the process, where its number is certain;
//   - otherwise, as between PID namespaces, a pipe whose write end the process never closes:
//     the kernel does, when the process has ended. (A child that the process has forked keeps
//     the write end open too. Then the end is noticed late, never early.)
//
// The descriptor outlives the channel that brought it: grants use it until they are freed.

import (
	"sync"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// life is the descriptor by which the end of a peer process is noticed.
type life struct {
	mu   sync.Mutex // guards what follows; never held while waiting
	fd   int        // a pidfd, or the read end of the peer's pipe
	uses int        // the channel, its grants, and each Grant.Await; the last drop closes fd
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
	read int        // 0: not made yet
}

// ownLife returns the read end of this process's pipe, which every peer gets a copy of. The
// first call that succeeds makes the pipe. This process never closes the write end, nor writes
// to it.
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
