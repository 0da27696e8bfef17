package link

// Channels to other processes: made by goroutines of the link's own, never by who
// sends. A sender that finds no channel asks for one and is told whether to wait
// (ErrBusy) or that there will be none.
//
// Two processes may dial each other at the same time. Then the one with the smaller
// number goes on, and refuses the other, who accepts: one channel is left.

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/train"
)

const (
	dialTime   = 2 * time.Second        // for a handshake
	failedTime = 100 * time.Millisecond // before a process that did not answer is asked again

	// maxEarly is how many packets wait for a channel to be made.
	maxEarly = 64

	failedLooks = 15 // for a channel, a tenth of failedTime apart: one more dial
)

// device is what is known of one device of this host.
type device struct {
	view     Neighbours // reached by the methods alone: it ends when nobody has the device
	channels [MaxNeighbours]atomic.Pointer[shm.Channel]

	mu    sync.Mutex // guards calls
	calls [MaxNeighbours]call

	unneeded runtime.Cleanup // closes the view of a device that nobody refers to any more
}

// newDevice makes one of a view that ends when the device is closed, or nobody needs
// it any more: flows do not tell when they end, and devices of other addresses come
// and go as long as this process lives.
func newDevice(n Neighbours) *device {
	d := &device{view: n}
	d.unneeded = runtime.AddCleanup(d, func(n Neighbours) { _ = n.Close() }, n) // it was mapped: it cannot fail
	return d
}

// Close ends the view at once.
func (d *device) Close() error {
	d.unneeded.Stop()
	return d.view.Close()
}

// The others of Neighbours.

func (d *device) Find(qpn uint32) (process int, ok bool) {
	process, ok = d.view.Find(qpn)
	runtime.KeepAlive(d)
	return process, ok
}

func (d *device) ByPackets(process int) (wants bool) {
	wants = d.view.ByPackets(process)
	runtime.KeepAlive(d)
	return wants
}

func (d *device) Dial(process int) (*net.UnixConn, error) {
	defer runtime.KeepAlive(d)
	return d.view.Dial(process)
}

func (d *device) Segment(process int, id uint64, write bool) (fd int, err error) {
	defer runtime.KeepAlive(d)
	return d.view.Segment(process, id, write)
}

func (d *device) Shared(process int, id uint64) (what []byte, fd int, err error) {
	defer runtime.KeepAlive(d)
	return d.view.Shared(process, id)
}

func (d *device) ID() [2]uint64 {
	defer runtime.KeepAlive(d)
	return d.view.ID()
}

// call is how far the making of a channel is.
type call struct {
	dialing   bool
	accepting int
	ended     chan struct{} // closed when there is neither; nil: there is neither
	failed    time.Time     // when it failed last
	err       error         // and why
	early     [][]byte      // records of packets for the process, which came before the channel
}

// tag says whose channel it is.
type tag struct {
	dev     *device
	process int

	out  [maxPairs]pair // what the peer has been told; who is sending has it
	sent int
	in   [maxPairs]pair // what the peer has told; Poll's own

	// A datagram was lost that had waited for room long enough, and what the peer had
	// given back by then; who is sending has it.
	stuck   bool
	stuckAt uint64

	offers [16]offers // by queue pair, see grant.go; Poll's own

	reached sync.Map   // from the numbers of our memory that the peer was told of to whether it has opened it, see opened.go
	leases  peerLeases // of what the peer sends by name; Poll's own
}

// working returns the channel to a process, if there is one that works.
func (d *device) working(process int) *shm.Channel {
	if c := d.channels[process].Load(); c != nil && c.Err() == nil {
		return c
	}
	return nil
}

// connect sees to it that there will be a channel to a process. It waits for
// nothing, and reports false if there is no hope: it was tried a moment ago.
func (s *Shared) connect(d *device, process int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := &d.calls[process]
	if c.ended != nil || d.working(process) != nil {
		return true
	}
	if time.Since(c.failed) < failedTime {
		return false
	}
	c.dialing, c.ended = true, make(chan struct{})
	if !s.start(func() { s.dial(d, process) }) {
		c.finishLocked(&c.dialing, ErrClosed)
		return false
	}
	return true
}

// finishLocked ends a dial.
func (c *call) finishLocked(what *bool, err error) {
	*what = false
	c.endLocked(err)
}

// endLocked notes that a call has ended, and how.
func (c *call) endLocked(err error) {
	if err != nil {
		c.failed, c.err = time.Now(), err
	} else {
		c.failed = time.Time{}
	}
	if !c.dialing && c.accepting == 0 {
		close(c.ended)
		c.ended = nil
	}
}

// start runs something that Close waits for. It reports false if the link is
// closed.
func (s *Shared) start(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.wg.Go(f)
	return true
}

// dial makes a channel.
func (s *Shared) dial(d *device, process int) {
	conn, err := d.Dial(process)
	var c *shm.Channel
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), dialTime)
		c, err = s.inbox.Dial(ctx, conn, &tag{dev: d, process: process})
		cancel()
	}
	d.mu.Lock()
	if err == nil {
		d.keepLocked(process, c)
	}
	d.calls[process].finishLocked(&d.calls[process].dialing, err)
	s.sendEarlyLocked(d, process)
	d.mu.Unlock()
	s.freed()
}

