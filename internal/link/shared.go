package link

// The link of a device that several processes share, and to the other devices of
// the host: trains go to other processes through rings in shared memory, whole
// and without checksums, and everything else goes by udp.
//
//  1. Prepare finds out whether a device of this host, of the same user, stands
//     at the address. Then queue pair numbers say which process a train is for.
//  2. Send packs trains into the ring to that process; the channel to it is made
//     when it is first needed.
//  3. Poll unpacks them. The owner of the UDP port passes on packets for others
//     (Router), which arrive by the same rings.

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
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// Neighbours are the processes of one device on this host.
type Neighbours interface {
	// Find returns the process that a queue pair belongs to.
	Find(qpn uint32) (process int, ok bool)
	// Dial connects to a process, and tells it who dials.
	Dial(process int) (*net.UnixConn, error)
	// ID tells devices apart, also those that follow each other at an address.
	ID() [2]uint64
	// Close ends the view of it.
	Close() error
}

// MaxNeighbours is how many processes a device has at most.
const MaxNeighbours = 256

// SharedConfig says what to open.
type SharedConfig struct {
	UDP UDPConfig // without Router and Event
	// Packets makes all traffic go by packets, also to processes of this host.
	Packets bool
	// NoPackets makes flows to other hosts fail, and keeps multicast on this one.
	NoPackets bool
	// Look finds the device at another address of this host.
	Look func(netip.Addr) (Neighbours, error)
}

// Shared is the link.
type Shared struct {
	*UDP
	cfg   SharedConfig
	inbox *shm.Inbox
	home  *device
	self  int // this process's number

	mu      sync.Mutex // guards what follows
	closed  bool
	devices map[[2]uint64]*device // of other addresses

	ticket *atomic.Uint64 // see far.go; on the heap, where it stays
	lost   atomic.Uint64  // trains and packets that did not fit, or whose process is gone

	// Poll's own.
	sink  Sink
	t     train.Train
	piece [1][]byte
	p     Packets
	far   farSource
	calm  int  // polls since something came from another process
	turn  uint // polls
}

// device is what is known of one device of this host.
type device struct {
	Neighbours
	channels [MaxNeighbours]atomic.Pointer[shm.Channel]
	dialing  sync.Mutex // held while a channel is made
	failed   [MaxNeighbours]time.Time
}

// tag says whose channel it is.
type tag struct {
	dev     *device
	process int
}

const (
	ringBytes  = 2 << 20                // in each direction, touched only as far as it is used
	dialTime   = 2 * time.Second        // for a handshake
	failedTime = 100 * time.Millisecond // before a process that did not answer is asked again
	fullTries  = 2000                   // looks at a full ring, with a yield after each

	// After so many polls without anything from a ring the socket is looked at
	// every time, and up to then once in so many polls.
	calmPolls   = 4096
	udpPollRate = 32
)

// OpenShared opens the link. Join must follow before it is used.
func OpenShared(cfg *SharedConfig) (*Shared, error) {
	s := &Shared{ticket: new(atomic.Uint64), cfg: *cfg, devices: make(map[[2]uint64]*device), calm: calmPolls}
	var err error
	if s.inbox, err = shm.NewInbox(&shm.Config{RingBytes: ringBytes}); err != nil {
		return nil, err
	}
	s.cfg.UDP.Router, s.cfg.UDP.Event, s.cfg.UDP.NearGroups = s, s.inbox.Event(), s.cfg.NoPackets
	if s.UDP, err = OpenUDP(&s.cfg.UDP); err != nil {
		s.inbox.Close()
		return nil, err
	}
	return s, nil
}

// Join tells the link which processes share its device, and which of them this
// one is.
func (s *Shared) Join(home Neighbours, self int) {
	s.home, s.self = &device{Neighbours: home}, self
}

// Accept makes a channel of a connection that a process of the device at an
// address has dialled.
func (s *Shared) Accept(conn *net.UnixConn, from netip.Addr, process int) error {
	d, err := s.deviceAt(from)
	if err != nil || process < 0 || process >= MaxNeighbours {
		return errors.Join(err, conn.Close())
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	defer cancel()
	c, err := s.inbox.Accept(ctx, conn, &tag{d, process})
	if err == nil {
		d.keep(process, c)
	}
	return err
}

// deviceAt finds the device of this host that stands at an address.
func (s *Shared) deviceAt(a netip.Addr) (*device, error) {
	if slices.Contains(s.UDP.Addrs(), a) {
		return s.home, nil
	}
	// Every time: another device may stand there now.
	n, err := s.cfg.Look(a)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.Join(ErrClosed, n.Close())
	}
	if d := s.devices[n.ID()]; d != nil {
		return d, n.Close()
	}
	d := &device{Neighbours: n}
	s.devices[n.ID()] = d
	return d, nil
}

