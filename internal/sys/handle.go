package sys

// A handle is a memory file that stands for an object of this process, as the descriptor of a
// dma-buf stands for a buffer of the kernel. Its descriptors can be duplicated, mapped, inherited
// and sent to other processes. The process that made it learns when the last of them is gone:
//
//  1. NewHandle opens the file twice. It closes the descriptor of memfd_create, because the kernel
//     does not count that one among the file's openers, and keeps the other.
//  2. FD opens the file once more for each caller.
//  3. The kernel reports by inotify each time that an open file of it ends: when its last
//     descriptor is closed and its last mapping removed, in whatever process (handle_watch.go).
//     Without inotify the process looks once a second.
//  4. tryRelease then asks for a lease on the kept descriptor. The kernel grants it only if
//     that descriptor is the only opener. If it is granted, the handle is released.
//
// It takes Linux 5.3. Descriptors that were opened with O_PATH do not count.
//
// A handle can also be made of a dma-buf of the kernel (NewDMABufHandle). All descriptors of that are one open
// file, so the end of a descriptor is not reported, and the process looks how many there are.
//
// A program may close descriptors that are not its own, and the numbers may be given to other
// files. So each use of a kept descriptor is preceded by a look whether it is still the same file.

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// HandleID identifies an open file of this machine for as long as it is open anywhere.
type HandleID struct{ Dev, Ino uint64 }

// HandleIDOf returns the identity of an open descriptor. The error is EBADF if it is not open.
func HandleIDOf(fd int) (HandleID, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return HandleID{}, fmt.Errorf("fstat: %w", err)
	}
	return HandleID{Dev: uint64(st.Dev), Ino: st.Ino}, nil //nolint:unconvert // its type depends on the architecture
}

// Handle stands for an object of this process. Its methods may be called from any goroutine.
type Handle struct {
	id       HandleID
	file     *handleFile
	kept     int // the process's own descriptor; whoever changes state from handleOpen closes it
	released func()
	watch    *closeWatch
	wd       int32 // the number of the file in watch; -1 if it is not watched

	// mu guards what follows. It keeps FD and the decision to release apart.
	mu    sync.Mutex
	state handleState
	given bool          // FD has returned a descriptor: the last one can be closed
	ended chan struct{} // closed when released has returned; nil until the handle is released
}

// handleFile is a kind of file that handles are made of.
type handleFile struct {
	open     func(kept int) (int, error) // returns another descriptor
	alone    func(kept int) error        // returns EAGAIN if the file is held by others than kept
	reported bool                        // inotify reports that an open file ends
}

var (
	// open cannot block: nobody else has a lease.
	handleMemory = handleFile{func(kept int) (int, error) { return reopen(kept, unix.O_RDWR) }, checkSoleOpener, true}
	handleDMABuf = handleFile{DupFD, checkSoleHolder, false} // there is one open file, which kept keeps
)

type handleState int

const (
	handleOpen     handleState = iota
	handleReleased             // all descriptors were closed
	handleClosed               // Close was called before that
)

// NewHandle makes a memory file of size bytes, sparse and sealed against shrinking and growing, that
// stands for an object of this process. /proc/PID/maps shows the name.
//
// Once FD has returned a descriptor, and all descriptors and mappings of the file are gone in
// all processes, released is called, once and on a goroutine of its own. The handle needs no Close
// then.
func NewHandle(name string, size int64, released func()) (*Handle, error) {
	kept, err := newHandleFile(name, size)
	if err != nil {
		return nil, err
	}
	return handleOf(kept, &handleMemory, released)
}

// NewDMABufHandle makes a handle of a dma-buf of the kernel, whose descriptor is the handle's from then on,
// also if there is an error. A driver that has imported the dma-buf counts as a descriptor. So does the copy of
// the handle's own descriptor that a child of fork(2) has, until it executes another program. The
// process looks once a second whether the last one is gone: the kernel does not report it.
func NewDMABufHandle(fd int, released func()) (*Handle, error) {
	return handleOf(fd, &handleDMABuf, released)
}

func handleOf(kept int, file *handleFile, released func()) (*Handle, error) {
	id, err := HandleIDOf(kept)
	if err != nil {
		_ = unix.Close(kept) // the first error says more
		return nil, err
	}
	h := &Handle{id: id, file: file, kept: kept, released: released}
	closeWatches.add(h)
	return h, nil
}

