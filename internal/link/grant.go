package link

// Grants: the initiator executes WRITEs to, and READs from, memory of another process. That
// takes one copy, and the owner process does nothing for it. The memory lies in a segment that
// both processes map; of other memory, grant_plain.go has how it is reached.
//
// The owner process checks rights, as for every request, but beforehand. After a queue pair
// has received a few requests by the ring for a region, its owner process gives the peer a
// grant (package shm). The record names the queue pairs, the region's key and bounds, and the
// segment that the region lies in, which the peer maps. From then on the
// peer copies to and from the region, until the owner process revokes the grant by taking
// its serial away:
//
//   - before the region is closed or changes, and before the queue pair is modified or
//     closed: then the owner process waits until the peer is not copying. (The close of a
//     region of plain memory does not wait for the peer: see grant_plain.go);
//   - before the region's memory moves, and when the queue pair fails: then it does not wait.
//
// The grant counts what the peer completed before the serial was taken away, and the owner
// process moves the queue pair on past that before it handles anything else that arrives for
// the queue pair. The peer repeats by the ring what was not counted.
//
// A sender uses a grant only when all its earlier requests have been acknowledged. So
// requests are executed in order, and each either by grant or by the ring.

import (
	"sync"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// offerMin is after how many requests by a channel's ring, counted for each entry of
// tag.offers, one is offered to the device for a grant. Each refusal doubles the number, up
// to about offerMax. The numbers are odd: where queue pairs that share an entry send in
// rotation, the request that is offered is not always the same queue pair's.
const (
	offerMin = 7
	offerMax = 4093
)

// grantRecord is the length of a record that gives a grant; plainBytes follow for plain memory.
const grantRecord = 5*4 + 5*8

// Offer is the memory that a device lets a peer access by grant.
type Offer struct {
	QPN, Peer uint32 // the queue pairs, ours and the peer's
	RKey      uint32
	Write     bool   // the peer may write it
	Read      bool   // the peer may read it
	VA        uint64 // of the first byte
	Bytes     []byte
	// Segment and Off say where the bytes lie: in which segment, and at which offset. They are 0
	// for plain memory.
	Segment, Off uint64
	// Of plain memory: what Via.Remaps returned before the memory was looked at, and the loan of
	// the memory; nil if the peer may only read.
	Remaps uint64
	Loan   *Loan
}

// Grant is the owner's end of a grant.
type Grant struct {
	*shm.Grant
	c *shm.Channel
}

// offer counts a request whose first train has just been delivered, and offers one in so
// many of them to the device.
func (s *Shared) offer(c *shm.Channel, t *train.Train) {
	if t.Kind != wire.KindWrite && t.Kind != wire.KindReadRequest || !t.Start || t.RETH.Len == 0 || s.cfg.Offer == nil || s.cfg.UDP.Tap != nil {
		return
	}
	k := c.Tag().(*tag)
	o := &k.offers[t.DestQP%uint32(len(k.offers))]
	if o.requests++; o.requests < max(o.at, offerMin) {
		return
	}
	o.requests = 0
	if s.cfg.Offer(t, Via{s, c}) {
		o.at = offerMin
	} else {
		o.at = min(max(2*o.at+1, offerMin), offerMax)
	}
}

// offers counts the requests until the next one is offered to the device.
type offers struct {
	requests uint // since the latest that was offered
	at       uint // the next is offered at so many; below offerMin: at offerMin
}

// Via is the channel that a request has come by.
type Via struct {
	s *Shared
	c *shm.Channel
}

// NewGrant makes a grant for the peer, which learns of it by Tell. It returns nil if none is
// left or the channel is closed.
func (v Via) NewGrant() *Grant {
	l := v.c.NewGrant()
	if l == nil {
		return nil
	}
	return &Grant{l, v.c}
}

// Tell sends the grant to the peer, once, and reports whether the record is in the ring. If
// it is not, the peer never learns of the grant.
func (g *Grant) Tell(o *Offer) bool {
	var rights uint32
	if o.Write {
		rights = grantWrite
	}
	if o.Read {
		rights |= grantRead
	}
	segment, off, size := o.Segment, o.Off, grantRecord
	switch {
	case segment == 0:
		segment, off, size = o.Loan.number(), sys.AddrOf(o.Bytes), grantRecord+plainBytes
	case o.Write:
		mem.OpenSegment(segment)
	}
	b := make([]byte, size)
	p := packer{b}
	p.u32(o.Peer)
	p.u32(o.QPN)
	p.u32(o.RKey)
	p.u32(rights)
	p.u32(uint32(g.Number()))
	p.u64(g.Serial())
	p.u64(o.VA)
	p.u64(uint64(len(o.Bytes)))
	p.u64(segment)
	p.u64(off)
	if o.Segment == 0 {
		packPlain(p.b, o)
	}
	return g.c.Send(recGrant, b) == nil
}

// Rights, as bits in the record.
const (
	grantWrite = 1 << iota
	grantRead
)

// PeerGrant is the initiator's end of a grant: memory of another process, and rights to it.
type PeerGrant struct {
	s     *Shared
	m     *mapping
	grant *shm.PeerGrant

	rkey     uint32
	rights   uint32
	va, size uint64
	off      uint64 // of the first byte: in the mapping, or its address in the owner process
	plain    *plain // nil: the memory is a segment's

	piece [1][]byte
	there mem.List
}

// mapping is that of another process which grants give access to: a segment, rings
// (grant_plain.go), or only the channel.
type mapping struct {
	c *shm.Channel

	mu     sync.RWMutex // guards what follows; held for reading during a copy
	closed bool
	b      []byte             // nil: it is no segment
	rings  *sys.BorrowedRings // nil: it is no rings
}

// takeGrant takes a grant from the peer. A goroutine of the link maps the segment, if it is
// not mapped yet, and calls Granted. takeGrant reports false if the record is malformed.
func (s *Shared) takeGrant(c *shm.Channel, b []byte) bool {
	var own [grantRecord + plainBytes]byte
	if len(b) != grantRecord && len(b) != len(own) {
		return false
	}
	isPlain := copy(own[:], b) == len(own)
	p := unpacker{own[:]}
	qpn, remote := p.u32(), p.u32()
	l := &PeerGrant{s: s, rkey: p.u32(), rights: p.u32()}
	number, serial := p.u32(), p.u64()
	l.va, l.size = p.u64(), p.u64()
	k := segmentKey{c, p.u64()}
	l.off = p.u64()
	var fds []int
	if isPlain {
		var ok bool
		if l.plain, fds, ok = unpackPlain(p.b, int(number)); !ok {
			return false
		}
	}
	if l.grant = c.PeerGrant(int(number), serial); l.grant == nil || s.cfg.Granted == nil || s.cfg.UDP.Tap != nil {
		return l.grant != nil
	}
	// Channels that this process closed itself (keepLocked): Gone is not called for them.
	s.dropSegments(func(k segmentKey) bool { return k.c.Err() != nil })
	t := c.Tag().(*tag)
	c.Hold()
	if !s.start(func() {
		defer c.Release() // the mapping has a hold of its own
		write := l.rights&grantWrite != 0
		if isPlain {
			s.reachPlain(l, k, fds)
		} else {
			l.m = s.mapGranted(grantKey{k, write}, func() (*mapping, error) {
				b, err := mapSegment(k, t, write)
				return &mapping{c: c, b: b}, err
			})
		}
		if l.m == nil || !isPlain && !l.m.has(l.off, l.size) {
			return
		}
		s.cfg.Granted(qpn, remote, l)
	}) {
		c.Release()
	}
	return true
}

// mapGranted returns the mapping with a key, which open makes if there is none yet. It returns
// nil if open cannot: requests then keep going by the ring.
func (s *Shared) mapGranted(key grantKey, open func() (*mapping, error)) *mapping {
	s.segments.mu.Lock()
	m, n := s.segments.grants[key], len(s.segments.grants)
	s.segments.mu.Unlock()
	if m != nil {
		return m
	}
	if n >= maxMapped {
		return nil
	}
	forgotten := s.segments.ask(key.segmentKey)
	fresh, err := open()
	s.segments.mu.Lock()
	defer s.segments.mu.Unlock()
	delete(s.segments.asked, forgotten)
	if err != nil {
		return nil
	}
	// Another goroutine has mapped it meanwhile; or the segment has been dropped, and nothing
	// would unmap it later.
	if m = s.segments.grants[key]; m != nil || key.c.Err() != nil || *forgotten {
		fresh.unmap()
		return m
	}
	if s.segments.grants == nil {
		s.segments.grants = make(map[grantKey]*mapping)
	}
	key.c.Hold()
	s.segments.grants[key] = fresh
	return fresh
}

// has reports whether the mapping has n bytes at off.
func (m *mapping) has(off, n uint64) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return off <= uint64(len(m.b)) && n <= uint64(len(m.b))-off
}

