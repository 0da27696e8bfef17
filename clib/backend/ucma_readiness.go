//go:build cgo

package main

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// eventfd is the readiness of a channel, by a descriptor of our own: the program reads the eventfd
// when it waits for an event, polls it, and may close its descriptor.
type eventfd struct {
	fd       int
	clearing bool
}

// newEventfd duplicates a descriptor. The duplicate is out of the program's way, at a number
// of at least above, if the limit on descriptors allows it.
func newEventfd(fd, above int) (*eventfd, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, above)
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EMFILE) {
		own, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	}
	if err != nil {
		return nil, err
	}
	e := &eventfd{fd: own}
	e.clearing = errors.Is(e.read(), syscall.EAGAIN) // nothing is there yet
	return e, nil
}

// canClear reports whether the kernel can read without waiting what is to be waited for: those
// before 5.8 cannot.
func (e *eventfd) canClear() bool { return e.clearing }

// set makes the descriptor readable.
func (e *eventfd) set() {
	b := [8]byte{}
	native.PutUint64(b[:], 1)
	_, _ = unix.Write(e.fd, b[:]) // it fails if the count is full, at 2^64 - 2
}

// clear makes the descriptor not readable. If a thread of the program has just read it, that
// thread will find no event.
func (e *eventfd) clear() { _ = e.read() }

func (e *eventfd) read() error {
	var b [8]byte
	_, err := unix.Preadv2(e.fd, [][]byte{b[:]}, -1, unix.RWF_NOWAIT)
	return err
}

func (e *eventfd) close() { _ = unix.Close(e.fd) } // nothing is written later
