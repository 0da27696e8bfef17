//go:build cgo

package main

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cma"
)

// cmFiles are the channels of the process, that is, what would be open files of
// /dev/infiniband/rdma_cm, and the ids on them.
//
// Methods of a connID are called without mu, since a sink takes it: the connection manager
// may hold locks of its own when it delivers an event.
type cmFiles struct {
	newEngine func() connEngine

	mu       sync.Mutex // guards what follows, and all that channels and ids contain
	engine   connEngine // nil until the first id
	ids      map[uint32]*cmID
	joins    map[uint32]*cmJoin
	byConn   map[connID]*cmID
	nextID   uint32
	channels []*cmChannel
}

func newCMFiles(newEngine func() connEngine) *cmFiles {
	return &cmFiles{newEngine: newEngine, ids: map[uint32]*cmID{}, joins: map[uint32]*cmJoin{}, byConn: map[connID]*cmID{},
		// In a child of fork, librdmacm may have ids of the parent: they should not be ids here.
		nextID: rand.Uint32N(usualIDs)}
}

// readiness is what the program polls: see eventfd.
type readiness interface {
	set()
	clear() // if nobody was faster
	canClear() bool
	close()
}

// cmChannel is an event channel: one open file.
//
// Its descriptor is readable if there are events, unless a thread of the program has read it
// and is about to take one. isSet follows that: a thread that reads the descriptor says so
// when it asks for an event.
type cmChannel struct {
	ready  readiness
	isSet  bool // ready was set, and neither cleared nor reported to have been read
	events []*cmEvent
	first  int // of events: those before it were taken
	closed bool
}

// cmID is an id as the program knows it.
type cmID struct {
	number  uint32
	uid     uint64 // the program's name for it, which its events carry; 0: it gets none
	channel *cmChannel
	conn    connID
	ps      cma.PortSpace
	typ     ib.QPType
	native  ibAddrs // set by addresses of AF_IB

	reported uint32   // events that the program has taken
	ending   bool     // being destroyed: it gets no more events
	orphans  []connID // of a listener that is being destroyed: requests that nobody will see
}

// cmJoin is a membership in a multicast group.
type cmJoin struct {
	number   uint32
	uid      uint64
	of       *cmID
	group    netip.Addr
	member   connJoin // nil until the connection manager has returned it, or told of it
	reported uint32
}

// cmEvent is an event that the program has not taken yet.
type cmEvent struct {
	of    *cmID // whose events_reported it counts for
	child *cmID // CONNECT_REQUEST: the new id
	join  *cmJoin
	resp  eventResp
}

func (f *cmFiles) open(ready readiness) *cmChannel {
	c := &cmChannel{ready: ready}
	f.mu.Lock()
	f.channels = append(f.channels, c)
	f.mu.Unlock()
	return c
}

// close destroys a channel's ids, and ends the channel.
func (f *cmFiles) close(c *cmChannel) {
	f.mu.Lock()
	if c.closed {
		f.mu.Unlock()
		return
	}
	c.closed = true
	f.channels = slices.DeleteFunc(f.channels, func(o *cmChannel) bool { return o == c })
	f.mu.Unlock()
	for {
		f.mu.Lock()
		var ids []*cmID
		for _, id := range f.ids {
			if id.channel == c {
				ids = append(ids, id)
				f.forgetLocked(id)
			}
		}
		f.mu.Unlock()
		if len(ids) == 0 {
			break
		}
		for _, id := range ids {
			f.destroy(id)
		}
	}
	c.ready.close()
}

// closeAll closes all channels, and ends the connection manager.
func (f *cmFiles) closeAll() error {
	f.mu.Lock()
	all, e := slices.Clone(f.channels), f.engine
	f.mu.Unlock()
	for _, c := range all {
		f.close(c)
	}
	if e == nil {
		return nil
	}
	return e.close()
}

func (f *cmFiles) start() connEngine {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.engine == nil {
		f.engine = f.newEngine()
	}
	return f.engine
}

// usualIDs is how many numbers there are for ids: librdmacm has a table of so many, and does not
// check a number against its size.
const usualIDs = 1 << 16

// numberLocked returns a number that neither an id nor a membership has. Numbers are used in
// turn, and are below usualIDs while there are so many.
func (f *cmFiles) numberLocked() uint32 {
	for n := uint32(0); ; n++ {
		number := n
		if n < usualIDs {
			number = (f.nextID + n) % usualIDs
		}
		if f.ids[number] == nil && f.joins[number] == nil {
			f.nextID = (number + 1) % usualIDs
			return number
		}
	}
}

// enterLocked gives an id its number.
func (f *cmFiles) enterLocked(id *cmID) {
	id.number = f.numberLocked()
	f.ids[id.number] = id
	f.byConn[id.conn] = id
}

// find returns an id of a channel.
func (f *cmFiles) find(c *cmChannel, number uint32) (*cmID, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.findLocked(c, number)
}

func (f *cmFiles) findLocked(c *cmChannel, number uint32) (*cmID, error) {
	switch id := f.ids[number]; {
	case id == nil:
		return nil, syscall.ENOENT
	case id.channel != c:
		return nil, syscall.EINVAL
	default:
		return id, nil
	}
}

// forgetLocked takes an id out of the table: no command finds it.
func (f *cmFiles) forgetLocked(id *cmID) {
	delete(f.ids, id.number)
	id.ending = true
}

