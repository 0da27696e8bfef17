package sys

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Poller blocks one goroutine until a socket has something to read or somebody
// calls Wake. A Wake that finds nobody waiting is kept for the next Wait.
//
// It waits in one of two ways. Blocking in ppoll wakes up fastest, but keeps one
// of the GOMAXPROCS places to run Go until the runtime's monitor takes it away,
// 10 to 20 ms later. Were that the last one, as in a container with one core,
// the program would stand still for so long. So the last place is left to
// others: the goroutine then parks in the runtime's own poller (parker), which
// costs about a quarter of the bandwidth of a passive target.
type Poller struct {
	fds    []unix.PollFd // sockets, then the event descriptor; Wait's own
	event  int
	parker parker
	state  atomic.Uint32

	mu     sync.Mutex // guards closed, and event against use after close
	closed bool
}

// What a Poller is doing.
const (
	pollIdle    = iota // nobody waits
	pollBlocked        // somebody is in ppoll, or on the way there
	pollParked         // somebody is parked, or on the way there
	pollWoken          // Wake was called, and Wait has not seen it yet
)

// blocked counts the pollers of the process that are in ppoll.
var blocked atomic.Int32

// NewPoller makes a poller of the sockets, which must outlive it.
func NewPoller(socks []*UDPSocket) (*Poller, error) {
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	p := &Poller{event: event}
	if err := p.parker.open(socks); err != nil {
		return nil, errors.Join(err, unix.Close(event))
	}
	for _, s := range socks {
		p.fds = append(p.fds, unix.PollFd{Fd: int32(s.fd), Events: unix.POLLIN})
	}
	p.fds = append(p.fds, unix.PollFd{Fd: int32(event), Events: unix.POLLIN})
	return p, nil
}

// Wait blocks until there is something to read, d has passed (negative: for
// ever) or Wake was called; it may return early for no reason. One at a time.
func (p *Poller) Wait(d time.Duration) {
	if int(blocked.Add(1)) < runtime.GOMAXPROCS(0) {
		if p.state.CompareAndSwap(pollIdle, pollBlocked) {
			p.block(d)
		}
		blocked.Add(-1)
	} else {
		blocked.Add(-1)
		if p.state.CompareAndSwap(pollIdle, pollParked) {
			p.parker.park(d, &p.state)
		}
	}
	// A waker that has not done its part yet makes a later Wait return early.
	p.state.Store(pollIdle)
}

func (p *Poller) block(d time.Duration) {
	var timeout *unix.Timespec
	if d >= 0 {
		ts := unix.NsecToTimespec(int64(d))
		timeout = &ts
	}
	_, err := unix.Ppoll(p.fds, timeout, nil) // an error, EINTR, is an early return
	if err == nil && p.fds[len(p.fds)-1].Revents != 0 {
		var count [8]byte
		_, _ = unix.Read(p.event, count[:]) // nothing to read is as good
	}
}

// Wake makes Wait return: the one that is under way, or else the next.
func (p *Poller) Wake() {
	was := p.state.Swap(pollWoken)
	if was != pollBlocked && was != pollParked {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
	case was == pollParked:
		p.parker.unpark()
	default:
		one := [8]byte{0: 1, 7: 1}         // not zero, and not the maximum, in any byte order
		_, _ = unix.Write(p.event, one[:]) // full is readable as well
	}
}

// Close gives up the descriptors. Nobody may be in Wait; Wake is harmless after
// it. It is idempotent.
func (p *Poller) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	return errors.Join(p.parker.file.Close(), unix.Close(p.event))
}

// parker waits in the Go runtime's poller.
//
// The runtime is told of every packet that arrives at a file it knows, and wakes
// a thread for it, though somebody polls the socket already. So it knows the
// sockets only through an epoll instance of our own, in which they are armed for
// one report by each wait.
type parker struct {
	file *os.File // the epoll instance
	raw  syscall.RawConn
	fds  []int
	try  func(epfd uintptr) bool // made once: a closure for each wait would be garbage

	timed  bool // the file has a deadline
	asked  bool // this wait has armed the sockets
	armed  bool // sockets are armed, by this wait or an earlier one
	events []unix.EpollEvent
}

func (p *parker) open(socks []*UDPSocket) error {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("epoll_create: %w", err)
	}
	for _, s := range socks {
		p.fds = append(p.fds, s.fd)
		if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, s.fd, &unix.EpollEvent{Fd: int32(s.fd)}); err != nil {
			return errors.Join(fmt.Errorf("epoll_ctl: %w", err), unix.Close(epfd))
		}
	}
	p.try, p.events = p.ready, make([]unix.EpollEvent, max(1, len(p.fds)))
	if err := unix.SetNonblock(epfd, true); err != nil { // or the runtime would not poll it
		return errors.Join(fmt.Errorf("epoll instance: %w", err), unix.Close(epfd))
	}
	p.file = os.NewFile(uintptr(epfd), "epoll")
	if p.raw, err = p.file.SyscallConn(); err == nil {
		err = p.file.SetReadDeadline(time.Time{}) // refused if the runtime cannot poll it
	}
	if err != nil {
		return errors.Join(fmt.Errorf("epoll instance: %w", err), p.file.Close())
	}
	return nil
}

// park waits, unless state says that somebody has called Wake.
func (p *parker) park(d time.Duration, state *atomic.Uint32) {
	if d >= 0 || p.timed {
		var at time.Time
		if d >= 0 {
			at = time.Now().Add(d)
		}
		_ = p.file.SetReadDeadline(at) // it can: open has tried
		p.timed = d >= 0
	}
	// An unpark before this has had its deadline overwritten, but it has set
	// the state; one after it has the last word.
	if state.Load() == pollParked {
		p.asked = false
		if p.raw.Read(p.try) != nil { // a deadline has passed: mine, or unpark's
			p.timed = true
		}
	}
}

func (p *parker) unpark() { _ = p.file.SetReadDeadline(time.Unix(1, 0)) }

// ready is called by the runtime before it waits, and again when there is
// something: then it is done.
func (p *parker) ready(epfd uintptr) bool {
	if p.armed {
		// What an earlier wait has left armed may have been reported to the
		// runtime meanwhile, which has forgotten it.
		n, _ := unix.EpollWait(int(epfd), p.events, 0) // disarms those that it reports
		p.armed = false
		if n > 0 || p.asked {
			return true
		}
	}
	for _, fd := range p.fds {
		_ = unix.EpollCtl(int(epfd), unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT, Fd: int32(fd)})
	}
	p.armed, p.asked = true, true
	return false
}