// good reports whether the mapping is open and the channel to its owner process works. A
// process that has ended takes no serial away, so a shown serial alone proves nothing. The
// caller holds mu.
func (m *mapping) good() bool { return !m.closed && m.c.Err() == nil }

// close ends the mapping, once no copy is under way.
func (m *mapping) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unmap()
	m.c.Release()
}

// unmap gives up what the mapping consists of.
func (m *mapping) unmap() {
	if m.b != nil {
		_ = sys.Unmap(m.b) // cannot fail for a whole mapping
	}
	if m.rings != nil {
		m.rings.Close()
	}
	m.closed, m.b, m.rings = true, nil, nil
}

// LeadsTo reports whether a grant is of the process that has queue pair qpn of the device
// that the flow leads to.
func (s *Shared) LeadsTo(f *train.Flow, qpn uint32, l *PeerGrant) bool { return leadsTo(f, qpn, l.m.c) }

// Leads reports whether the channel is that to the process which has queue pair qpn of the
// device that the flow leads to.
func (v Via) Leads(f *train.Flow, qpn uint32) bool { return leadsTo(f, qpn, v.c) }

func leadsTo(f *train.Flow, qpn uint32, c *shm.Channel) bool {
	if f == nil {
		return false
	}
	to, ok := f.Link.(*localFlow)
	if !ok {
		return false
	}
	process, ok := to.dev.Find(qpn)
	return ok && to.dev.channels[process].Load() == c
}

