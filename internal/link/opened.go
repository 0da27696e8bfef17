package link

// Payload by name: the payload of a Carried train lies in memory that the CPU does not address
// but that engines of both processes reach (mem.Sharing). The record names the memory, and the
// receiver's engine moves the bytes from there.
//
//  1. The sending queue pair calls Carries. If the peer has not opened the memory, the sender
//     tells the peer of it, once, and meanwhile loads the bytes before it sends them.
//  2. A goroutine of the peer opens the memory and tells the sender.
//  3. From then on trains name the memory by its number, and the offset in it.
//  4. When the memory's region is closed the sender tells the peer, which closes the memory.
//
// A word of the sender keeps the receiver from using what was given up: the receiver compares
// the word with the value in the record before and after the move. For answers that word is
// the ticket, as in reference.go: if it has changed, the requester asks for them again, and
// gets them loaded. A request must not be repeated after requests behind it were executed, so
// its word is a lease of its queue pair, which changes only when that gives its requests up;
// and while the request is under way the sender keeps a section open on its memory.

import (
	"errors"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/train"
)

// namedBytes is the length of what a recNamed record has behind the train's fields: the
// lease's number and value, the memory's number, and the offset in it.
const namedBytes = 4 + 3*8

// opened is the memory of other processes that this one has opened.
type opened struct {
	sge [1]ib.SGE // of the train being delivered; only Poll uses it

	mu    sync.Mutex // guards what follows
	table *mem.Table // of the regions; nil: there was none yet
	byKey map[segmentKey]*openedMemory
}

// makeTable makes the table, if there is none yet. The caller holds mu.
func (o *opened) makeTable() {
	if o.table == nil {
		o.table = mem.NewTable(mem.TableConfig{})
	}
}

// openedMemory is one memory of another process.
type openedMemory struct {
	region  *mem.Region // nil: it is not open yet, or could not be opened
	dropped bool        // dropOpened has removed it: openNow must not open it any more
}

// leases are the slots of the inbox for words that show peers whether carried requests under
// way may still be read.
type leases struct {
	mu   sync.Mutex // guards used
	used [shm.MaxLeases]bool
}

// Carrier sends a queue pair's trains from memory that the peer's process has opened. It
// implements qp.Carrier.
type Carrier struct {
	s    *Shared
	flow *localFlow
	qpn  uint32 // the peer
	slot int    // of the lease; -1: it has none
}

// NewCarrier returns a Carrier to queue pair qpn at the other end of a flow, or nil if the
// flow does not go by a ring, or a tap needs the bytes.
func (s *Shared) NewCarrier(f *train.Flow, qpn uint32) *Carrier {
	to, ok := f.Link.(*localFlow)
	if !ok || s.cfg.UDP.Tap != nil {
		return nil
	}
	return &Carrier{s: s, flow: to, qpn: qpn, slot: -1}
}

// Carries makes t a carried train of the first of n bytes of a list that the CPU does not
// address, if the peer's process has opened their memory. The result's Len is how many bytes:
// a multiple of unit, or all. The zero result means that t is not carried; a later call may
// succeed. With lease, for a request, the result holds the memory, and the caller releases it.
func (c *Carrier) Carries(t *train.Train, l *mem.List, n, unit uint64, lease bool) (none mem.SharedHold) {
	process, ok := c.flow.dev.Find(c.qpn)
	if !ok || c.flow.dev.ByPackets(process) {
		return none
	}
	to := c.flow.dev.channels[process].Load()
	if to == nil {
		return none
	}
	h, fault := mem.HoldShared(l, n)
	if !fault.OK() {
		return none
	}
	short := h.Len < n
	if short {
		h.Len -= h.Len % unit
	}
	if short && h.Len < train.LeastCarried || !c.s.reaches(to, h.ID) || lease && c.slot < 0 && !c.take() {
		h.Release()
		return none
	}
	t.Carried, t.Name = true, train.Name{Memory: h.ID, Off: h.Off}
	if lease {
		t.Name.Lease, t.Name.At = uint32(c.slot)+1, c.s.inbox.Lease(c.slot).Load()
	} else {
		h.Release()
	}
	return h
}

// take takes a lease, and reports whether one was left.
func (c *Carrier) take() bool {
	k := &c.s.leases
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range k.used {
		if !k.used[i] {
			k.used[i], c.slot = true, i
			return true
		}
	}
	return false
}

// GiveUp ends the lease of all requests that were sent so far: the peer must not read them.
func (c *Carrier) GiveUp() {
	if c.slot >= 0 {
		c.s.tickets.change(func() { c.s.inbox.Lease(c.slot).Add(1) })
	}
}

// Close gives the lease back. The queue pair sends nothing by this Carrier any more.
func (c *Carrier) Close() {
	c.GiveUp()
	if c.slot < 0 {
		return
	}
	k := &c.s.leases
	k.mu.Lock()
	defer k.mu.Unlock()
	k.used[c.slot] = false
	c.slot = -1
}

// reaches reports whether the peer has opened a memory of ours. If the peer was never told of
// it, reaches starts a goroutine that tells it: the caller holds a lock and must not wait.
func (s *Shared) reaches(c *shm.Channel, id uint64) bool {
	k := c.Tag().(*tag)
	if open, told := k.reached.LoadOrStore(id, false); told {
		return open.(bool)
	}
	s.start(func() {
		if !s.tell(c, recShare, id) {
			k.reached.Delete(id) // a later call tries again
		}
	})
	return false
}

