package sys

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Poller blocks one thread until a socket has something to read, an event is
// signalled, or Wake is called. A Wake while no thread waits ends the next Wait.
type Poller struct {
	fds     []unix.PollFd // the poller's own event, the given events, the sockets; used by Wait alone
	events  []*Event
	timeout unix.Timespec // used by Wait alone
	event   int           // the poller's own event, which Wake signals
	state   atomic.Uint32
	deaf    bool // the program has closed the poller's own event: Wake has no effect; used by Wait alone

	mu     sync.Mutex // guards what follows, and event against use after close
	added  []int      // descriptors that the next Wait adds
	gone   []int      // descriptors that the next Wait removes
	closed bool
}

// What a Poller is doing.
const (
	pollIdle    = iota // no thread waits
	pollWaiting        // a thread is in the kernel, or about to enter it
	pollWoken          // Wake was called, and Wait has not seen it yet
)

// deafWait is the longest Wait of a poller whose own event is closed: no Wake can end it.
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

// Remove makes the poller wait for sockets no more. They may be closed then: a Wait that
// is under way may return early for that.
func (p *Poller) Remove(socks []*UDPSocket) {
	p.mu.Lock()
	for _, s := range socks {
		if i := slices.Index(p.added, s.fd); i >= 0 { // no Wait has added it yet
			p.added = slices.Delete(p.added, i, i+1)
		} else {
			p.gone = append(p.gone, s.fd)
		}
	}
	p.mu.Unlock()
	p.Wake()
}

// merge applies what Add and Remove have recorded.
func (p *Poller) merge() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, fd := range p.gone { // before those added: a new socket may have the number of a removed one
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
// ever), an event is signalled or Wake is called; it may return early for no
// reason. It clears the events before it returns. One thread at a time may call it.
//
// A program that closes descriptors which are not its own may close those of a poller.
// Wait drops such a descriptor: otherwise the kernel would report it at once, each time.
func (p *Poller) Wait(d time.Duration) {
	if !p.state.CompareAndSwap(pollIdle, pollWaiting) {
		p.state.Store(pollIdle) // Wake was called before
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
		return // Revents are those of an earlier call
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
	// A Wake that has not written to the event yet makes the next Wait return early.
	if p.fds[0].Revents != 0 {
		var count [8]byte
		_, _ = unix.Read(p.event, count[:]) // if there is nothing to read, it is clear already
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
		_, _ = unix.Write(p.event, one[:]) // if the counter is full, the event is signalled already
	}
}

// Close closes the poller's own event. No thread may be in Wait; Wake does nothing
// afterwards. It is idempotent.
func (p *Poller) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	return unix.Close(p.event)
}