// Covers reports whether the grant allows to write, or with read to read, n bytes at va of
// the peer's memory.
func (l *PeerGrant) Covers(rkey uint32, va uint64, n int, read bool) bool {
	right := uint32(grantWrite)
	if read {
		right = grantRead
	}
	off := va - l.va // an address below l.va wraps to an offset beyond any size
	return rkey == l.rkey && l.rights&right != 0 && off <= l.size && uint64(n) <= l.size-off
}

// Plain reports whether the grant is to plain memory: each use of it makes system calls.
func (l *PeerGrant) Plain() bool { return l.plain != nil }

// Good reports whether the grant may still be used.
func (l *PeerGrant) Good() bool {
	l.m.mu.RLock()
	defer l.m.mu.RUnlock()
	return l.m.good() && l.grant.Shown() && (l.plain == nil || l.plainGood())
}

// Copy copies n bytes from the list own to the peer's address va, or with read from va to
// own, and counts them as a message of so many packets. Covers has allowed it. Copy reports
// false if the grant is not good, if its owner revoked it during the copy, or if memory
// could not be accessed: the request then has to go by the ring, though some bytes may have
// been copied. Only one goroutine at a time may call it.
func (l *PeerGrant) Copy(va uint64, own *mem.List, n, packets int, read bool) bool {
	l.m.mu.RLock()
	defer l.m.mu.RUnlock()
	if !l.m.good() || !l.grant.Enter() {
		return false
	}
	what := shm.GrantWrites
	if read {
		what = shm.GrantReads
	}
	var done bool
	if l.plain == nil {
		done = l.copyMapped(va, own, n, read)
	} else {
		done = l.copyPlain(va-l.va, own, n, read)
	}
	done = done && l.grant.Count(what, packets, n)
	l.grant.Leave()
	if !l.s.lively.Load() {
		l.s.lively.Store(true)
	}
	return done
}

// copyMapped is Copy in a segment. It reports whether it has copied all.
func (l *PeerGrant) copyMapped(va uint64, own *mem.List, n int, read bool) bool {
	l.piece[0] = l.m.b[l.off+(va-l.va):][:n]
	l.there = mem.List{Raw: l.piece[:], MayFault: true}
	to, from := &l.there, own
	if read {
		to, from = own, &l.there
	}
	f, _ := mem.Copy(to, from, uint64(n), true)
	return f.OK()
}