// keep notes a channel, unless there is one that works.
func (d *device) keep(process int, c *shm.Channel) *shm.Channel {
	for {
		old := d.channels[process].Load()
		if old != nil && old.Err() == nil {
			return old // the peer may send by the other all the same
		}
		if d.channels[process].CompareAndSwap(old, c) {
			return c
		}
	}
}

// localFlow is a flow to a device of this host.
type localFlow struct {
	link     *Shared
	dev      *device
	src, dst netip.Addr
}

// Prepare prepares a flow: to a device of this host if one is there.
func (s *Shared) Prepare(f *train.Flow) error {
	if !s.cfg.Packets && !f.Dst.IsMulticast() {
		if d, err := s.deviceAt(f.Dst.Unmap()); err == nil {
			f.Link = &localFlow{s, d, f.Src.Unmap(), f.Dst.Unmap()}
			return nil
		}
	}
	if s.cfg.NoPackets && !f.Dst.IsMulticast() {
		return ib.Errorf("prepare_flow", syscall.EHOSTUNREACH, "no device of this host is at %v, and packets are not wanted", f.Dst)
	}
	return s.UDP.Prepare(f)
}

// IsLocal tells whether a flow stays on this host, where nothing is lost.
func (s *Shared) IsLocal(f *train.Flow) bool {
	_, ok := f.Link.(*localFlow)
	return ok
}

// LocalWindow returns how many packets may be under way to another process: as
// many as 3/8 of a ring hold, of the longest. As much again is for answers.
func (s *Shared) LocalWindow() int { return 3 * ringBytes / 8 / (wire.MaxPayload + 2*trainBytes) }

// Send sends trains in order, in runs that go the same way.
func (s *Shared) Send(ts []*train.Train) (int, error) {
	done := 0
	for done < len(ts) {
		f, local := ts[done].Flow.Link.(*localFlow)
		if local {
			if fault := s.sendTrain(f, ts[done]); !fault.OK() {
				return done, &PayloadError{Fault: fault}
			}
			done++
			continue
		}
		n := 1
		for done+n < len(ts) {
			if _, local := ts[done+n].Flow.Link.(*localFlow); local {
				break
			}
			n++
		}
		sent, err := s.UDP.Send(ts[done : done+n])
		if done += sent; err != nil {
			return done, err
		}
	}
	return done, nil
}

// sendTrain puts a train into the ring to its process. Trains that cannot be
// delivered are lost, as on any network.
func (s *Shared) sendTrain(f *localFlow, t *train.Train) mem.Fault {
	process, ok := f.dev.Find(t.DestQP)
	if !ok {
		s.lost.Add(1)
		return mem.Fault{}
	}
	c := s.channel(f.dev, process)
	if c == nil {
		s.lost.Add(1)
		return mem.Fault{}
	}
	s.capture(t)
	if mayFetch(c, t) {
		if done, fault := s.sendFar(c, f, t); done {
			return fault
		}
	}
	b, ok := s.reserve(c, recTrain, trainBytes+t.Len)
	if !ok {
		s.lost.Add(1)
		return mem.Fault{}
	}
	defer c.End()
	packTrain(b, t, f.src, f.dst)
	if t.Len > 0 {
		g := scratches.Get().(*scratch)
		fault := g.copyOut(b[trainBytes:], &t.Payload, 0, t.Len)
		scratches.Put(g)
		if !fault.OK() {
			return fault
		}
	}
	c.Commit()
	return mem.Fault{}
}

// capture shows a train to the tap, as the packets that it would be. What cannot
// be read is left out: somebody is about to find out why.
func (s *Shared) capture(t *train.Train) {
	if tap := s.cfg.UDP.Tap; tap != nil {
		_ = Capture(t, tap, time.Now())
	}
}

// deliver hands on a train that has come by a ring.
func (s *Shared) deliver() {
	t := &s.t
	if s.cfg.UDP.Tap != nil {
		t.Flow = &train.Flow{Src: t.From, Dst: t.To, TClass: t.TClass, HopLimit: t.HopLimit}
		s.capture(t)
		t.Flow = nil
	}
	s.sink.Deliver(t)
	t.Reset()
	s.piece[0] = nil
}

// reserve takes a channel and room in its ring. A full ring is worth a little
// patience: its reader is on its way.
func (s *Shared) reserve(c *shm.Channel, typ byte, n int) ([]byte, bool) {
	for range fullTries {
		if !c.Begin() {
			return nil, false
		}
		if b, ok := c.Reserve(typ, n); ok {
			return b, true
		}
		c.End()
		if c.Err() != nil || n > c.MaxRecord() {
			return nil, false
		}
		runtime.Gosched()
	}
	return nil, false
}

