package link

// The link of a device that several processes share, and to the other devices of
// the host: trains go to other processes through rings in shared memory, whole
// and without checksums, and everything else goes by udp.
//
//  1. Prepare finds out whether a device of this host, of the same user, stands
//     at the address. Then queue pair numbers say which process a train is for.
//  2. Send packs trains into the ring to that process (record.go, short.go), or says
//     that the way is busy; channels are made elsewhere (connect.go). Long payload
//     stays where it is, for the receiver to get it (reference.go, segment.go).
//  3. Poll unpacks them. The owner of the UDP port passes on packets for others
//     (Router), which arrive by the same rings.

import (
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"weak"

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
	// ByPackets tells whether a process wants trains as packets, not by a ring.
	ByPackets(process int) bool
	// Dial connects to a process, and tells it who dials.
	Dial(process int) (*net.UnixConn, error)
	// Segment gets a descriptor of a segment of a process's memory, to read from or
	// also to write to.
	Segment(process int, id uint64, write bool) (fd int, err error)
	// Shared gets what an opener needs to know of memory of a process, and a descriptor, -1
	// if there is none (mem.Sharing).
	Shared(process int, id uint64) (what []byte, fd int, err error)
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
	// Freed, if set, is called when what made Send return ErrBusy may be over. It
	// must not wait.
	Freed func()

	// Offer, if set, is told of WRITEs and READs that came by a ring, now and then. If the
	// device lets the peer do them by itself, it gives it a lane, and returns true. Granted,
	// if set, is told that the peer has let us: that our queue pair may access what remote's
	// requests do. See grant.go.
	Offer   func(t *train.Train, via Via) bool
	Granted func(qpn, remote uint32, l *PeerGrant)
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
	devices map[[2]uint64]weak.Pointer[device] // of other addresses, while a flow or a channel needs them

	wg      sync.WaitGroup // dials and accepts under way
	frees   atomic.Uint64
	tickets tickets // see reference.go

	segments segmentMaps // see segment.go
	opened   opened      // see opened.go
	leases   leases      // of requests that are carried, likewise
	unwatch  func()
	fetched  atomic.Uint64 // trains whose payload was fetched from another process
	mapped   atomic.Uint64 // and copied from memory that both have mapped
	named    atomic.Uint64 // trains whose payload stays in memory that both have opened
	lost     atomic.Uint64 // trains and packets that did not fit, or whose process is gone
	lively   atomic.Bool   // something went by a lane since the last poll

	// Poll's own.
	sink   Sink
	t      train.Train
	piece  [1][]byte
	words  [MaxControl]byte
	p      Packets
	ref    refSource
	long   int          // bytes that this poll has fetched
	longOf *shm.Channel // from whom
	calm   int          // polls since something came from another process
	polls  uint         // polls
}

const (
	fetchRun  = 1 << 20 // bytes to fetch before what has come is answered
	ringBytes = 2 << 20 // in each direction, touched only as far as it is used

	// After so many polls without anything from a ring the socket is looked at
	// every time, and up to then once in so many polls.
	calmPolls   = 4096
	udpPollRate = 32
)

// OpenShared opens the link. Join must follow before it is used.
func OpenShared(cfg *SharedConfig) (*Shared, error) {
	s := &Shared{cfg: *cfg, devices: make(map[[2]uint64]weak.Pointer[device]), calm: calmPolls}
	var err error
	if s.inbox, err = shm.NewInbox(&shm.Config{RingBytes: ringBytes}); err != nil {
		return nil, err
	}
	s.unwatch = mem.WatchSegments(s.forgetSegment)
	s.cfg.UDP.Router, s.cfg.UDP.Event, s.cfg.UDP.NearGroups = s, s.inbox.Event(), s.cfg.NoPackets
	if s.UDP, err = OpenUDP(&s.cfg.UDP); err != nil {
		s.unwatch()
		s.inbox.Close()
		return nil, err
	}
	s.tickets.open(s.inbox.Ticket())
	return s, nil
}

