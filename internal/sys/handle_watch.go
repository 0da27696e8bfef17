package sys

// Which open files of handles end, in whatever process: one inotify instance and one goroutine for
// all handles of the process. Both exist only while there are handles.
//
// A user has few instances (fs.inotify.max_user_instances, often 128 for all processes) and a limited
// number of files to watch. Where they have run out, the goroutine looks at the handle once a second, as it
// does at handles of the kernel's dma-bufs.

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
	fd   int      // -1 if there is no instance
	file *os.File // of fd: its deadline ends a wait; nil if there is no instance
	raw  syscall.RawConn
	wake chan struct{} // ends a wait if there is no instance
	done chan struct{} // closed when the goroutine has ended

	// The list's lock guards what follows.
	handles   map[int32]*Handle // by number in the instance
	unwatched map[*Handle]bool  // those whose files the instance does not report
	ending    bool              // there are no handles: the goroutine ends
}

// The pauses between two attempts to release a handle. The first ones cover the short time between
// the report that an open file ends and its end. The longest one is repeated for as long as the
// handle is not released: whoever ends the file may be kept from running for any time.
const (
	firstReleasePause = 100 * time.Microsecond
	lastReleasePause  = time.Second
)

// add begins to watch the file of a handle.
func (l *closeWatchList) add(h *Handle) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current == nil || !l.current.isOpen() {
		// If the current watch has no instance either, it will do.
		if w := newCloseWatch(); w.file != nil || l.current == nil || l.current.file != nil {
			l.current = w
			go w.run()
		}
	}
	w := l.current
	h.watch, h.wd = w, -1
	if h.file.reported {
		if wd, err := w.addFile(h.kept); err == nil {
			h.wd = wd
			w.handles[wd] = h
			return
		}
	}
	w.unwatched[h] = true
	w.interruptLocked() // it may wait for reports only
}

// newCloseWatch makes a watch, without an instance if there can be none.
func newCloseWatch() *closeWatch {
	w := &closeWatch{
		fd: -1, wake: make(chan struct{}, 1), done: make(chan struct{}),
		handles: make(map[int32]*Handle), unwatched: make(map[*Handle]bool),
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return w
	}
	file := os.NewFile(uintptr(fd), "inotify")
	raw, err := file.SyscallConn()
	if err == nil {
		err = file.SetDeadline(time.Time{}) // fails if the runtime does not wait for it
	}
	if err == nil {
		err = setQuietSignal(fd) // isOpen looks for it
	}
	if err != nil {
		_ = file.Close() // it has reported nothing yet
		return w
	}
	w.fd, w.file, w.raw = fd, file, raw
	return w
}

// addFile makes the instance report each end of an open file of a descriptor's file.
func (w *closeWatch) addFile(fd int) (int32, error) {
	for _, dir := range procFDs {
		wd, err := unix.InotifyAddWatch(w.fd, fmt.Sprintf("%s/%d", dir, fd), unix.IN_CLOSE)
		if err != unix.ENOENT {
			return int32(wd), err
		}
	}
	return -1, unix.ENOENT
}

// interruptLocked ends a wait of the goroutine. The list's lock must be held.
func (w *closeWatch) interruptLocked() {
	if w.file != nil {
		_ = w.file.SetReadDeadline(time.Unix(1, 0)) // in the past. The file is open: it cannot fail
		return
	}
	select {
	case w.wake <- struct{}{}:
	default: // it is woken already
	}
}

// isOpen reports whether there is an instance, and the number of its descriptor still stands for
// it. All instances of the machine have one inode. What tells this one apart is the signal that
// was set for it and is never sent.
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
	delete(w.unwatched, h)
	delete(w.handles, h.wd)
	if h.wd >= 0 && w.isOpen() {
		_, _ = unix.InotifyRmWatch(w.fd, uint32(h.wd)) // it fails if the program has closed the file's descriptors
	}
	w.endIfUnusedLocked()
}

// endIfUnusedLocked tells the goroutine to end if there are no handles. The list's lock must be held.
func (w *closeWatch) endIfUnusedLocked() {
	if len(w.handles)+len(w.unwatched) > 0 {
		return
	}
	w.ending = true
	if closeWatches.current == w {
		closeWatches.current = nil
	}
	w.interruptLocked()
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
		n, ok := w.wait(buf, &r)
		if !ok {
			break
		}
		r.report(buf[:n], time.Now())
		r.attempt(time.Now())
	}
	switch {
	case w.file == nil:
	case w.isOpen():
		_ = w.file.Close() // what was read is all that counts
	default:
		closeWatches.mu.Lock()
		defer closeWatches.mu.Unlock()
		closeWatches.lost = append(closeWatches.lost, w.file)
	}
}

// wait waits for reports, or until an attempt is due. It returns false if the goroutine must end.
func (w *closeWatch) wait(buf []byte, r *releaser) (n int, ok bool) {
	closeWatches.mu.Lock()
	if w.ending {
		closeWatches.mu.Unlock()
		return 0, false
	}
	for h := range w.unwatched {
		if _, ok := r.pending[h]; !ok {
			r.pending[h] = attempt{time.Now().Add(lastReleasePause), lastReleasePause}
		}
	}
	until := r.next()
	if w.file != nil {
		_ = w.file.SetReadDeadline(until) // the file is open: it cannot fail
	}
	closeWatches.mu.Unlock()
	if w.file == nil {
		w.sleep(until)
		return 0, true
	}
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

// sleep waits where there is no instance to read. There is a handle, so until is not zero.
func (w *closeWatch) sleep(until time.Time) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-w.wake:
	case <-timer.C:
	}
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
