package sys

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Poller blocks one thread until a socket has something to read, an event was
// signalled, or somebody calls Wake. A Wake that finds nobody waiting is kept
// for the next Wait.
type Poller struct {
	fds     []unix.PollFd // the own event, the given ones, sockets; Wait's own
	events  []*Event
	timeout unix.Timespec // Wait's own
	event   int
	state   atomic.Uint32
	deaf    bool // the own event was closed by somebody else: Wake is not heard; Wait's own

	mu     sync.Mutex // guards what follows, and event against use after close
	added  []int      // descriptors that the next Wait adds
	gone   []int      // and those that it forgets
	closed bool
}

// What a Poller is doing.
const (
	pollIdle    = iota // nobody waits
	pollWaiting        // somebody is in the kernel, or on the way there
	pollWoken          // Wake was called, and Wait has not seen it yet
)

// deafWait is how long a Wait takes at most that no Wake can end.
const deafWait = 10 * time.Millisecond

// NewPoller makes a poller of sockets and events, which must outlive it.
func NewPoller(socks []*UDPSocket, events ...*Event) (*Poller, error) {
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, err
	}
	p := &Poller{event: event, events: events}
	p.watch(event)
	for _, e := range events {
		p.watch(e.fd)
	}
	for _, s := range socks {
		p.watch(s.fd)
	}
	return p, nil
}

func (p *Poller) watch(fd int) {
	p.fds = append(p.fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
}

// Add makes the poller wait for more sockets, which must outlive it.
func (p *Poller) Add(socks []*UDPSocket) {
	p.mu.Lock()
	for _, s := range socks {
		p.added = append(p.added, s.fd)
	}
	p.mu.Unlock()
	p.Wake()
}

// Remove makes the poller forget sockets, which may be closed then: a Wait that is
// under way may return early for it.
func (p *Poller) Remove(socks []*UDPSocket) {
	p.mu.Lock()
	for _, s := range socks {
		if i := slices.Index(p.added, s.fd); i >= 0 { // nobody has looked at it yet
			p.added = slices.Delete(p.added, i, i+1)
		} else {
			p.gone = append(p.gone, s.fd)
		}
	}
	p.mu.Unlock()
	p.Wake()
}

// merge takes over what Add and Remove have left.
func (p *Poller) merge() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, fd := range p.gone { // before those added: a number may have come back
		if i := slices.IndexFunc(p.fds, func(f unix.PollFd) bool { return int(f.Fd) == fd }); i > len(p.events) {
			p.fds = slices.Delete(p.fds, i, i+1)
		}
	}
	p.gone = p.gone[:0]
	for _, fd := range p.added {
		p.watch(fd)
	}
	p.added = p.added[:0]
}

// Wait blocks until there is something to read, d has passed (negative: for
// ever), an event was signalled or Wake was called; it may return early for no
// reason. Events are silent again when it returns. One at a time.
//
// A program that closes descriptors which are not its own may close those of a poller.
// Wait forgets such a descriptor: the kernel would report it at once, each time.
func (p *Poller) Wait(d time.Duration) {
	if !p.state.CompareAndSwap(pollIdle, pollWaiting) {
		p.state.Store(pollIdle) // woken before
		return
	}
	p.merge()
	var timeout *unix.Timespec
	if p.deaf && (d < 0 || d > deafWait) {
		d = deafWait
	}
	if d >= 0 {
		p.timeout = unix.NsecToTimespec(int64(d))
		timeout = &p.timeout
	}
	errno := ppoll(p.fds, timeout) // an error, EINTR, is an early return
	p.state.Store(pollIdle)
	if errno != 0 {
		return // what the kernel says about descriptors is left from before
	}
	for i := range p.fds {
		if p.fds[i].Revents&unix.POLLNVAL != 0 { // there is no such descriptor
			p.fds[i] = unix.PollFd{Fd: -1} // the kernel skips it
			p.deaf = p.deaf || i == 0
		}
	}
	for i, e := range p.events {
		if p.fds[1+i].Revents != 0 {
			e.Drain()
		}
	}
	// A waker that has not written yet makes the next Wait return early.
	if p.fds[0].Revents != 0 {
		var count [8]byte
		_, _ = unix.Read(p.event, count[:]) // nothing to read is as good
	}
}

// Wake makes Wait return: the one that is under way, or else the next.
func (p *Poller) Wake() {
	if p.state.Swap(pollWoken) != pollWaiting {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		one := [8]byte{0: 1, 7: 1}         // not zero, and not the maximum, in any byte order
		_, _ = unix.Write(p.event, one[:]) // full is readable as well
	}
}

// Close gives up the event descriptor. Nobody may be in Wait; Wake is harmless
// after it. It is idempotent.
func (p *Poller) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	return unix.Close(p.event)
}
