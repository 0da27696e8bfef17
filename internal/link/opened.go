package link

// Payloads in memory that the CPU does not address, but that engines of both processes reach
// (mem.Sharing): the record names the memory, and the receiver's engine takes the bytes from
// there.
//
//  1. A sender asks whether the peer has opened the memory (Carries). If it has not, the sender
//     tells the peer of it, once, and loads the bytes first, as ever.
//  2. The peer opens it, off its poller, and says so.
//  3. From then on trains name it, by the number of the memory and the place in it.
//  4. When the memory's region is closed the peer is told, and closes it.
//
// What keeps a peer from using what was given up is a word that it compares before and
// after. For answers that is the ticket, as in reference.go: if it has changed they are asked for
// again, and then loaded. Requests must not come again when others behind them were seen: so
// theirs is a word of the queue pair's own, a lease, which changes when it gives its requests
// up; and while they are under way the sender has a section open on their memory.

import (
	"errors"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/train"
)

// namedBytes is what the record of a train says besides its fields: lease, number, place.
const namedBytes = 4 + 3*8

// opened is memory of other processes that was opened.
type opened struct {
	sge [1]ib.SGE // of the train that is delivered; Poll's own

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

// openedMemory is one of them.
type openedMemory struct {
	region  *mem.Region // nil: it is not open, or could not be opened
	dropped bool        // it is not wanted any more
}

// leases are the words that tell peers whether requests that are under way may still be read.
type leases struct {
	mu   sync.Mutex // guards used
	used [shm.MaxLeases]bool
}

// Carrier is a queue pair's way to send from memory that the peer's process has opened. It
// implements qp.Carrier.
type Carrier struct {
	s    *Shared
	flow *localFlow
	qpn  uint32 // the peer
	slot int    // of the lease; -1: there was none left
}

// NewCarrier makes one for the queue pair at the other end of a flow, nil if none is needed.
func (s *Shared) NewCarrier(f *train.Flow, qpn uint32) *Carrier {
	to, ok := f.Link.(*localFlow)
	if !ok || s.cfg.UDP.Tap != nil { // who listens wants the bytes
		return nil
	}
	return &Carrier{s: s, flow: to, qpn: qpn, slot: -1}
}

// Carries has the first of n bytes of a list, which the CPU does not address, go to the peer's
// process by name, and notes that in the train, if it can. If not, it may later. Len tells how
// many: a multiple of unit, or all. For a request, with lease, the memory is held when it
// returns, and is the caller's to release.
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

// take takes a lease.
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

// GiveUp tells the peer that nothing may be read that was sent so far.
func (c *Carrier) GiveUp() {
	if c.slot >= 0 {
		c.s.tickets.change(func() { c.s.inbox.Lease(c.slot).Add(1) })
	}
}

// Close gives the lease back. Nothing is sent any more.
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

// reaches reports whether the peer has opened memory of ours, and has it told of it if it was
// never told: by a goroutine, since who asks holds a lock.
func (s *Shared) reaches(c *shm.Channel, id uint64) bool {
	k := c.Tag().(*tag)
	if open, told := k.reached.LoadOrStore(id, false); told {
		return open.(bool)
	}
	s.start(func() {
		if !s.tell(c, recShare, id) {
			k.reached.Delete(id) // another time
		}
	})
	return false
}

// tell sends a number to a peer, and waits a while if its ring is full.
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

// sendNamed sends a train whose payload stays where it is.
func (s *Shared) sendNamed(c *shm.Channel, f *localFlow, t *train.Train) error {
	if open, _ := c.Tag().(*tag).reached.Load(t.Name.Memory); open != true { // another channel by now, or it is closed
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
	p.u64(at) // from before the memory was looked at
	p.u64(t.Name.Memory)
	p.u64(t.Name.Off)
	c.Commit()
	return nil
}

// takeNamed finds the payload of a train. If it is not open here the train has one that
// cannot be read, and the peer is asked to send it again.
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

// peerLeases are the leases of a peer that were met with.
type peerLeases struct {
	words *shm.PeerWords // nil: there was none
	byNum map[uint32]*train.Lease
}

// find returns a lease: 0 is the ticket. It is nil if there is no such.
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

// openShared opens memory that the peer has told of, in a goroutine of the link's own.
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

// openNow opens memory and tells the peer. What cannot be opened is loaded there, as before.
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
		_ = e.Close() // there is nothing to lose in it
		return
	}
	o.mu.Lock()
	if m.dropped || k.c.Check() != nil { // another process may have the peer's number, and have answered
		o.mu.Unlock()
		_ = r.Close() // nobody stands on it
		return
	}
	m.region = r
	o.mu.Unlock()
	s.tell(k.c, recOpened, k.id) // if it does not hear of it, it goes on as before
}

// dropOpened closes what matches, when no engine is at it any more: nobody waits for that,
// but whoever closes the link.
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
		if !s.start(func() { _ = r.Close() }) { // nobody stands on it: it cannot fail
			_ = r.Close()
		}
	}
}
