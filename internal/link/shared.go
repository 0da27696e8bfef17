package link

// The link of a device that several processes share: trains to other processes of this
// host, of the same device or another, go through rings in shared memory, whole and
// without checksums. All others go by UDP.
//
//  1. Prepare looks for a device of this host, of the same user, at the peer's address.
//     If there is one, queue pair numbers say which of its processes a train is for.
//  2. Send packs trains into the ring to that process (record.go, short.go), or returns
//     ErrBusy; goroutines of the link make channels (connect.go). A long payload stays
//     where it is and goes by reference (reference.go, segment.go), or by name if the CPU
//     does not address it (opened.go).
//  3. Poll unpacks records and delivers their trains. A process that receives packets for
//     another one passes them on (Router) by the same rings.
//  4. Of memory that both processes map, a peer may WRITE and READ by itself (grant.go).

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
	// ByPackets reports whether a process wants trains as packets, not by a ring.
	ByPackets(process int) bool
	// Dial connects to a process, and tells it which process dials.
	Dial(process int) (*net.UnixConn, error)
	// Segment returns a descriptor of a segment of a process's memory, for reading, or
	// with write also for writing.
	Segment(process int, id uint64, write bool) (fd int, err error)
	// Shared returns what mem.OpenShared needs to open memory of a process: a description
	// and a descriptor, which is -1 if there is none.
	Shared(process int, id uint64) (what []byte, fd int, err error)
	// Gone is called when the channel to a process has ended. It must not wait for a process.
	Gone(process int)
	// Alive reports whether any process has the device open. A device has its addresses until the
	// last one has ended.
	Alive() bool
	// ID identifies the device. A later device at the same address has another ID.
	ID() [2]uint64
	// Close ends this view of the device.
	Close() error
}

// MaxNeighbours is the most processes that a device has.
const MaxNeighbours = 256

// SharedConfig says what to open.
type SharedConfig struct {
	UDP UDPConfig // without Router and Event
	// Packets makes all traffic go by packets, also to processes of this host.
	Packets bool
	// NoPackets makes flows to other hosts fail, and keeps multicast on this host.
	NoPackets bool
	// Look finds the device at another address of this host.
	Look func(netip.Addr) (Neighbours, error)
	// Freed, if set, is called when the cause of an ErrBusy may have ended. It must not
	// block.
	Freed func()

	// Offer, if set, is called now and then with a WRITE or READ that came by a ring. It
	// returns true if it has given the peer a grant to execute such requests by itself.
	// Granted, if set, is called with a grant that the peer has given: queue pair qpn of
	// this process may use it for its requests to queue pair remote. See grant.go.
	Offer   func(t *train.Train, via Via) bool
	Granted func(qpn, remote uint32, l *PeerGrant)
}

// Shared is the link of a device that several processes share.
type Shared struct {
	*UDP
	cfg   SharedConfig
	inbox *shm.Inbox
	home  *device
	self  int // this process's number

	mu      sync.Mutex // guards what follows
	closed  bool
	devices map[[2]uint64]weak.Pointer[device]  // of other addresses, while a flow or a channel needs them
	byAddr  map[netip.Addr]weak.Pointer[device] // the same, by the addresses that they were found at

	wg      sync.WaitGroup // what start has started
	frees   atomic.Uint64
	tickets tickets // see reference.go

	segments segmentMaps // see segment.go
	opened   opened      // see opened.go
	leases   leases      // of carried requests, see opened.go
	unwatch  func()
	fetched  atomic.Uint64 // trains received with payload by reference, not mapped here
	mapped   atomic.Uint64 // trains received with payload by reference, mapped here
	named    atomic.Uint64 // trains received with payload in opened memory
	lost     atomic.Uint64 // trains and packets that did not fit, or whose process is gone
	passed   atomic.Uint64 // packets for other processes, see Forward
	lively   atomic.Bool   // this process has copied by grant since the last poll

	// What follows is used by Poll alone.
	sink   Sink
	t      train.Train
	piece  [1][]byte
	words  [MaxControl]byte
	p      Packets
	ref    refSource
	long   int          // bytes of payload by reference that this poll has got from longOf
	longOf *shm.Channel // the channel that the latest of them came by
	calm   int          // polls since a record came or a grant was used
	polls  uint
}

