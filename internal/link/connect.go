package link

// Channels to other processes: goroutines of the link make them, never a sender. A sender
// that finds no channel calls connect, which reports whether there will be one (then the
// sender returns ErrBusy) or not.
//
// Two processes may dial each other at the same time. Then the one that comes first
// (before) refuses the other's dial, and the other accepts: one channel is left.

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

	failedLooks = 15 // looks for a channel, a tenth of failedTime apart: long enough to dial again
)

// device is one device of this host, and the channels to its processes.
type device struct {
	view     Neighbours // used by the methods alone, which keep the device, and so the view, alive
	channels [MaxNeighbours]atomic.Pointer[shm.Channel]

	mu    sync.Mutex // guards calls
	calls [MaxNeighbours]call

	unneeded runtime.Cleanup // closes the view when nothing refers to the device any more
}

// newDevice makes a device that closes its view when it is closed itself, or is garbage:
// flows are not closed, and devices of other addresses come and go as long as this process
// lives.
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

// The other methods of Neighbours.

func (d *device) Find(qpn uint32) (process int, ok bool) {
	process, ok = d.view.Find(qpn)
	runtime.KeepAlive(d)
	return process, ok
}

func (d *device) Alive() bool {
	alive := d.view.Alive()
	runtime.KeepAlive(d)
	return alive
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

// call is the state of making a channel to one process.
type call struct {
	dialing   bool
	accepting int           // accepts under way
	ended     chan struct{} // closed when no dial or accept is under way any more; nil: none is
	failed    time.Time     // when the latest ended, if it failed; else zero
	err       error         // why the latest failure was
	early     [][]byte      // recPackets records for the process, until there is a channel
}

// tag is what the link knows of a channel: its peer, and what either side has told the
// other. Fields that Poll uses are used by it alone; those of the sending side are used
// between Begin and End.
type tag struct {
	dev     *device
	process int

	out  [maxPairs]pair // pairs that the peer was told of; sending side
	sent int            // how many those are; sending side
	in   [maxPairs]pair // pairs that the peer has told of; Poll

	// stuck: a datagram expired waiting for room, when the peer had given stuckAt bytes
	// back (shm.Channel.Given); sending side.
	stuck   bool
	stuckAt uint64

	offers [16]offers // by queue pair number modulo 16, see grant.go; Poll
	lent   lent       // memory of ours that the peer writes to by itself, see grant_plain.go

	// reached maps the number of each memory of ours that the peer was told of to whether
	// the peer has opened it, see opened.go.
	reached sync.Map
	leases  peerLeases // of payloads that the peer sends by name; Poll
}

// working returns the channel to a process, or nil if there is none that works.
func (d *device) working(process int) *shm.Channel {
	if c := d.channels[process].Load(); c != nil && c.Err() == nil {
		return c
	}
	return nil
}

// connect starts to make a channel to a process, unless there is one or a call is under
// way. It does not wait. It reports false if it starts none, because the latest call failed
// a moment ago or the link is closed.
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

// finishLocked ends a dial, of which *what is the mark.
func (c *call) finishLocked(what *bool, err error) {
	*what = false
	c.endLocked(err)
}

// endLocked notes that a dial or accept has ended, and with which error.
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

// start runs f in a goroutine that Close waits for. It reports false, and does not run f, if
// the link is closed.
func (s *Shared) start(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.wg.Go(f)
	return true
}

// dial makes a channel to a process by connecting to it.
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

// keepEarly keeps a copy of packets for a process until there is a channel to it, or returns
// the channel if there is one by now. The first datagrams of a conversation arrive while the
// channel is being made, and their senders may not send them again.
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

// sendEarlyLocked sends what keepEarly has kept, when a dial or accept has ended. Without a
// channel the packets wait for the next call to end, or are lost if none is under way.
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

// keepLocked makes c the channel to a process, and closes an older one: it is of a process
// that had the number before, or of an earlier link of the same process.
func (d *device) keepLocked(process int, c *shm.Channel) {
	if old := d.channels[process].Swap(c); old != nil && old != c {
		old.Close()
	}
	if c.Err() != nil { // Gone may have been called before the channel was stored
		d.channels[process].CompareAndSwap(c, nil)
	}
}

// Accept makes a channel of a connection that a process of the device at address from has
// dialled. It returns at once; a goroutine waits for ready and then shakes hands.
func (s *Shared) Accept(conn *net.UnixConn, from netip.Addr, process int, ready <-chan struct{}) {
	if !s.start(func() {
		<-ready
		if err := s.accept(conn, from, process); err != nil {
			_ = conn.Close() // it may be closed already
		}
	}) {
		_ = conn.Close() // the link is closed
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
	// If our dial has made a channel, the peer is about to find that out. (Or the peer has
	// lost that channel, and dials again until this process has noticed.)
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

// before reports whether this process's dial prevails over that of another process: within
// the device the smaller number does, between devices the smaller ID.
func (s *Shared) before(d *device, process int) bool {
	if d == s.home {
		return s.self < process
	}
	own, other := s.home.ID(), d.ID()
	return slices.Compare(own[:], other[:]) < 0
}

// channel returns the channel to a process. It waits until there is one, or has failed to be
// made several times.
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
			time.Sleep(failedTime / 10) // the dial failed, perhaps because the peer refused it and dials itself
		}
	}
	if c := d.working(process); c != nil {
		return c, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return nil, d.calls[process].err
}

// Connect makes the channel to a process of this device before it is needed, and waits for
// it.
func (s *Shared) Connect(process int) {
	_, _ = s.channel(s.home, process) // Forward and SendControl try again
}

// Reach makes the channel to the process that has a queue pair before it is needed, and
// waits for it: connecting a queue pair may wait, sending should not. Where no channel can
// be made, or that process wants packets, the flow becomes one of packets; with NoPackets
// Reach fails.
func (s *Shared) Reach(f *train.Flow, qpn uint32) error {
	l, ok := f.Link.(*localFlow)
	if !ok {
		return nil
	}
	p, ok := l.dev.Find(qpn)
	if !ok {
		return nil // no process has it: requests will not be answered
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

// ErrBusy means that a train cannot go to its process now: the ring is full, or the channel
// is being made. SharedConfig.Freed is called when sending may work again.
var ErrBusy = errors.New("link: busy")

// freed counts and reports that the cause of an ErrBusy may have ended.
func (s *Shared) freed() {
	s.frees.Add(1)
	if s.cfg.Freed != nil {
		s.cfg.Freed()
	}
}

// Frees implements Freer.
func (s *Shared) Frees() uint64 { return s.frees.Load() }
