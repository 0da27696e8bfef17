//go:build cgo

package main

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// semaphore is the eventfd of a channel, by a descriptor of our own: the program reads it when
// it takes an event, polls it, and may close its descriptor.
type semaphore struct{ fd int }

// newSemaphore duplicates a descriptor. The duplicate is out of the program's way, at a number
// of at least above, if the limit on descriptors allows it.
func newSemaphore(fd, above int) (*semaphore, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, above)
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EMFILE) {
		own, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	}
	if err != nil {
		return nil, err
	}
	return &semaphore{own}, nil
}

// add adds one.
func (s *semaphore) add() {
	b := [8]byte{}
	native.PutUint64(b[:], 1)
	_, _ = unix.Write(s.fd, b[:]) // it fails if the count is full, at 2^64 - 2
}

// take takes one back, for an event that was dropped. If the count is zero, a reader has
// taken it and will find no event. Kernels before 5.8 cannot read without waiting what is
// to be waited for: then the next reader finds no event.
func (s *semaphore) take() {
	var b [8]byte
	_, _ = unix.Preadv2(s.fd, [][]byte{b[:]}, -1, unix.RWF_NOWAIT)
}

func (s *semaphore) close() { _ = unix.Close(s.fd) } // nothing is written later