// tell sends the number of a memory to a peer, waiting a while for room in the ring. It
// reports whether the record is in the ring.
func (s *Shared) tell(c *shm.Channel, typ byte, id uint64) bool {
	var b [8]byte
	le.PutUint64(b[:], id)
	for range tellTries {
		err := c.Send(typ, b[:])
		if err == nil {
			return true
		}
		if !errors.Is(err, shm.ErrFull) {
			return false
		}
		time.Sleep(time.Millisecond)
	}
	return false
}

const tellTries = 100

// sendNamed sends a carried train.
func (s *Shared) sendNamed(c *shm.Channel, f *localFlow, t *train.Train) error {
	// Since Carries the channel may have been replaced, or the memory closed.
	if open, _ := c.Tag().(*tag).reached.Load(t.Name.Memory); open != true {
		return &PayloadError{Fault: mem.StagedFault()}
	}
	b, err := s.reserve(c, recNamed, trainBytes+namedBytes, t)
	if b == nil {
		return err
	}
	defer c.End()
	packTrain(b, t, f.src, f.dst)
	p := packer{b[trainBytes:]}
	at := t.Name.At
	if t.Name.Lease == 0 {
		at = t.Ticket
	}
	p.u32(t.Name.Lease)
	p.u64(at) // read before the train was made
	p.u64(t.Name.Memory)
	p.u64(t.Name.Off)
	c.Commit()
	return nil
}

// takeNamed sets the payload of a carried train. If its memory is not open here, reading the
// payload faults, and the receiving queue pair has the peer send the train again. takeNamed
// reports false if the record is malformed.
func (s *Shared) takeNamed(c *shm.Channel, t *train.Train, b []byte) bool {
	if len(b) != namedBytes || t.Len == 0 {
		return false
	}
	p := unpacker{b}
	lease := c.Tag().(*tag).leases.find(c, p.u32())
	at, id, off := p.u64(), p.u64(), p.u64()
	if lease == nil {
		return false
	}
	o := &s.opened
	o.mu.Lock()
	defer o.mu.Unlock()
	o.makeTable()
	o.sge[0] = ib.SGE{Addr: off, Length: uint32(t.Len)}
	if m := o.byKey[segmentKey{c, id}]; m != nil && m.region != nil {
		o.sge[0].LKey = m.region.Key()
	}
	t.Payload = mem.List{Table: o.table, SGEs: o.sge[:]}
	t.Lease, t.LeaseAt = lease, at
	return true
}

// peerLeases are the leases of a peer that its records have named.
type peerLeases struct {
	words *shm.PeerWords // nil: no record has named one yet
	byNum map[uint32]*train.Lease
}

// find returns the lease with a number, of which 0 is the ticket, or nil if there is none.
func (k *peerLeases) find(c *shm.Channel, number uint32) *train.Lease {
	if l := k.byNum[number]; l != nil {
		return l
	}
	if k.words == nil {
		k.words, k.byNum = c.PeerWords(), make(map[uint32]*train.Lease)
	}
	word := k.words.Ticket()
	if number > 0 {
		word = k.words.Lease(int(number - 1))
	}
	if word == nil {
		return nil
	}
	l := train.LeaseOf(word, k.words)
	k.byNum[number] = l
	return l
}

// openShared starts a goroutine that opens a memory which the peer has told of.
func (s *Shared) openShared(c *shm.Channel, b []byte) {
	if len(b) != 8 || s.cfg.UDP.Tap != nil {
		return
	}
	k := segmentKey{c, le.Uint64(b)}
	s.dropSegments(func(k segmentKey) bool { return k.c.Err() != nil })
	o := &s.opened
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byKey[k] != nil || len(o.byKey) >= maxMapped {
		return
	}
	if o.byKey == nil {
		o.byKey = make(map[segmentKey]*openedMemory)
	}
	o.makeTable()
	m := new(openedMemory)
	o.byKey[k] = m
	t := c.Tag().(*tag)
	s.start(func() { s.openNow(k, t, m) })
}

// openNow opens a memory and tells the peer. If it cannot be opened, the peer keeps loading
// the bytes before it sends them.
func (s *Shared) openNow(k segmentKey, t *tag, m *openedMemory) {
	what, fd, err := t.dev.Shared(t.process, k.id)
	if err != nil {
		return
	}
	e, err := mem.OpenShared(what, fd)
	if err != nil {
		return
	}
	o := &s.opened
	r, err := o.table.Register(mem.RegionConfig{Length: e.Len(), Backing: e})
	if err != nil {
		_ = e.Close() // nothing was written
		return
	}
	o.mu.Lock()
	if m.dropped || k.c.Check() != nil { // another process may have the peer's number by now, and have answered
		o.mu.Unlock()
		_ = r.Close() // nothing is bound to it: it cannot fail
		return
	}
	m.region = r
	o.mu.Unlock()
	s.tell(k.c, recOpened, k.id) // a peer that is not told keeps loading the bytes
}

// dropOpened closes the opened memory that matches, once no engine uses it. Goroutines wait
// for that, and Close waits for the goroutines.
func (s *Shared) dropOpened(match func(segmentKey) bool) {
	o := &s.opened
	o.mu.Lock()
	var gone []*mem.Region
	for k, m := range o.byKey {
		if !match(k) {
			continue
		}
		delete(o.byKey, k)
		m.dropped = true
		if m.region != nil {
			gone = append(gone, m.region)
		}
	}
	o.mu.Unlock()
	for _, r := range gone {
		if !s.start(func() { _ = r.Close() }) { // nothing is bound to it: it cannot fail
			_ = r.Close()
		}
	}
}
