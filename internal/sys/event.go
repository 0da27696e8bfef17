package sys

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Event is an eventfd: a bell that other processes can ring, and that can be
// waited for beside sockets (NewPoller).
type Event struct{ fd int }

// NewEvent makes a bell that has not been rung.
func NewEvent() (*Event, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return &Event{fd}, nil
}

// OpenEvent takes over a descriptor that somebody sent. What is no eventfd is
// refused, and left open.
func OpenEvent(fd int) (*Event, error) {
	link := fmt.Sprintf("/proc/self/fd/%d", fd)
	what, err := os.Readlink(link)
	if err != nil {
		return nil, err
	}
	if what != "anon_inode:[eventfd]" {
		return nil, fmt.Errorf("%q is not an eventfd: %w", what, unix.EINVAL)
	}
	return &Event{fd}, nil
}

// FD returns the descriptor: readable when the bell has been rung.
func (e *Event) FD() int { return e.fd }

// Signal rings the bell.
func (e *Event) Signal() {
	one := [8]byte{0: 1, 7: 1}      // not zero, and not the maximum, in any byte order
	_, _ = unix.Write(e.fd, one[:]) // full is readable as well
}

// Drain makes the bell silent again.
func (e *Event) Drain() {
	var count [8]byte
	_, _ = unix.Read(e.fd, count[:]) // nothing to read is as good
}

// Close closes the descriptor. Nobody may be using it.
func (e *Event) Close() error { return unix.Close(e.fd) }
