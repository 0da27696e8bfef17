package sys

// Which open files of handles end, in whatever process: one inotify instance and one goroutine for
// all handles of the process. Both exist only while there are handles.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// closeWatches has the watch that new handles are added to.
var closeWatches closeWatchList

type closeWatchList struct {
	mu      sync.Mutex  // guards what follows, and the maps of all watches
	current *closeWatch // nil while there are no handles
	lost    []*os.File  // instances whose descriptors the program has closed: their finalizers must not run
}

// closeWatch is an inotify instance and the goroutine that reads it.
type closeWatch struct {
	fd   int
	file *os.File // of fd: its deadline ends a read
	raw  syscall.RawConn
	done chan struct{} // closed when the goroutine has ended

	// The list's lock guards what follows.
	handles map[int32]*Handle // by number in the instance
	ending  bool              // there are no handles: the goroutine ends
}

// The pauses between two attempts to release a handle. The first ones cover the short time between
// the report that an open file ends and its end. The longest one is repeated for as long as the
// handle is not released: whoever ends the file may be kept from running for any time.
const (
	firstReleasePause = 100 * time.Microsecond
	lastReleasePause  = time.Second
)

// add begins to watch the file of a handle.
func (l *closeWatchList) add(h *Handle) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current == nil || !l.current.isOpen() {
		w, err := newCloseWatch()
		if err != nil {
			return err
		}
		l.current = w
		go w.run()
	}
	w := l.current
	wd, err := addInotify(w.fd, h.kept)
	if err != nil {
		w.endIfUnusedLocked()
		return err
	}
	h.watch, h.wd = w, int32(wd)
	w.handles[h.wd] = h
	return nil
}

func newCloseWatch() (*closeWatch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify_init: %w", err)
	}
	if err := setQuietSignal(fd); err != nil { // isOpen looks for it
		_ = unix.Close(fd) // the first error says more
		return nil, fmt.Errorf("F_SETSIG: %w", err)
	}
	w := &closeWatch{
		fd: fd, file: os.NewFile(uintptr(fd), "inotify"),
		done: make(chan struct{}), handles: make(map[int32]*Handle),
	}
	if w.raw, err = w.file.SyscallConn(); err == nil {
		err = w.file.SetDeadline(time.Time{}) // fails if the runtime does not wait for it
	}
	if err != nil {
		_ = w.file.Close() // the first error says more
		return nil, err
	}
	return w, nil
}

// addInotify makes an inotify instance report each end of an open file of a descriptor's file.
func addInotify(inotify, fd int) (wd int, err error) {
	for _, dir := range procFDs {
		wd, err = unix.InotifyAddWatch(inotify, fmt.Sprintf("%s/%d", dir, fd), unix.IN_CLOSE)
		if err != unix.ENOENT {
			break
		}
	}
	if err != nil {
		return -1, fmt.Errorf("inotify_add_watch: %w", err)
	}
	return wd, nil
}

// isOpen reports whether the number of the descriptor still stands for the instance. All
// instances of the machine have one inode. What tells this one apart is the signal that was set
// for it and is never sent.
func (w *closeWatch) isOpen() bool {
	sig, err := unix.FcntlInt(uintptr(w.fd), unix.F_GETSIG, 0)
	if err != nil || sig != int(quietSignal) {
		return false
	}
	what, err := readFDLink(w.fd)
	return err == nil && what == "anon_inode:inotify"
}

// readFDLink returns what the kernel calls the file of a descriptor.
func readFDLink(fd int) (what string, err error) {
	for _, dir := range procFDs {
		if what, err = os.Readlink(fmt.Sprintf("%s/%d", dir, fd)); !errors.Is(err, unix.ENOENT) {
			break
		}
	}
	return what, err
}

// remove ends the watching of a handle's file. After the last one it tells the goroutine to end.
func (w *closeWatch) remove(h *Handle) {
	closeWatches.mu.Lock()
	defer closeWatches.mu.Unlock()
	delete(w.handles, h.wd)
	if w.isOpen() {
		_, _ = unix.InotifyRmWatch(w.fd, uint32(h.wd)) // it fails if the program has closed the file's descriptors
	}
	w.endIfUnusedLocked()
}

