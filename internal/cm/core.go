// Package cm is the protocol core of the InfiniBand connection manager (IBA volume 1 chapter 12), as
// Linux's ib_cm does it on RoCE. A MAD, a call or a tick comes in, with the time; MADs, events and
// the next deadline go out. It does no I/O, starts no goroutine, has no clock and no locks: the
// caller serialises all calls of a Core and of its Conns, and after each call takes what NextMAD and
// NextEvent have.
//
// The states of a Conn are in state.go. Each message and each call of the program is one small
// function that says in which states it is valid and which state follows:
//
//	active.go   Connect, MRA, REP, Establish
//	passive.go  REQ, Accept, MRA, RTU, Confirm
//	end.go      Reject, REJ, Disconnect, DREQ, DREP, Close, time wait
//	sidr.go     Resolve, SIDR_REQ, AnswerSIDR, SIDR_REP
//	backlog.go  requests that no program has seen yet, and a flood of them
//	timers.go   what happens when no answer comes
//	route.go    MADs that need no state: for processes that share an address
package cm

import (
	"container/heap"
	"hash/maphash"
	"net/netip"
)

// Core is the connection manager of one process on one device.
type Core struct {
	cfg Config

	conns map[uint32]*Conn    // by communication id, those that are not Idle
	byID  map[remoteKey]*Conn // by the peer's CA GUID and communication id
	byQPN map[remoteKey]*Conn // by the peer's CA GUID and QPN, until time wait
	sidr  map[sidrKey]*Conn   // those in SIDRReqRcvd

	timers  timers
	pending pool // requests that wait for the program
	waiting pool // closed ones in time wait: see remember

	turnedAway turned // requests that found no room: see backlog.go

	mads       []Send // to send, from mads[sent] on
	sent       int
	head, tail *queued
}

// remoteKey is a communication id or a QPN of a peer.
type remoteKey struct {
	guid uint64
	num  uint32
}

// sidrKey finds duplicates of a SIDR_REQ.
type sidrKey struct {
	from netip.Addr
	id   uint32
}

// New makes a core.
func New(cfg Config) *Core {
	if cfg.MaxPending <= 0 {
		cfg.MaxPending = 1024
	}
	if cfg.MaxTimeWait <= 0 {
		cfg.MaxTimeWait = 1024
	}
	return &Core{
		cfg:        cfg,
		conns:      map[uint32]*Conn{},
		byID:       map[remoteKey]*Conn{},
		byQPN:      map[remoteKey]*Conn{},
		sidr:       map[sidrKey]*Conn{},
		turnedAway: turned{seed: maphash.MakeSeed()},
	}
}

// packet is what handlers of messages need besides the data.
type packet struct {
	now      Time
	from, to netip.Addr
	tid      uint64
	mod      uint32 // attribute modifier
}

// Receive handles a MAD that has come to queue pair 1. Whatever is not a valid message for a Conn in
// its state has no effect.
func (c *Core) Receive(now Time, from, to netip.Addr, mad []byte) {
	h, d, ok := parseHeader(mad)
	if !ok {
		return
	}
	p := &packet{now: now, from: from.Unmap(), to: to.Unmap(), tid: h.tid, mod: h.mod}
	switch h.attr {
	case AttrREQ:
		c.onREQ(p, d)
	case AttrMRA:
		c.onMRA(p, d)
	case AttrREJ:
		c.onREJ(p, d)
	case AttrREP:
		c.onREP(p, d)
	case AttrRTU:
		c.onRTU(d)
	case AttrDREQ:
		c.onDREQ(p, d)
	case AttrDREP:
		c.onDREP(p, d)
	case AttrSIDRREQ:
		c.onSIDRREQ(p, d)
	case AttrSIDRREP:
		c.onSIDRREP(d)
	default:
		// LAP and APR move a connection to another path, which RoCE has not.
	}
}

// find returns the Conn with these communication ids, nil if there is none. remoteID 0 finds a Conn
// that has heard nothing of its peer yet.
func (c *Core) find(localID, remoteID uint32) *Conn {
	if n := c.conns[localID]; n != nil && n.remoteID == remoteID {
		return n
	}
	return nil
}

// newConn makes a Conn with an id of its own. nil: the caller has no ids left.
func (c *Core) newConn() *Conn {
	for range 16 {
		id := c.cfg.NewID()
		if id != 0 && c.conns[id] == nil {
			n := &Conn{core: c, localID: id}
			c.conns[id] = n
			return n
		}
	}
	return nil
}

// admit puts a request into the pool of those that wait for the program, at the cost of a random one
// if the pool is full.
func (c *Core) admit(n *Conn) {
	if len(c.pending.conns) >= c.cfg.MaxPending {
		c.drop(c.pending.random(c.cfg.Rand()))
	}
	c.pending.add(n)
}

// queue sends a MAD.
func (c *Core) queue(s *Send) { c.mads = append(c.mads, *s) }

// answer returns a MAD to the sender of a packet, which echoes its transaction id.
func (p *packet) answer(attr Attr) (s *Send, data []byte) {
	s = &Send{From: p.to, To: p.from, HopLimit: defaultHopLimit}
	return s, header{tid: p.tid, attr: attr}.put(&s.MAD)
}

// defaultHopLimit is that of MADs that belong to no path.
const defaultHopLimit = 64

// NextMAD returns the next MAD to send; ok is false if there is none.
func (c *Core) NextMAD() (m Send, ok bool) {
	if c.sent == len(c.mads) {
		return m, false
	}
	m = c.mads[c.sent]
	c.sent++
	if c.sent == len(c.mads) {
		c.sent, c.mads = 0, c.mads[:0]
		if cap(c.mads) > 64 {
			c.mads = nil
		}
	}
	return m, true
}

// queued is an event that the caller has not taken.
type queued struct {
	Event
	prev, next *queued
}

// emit queues an event.
func (c *Core) emit(e Event) *queued {
	q := &queued{Event: e, prev: c.tail}
	if c.tail != nil {
		c.tail.next = q
	} else {
		c.head = q
	}
	c.tail = q
	return q
}

// unlink takes an event out of the queue.
func (c *Core) unlink(q *queued) {
	if q.prev != nil {
		q.prev.next = q.next
	} else {
		c.head = q.next
	}
	if q.next != nil {
		q.next.prev = q.prev
	} else {
		c.tail = q.prev
	}
}

// NextEvent returns the next event; ok is false if there is none. When a request or a reply has been
// taken, the program is at work on it, so that its duplicates are answered by MRA from then on.
func (c *Core) NextEvent() (e Event, ok bool) {
	for c.head != nil {
		q := c.head
		c.unlink(q)
		n := q.Conn
		if n.unseen == q {
			n.unseen = nil
		}
		if n.closed {
			continue
		}
		switch {
		case q.Type == EventRequest && n.state == ReqRcvd:
			n.state = MRAReqSent
		case (q.Type == EventReply || q.Type == EventReplyError) && n.state == RepRcvd:
			n.state = MRARepSent
		}
		return q.Event, true
	}
	return e, false
}

// Tick handles the timers that are due.
func (c *Core) Tick(now Time) {
	for len(c.timers) > 0 && c.timers[0].deadline <= now {
		n := c.timers[0]
		heap.Remove(&c.timers, 0)
		n.expire(now)
	}
}

// Deadline returns when Tick is to be called; ok is false if no timer runs.
func (c *Core) Deadline() (t Time, ok bool) {
	if len(c.timers) == 0 {
		return 0, false
	}
	return c.timers[0].deadline, true
}