const (
	fetchRun  = 1 << 20 // bytes to fetch from one channel before answers are sent
	ringBytes = 2 << 20 // in each direction; pages not used take no memory

	// After calmPolls polls without traffic between processes every poll looks at the
	// sockets, and until then one in udpPollRate.
	calmPolls   = 4096
	udpPollRate = 32
)

// OpenShared opens the link. Join must be called before the link is used.
func OpenShared(cfg *SharedConfig) (*Shared, error) {
	s := &Shared{cfg: *cfg, devices: make(map[[2]uint64]weak.Pointer[device]), byAddr: make(map[netip.Addr]weak.Pointer[device]), calm: calmPolls}
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
	s.tickets.open(s.inbox.Ticket(), s.inbox.Remaps())
	return s, nil
}

// Join sets the processes that share the link's device, and this process's number
// among them.
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
	s.mu.Lock()
	d := s.byAddr[a].Value()
	s.mu.Unlock()
	if d != nil && d.Alive() { // otherwise another device may have the address by now
		return d, nil
	}
	n, err := s.cfg.Look(a)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.Join(ErrClosed, n.Close())
	}
	maps.DeleteFunc(s.devices, func(_ [2]uint64, d weak.Pointer[device]) bool { return d.Value() == nil })
	maps.DeleteFunc(s.byAddr, func(_ netip.Addr, d weak.Pointer[device]) bool { return d.Value() == nil })
	if d = s.devices[n.ID()].Value(); d != nil {
		err = n.Close()
	} else {
		d = newDevice(n)
		s.devices[n.ID()] = weak.Make(d)
	}
	s.byAddr[a] = weak.Make(d)
	return d, err
}

// OnHost reports whether the queue pair that a flow leads to is a process's of a device of this host.
func (s *Shared) OnHost(f *train.Flow, qpn uint32) bool {
	if u, ok := f.Link.(*udpFlow); ok && u.elsewhere {
		return false
	}
	d, err := s.deviceAt(f.Dst.Unmap())
	if err != nil {
		return false
	}
	_, ok := d.Find(qpn)
	return ok
}

// localFlow is a flow to a device of this host.
type localFlow struct {
	link     *Shared
	dev      *device
	src, dst netip.Addr
	rest     *train.Flow // the same flow by packets; nil with NoPackets
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
	if err := s.UDP.Prepare(f); err != nil {
		return err
	}
	f.Link.(*udpFlow).elsewhere = !s.cfg.Packets
	return nil
}

// IsLocal reports whether a flow goes by the rings of this host, not by packets.
func (s *Shared) IsLocal(f *train.Flow) bool {
	_, ok := f.Link.(*localFlow)
	return ok
}

// LocalWindow returns how many packets may be under way to the process that has queue pair
// qpn, and how many of them, short, may be of messages shorter than below. short is how many
// of the longest packets fit into 3/8 of a ring; as much again is for answers. Queue pairs
// that together have more under way wait for room. Where the peer fetches long payloads,
// more packets of long messages may be under way, so that the receiver does not run out of
// them between two answers.
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

// longWindows is how many times more packets may be under way where the peer fetches.
const longWindows = 4

// Send sends trains in order, in runs that go by packets or to one queue pair.
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

