package link

// Grants: the initiator executes WRITEs to, and READs from, memory that both processes can
// map. That takes one copy, and the owner process does nothing for it.
//
// The owner process checks rights, as for every request, but beforehand. After a queue pair
// has received a few requests by the ring for a region of such memory, its owner process
// gives the peer a grant (package shm). The record names the queue pairs, the region's key
// and bounds, and the segment that the region lies in, which the peer maps. From then on the
// peer copies to and from the region, until the owner process revokes the grant by taking
// its serial away:
//
//   - before the region is closed or changes, and before the queue pair is modified or
//     closed: then the owner process waits until the peer is not copying;
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

// grantRecord is the length of a record that gives a grant.
const grantRecord = 5*4 + 5*8

// Offer is the memory that a device lets a peer access by grant.
type Offer struct {
	QPN, Peer uint32 // the queue pairs, ours and the peer's
	RKey      uint32
	Write     bool   // the peer may write it
	Read      bool   // the peer may read it
	VA        uint64 // of the first byte
	Bytes     []byte
	// Segment and Off say where the bytes lie: in which segment, and at which offset.
	Segment, Off uint64
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
	if s.cfg.Offer(t, Via{c}) {
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
type Via struct{ c *shm.Channel }

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
		mem.OpenSegment(o.Segment)
		rights = grantWrite
	}
	if o.Read {
		rights |= grantRead
	}
	b := make([]byte, grantRecord)
	p := packer{b}
	p.u32(o.Peer)
	p.u32(o.QPN)
	p.u32(o.RKey)
	p.u32(rights)
	p.u32(uint32(g.Number()))
	p.u64(g.Serial())
	p.u64(o.VA)
	p.u64(uint64(len(o.Bytes)))
	p.u64(o.Segment)
	p.u64(o.Off)
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
	off      uint64 // of the first byte, in the mapping

	piece [1][]byte
	there mem.List
}

// mapping is a segment of another process that grants give access to.
type mapping struct {
	c *shm.Channel

	mu sync.RWMutex // guards b; held for reading during a copy
	b  []byte       // nil: it is unmapped
}

// takeGrant takes a grant from the peer. A goroutine of the link maps the segment, if it is
// not mapped yet, and calls Granted. takeGrant reports false if the record is malformed.
func (s *Shared) takeGrant(c *shm.Channel, b []byte) bool {
	if len(b) != grantRecord {
		return false
	}
	var own [grantRecord]byte
	copy(own[:], b)
	p := unpacker{own[:]}
	qpn, remote := p.u32(), p.u32()
	l := &PeerGrant{s: s, rkey: p.u32(), rights: p.u32()}
	number, serial := p.u32(), p.u64()
	l.va, l.size = p.u64(), p.u64()
	k := segmentKey{c, p.u64()}
	l.off = p.u64()
	if l.grant = c.PeerGrant(int(number), serial); l.grant == nil || s.cfg.Granted == nil || s.cfg.UDP.Tap != nil {
		return l.grant != nil
	}
	// Channels that this process closed itself (keepLocked): Gone is not called for them.
	s.dropSegments(func(k segmentKey) bool { return k.c.Err() != nil })
	t := c.Tag().(*tag)
	c.Hold()
	if !s.start(func() {
		defer c.Release() // the mapping has a hold of its own
		m := s.mapGranted(k, t, l.rights&grantWrite != 0)
		if m == nil || !m.has(l.off, l.size) {
			return
		}
		l.m = m
		s.cfg.Granted(qpn, remote, l)
	}) {
		c.Release()
	}
	return true
}

// mapGranted returns a mapping of another process's segment, for reading, or with write also
// for writing. It returns nil if there is none: requests then keep going by the ring.
func (s *Shared) mapGranted(k segmentKey, t *tag, write bool) *mapping {
	key := grantKey{k, write}
	s.segments.mu.Lock()
	m, n := s.segments.grants[key], len(s.segments.grants)
	s.segments.mu.Unlock()
	if m != nil {
		return m
	}
	if n >= maxMapped {
		return nil
	}
	forgotten := s.segments.ask(k)
	b, err := mapSegment(k, t, write)
	s.segments.mu.Lock()
	defer s.segments.mu.Unlock()
	delete(s.segments.asked, forgotten)
	if err != nil {
		return nil
	}
	// Another goroutine has mapped it meanwhile; or the segment has been dropped, and nothing
	// would unmap it later.
	if m = s.segments.grants[key]; m != nil || k.c.Err() != nil || *forgotten {
		_ = sys.Unmap(b)
		return m
	}
	if s.segments.grants == nil {
		s.segments.grants = make(map[grantKey]*mapping)
	}
	m = &mapping{c: k.c, b: b}
	k.c.Hold()
	s.segments.grants[key] = m
	return m
}

// has reports whether the mapping has n bytes at off.
func (m *mapping) has(off, n uint64) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return off <= uint64(len(m.b)) && n <= uint64(len(m.b))-off
}

// good reports whether the segment is mapped and the channel to its owner process works. A
// process that has ended takes no serial away, so a shown serial alone proves nothing. The
// caller holds mu.
func (m *mapping) good() bool { return m.b != nil && m.c.Err() == nil }

// close unmaps the segment, once no copy is under way.
func (m *mapping) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	_ = sys.Unmap(m.b) // cannot fail for a whole mapping
	m.b = nil
	m.c.Release()
}

// LeadsTo reports whether a grant is of the process that has queue pair qpn of the device
// that the flow leads to.
func (s *Shared) LeadsTo(f *train.Flow, qpn uint32, l *PeerGrant) bool {
	if f == nil {
		return false
	}
	to, ok := f.Link.(*localFlow)
	if !ok {
		return false
	}
	process, ok := to.dev.Find(qpn)
	return ok && to.dev.channels[process].Load() == l.m.c
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

// Good reports whether the grant may still be used.
func (l *PeerGrant) Good() bool {
	l.m.mu.RLock()
	defer l.m.mu.RUnlock()
	return l.m.good() && l.grant.Shown()
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
	l.piece[0] = l.m.b[l.off+(va-l.va):][:n]
	l.there = mem.List{Raw: l.piece[:], MayFault: true}
	to, from, what := &l.there, own, shm.GrantWrites
	if read {
		to, from, what = own, &l.there, shm.GrantReads
	}
	f, _ := mem.Copy(to, from, uint64(n), true)
	done := f.OK() && l.grant.Count(what, packets, n)
	l.grant.Leave()
	if !l.s.lively.Load() {
		l.s.lively.Store(true)
	}
	return done
}