// Join tells the link which processes share its device, and which of them this
// one is.
func (s *Shared) Join(home Neighbours, self int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.home, s.self = &device{view: home}, self
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
	if d := s.devices[n.ID()].Value(); d != nil {
		return d, n.Close()
	}
	maps.DeleteFunc(s.devices, func(_ [2]uint64, d weak.Pointer[device]) bool { return d.Value() == nil })
	d := newDevice(n)
	s.devices[n.ID()] = weak.Make(d)
	return d, nil
}

// localFlow is a flow to a device of this host.
type localFlow struct {
	link     *Shared
	dev      *device
	src, dst netip.Addr
	rest     *train.Flow // the same by packets; nil: they are not wanted
}

// Prepare prepares a flow: to a device of this host if one is there.
func (s *Shared) Prepare(f *train.Flow) error {
	if !s.cfg.Packets && !f.Dst.IsMulticast() {
		if d, err := s.deviceAt(f.Dst.Unmap()); err == nil {
			l := &localFlow{link: s, dev: d, src: f.Src.Unmap(), dst: f.Dst.Unmap()}
			if !s.cfg.NoPackets {
				l.rest = new(train.Flow)
				*l.rest = *f
				if err := s.UDP.Prepare(l.rest); err != nil {
					return err
				}
			}
			f.Link = l
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

// LocalWindow returns how many packets may be under way to the process that has a queue
// pair: as many as 3/8 of a ring hold, of the longest. As much again is for answers; if
// several queue pairs have more under way than there is room for, they wait for it. Where
// long messages are fetched, there may be more packets of those, so that the receiver does
// not run out of them between two answers.
func (s *Shared) LocalWindow(f *train.Flow, qpn uint32) (window, short, below int) {
	short = 3 * ringBytes / 8 / (wire.MaxPayload + 2*trainBytes)
	if l, ok := f.Link.(*localFlow); ok {
		if p, ok := l.dev.Find(qpn); ok {
			if c := l.dev.working(p); c != nil && c.PeerReads() {
				return longWindows * short, short, refMin
			}
		}
	}
	return short, short, 0
}

// longWindows is how many times as many packets of long messages may be under way.
const longWindows = 4

// Send sends trains in order, in runs that go the same way.
func (s *Shared) Send(ts []*train.Train) (int, error) {
	done := 0
	for done < len(ts) {
		f, local := ts[done].Flow.Link.(*localFlow)
		if local {
			if n := s.sendShorts(f, ts[done:]); n > 0 {
				done += n
				continue
			}
			if err := s.sendTrain(f, ts[done:done+1]); err != nil {
				return done, err
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

// sendTrain puts a train into the ring to its process. What cannot be delivered is
// lost, as on any network; what cannot be delivered now is ErrBusy.
func (s *Shared) sendTrain(f *localFlow, one []*train.Train) error {
	t := one[0]
	process, ok := f.dev.Find(t.DestQP)
	if !ok {
		s.lost.Add(1)
		return nil
	}
	if f.dev.ByPackets(process) {
		if t.Carried { // since it was asked: its bytes are needed now
			return &PayloadError{Fault: mem.StagedFault()}
		}
		return s.sendRest(f, one)
	}
	c := f.dev.channels[process].Load()
	if c == nil {
		soon := s.connect(f.dev, process)
		switch {
		case t.Transport == wire.UD && f.rest != nil:
			// The queue pair has other peers, who must not wait for this one. (Who is
			// connected has looked for another way before.)
			return s.sendRest(f, one)
		case soon:
			return ErrBusy
		}
		s.lost.Add(1)
		return nil
	}
	if t.Carried {
		return s.sendNamed(c, f, t)
	}
	s.capture(t)
	if mayFetch(c, t) {
		if done, err := s.sendFar(c, f, t); done {
			return err
		}
	}
	b, err := s.reserve(c, recTrain, trainBytes+t.Len, t)
	if b == nil {
		return err
	}
	defer c.End()
	packTrain(b, t, f.src, f.dst)
	if fault := packPayload(b[trainBytes:], t); !fault.OK() {
		return &PayloadError{Fault: fault}
	}
	c.Commit()
	return nil
}

// sendRest sends a train by packets, if they are wanted here.
func (s *Shared) sendRest(f *localFlow, one []*train.Train) error {
	if f.rest == nil {
		s.lost.Add(1)
		return nil
	}
	one[0].Flow = f.rest
	_, err := s.UDP.Send(one)
	return err
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
	t.Payload, s.piece[0] = mem.List{}, nil // the next one clears the rest
}

// reserve takes a channel and room in its ring for a train, or returns nil: it is
// lost, or ErrBusy says that it has to wait. Half of the ring is for those who send
// again what is lost: the others must not be in their way.
func (s *Shared) reserve(c *shm.Channel, typ byte, n int, t *train.Train) (b []byte, err error) {
	if !c.Begin() {
		s.lost.Add(1)
		return nil, nil
	}
	leave := ringBytes / 2
	if t.Transport == wire.RC || t.Transport == wire.XRC {
		leave = 0
	}
	b, ok := c.ReserveLeaving(typ, n, leave)
	if ok {
		return b, nil
	}
	waits := t.Transport != wire.UD || c.Tag().(*tag).waitsForRoom(c, t)
	c.End()
	if waits && c.Err() == nil && n <= c.MaxRecord() {
		return nil, ErrBusy
	}
	s.lost.Add(1)
	return nil, nil
}

// patient tells whether a datagram waits for room in the ring. Its queue pair has other
// peers, so it does not wait for long: where one has done so in vain, none waits any more
// until the peer has read something.
func (k *tag) waitsForRoom(c *shm.Channel, t *train.Train) bool {
	given := c.Given()
	if t.Expired {
		k.stuck, k.stuckAt = true, given
	}
	return !k.stuck || k.stuckAt != given
}

// Route implements Router.
func (s *Shared) Route(qpn uint32) (process int, here bool) {
	p, ok := s.home.Find(qpn)
	return p, !ok || p == s.self
}

// Forward implements Router. It does not wait: who has the port reads it for
// everybody. Nor does it take the last quarter of the ring, which is for those who
// share it.
func (s *Shared) Forward(process int, p *Packets) {
	c := s.home.channels[process].Load()
	if c == nil {
		if c = s.keepEarly(process, p); c == nil {
			return
		}
	}
	if !c.Begin() {
		s.lost.Add(1)
		return
	}
	defer c.End()
	n := packetsBytes + len(p.Bytes)
	b, ok := []byte(nil), false
	if c.Has(ringBytes/4 + n) {
		b, ok = c.Reserve(recPackets, n)
	}
	if !ok {
		s.lost.Add(1)
		return
	}
	packPackets(b, p)
	copy(b[packetsBytes:], p.Bytes)
	c.Commit()
}

// Poll hands what has arrived to the sink. The socket is looked at less often
// while there is talk with other processes: a system call takes longer than a
// whole message through a ring.
func (s *Shared) Poll(sink Sink, budget int) int {
	s.sink, s.long = sink, 0
	n := s.inbox.Poll((*fromRings)(s), budget)
	s.sink, s.longOf = nil, nil
	if n > 0 || s.lively.Load() {
		s.calm = 0
		s.lively.Store(false)
	} else {
		s.calm++
	}
	if s.polls++; s.calm >= calmPolls || s.polls%udpPollRate == 0 {
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
	case recShort:
		payload, ok := c.Tag().(*tag).unpackShort(b, &s.t)
		if !ok {
			s.sink.Drop(DropOther)
			return
		}
		if len(payload) > 0 {
			s.piece[0] = payload
			s.t.Payload = mem.List{Raw: s.piece[:]}
		}
		s.deliver()
		s.offer(c, &s.t)
	case recPair:
		if !c.Tag().(*tag).takePair(b) {
			s.sink.Drop(DropOther)
		}
	case recTrain:
		if !unpackTrain(b, &s.t, train.MaxBytes) || s.t.Len != len(b)-trainBytes {
			s.sink.Drop(DropOther)
			return
		}
		if s.t.Len > 0 {
			s.piece[0] = b[trainBytes:]
			s.t.Payload = mem.List{Raw: s.piece[:]}
		}
		s.deliver()
		s.offer(c, &s.t)
	case recFar:
		if !unpackTrain(b, &s.t, train.MaxBytes) || !s.ref.unpackFar(s, c, &s.t, b[trainBytes:]) {
			s.sink.Drop(DropOther)
			return
		}
		if s.ref.mapped != nil {
			s.mapped.Add(1)
		} else {
			s.fetched.Add(1)
		}
		if s.longOf != c {
			s.longOf, s.long = c, 0
		}
		s.long += s.t.Len
		s.piece[0] = b[len(b)-refTail:]
		s.t.Payload = mem.List{Ref: &s.ref, RefLen: uint64(s.t.Len - refTail), Raw: s.piece[:]}
		s.deliver()
		s.ref.c, s.ref.mapped = nil, nil
		s.offer(c, &s.t)
	case recNamed:
		if !unpackTrain(b, &s.t, train.MaxCarried) || !s.takeNamed(c, &s.t, b[trainBytes:]) {
			s.sink.Drop(DropOther)
			return
		}
		s.named.Add(1)
		s.deliver()
		s.t.Lease = nil
	case recShare:
		s.openShared(c, b)
	case recOpened:
		if len(b) == 8 {
			c.Tag().(*tag).reached.CompareAndSwap(le.Uint64(b), false, true) // if it was told of it
		}
	case recPackets:
		if !unpackPackets(b, &s.p) {
			s.sink.Drop(DropOther)
			return
		}
		s.UDP.Inject(s.sink, &s.p)
		s.p.Bytes = nil
	case recForget:
		if len(b) == 8 {
			id := le.Uint64(b)
			s.dropSegments(func(k segmentKey) bool { return k.c == c && k.id == id })
		}
	case recControl:
		s.takeControl(c, b)
	case recGrant:
		if !s.takeGrant(c, b) {
			s.sink.Drop(DropOther)
		}
	default:
		s.sink.Drop(DropOther)
	}
}

// Full says that what was fetched should be answered first: the sender can then go on while
// the rest is fetched.
func (r *fromRings) Full(c *shm.Channel) bool { return r.longOf == c && r.long >= fetchRun }

// Room says that a ring has room again.
func (r *fromRings) Room(*shm.Channel) { (*Shared)(r).freed() }

// Gone forgets a channel whose process has ended.
func (r *fromRings) Gone(c *shm.Channel, _ error) {
	t := c.Tag().(*tag)
	(*Shared)(r).dropSegments(func(k segmentKey) bool { return k.c == c })
	if t.dev.channels[t.process].CompareAndSwap(c, nil) && t.dev == (*Shared)(r).home {
		(*Shared)(r).partner(t.process)
	}
	(*Shared)(r).freed() // what waits for room there has nobody to wait for
}

// Wait blocks until something may have arrived.
func (s *Shared) Wait(d time.Duration) {
	if s.inbox.Announce() {
		s.UDP.Wait(d)
		s.inbox.Awake()
	}
}

// Fetched returns how many trains' payloads were fetched from another process, and
// how many copied from memory of its that is mapped here.
func (s *Shared) Fetched() (fetched, direct uint64) { return s.fetched.Load(), s.mapped.Load() }

// Named returns how many trains came whose payload is in an engine's memory that was opened.
func (s *Shared) Named() uint64 { return s.named.Load() }

// Lost returns how many trains and packets could not be given to another
// process.
func (s *Shared) Lost() uint64 { return s.lost.Load() }

// Close closes the link.
func (s *Shared) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.unwatch()
	err := s.UDP.Close()
	s.tickets.close()
	s.inbox.Close() // which ends handshakes
	s.wg.Wait()
	s.dropSegments(func(segmentKey) bool { return true })
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.devices {
		if d := w.Value(); d != nil {
			err = errors.Join(err, d.Close())
		}
	}
	clear(s.devices)
	return err
}