// sendTrain puts a train into the ring to its process. A train that cannot be delivered
// counts as sent and is lost, as on any network; for one that cannot be delivered now but
// may be later, sendTrain returns ErrBusy.
func (s *Shared) sendTrain(f *localFlow, one []*train.Train) error {
	t := one[0]
	process, ok := f.dev.Find(t.DestQP)
	if !ok {
		s.lost.Add(1)
		return nil
	}
	if f.dev.ByPackets(process) {
		if t.Carried { // the process wants packets since Carries was called: they need the bytes
			return &PayloadError{Fault: mem.StagedFault()}
		}
		return s.sendRest(f, one)
	}
	c := f.dev.channels[process].Load()
	if c == nil {
		soon := s.connect(f.dev, process)
		switch {
		case t.Transport == wire.UD && f.rest != nil:
			// A UD queue pair has other peers, which must not wait for this one. (For
			// a connected queue pair Reach has chosen rings or packets.)
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
		if done, err := s.sendRef(c, f, t); done {
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

// sendRest sends a train by packets; with NoPackets the train is lost.
func (s *Shared) sendRest(f *localFlow, one []*train.Train) error {
	if f.rest == nil {
		s.lost.Add(1)
		return nil
	}
	one[0].Flow = f.rest
	_, err := s.UDP.Send(one)
	return err
}

// capture shows a train to the tap, as the packets that it would be. A payload that
// cannot be read is left out: the copy that follows reports the fault.
func (s *Shared) capture(t *train.Train) {
	if tap := s.cfg.UDP.Tap; tap != nil {
		_ = Capture(t, tap, time.Now())
	}
}

// deliver hands s.t, which has come by a ring, to the sink.
func (s *Shared) deliver() {
	t := &s.t
	if s.cfg.UDP.Tap != nil {
		t.Flow = &train.Flow{Src: t.From, Dst: t.To, TClass: t.TClass, HopLimit: t.HopLimit}
		s.capture(t)
		t.Flow = nil
	}
	s.sink.Deliver(t)
	t.Payload, s.piece[0] = mem.List{}, nil // unpacking the next train resets the other fields
}

// reserve begins to send on a channel and reserves n bytes for a train; the caller calls
// End. If b is nil, the train is lost, or has to wait if err is ErrBusy. Only RC and XRC
// trains may use the second half of the ring: those transports send again what is lost,
// and other traffic must not crowd them out.
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

// waitsForRoom reports whether a datagram waits for room in the ring. Its queue pair has
// other peers, so it must not wait for long: after one has expired waiting, no datagram
// waits until the peer has read something.
func (k *tag) waitsForRoom(c *shm.Channel, t *train.Train) bool {
	given := c.Given()
	if t.Expired {
		k.stuck, k.stuckAt = true, given
	}
	return !k.stuck || k.stuckAt != given
}

// Route implements Router.
func (s *Shared) Route(qpn uint32) (process int, here bool) {
	if qpn <= wire.ManagementQP { // 0: a packet too short to name a queue pair
		return 0, true
	}
	p, ok := s.home.Find(qpn)
	return p, !ok || p == s.self
}

// Forward implements Router. It does not wait for room, because the goroutine that polls reads
// the sockets for all queue pairs. It leaves a quarter of the ring to the trains of this
// process.
func (s *Shared) Forward(process int, p *Packets) {
	s.passed.Add(uint64((len(p.Bytes) + p.Segment - 1) / p.Segment))
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

// Poll hands what has arrived to the sink. While there is traffic with other processes
// of this host it looks at the sockets less often: a system call takes longer than a
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

// fromRings implements shm.Sink.
type fromRings Shared

// Record handles one record of a peer.
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
	case recRef:
		if !unpackTrain(b, &s.t, train.MaxBytes) || !s.ref.unpackRef(s, c, &s.t, b[trainBytes:]) {
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
			c.Tag().(*tag).reached.CompareAndSwap(le.Uint64(b), false, true) // only memory that the peer was told of
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

// Full reports whether so much was fetched from a channel that it should be answered first:
// the sender can then go on while the rest is fetched.
func (r *fromRings) Full(c *shm.Channel) bool { return r.longOf == c && r.long >= fetchRun }

// Room is called when a ring may have room again.
func (r *fromRings) Room(*shm.Channel) { (*Shared)(r).freed() }

// Gone forgets a channel whose peer has ended, or whose ring is broken.
func (r *fromRings) Gone(c *shm.Channel, _ error) {
	t := c.Tag().(*tag)
	(*Shared)(r).dropSegments(func(k segmentKey) bool { return k.c == c })
	if t.dev.channels[t.process].CompareAndSwap(c, nil) && t.dev == (*Shared)(r).home {
		(*Shared)(r).partner(t.process)
		t.dev.view.Gone(t.process)
	}
	(*Shared)(r).freed() // trains that wait for room there would wait for ever
}

// Wait blocks until something may have arrived.
func (s *Shared) Wait(d time.Duration) {
	if s.inbox.Announce() {
		s.UDP.Wait(d)
		s.inbox.Awake()
	}
}

// Fetched returns how many trains came with payload by reference: fetched counts those
// whose memory is not mapped here, direct those copied from mapped memory.
func (s *Shared) Fetched() (fetched, direct uint64) { return s.fetched.Load(), s.mapped.Load() }

// Named returns how many trains came whose payload lies in opened memory (opened.go).
func (s *Shared) Named() uint64 { return s.named.Load() }

// Lost returns how many trains and packets could not be delivered to another process.
func (s *Shared) Lost() uint64 { return s.lost.Load() }

// Forwarded returns how many packets for other processes have come to this one.
func (s *Shared) Forwarded() uint64 { return s.passed.Load() }

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
	clear(s.byAddr)
	return err
}
