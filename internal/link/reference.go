package link

// Payload by reference: a long payload reaches another process in one copy. The record says
// where the payload lies in the sender's memory, and the receiver fetches it once it has
// determined where it goes. Only SENDs, WRITEs and READ responses of RC travel so, not those of
// XRC. The application leaves the memory of a request alone until the request is acknowledged,
// and that of a READ may change while it is read. If fetching fails, the receiver asks for the
// train again, and its payload then comes in the ring.
//
// The sender may give a train up while its record still lies in the ring of a receiver that
// is behind: the queue pair fails or is closed, or the region is closed, and the memory is
// the application's again. So every record carries a ticket: the value of a word of the
// sender that changes before any such thing. The receiver has that word mapped. It reads the
// word before and after fetching, and the train counts only if both values are the ticket.

import (
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

const (
	// refMin is the length from which on a system call is cheaper than a second copy.
	refMin = 16 << 10
	// refTail is how many of the last bytes travel in the record: the receiver stores them
	// last, in one piece, for programs that poll the end of a message.
	refTail = 64
	// refBytes is the length of what precedes the runs: ticket, segment, offset, and how
	// many runs there are.
	refBytes = 3*8 + 4
	// maxFarRuns is the most pieces of memory that a payload by reference may lie in.
	maxFarRuns = 32
)

// scratch is storage for one send, pooled so that sending does not allocate.
type scratch struct {
	runs  [maxFarRuns + 1][]byte
	pins  mem.Pins
	to    mem.List
	from  mem.List
	piece [1][]byte
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// copyOut copies n bytes of a payload, from off on, into b.
func (g *scratch) copyOut(b []byte, payload *mem.List, off, n int) mem.Fault {
	g.piece[0] = b[:n]
	g.to, g.from = mem.List{Raw: g.piece[:]}, *payload
	g.from.Off += uint64(off)
	f, _ := mem.Copy(&g.to, &g.from, uint64(n), false)
	g.piece[0], g.from = nil, mem.List{}
	return f
}

// mayFetch reports whether a train's payload may go by reference. One that was sent before
// goes in the ring, since fetching may have failed; so does one whose memory is only lent.
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

// sendRef sends a train with its payload by reference. done is false if the payload has to
// go in the ring: the memory lies in too many pieces or is not addressable by the CPU, or
// tickets do not follow remapping (tickets.none).
func (s *Shared) sendRef(c *shm.Channel, f *localFlow, t *train.Train) (done bool, err error) {
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
	b, err := s.reserve(c, recRef, trainBytes+refBytes+16*len(runs)+refTail, t)
	if b == nil {
		return true, err
	}
	defer c.End()
	packTrain(b, t, f.src, f.dst)
	p := packer{b[trainBytes:]}
	p.u64(t.Ticket) // read before the memory was resolved
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

// refSource is the payload by reference of the train being delivered; only Poll uses it.
type refSource struct {
	c      *shm.Channel
	ranges [maxFarRuns]shm.Range
	n      int
	want   uint64        // the ticket in the record
	fence  atomic.Uint32 // see Still
	mapped []byte        // the payload, if its segment is mapped here; else nil

	read    refRead
	reading atomic.Bool // read is in use
}

// refRead is storage for one read of payload by reference. Several goroutines may read parts of one payload.
type refRead struct {
	copier shm.Copier
	part   [maxFarRuns]shm.Range
	dst    [1][]byte
}

var refReads = sync.Pool{New: func() any { return new(refRead) }}

// unpackRef reads from a record where a train's payload lies. It reports false if the record
// is malformed.
func (r *refSource) unpackRef(s *Shared, c *shm.Channel, t *train.Train, b []byte) bool {
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

// Mapped implements mem.Reference.
func (r *refSource) Mapped(off, n uint64) []byte {
	if r.mapped == nil || r.c.PeerTicket() != r.want {
		return nil
	}
	return r.mapped[off:][:n]
}

// Still implements mem.Reference.
func (r *refSource) Still() bool {
	r.fence.Add(1) // orders the loads of the payload before that of the ticket, on every processor
	return r.c.PeerTicket() == r.want
}

// ReadRef implements mem.Reference.
func (r *refSource) ReadRef(b []byte, off uint64) (ok, own bool) {
	if r.c.PeerTicket() != r.want {
		return false, false
	}
	g := &r.read
	if r.reading.CompareAndSwap(false, true) {
		defer r.reading.Store(false)
	} else { // another goroutine reads a part
		g = refReads.Get().(*refRead)
		defer refReads.Put(g)
	}
	part, left := g.part[:0], len(b)
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
	g.dst[0] = b
	n, err := r.c.CopyFrom(&g.copier, g.dst[:], part)
	g.dst[0] = nil
	if err != nil || left != 0 || n != len(b) {
		return false, err == shm.ErrOwnMemory
	}
	return r.Still(), false
}

// tickets holds the word that tickets are read from, in memory that other processes see.
// GiveUpFetches counts the word up, and so does remapping of watched memory (mem.AddTicket).
// Remapping alone counts another word up, for grants (grant.go).
type tickets struct {
	shown  atomic.Pointer[atomic.Uint64] // nil: the link is closed
	remaps *atomic.Uint64                // nil: it does not follow remapping
	mu     sync.Mutex                    // guards the words that peers read: close waits for change
	none   bool                          // remapping does not count the word up: nothing is sent by reference
}

// Ticket returns the ticket for trains that are about to be sent: see Train.Ticket. It
// returns 0 when the link is closed and sends nothing.
func (s *Shared) Ticket() uint64 {
	if shown := s.tickets.shown.Load(); shown != nil {
		return shown.Load()
	}
	return 0
}

func (k *tickets) open(word, remaps *atomic.Uint64) {
	k.shown.Store(word)
	k.none = !mem.AddTicket(word)
	if mem.AddTicket(remaps) {
		k.remaps = remaps
	}
}

// GiveUpFetches makes other processes drop what they have not fetched yet. The device calls
// it before it gives the memory of requests back to the application.
func (s *Shared) GiveUpFetches() {
	k := &s.tickets
	k.change(func() { k.shown.Load().Add(1) }) // trains about to leave carry the old ticket, and are sent again
}

// change calls f, which changes a word that peers read, unless the link is closed.
func (k *tickets) change(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.shown.Load() != nil {
		f()
	}
}

// remapped returns how often mappings of this process have changed. ok is false if that is not
// known, or the link is closed.
func (k *tickets) remapped() (n uint64, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.shown.Load() == nil || k.remaps == nil {
		return 0, false
	}
	return k.remaps.Load(), true
}

func (k *tickets) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if shown := k.shown.Swap(nil); shown != nil {
		mem.RemoveTicket(shown)
		if k.remaps != nil {
			mem.RemoveTicket(k.remaps)
		}
	}
}
