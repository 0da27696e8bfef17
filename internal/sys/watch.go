package sys

import (
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Watch waits for any of many descriptors to become readable or to be hung up,
// in one goroutine and without a thread of its own: it is an epoll instance,
// which is a descriptor itself, and the runtime waits for it as it waits for
// sockets. Descriptors may be added and removed at any time.
type Watch struct {
	file   *os.File
	raw    syscall.RawConn
	events []unix.EpollEvent // used by Wait alone
}

// NewWatch makes a watch of nothing.
func NewWatch() (*Watch, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create: %w", err)
	}
	// Not blocking, so that the runtime's poller waits for it.
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd) // the first error says more
		return nil, err
	}
	w := &Watch{file: os.NewFile(uintptr(fd), "epoll"), events: make([]unix.EpollEvent, 32)}
	if w.raw, err = w.file.SyscallConn(); err == nil {
		err = w.file.SetDeadline(time.Time{}) // fails if the runtime does not wait for it
	}
	if err != nil {
		_ = w.file.Close() // the first error says more
		return nil, err
	}
	return w, nil
}

// Add begins to watch a descriptor. Wait returns the tag for as long as it is
// readable or hung up.
func (w *Watch) Add(fd int, tag int32) error {
	return w.change(unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: tag})
}

// AddHangup begins to watch a descriptor. Wait returns the tag for as long as it is hung up; that it is
// readable does not count.
func (w *Watch) AddHangup(fd int, tag int32) error {
	return w.change(unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Fd: tag})
}

// AddWritable begins to watch a descriptor. Wait returns the tag for as long as it is writable
// or hung up.
func (w *Watch) AddWritable(fd int, tag int32) error {
	return w.change(unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLOUT, Fd: tag})
}

// Remove ends the watching of a descriptor. A Wait that is under way may still return the
// tag. An error means that the descriptor was not watched.
func (w *Watch) Remove(fd int) error { return w.change(unix.EPOLL_CTL_DEL, fd, nil) }

func (w *Watch) change(op, fd int, ev *unix.EpollEvent) (err error) {
	if w.raw.Control(func(epoll uintptr) { err = unix.EpollCtl(int(epoll), op, fd, ev) }) != nil {
		err = os.ErrClosed // there is no other reason
	}
	if err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

// AddConn begins to watch a socket of package net.
func (w *Watch) AddConn(c *net.UnixConn, tag int32) error {
	return control(c, func(fd int) error { return w.Add(fd, tag) })
}

// RemoveConn ends the watching of a socket. It must be called before the socket
// is closed: a forked child may keep the socket, and with it the watch, alive.
func (w *Watch) RemoveConn(c *net.UnixConn) error { return control(c, w.Remove) }

// Wait blocks until descriptors are readable or hung up and stores their tags, some of
// them perhaps twice. The error is os.ErrClosed after Close. One goroutine at a time may
// call it.
func (w *Watch) Wait(tags []int32) (n int, err error) {
	events := w.events[:min(len(tags), len(w.events))]
	if w.raw.Read(func(fd uintptr) bool {
		n, err = unix.EpollWait(int(fd), events, 0)
		return n > 0 || err != nil && err != unix.EINTR
	}) != nil {
		return 0, os.ErrClosed // there is no other reason: nothing sets a deadline
	}
	if err != nil {
		return 0, fmt.Errorf("epoll_wait: %w", err)
	}
	for i := range events[:n] {
		tags[i] = events[i].Fd
	}
	return n, nil
}

// Close ends Wait, and all watching. Add and Remove do nothing but fail afterwards.
func (w *Watch) Close() error { return w.file.Close() }

// OpenPidfd returns a descriptor that is readable once the process has ended.
// Kernels older than 5.3 have none: ENOSYS.
func OpenPidfd(pid int) (int, error) { return unix.PidfdOpen(pid, 0) }

// NewPipe makes a pipe, closed on exec. When all copies of the write end are closed, as
// those of a process are when it ends, Exited reports so of the read end.
func NewPipe() (read, write int, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return -1, -1, fmt.Errorf("pipe2: %w", err)
	}
	return fds[0], fds[1], nil
}

// IsPipe reports whether a descriptor is an end of a pipe.
func IsPipe(fd int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO
}

// Exited reports whether the process of a descriptor has ended. The descriptor is a pidfd,
// or the read end of a pipe that no process writes to (NewPipe).
func Exited(fd int) bool { return readable(fd) }

// readable reports whether poll finds something to read, an end or an error.
func readable(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if err != unix.EINTR {
			return n > 0
		}
	}
}

// CanAccept reports whether a connection waits to be accepted.
func CanAccept(l *net.UnixListener) bool {
	waits := false
	return control(l, func(fd int) error {
		waits = readable(fd)
		return nil
	}) == nil && waits
}
