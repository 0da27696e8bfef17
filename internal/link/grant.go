package link

// WRITEs into memory that both processes can map, and READs from there, by the initiator
// itself: one copy, and nobody there has to do anything.
//
// Rights are the owner's to check, as ever; here he does so beforehand. When a queue
// pair has got a few requests for a region of such memory by the ring, its owner gives
// the peer a lane (shm): the record names the queue pairs, the region's key and bounds,
// and the segment that it lies in, which the peer maps. From then on the peer may copy
// there and from there, until the owner takes the lane's pass away: before the region is
// closed or changes, and before the queue pair changes, when he waits until the peer is
// not copying; before the region's memory moves, and when the queue pair fails, when he
// does not wait. What was done before the pass was taken away is counted on the lane, and
// the owner moves the queue pair on past it before he looks at anything else that comes
// for it; what was not counted is done again by the ring.
//
// A sender uses a lane only when everything before has been acknowledged, so that
// requests are executed in order, and each one either by a lane or by the ring.

import (
	"sync"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// After so many requests of a queue pair, or of a few, by a channel's ring one of them is looked at, whether a lane would
// do instead; while the answer is no, after twice as many each time. The numbers are odd:
// of queue pairs that take turns, not always the same one is looked at.
const (
	offerMin = 7
	offerMax = 4093
)

// grantRecord is the length of a record that gives a lane.
const grantRecord = 5*4 + 5*8

// Offer is what a device lets a peer access.
type Offer struct {
	QPN, Peer uint32 // the queue pairs, ours and the peer's
	RKey      uint32
	Write     bool   // it may be written to
	Read      bool   // and read from
	VA        uint64 // of the first byte
	Bytes     []byte
	// Segment and Off are where the bytes lie.
	Segment, Off uint64
}

// Grant is a lane that is given to a peer: the owner's end.
type Grant struct {
	*shm.Grant
	c *shm.Channel
}

// offer looks at a request, the start of which has just been executed.
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

// offers is how long it is until a request is looked at.
type offers struct {
	requests uint // since one was
	at       uint // at how many the next one is
}

// Via is the way that a request has come.
type Via struct{ c *shm.Channel }

// NewGrant opens a lane for the peer, which Tell then tells it of; or returns nil, if there
// is none left.
func (v Via) NewGrant() *Grant {
	l := v.c.NewGrant()
	if l == nil {
		return nil
	}
	return &Grant{l, v.c}
}

// Tell tells the peer of the lane, once, and reports whether it will hear of it. If not,
// the lane is of no use.
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

// Rights, as the record has them.
const (
	grantWrite = 1 << iota
	grantRead
)

// PeerGrant is the initiator's end: memory of another process, and rights to it.
type PeerGrant struct {
	s     *Shared
	m     *mapping
	grant *shm.PeerGrant

	rkey     uint32
	rights   uint32
	va, size uint64
	off      uint64 // where in the mapping the first byte lies

	piece [1][]byte
	there mem.List
}

// mapping is a segment of another process, which lanes lead to.
type mapping struct {
	c *shm.Channel

	mu sync.RWMutex // held for reading while somebody copies
	b  []byte       // nil: it is gone
}

// takeGrant takes a lane that the peer has given us. The segment is got by a goroutine
// of the link's own, if it is not there.
func (s *Shared) takeGrant(c *shm.Channel, b []byte) bool {
	if len(b) != grantRecord {
		return false
	}
	var own [grantRecord]byte
	copy(own[:], b)
	p := unpacker{own[:]}
	qpn, remote := p.u32(), p.u32()
	l := &PeerGrant{s: s, rkey: p.u32(), rights: p.u32()}
	number, pass := p.u32(), p.u64()
	l.va, l.size = p.u64(), p.u64()
	k := segmentKey{c, p.u64()}
	l.off = p.u64()
	if l.grant = c.PeerGrant(int(number), pass); l.grant == nil || s.cfg.Granted == nil || s.cfg.UDP.Tap != nil {
		return l.grant != nil
	}
	s.dropSegments(func(k segmentKey) bool { return k.c.Err() != nil }) // of processes whose place was taken: nobody else says so
	t := c.Tag().(*tag)
	c.Hold()
	if !s.start(func() {
		defer c.Release() // the mapping has its own hold
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

// mapGranted returns a segment of a process, mapped to read from or also to write to.
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
		return nil // it goes by the ring, as before
	}
	if m = s.segments.grants[key]; m != nil || k.c.Err() != nil || *forgotten { // somebody else was faster; or it is gone, and nobody would unmap it
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

// has tells whether so many bytes are there.
func (m *mapping) has(off, n uint64) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return off <= uint64(len(m.b)) && n <= uint64(len(m.b))-off
}

// good tells whether the mapping is, and whose memory it is. Who has ended takes no pass
// away. The caller holds mu.
func (m *mapping) good() bool { return m.b != nil && m.c.Err() == nil }

// close ends the mapping, when nobody stores there.
func (m *mapping) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	_ = sys.Unmap(m.b) // it was mapped: it cannot fail
	m.b = nil
	m.c.Release()
}

// LeadsTo tells whether a lane is one to the process that a flow reaches a queue pair of.
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

// Covers tells whether a range of the peer's memory is one that the lane leads to, to be
// written to or read from.
func (l *PeerGrant) Covers(rkey uint32, va uint64, n int, read bool) bool {
	right := uint32(grantWrite)
	if read {
		right = grantRead
	}
	off := va - l.va // below va it is larger than any size
	return rkey == l.rkey && l.rights&right != 0 && off <= l.size && uint64(n) <= l.size-off
}

// Good tells whether the lane may still be used.
func (l *PeerGrant) Good() bool {
	l.m.mu.RLock()
	defer l.m.mu.RUnlock()
	return l.m.good() && l.grant.Shown()
}

// Copy copies n bytes of a list to where the peer's address is, which the lane covers, or
// from there if read is set, and counts them as so many packets. It reports false, and the
// request has to go another way, if the lane is not good any more, also if the owner has
// taken it away during the copy, or our own memory could not be accessed: some bytes may
// have been copied. One at a time.
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