// destroy ends an id that is out of the table, and returns how many of its events the program
// has taken. Events that it has not taken are dropped; requests among them are refused.
func (f *cmFiles) destroy(id *cmID) uint32 {
	_ = id.conn.Close() // the id is gone in any case
	f.mu.Lock()
	delete(f.byConn, id.conn)
	orphans := id.orphans
	for _, j := range f.joins {
		if j.of == id {
			delete(f.joins, j.number)
		}
	}
	for _, e := range id.channel.dropLocked(func(e *cmEvent) bool { return e.of == id }) {
		if e.child != nil && f.ids[e.child.number] == e.child {
			f.forgetLocked(e.child)
			orphans = append(orphans, e.child.conn)
		}
	}
	reported := id.reported
	f.mu.Unlock()
	for _, o := range orphans {
		_ = o.Close()
		f.mu.Lock()
		delete(f.byConn, o)
		f.mu.Unlock()
	}
	return reported
}

// dropLocked removes events, and returns them.
func (c *cmChannel) dropLocked(drop func(*cmEvent) bool) (dropped []*cmEvent) {
	c.compactLocked()
	c.events = slices.DeleteFunc(c.events, func(e *cmEvent) bool {
		if !drop(e) {
			return false
		}
		dropped = append(dropped, e)
		return true
	})
	c.showLocked()
	return dropped
}

// addLocked appends an event.
func (c *cmChannel) addLocked(e *cmEvent) {
	if len(c.events) == cap(c.events) {
		c.compactLocked()
	}
	c.events = append(c.events, e)
	c.showLocked()
}

// takeLocked returns the first event, nil if there is none.
func (c *cmChannel) takeLocked() (e *cmEvent) {
	if c.first < len(c.events) {
		e = c.events[c.first]
		c.events[c.first] = nil
		c.first++
	}
	c.showLocked()
	return e
}

// compactLocked forgets the places of events that were taken.
func (c *cmChannel) compactLocked() {
	c.events = slices.Delete(c.events, 0, c.first)
	c.first = 0
}

// showLocked makes the descriptor readable if there are events, and only then.
func (c *cmChannel) showLocked() {
	some := c.first < len(c.events)
	switch {
	case c.closed || some == c.isSet:
		return
	case some:
		c.ready.set()
	default:
		c.ready.clear()
	}
	c.isSet = some
}

// deliver is the sink of all ids.
func (f *cmFiles) deliver(ev *connEvent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id := f.byConn[ev.id]
	if id == nil {
		return
	}
	e := &cmEvent{of: id}
	switch {
	case ev.typ == cma.ConnectRequest && ev.child == nil:
		return
	case ev.typ == cma.ConnectRequest && id.ending:
		id.orphans = append(id.orphans, ev.child)
		return
	case ev.typ == cma.ConnectRequest:
		// Its uid is set when the program accepts it. What happens to it before, the
		// program learns when it accepts.
		e.child = &cmID{channel: id.channel, conn: ev.child, ps: id.ps, typ: id.typ, native: id.native.ofChild()}
		f.enterLocked(e.child)
	case id.ending || id.uid == 0:
		return
	case ev.member != nil:
		if e.join = f.joinLocked(id, ev); e.join == nil {
			return
		}
	}
	e.resp = f.respLocked(e, ev)
	id.channel.addLocked(e)
}

// joinLocked returns the membership that an event is about. The event may come before the
// connection manager has returned the membership.
func (f *cmFiles) joinLocked(id *cmID, ev *connEvent) *cmJoin {
	for _, j := range f.joins {
		if j.member == ev.member || j.member == nil && j.of == id && j.group == ev.group {
			j.member = ev.member
			return j
		}
	}
	return nil
}

// respLocked returns what the program gets of an event.
func (f *cmFiles) respLocked(e *cmEvent, ev *connEvent) eventResp {
	r := eventResp{uid: e.of.uid, id: e.of.number, event: uint32(ev.typ), status: uint32(int32(ev.status))}
	switch {
	case e.child != nil:
		r.id = e.child.number
	case e.join != nil:
		r.uid, r.id = e.join.uid, e.join.number
	}
	if e.of.typ == ib.UD {
		r.ud = &ev.ud
	} else {
		r.conn = &ev.conn
	}
	return r
}

// next takes the next event of a channel, for a thread that has read its descriptor, or
// has not; nil if there is none, or the descriptor has to be read first.
func (f *cmFiles) next(c *cmChannel, hasRead bool) *cmEvent {
	f.mu.Lock()
	defer f.mu.Unlock()
	if hasRead {
		c.isSet = false
	} else if !c.ready.canClear() {
		return nil
	}
	e := c.takeLocked()
	if e == nil {
		return nil
	}
	e.of.reported++
	if e.join != nil {
		e.join.reported++
	}
	return e
}

// migrate moves an id to another channel, with the events that the program has not taken, and
// returns how many it has.
func (f *cmFiles) migrate(number uint32, from, to *cmChannel) (uint32, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id, err := f.findLocked(from, number)
	if err != nil {
		return 0, err
	}
	if to.closed {
		return 0, syscall.EINVAL
	}
	if from != to {
		id.channel = to
		for _, e := range from.dropLocked(func(e *cmEvent) bool { return e.of == id }) {
			if e.child != nil {
				e.child.channel = to
			}
			to.addLocked(e)
		}
	}
	return id.reported, nil
}