// channel returns the channel to a process, and makes it if there is none.
func (s *Shared) channel(d *device, process int) *shm.Channel {
	if c := d.channels[process].Load(); c != nil && c.Err() == nil {
		return c
	}
	d.dialing.Lock()
	defer d.dialing.Unlock()
	if c := d.channels[process].Load(); c != nil && c.Err() == nil {
		return c
	}
	if time.Since(d.failed[process]) < failedTime {
		return nil
	}
	c, err := s.dial(d, process)
	if err != nil {
		d.failed[process] = time.Now()
		return nil
	}
	return d.keep(process, c)
}

func (s *Shared) dial(d *device, process int) (*shm.Channel, error) {
	conn, err := d.Dial(process)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	defer cancel()
	return s.inbox.Dial(ctx, conn, &tag{d, process})
}

// Connect makes the channel to a process of this device, before it is needed.
func (s *Shared) Connect(process int) { s.channel(s.home, process) }

// Reach makes the channel to the process that has a queue pair, before it is
// needed: who connects may wait, who sends should not.
func (s *Shared) Reach(f *train.Flow, qpn uint32) {
	if l, ok := f.Link.(*localFlow); ok {
		if p, ok := l.dev.Find(qpn); ok {
			s.channel(l.dev, p)
		}
	}
}

// Route implements Router.
func (s *Shared) Route(qpn uint32) (process int, here bool) {
	p, ok := s.home.Find(qpn)
	return p, !ok || p == s.self
}

// Forward implements Router. It does not wait: who has the port reads it for
// everybody.
func (s *Shared) Forward(process int, p *Packets) {
	c := s.home.channels[process].Load()
	if c == nil || !c.Begin() {
		s.lost.Add(1)
		return
	}
	defer c.End()
	b, ok := c.Reserve(recPackets, packetsBytes+len(p.Bytes))
	if !ok {
		s.lost.Add(1)
		return
	}
	packPackets(b, p)
	copy(b[packetsBytes:], p.Bytes)
	c.Commit()
}

// Poll hands what has arrived to the sink. The socket is looked at less often
// while other processes have something to say: a system call takes longer than a
// whole message through a ring.
func (s *Shared) Poll(sink Sink, budget int) int {
	s.sink = sink
	n := s.inbox.Poll((*fromRings)(s), budget)
	s.sink = nil
	if n > 0 {
		s.calm = 0
	} else {
		s.calm++
	}
	if s.turn++; s.calm >= calmPolls || s.turn%udpPollRate == 0 {
		n += s.UDP.Poll(sink, budget)
	}
	return n
}

// fromRings is what shm calls with what came.
type fromRings Shared

// Record takes in what another process has sent.
func (r *fromRings) Record(c *shm.Channel, typ byte, b []byte) {
	s := (*Shared)(r)
	switch typ {
	case recTrain:
		if !unpackTrain(b, &s.t) || s.t.Len != len(b)-trainBytes {
			s.sink.Drop(DropOther)
			return
		}
		if s.t.Len > 0 {
			s.piece[0] = b[trainBytes:]
			s.t.Payload = mem.List{Raw: s.piece[:]}
		}
		s.deliver()
	case recFar:
		if !unpackTrain(b, &s.t) || !s.far.unpackFar(c, &s.t, b[trainBytes:]) {
			s.sink.Drop(DropOther)
			return
		}
		s.piece[0] = b[len(b)-farTail:]
		s.t.Payload = mem.List{Far: &s.far, FarLen: uint64(s.t.Len - farTail), Raw: s.piece[:]}
		s.deliver()
	case recPackets:
		if !unpackPackets(b, &s.p) {
			s.sink.Drop(DropOther)
			return
		}
		s.UDP.Inject(s.sink, &s.p)
		s.p.Bytes = nil
	default:
		s.sink.Drop(DropOther)
	}
}

// Room says that a ring has room again: who waits for it tries again anyway.
func (r *fromRings) Room(*shm.Channel) {}

// Gone forgets a channel whose process has ended.
func (r *fromRings) Gone(c *shm.Channel, _ error) {
	t := c.Tag().(*tag)
	t.dev.channels[t.process].CompareAndSwap(c, nil)
}

// Wait blocks until something may have arrived.
func (s *Shared) Wait(d time.Duration) {
	if s.inbox.Announce() {
		s.UDP.Wait(d)
		s.inbox.Awake()
	}
}

// Lost returns how many trains and packets could not be given to another
// process.
func (s *Shared) Lost() uint64 { return s.lost.Load() }

// Close closes the link.
func (s *Shared) Close() error {
	err := s.UDP.Close()
	s.inbox.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, d := range s.devices {
		err = errors.Join(err, d.Close())
	}
	clear(s.devices)
	return err
}
