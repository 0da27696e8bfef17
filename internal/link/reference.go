package link

// Long payloads between processes, in one copy: the record says where they lie in
// the sender's memory, and the receiver fetches them when it has found out where
// they go. Only requests of reliable connections, and the answers to READs, travel
// so: their memory is left alone until they are acknowledged, or may change while it
// is read, and they can be sent again, by the ring, if fetching fails.
//
// They may also be given up: the queue pair fails or is closed, the region is
// closed, and the memory is the application's again, while the record still lies
// in the ring of a process that is slow. So every record carries a ticket, the
// value of a word of the sender's that changes before any such thing. It lies in
// memory that the receiver has mapped; it looks there before it fetches and when it
// has, and the train counts only if the word still has that value.

import (
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

const (
	// refMin is from which length on a system call is cheaper than a second
	// copy.
	refMin = 16 << 10
	// refTail is how many of the last bytes go in the record: they are stored
	// last, in one piece, for those who watch the end of a message.
	refTail = 64
	// refBytes is how much the record says before the runs.
	refBytes = 3*8 + 4
	// maxFarRuns is how many pieces the memory may be made of.
	maxFarRuns = 32
)

// scratch is what sending needs and must not allocate.
type scratch struct {
	runs  [maxFarRuns + 1][]byte
	pins  mem.Pins
	to    mem.List
	from  mem.List
	piece [1][]byte
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// copyOut copies n bytes of a payload, from an offset on, into b.
func (g *scratch) copyOut(b []byte, payload *mem.List, off, n int) mem.Fault {
	g.piece[0] = b[:n]
	g.to, g.from = mem.List{Raw: g.piece[:]}, *payload
	g.from.Off += uint64(off)
	f, _ := mem.Copy(&g.to, &g.from, uint64(n), false)
	g.piece[0], g.from = nil, mem.List{}
	return f
}

// mayFetch tells whether the peer may fetch a train's payload.
func mayFetch(c *shm.Channel, t *train.Train) bool {
	if t.Len < refMin || t.Again || t.Lent || t.Transport != wire.RC {
		return false
	}
	switch t.Kind {
	case wire.KindSend, wire.KindWrite, wire.KindReadResponse:
		return c.PeerReads()
	}
	return false
}

// sendFar sends a train without its payload. done is false if it must go another
// way: the memory is in too many pieces.
func (s *Shared) sendFar(c *shm.Channel, f *localFlow, t *train.Train) (done bool, err error) {
	if s.tickets.none {
		return false, nil
	}
	g := scratches.Get().(*scratch)
	defer scratches.Put(g)
	runs, fault, whole := mem.Gather(&t.Payload, uint64(t.Len), g.runs[:0:maxFarRuns], &g.pins)
	if !fault.OK() {
		return true, &PayloadError{Fault: fault}
	}
	if !whole {
		return false, nil
	}
	defer g.pins.Release()
	defer clear(runs)
	b, err := s.reserve(c, recFar, trainBytes+refBytes+16*len(runs)+refTail, t)
	if b == nil {
		return true, err
	}
	defer c.End()
	packTrain(b, t, f.src, f.dst)
	p := packer{b[trainBytes:]}
	p.u64(t.Ticket) // from before the memory was looked at
	var segment, at uint64
	if len(runs) == 1 {
		segment, at = mem.SegmentOf(runs[0])
	}
	p.u64(segment)
	p.u64(at)
	p.u32(uint32(len(runs)))
	for _, r := range runs {
		p.u64(addrOf(r))
		p.u64(uint64(len(r)))
	}
	if fault := g.copyOut(p.b, &t.Payload, t.Len-refTail, refTail); !fault.OK() {
		return true, &PayloadError{Fault: fault}
	}
	c.Commit()
	return true, nil
}

// refSource is the payload of a train that lies in another process: Poll's own.
type refSource struct {
	c      *shm.Channel
	ranges [maxFarRuns]shm.Range
	n      int
	copier shm.Copier
	part   [maxFarRuns]shm.Range
	dst    [1][]byte
	want   uint64        // the ticket
	fence  atomic.Uint32 // see Still
	mapped []byte        // the payload, if it is mapped here
}

// unpackFar reads where the payload of a train lies.
func (r *refSource) unpackFar(s *Shared, c *shm.Channel, t *train.Train, b []byte) bool {
	if len(b) < refBytes || t.Len < refMin {
		return false
	}
	p := unpacker{b}
	r.want = p.u64()
	segment, at := p.u64(), p.u64()
	n := p.u32()
	if n < 1 || n > maxFarRuns || len(p.b) != int(n)*16+refTail {
		return false
	}
	left := t.Len
	for i := range int(n) {
		addr, size := p.u64(), p.u64()
		if size == 0 || size > uint64(left) {
			return false
		}
		r.ranges[i] = shm.Range{Addr: addr, Len: int(size)}
		left -= int(size)
	}
	if left != 0 {
		return false
	}
	r.c, r.n, r.mapped = c, int(n), nil
	if segment != 0 {
		if m := s.findSegment(c, segment); at <= uint64(len(m)) && uint64(t.Len) <= uint64(len(m))-at {
			r.mapped = m[at:][:t.Len]
		}
	}
	return true
}

// Mapped implements mem.Far.
func (r *refSource) Mapped(off, n uint64) []byte {
	if r.mapped == nil || r.c.PeerTicket() != r.want {
		return nil
	}
	return r.mapped[off:][:n]
}

// Still implements mem.Far.
func (r *refSource) Still() bool {
	r.fence.Add(1) // what was read was read before the ticket is: not every processor orders two loads
	return r.c.PeerTicket() == r.want
}

// ReadFar implements mem.Far.
func (r *refSource) ReadFar(b []byte, off uint64) (ok, own bool) {
	if r.c.PeerTicket() != r.want {
		return false, false
	}
	part, left := r.part[:0], len(b)
	for _, s := range r.ranges[:r.n] {
		if off >= uint64(s.Len) {
			off -= uint64(s.Len)
			continue
		}
		if n := min(left, s.Len-int(off)); n > 0 {
			part = append(part, shm.Range{Addr: s.Addr + off, Len: n})
			left -= n
		}
		off = 0
	}
	r.dst[0] = b
	n, err := r.c.CopyFrom(&r.copier, r.dst[:], part)
	r.dst[0] = nil
	if err != nil || left != 0 || n != len(b) {
		return false, err == shm.ErrOwnMemory
	}
	return r.Still(), false
}

// tickets is the word that GiveUpFetches counts up, where other processes see it. Whoever
// remaps memory that is watched counts it up, too (mem.AddTicket).
type tickets struct {
	shown atomic.Pointer[atomic.Uint64] // nil: the link is closed
	mu    sync.Mutex                    // held while the word is counted up: it does not go away meanwhile
	none  bool                          // remapping does not count the word up: nothing is sent by reference
}

// Ticket is for trains that are about to be sent: see Train.Ticket. Nobody sends when the
// link is closed.
func (s *Shared) Ticket() uint64 {
	if shown := s.tickets.shown.Load(); shown != nil {
		return shown.Load()
	}
	return 0
}

func (k *tickets) open(word *atomic.Uint64) {
	k.shown.Store(word)
	k.none = !mem.AddTicket(word)
}

// GiveUpFetches makes other processes drop what they have not fetched yet. It is
// called before the memory of requests is given back.
func (s *Shared) GiveUpFetches() {
	k := &s.tickets
	k.change(func() { k.shown.Load().Add(1) }) // what is about to be sent carries the old one, and is sent again
}

// change changes a word that peers look at, unless the link is closed.
func (k *tickets) change(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.shown.Load() != nil {
		f()
	}
}

func (k *tickets) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if shown := k.shown.Swap(nil); shown != nil {
		mem.RemoveTicket(shown)
	}
}