// endIfUnusedLocked tells the goroutine to end if there are no handles. The list's lock must be held.
func (w *closeWatch) endIfUnusedLocked() {
	if len(w.handles) > 0 {
		return
	}
	w.ending = true
	if closeWatches.current == w {
		closeWatches.current = nil
	}
	_ = w.file.SetReadDeadline(time.Unix(1, 0)) // in the past: it ends the read. The file is open: it cannot fail
}

// waitIfEnding waits for the goroutine if it was told to end.
func (w *closeWatch) waitIfEnding() {
	closeWatches.mu.Lock()
	ending := w.ending
	closeWatches.mu.Unlock()
	if ending {
		<-w.done
	}
}

// run reads reports and releases handles until there are none.
func (w *closeWatch) run() {
	defer close(w.done)
	r := releaser{watch: w, pending: make(map[*Handle]attempt)}
	buf := make([]byte, 256*unix.SizeofInotifyEvent)
	for {
		n, ok := w.read(buf, r.next())
		if !ok {
			break
		}
		r.report(buf[:n], time.Now())
		r.attempt(time.Now())
	}
	if w.isOpen() {
		_ = w.file.Close() // what was read is all that counts
		return
	}
	closeWatches.mu.Lock()
	defer closeWatches.mu.Unlock()
	closeWatches.lost = append(closeWatches.lost, w.file)
}

// read waits for reports, until a time unless it is zero. It returns false if the goroutine
// must end.
func (w *closeWatch) read(buf []byte, until time.Time) (n int, ok bool) {
	closeWatches.mu.Lock()
	if w.ending {
		closeWatches.mu.Unlock()
		return 0, false
	}
	_ = w.file.SetReadDeadline(until) // the file is open: it cannot fail
	closeWatches.mu.Unlock()
	// An error means that the time has come.
	_ = w.raw.Read(func(uintptr) bool {
		if !w.isOpen() {
			return false // no report comes any more: wait for the deadline
		}
		var err error
		n, err = unix.Read(w.fd, buf)
		return err != unix.EAGAIN && err != unix.EINTR
	})
	return max(n, 0), true
}

// releaser has the handles that may have lost their last descriptor. The goroutine of a watch
// owns it.
type releaser struct {
	watch   *closeWatch
	pending map[*Handle]attempt
}

// attempt is when the next attempt to release a handle is due, and the pause after it.
type attempt struct {
	at    time.Time
	pause time.Duration
}

// next returns when the next attempt is due, the zero time if none is.
func (r *releaser) next() (at time.Time) {
	for _, a := range r.pending {
		if at.IsZero() || a.at.Before(at) {
			at = a.at
		}
	}
	return at
}

// report notes the handles that reports name, all if reports were lost.
func (r *releaser) report(b []byte, now time.Time) {
	closeWatches.mu.Lock()
	defer closeWatches.mu.Unlock()
	for len(b) >= unix.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(b))
		mask := binary.NativeEndian.Uint32(b[4:])
		name := int(binary.NativeEndian.Uint32(b[12:]))
		b = b[min(unix.SizeofInotifyEvent+name, len(b)):] // files have no name here, directories would
		if mask&unix.IN_Q_OVERFLOW != 0 {
			for _, h := range r.watch.handles {
				r.pending[h] = attempt{now, firstReleasePause}
			}
		} else if h := r.watch.handles[wd]; h != nil {
			r.pending[h] = attempt{now, firstReleasePause}
		}
	}
}

// attempt makes the attempts that are due.
func (r *releaser) attempt(now time.Time) {
	for h, a := range r.pending {
		if a.at.After(now) {
			continue
		}
		if h.tryRelease() {
			delete(r.pending, h)
		} else {
			r.pending[h] = attempt{now.Add(a.pause), min(2*a.pause, lastReleasePause)}
		}
	}
}