// newHandleFile makes the file and returns the descriptor to be kept. The descriptor is open for
// writing: so no process can take a lease on the file, which would make FD wait.
func newHandleFile(name string, size int64) (int, error) {
	first, err := createMemfd(name)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(first) }() // it is open: it cannot fail
	if err := unix.Ftruncate(first, size); err != nil {
		return -1, fmt.Errorf("ftruncate to %d bytes: %w", size, err)
	}
	if _, err := unix.FcntlInt(uintptr(first), unix.F_ADD_SEALS, memfdSeals); err != nil {
		return -1, fmt.Errorf("sealing: %w", err)
	}
	kept, err := reopen(first, unix.O_RDWR)
	if err != nil {
		return -1, fmt.Errorf("opening a memory file again: %w", err)
	}
	return kept, nil
}

// ID returns what identifies the file.
func (h *Handle) ID() HandleID { return h.id }

// FD returns a new descriptor of the file, closed on exec, which the caller closes. The error is
// os.ErrClosed after Close and after the release, EBADF if the program has closed the
// descriptor that the handle keeps, and otherwise that of open(2), as EMFILE.
func (h *Handle) FD() (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.state != handleOpen {
		return -1, os.ErrClosed
	}
	if !h.isKept() {
		return -1, h.errLost()
	}
	fd, err := h.file.open(h.kept)
	if err != nil {
		return -1, fmt.Errorf("opening a handle: %w", err)
	}
	if id, err := HandleIDOf(fd); err != nil || id != h.id { // the program has closed kept meanwhile
		_ = unix.Close(fd) // it was just opened: it cannot fail
		return -1, h.errLost()
	}
	h.given = true
	return fd, nil
}

// isKept reports whether the number of the kept descriptor still stands for the file.
func (h *Handle) isKept() bool {
	id, err := HandleIDOf(h.kept)
	return err == nil && id == h.id
}

func (h *Handle) errLost() error {
	return fmt.Errorf("the program has closed descriptor %d of a handle: %w", h.kept, unix.EBADF)
}

// tryRelease releases the handle if nobody else has the file open. It returns false if it should be
// called again later: an open file that ends is reported before the kernel stops counting it.
func (h *Handle) tryRelease() bool {
	h.mu.Lock()
	if h.state != handleOpen || !h.given || !h.isKept() {
		h.mu.Unlock()
		return true
	}
	if err := h.file.alone(h.kept); err != nil {
		h.mu.Unlock()
		if err != unix.EAGAIN {
			aloneFailure.Do(func() {
				slog.Warn("verbena: the end of a handle cannot be noticed", "err", err)
			})
		}
		return false
	}
	h.state, h.ended = handleReleased, make(chan struct{})
	h.mu.Unlock()
	h.watch.remove(h)
	h.closeKept()
	go func() {
		defer close(h.ended)
		h.released()
	}()
	return true
}

var aloneFailure sync.Once // the log names one failure; those behind it are of the same kind

// checkSoleOpener returns EAGAIN if a file is open other than by this descriptor.
func checkSoleOpener(fd int) error {
	if err := setQuietSignal(fd); err != nil { // the end of a lease sets it back
		return err
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		return err
	}
	_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK) // the lease is there: it cannot fail
	return nil
}

// quietSignal is ignored by programs that do not ask for it, unlike SIGIO, which the kernel sends
// otherwise to the holder of a lease when another process opens the file: SIGIO ends a C program.
const quietSignal = unix.SIGURG

// setQuietSignal makes quietSignal the signal of an open file.
func setQuietSignal(fd int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETSIG, int(quietSignal))
	return err
}

func (h *Handle) closeKept() {
	if h.isKept() {
		_ = unix.Close(h.kept) // it is open: it cannot fail
	}
}

// Close gives up the handle, though descriptors may be left: they stay good. After it has returned,
// released is neither called nor running. So it must not be called by released, nor with a
// lock held that released waits for. It is idempotent.
//
// Close of the last handle of the process takes some ten milliseconds: the kernel waits for those
// who read its lists before it gives up inotify.
func (h *Handle) Close() error {
	h.mu.Lock()
	state := h.state
	if state == handleOpen {
		h.state = handleClosed
	}
	h.mu.Unlock()
	switch state {
	case handleReleased:
		<-h.ended
	case handleOpen:
		h.watch.remove(h)
		h.closeKept()
	}
	h.watch.waitIfEnding()
	return nil
}

// MemfdName returns the name that a memory file was made with. The error is EINVAL if the descriptor
// is that of another kind of file.
func MemfdName(fd int) (string, error) {
	link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return "", err
	}
	name, ok := strings.CutPrefix(link, "/memfd:")
	if !ok {
		return "", fmt.Errorf("%s is no memory file: %w", link, unix.EINVAL)
	}
	return strings.TrimSuffix(name, " (deleted)"), nil
}
