package sys

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Event is an eventfd that other processes can signal, and that a Poller can wait for
// beside sockets.
type Event struct{ fd int }

// NewEvent makes an event that is not signalled.
func NewEvent() (*Event, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return &Event{fd}, nil
}

// OpenEvent takes over a descriptor that another process has sent. It refuses one that
// is no eventfd, and leaves it open.
func OpenEvent(fd int) (*Event, error) {
	what, err := readFDLink(fd)
	if err != nil {
		return nil, err
	}
	if what != "anon_inode:[eventfd]" {
		return nil, fmt.Errorf("%q is not an eventfd: %w", what, unix.EINVAL)
	}
	return &Event{fd}, nil
}

// FD returns the descriptor, which is readable while the event is signalled.
func (e *Event) FD() int { return e.fd }

// Signal signals the event.
func (e *Event) Signal() {
	one := [8]byte{0: 1, 7: 1}      // not zero, and not the maximum, in any byte order
	_, _ = unix.Write(e.fd, one[:]) // if the counter is full, the event is signalled already
}

// Drain clears the event.
func (e *Event) Drain() {
	var count [8]byte
	_, _ = unix.Read(e.fd, count[:]) // if there is nothing to read, it is clear already
}

// Close closes the descriptor. No goroutine may be using it.
func (e *Event) Close() error { return unix.Close(e.fd) }