// keepEarly keeps packets for a process until there is a channel to it; or returns
// the channel if there is one. The first datagrams of a conversation come while it is
// being made, and who sends datagrams may not send them again.
func (s *Shared) keepEarly(process int, p *Packets) *shm.Channel {
	d := s.home
	s.connect(d, process)
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.working(process); c != nil {
		return c
	}
	call := &d.calls[process]
	if call.ended == nil || len(call.early) == maxEarly {
		s.lost.Add(1)
		return nil
	}
	b := make([]byte, packetsBytes+len(p.Bytes))
	packPackets(b, p)
	copy(b[packetsBytes:], p.Bytes)
	call.early = append(call.early, b)
	return nil
}

// sendEarlyLocked sends what was kept, when a call has ended: if there is no channel
// and no other call is under way, it is lost.
func (s *Shared) sendEarlyLocked(d *device, process int) {
	call, c := &d.calls[process], d.working(process)
	if c == nil && call.ended != nil {
		return
	}
	for _, b := range call.early {
		if c == nil || c.Send(recPackets, b) != nil {
			s.lost.Add(1)
		}
	}
	call.early = nil
}

// keepLocked notes a new channel. One that worked was of a process that had the
// number before, or made itself another link.
func (d *device) keepLocked(process int, c *shm.Channel) {
	if old := d.channels[process].Swap(c); old != nil && old != c {
		old.Close()
	}
	if c.Err() != nil { // Gone may have looked before the channel was here
		d.channels[process].CompareAndSwap(c, nil)
	}
}

// Accept makes a channel of a connection that a process of the device at an
// address has dialled. It returns at once; ready is waited for first.
func (s *Shared) Accept(conn *net.UnixConn, from netip.Addr, process int, ready <-chan struct{}) {
	if !s.start(func() {
		<-ready
		if err := s.accept(conn, from, process); err != nil {
			_ = conn.Close() // if it is not closed yet
		}
	}) {
		_ = conn.Close() // there is nobody to talk to
	}
}

var errDialling = errors.New("this process has dialled the other one")

func (s *Shared) accept(conn *net.UnixConn, from netip.Addr, process int) error {
	if s.home == nil || process < 0 || process >= MaxNeighbours {
		return ErrClosed
	}
	d, err := s.deviceAt(from)
	if err != nil {
		return err
	}
	d.mu.Lock()
	call := &d.calls[process]
	// If our dial has ended already, the other side is about to see that too. (Or it
	// has lost that channel, and asks again when we have noticed.)
	if s.before(d, process) && (call.dialing || d.working(process) != nil) {
		d.mu.Unlock()
		return errDialling
	}
	if call.ended == nil {
		call.ended = make(chan struct{})
	}
	call.accepting++
	d.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	c, err := s.inbox.Accept(ctx, conn, &tag{dev: d, process: process})
	cancel()
	d.mu.Lock()
	if err == nil {
		d.keepLocked(process, c)
	}
	call.accepting--
	call.endLocked(err)
	s.sendEarlyLocked(d, process)
	d.mu.Unlock()
	s.freed()
	return err
}

// before tells whether this process comes before another one.
func (s *Shared) before(d *device, process int) bool {
	if d == s.home {
		return s.self < process
	}
	own, other := s.home.ID(), d.ID()
	return slices.Compare(own[:], other[:]) < 0
}

// channel returns the channel to a process, and waits until there is one, or none
// will be.
func (s *Shared) channel(d *device, process int) (*shm.Channel, error) {
	for range failedLooks {
		if c := d.working(process); c != nil {
			return c, nil
		}
		s.connect(d, process)
		d.mu.Lock()
		ended := d.calls[process].ended
		d.mu.Unlock()
		if ended != nil {
			<-ended
		} else {
			time.Sleep(failedTime / 10) // it was refused, perhaps because the other side is about to dial
		}
	}
	if c := d.working(process); c != nil {
		return c, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return nil, d.calls[process].err
}

// Connect makes the channel to a process of this device, before it is needed.
func (s *Shared) Connect(process int) {
	_, _ = s.channel(s.home, process) // what is passed on asks again
}

// Reach makes the channel to the process that has a queue pair, before it is
// needed: who connects may wait, who sends should not. Where there can be none, or
// that process wants packets, the flow becomes one of packets; if those are not
// wanted here, that is an error.
func (s *Shared) Reach(f *train.Flow, qpn uint32) error {
	l, ok := f.Link.(*localFlow)
	if !ok {
		return nil
	}
	p, ok := l.dev.Find(qpn)
	if !ok {
		return nil // nobody has it, and nothing will answer
	}
	err := errPackets
	if !l.dev.ByPackets(p) {
		_, err = s.channel(l.dev, p)
	}
	switch {
	case err == nil:
	case l.rest == nil:
		return ib.Errorf("prepare_flow", syscall.EHOSTUNREACH, "no channel to the process that has queue pair %#06x, and packets are not wanted: %v", qpn, err)
	default:
		f.SrcPort, f.Link = l.rest.SrcPort, l.rest.Link
	}
	return nil
}

var errPackets = errors.New("it takes nothing else")

// ErrBusy means that the way to a process is not free now: its ring is full, or
// the channel to it is being made. Freed is called when it may be.
var ErrBusy = errors.New("link: busy")

// freed tells that something that was busy may not be any more.
func (s *Shared) freed() {
	s.frees.Add(1)
	if s.cfg.Freed != nil {
		s.cfg.Freed()
	}
}

// Frees counts the calls of Freed.
func (s *Shared) Frees() uint64 { return s.frees.Load() }
