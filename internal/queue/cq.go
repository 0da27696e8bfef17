// Package queue holds the rings that work requests and completions wait in.
// Rings are sized once and never allocate afterwards; only Resize replaces one. The places for
// inline data grow with the most that has ever waited.
package queue

import (
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// CQ is a ring of completions and its notification.
type CQ struct {
	// OnEvent is called, with no lock held, when an armed queue gets a
	// completion that it was armed for. OnOverflow is called once, when a
	// completion did not fit. Both are set before the queue is used.
	OnEvent    func()
	OnOverflow func()
	// Clock, if it is set, returns the current time. PollNotes returns with each
	// completion when it was pushed. It is set before the queue is used.
	Clock func() int64
	// Taker, if it is set, is called by a push that finds the queue empty, under the
	// queue's lock, unless the completion has inline data or Hold keeps completions from
	// it. It reports whether it has taken the completion, as a poll would. It must not
	// wait. It is set before the queue is used.
	Taker func(*ib.WC, *Note) bool
	// Earlier, if it is set, makes arming count completions that are there already: the
	// first that has raised no event raises one. Earlier looks for it among those that
	// Taker or PollNotes took and the program has not polled yet, stores event in its Note,
	// and reports whether there is one; if not, the queue looks among its own. It is called
	// under the queue's lock, must not wait, and is set before the queue is used.
	Earlier func(event uint32, solicitedOnly bool) bool

	overflow atomic.Bool

	mu    sync.Mutex  // guards what follows, and changes of the above
	ring  ring[entry] // an empty poll asks for its length without the lock
	armed arming
	fired uint32 // how many events there were
	held  bool   // Taker is not called: PollNotes's caller may not have stored what it got yet

	inline     []InlineData // waits beside its completion; by number less 1
	inlineFree uint32       // a place there that is free; 0: none
	fetching   bool         // a poll fetches pages for the inline data of the first completion
	// fetchDone is signalled when fetching becomes false.
	fetchDone sync.Cond
	writer    writer

	reopening bool           // a goroutine waits until suspended memory is open again (awaitReopened)
	ended     chan struct{}  // closed by End
	waits     sync.WaitGroup // for that goroutine
}

// Freed is the number of the first request of a send queue that still holds its place there:
// a request keeps its place until its completion is polled, as on hardware. The lock of the
// queue pair that pushes the completions guards it.
type Freed struct {
	polled atomic.Uint32 // as of the latest poll, which stores it without that lock
	taken  uint32        // as of the latest completion that Taker took, or Load
}

// Load returns the number. It brings taken up to what was polled: numbers go round, and
// the two must not be half of all numbers apart.
func (f *Freed) Load() uint32 {
	if polled := f.polled.Load(); int32(polled-f.taken) > 0 {
		f.taken = polled
	}
	return f.taken
}

// Store sets the number. No completion of the send queue may wait for a poll.
func (f *Freed) Store(n uint32) {
	f.polled.Store(n)
	f.taken = n
}

// entry is a completion in the ring. When the completion of a send request is polled, freed
// becomes upto.
type entry struct {
	wc     ib.WC
	freed  *Freed
	upto   uint32
	inline uint32 // the number of its inline data; 0: none
	note   Note
}

// Note is what the queue keeps about a completion besides its WC: when it was pushed, which
// event it has raised, counted from 1 (0: none), and whether it is solicited or has failed.
type Note struct {
	At        int64
	Event     uint32
	Solicited bool
}

type arming uint8

const (
	notArmed arming = iota
	armedSolicited
	armedNext
)

// NewCQ makes a ring of the given number of entries, at least 1.
func NewCQ(entries int) *CQ {
	c := &CQ{ring: ring[entry]{slots: make([]entry, entries)}, ended: make(chan struct{})}
	c.fetchDone.L = &c.mu
	return c
}

// Cap returns the number of entries.
func (c *CQ) Cap() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.ring.slots)
}

// Push appends a completion. It returns false if the queue has overflowed, now
// or before: the completion is lost then, as it would be in hardware.
// Solicited completions, and failed ones, raise the event of a queue that is
// armed for solicited completions (IBA 11.4.2.2).
func (c *CQ) Push(wc *ib.WC, solicited bool) bool { return c.push(wc, solicited, nil, 0, nil) }

// PushSend appends the completion of a send request; freed becomes upto when it
// is polled.
func (c *CQ) PushSend(wc *ib.WC, freed *Freed, upto uint32) bool {
	return c.push(wc, false, freed, upto, nil)
}

func (c *CQ) push(wc *ib.WC, solicited bool, freed *Freed, upto uint32, l *InlineData) bool {
	at := int64(0)
	if c.Clock != nil {
		at = c.Clock()
	}
	c.mu.Lock()
	n := c.ring.len()
	if c.overflow.Load() || n == len(c.ring.slots) {
		first := c.overflow.CompareAndSwap(false, true)
		c.mu.Unlock()
		if first && c.OnOverflow != nil {
			c.OnOverflow()
		}
		return false
	}
	kept := uint32(0)
	if l != nil {
		kept = c.keepLocked(l)
	}
	e := c.ring.at(n)
	e.wc, e.freed, e.upto, e.inline = *wc, freed, upto, kept
	e.note = Note{At: at, Solicited: solicited || wc.Status != ib.WCSuccess}
	fire := c.fireLocked(&e.note)
	if c.Taker == nil || n > 0 || kept != 0 || c.held || !c.Taker(&e.wc, &e.note) {
		c.ring.add(1)
	} else if freed != nil {
		freed.taken = upto
	}
	c.mu.Unlock()
	c.raise(fire)
	return true
}

// Poll takes up to len(out) completions. It waits only if the first completion has inline
// data, and pages of the memory that the data are for have to be fetched. If that memory is
// suspended, it returns 0 instead.
func (c *CQ) Poll(out []ib.WC) int { return c.PollNotes(out, nil) }

// PollNotes is Poll, and returns the Note of each completion; notes is as long as out, or nil.
// If it returns notes, Taker is not called until the caller has stored the completions where
// Taker stores its own, and calls Hold(false).
func (c *CQ) PollNotes(out []ib.WC, notes []Note) int {
	for c.ring.len() > 0 {
		n, f := c.take(out, notes)
		if n > 0 || f.OK() {
			return n
		}
		if reopened := f.Suspended(); reopened != nil { // the memory may stay suspended for long
			c.fetched()
			c.awaitReopened(reopened)
			return 0
		}
		f.Await() // if a fault remains, the next take meets it
		c.fetched()
	}
	return 0
}

// take takes completions up to one for whose inline data pages have to be fetched first. If
// that is the first, take returns the fault: the caller awaits it, and calls fetched.
func (c *CQ) take(out []ib.WC, notes []Note) (n int, f mem.Fault) {
	c.mu.Lock()
	taken := 0 // completions that are in out, and still in the ring
	for have := c.ring.len(); n < len(out) && taken < have; {
		e := c.ring.at(taken)
		var failed func(mem.Fault) uint16
		if e.inline != 0 {
			f = c.writeLocked(e.inline)
			if f.Kind == mem.FaultPending && (f.Brief() || c.inline[e.inline-1].fetches < maxFetches) {
				if n > 0 || c.fetchLocked(e.inline, f) {
					break
				}
				f, have = mem.Fault{}, c.ring.len()
				continue // another poll has fetched them, and may have taken completions
			}
			failed = c.inline[e.inline-1].Failed
			c.dropLocked(e.inline)
		}
		out[n] = e.wc
		if notes != nil {
			notes[n], c.held = e.note, true
		}
		if e.freed != nil {
			e.freed.polled.Store(e.upto)
		}
		taken++
		if !f.OK() {
			c.ring.drop(taken)
			taken = 0
			c.mu.Unlock() // others may push and poll meanwhile
			out[n].Status, out[n].VendorErr = ib.WCLocProtErr, failed(f)
			f = mem.Fault{}
			c.mu.Lock()
			have = c.ring.len()
		}
		n++
	}
	c.ring.drop(taken)
	c.mu.Unlock()
	return n, f
}

// Hold keeps completions from Taker, or lets it have them again. If the queue was armed
// meanwhile, Hold(false) looks for an earlier completion that raises the event, which Arm
// could not do.
func (c *CQ) Hold(hold bool) {
	c.mu.Lock()
	c.held = hold
	fire := c.earlierLocked()
	c.mu.Unlock()
	c.raise(fire)
}

// Len returns the number of completions that wait.
func (c *CQ) Len() int { return c.ring.len() }

// Overflowed reports whether a completion was lost. Nothing mends the queue.
func (c *CQ) Overflowed() bool { return c.overflow.Load() }

// Arm asks for one event at the next completion, or at the next solicited or
// failed one. An arming for any completion is not weakened by a later one for
// solicited ones (IBA 11.4.2.2). What is there already counts if Earlier is set.
func (c *CQ) Arm(solicitedOnly bool) {
	c.mu.Lock()
	if !solicitedOnly {
		c.armed = armedNext
	} else if c.armed == notArmed {
		c.armed = armedSolicited
	}
	fire := c.earlierLocked()
	c.mu.Unlock()
	c.raise(fire)
}

// fireLocked reports whether the queue is armed for a completion. If it is, that one
// raises the event.
func (c *CQ) fireLocked(note *Note) bool {
	fire := c.armed == armedNext || c.armed == armedSolicited && note.Solicited
	if fire {
		c.armed = notArmed
		c.fired++
		note.Event = c.fired
	}
	return fire
}

// raise calls OnEvent if a completion has raised the event. The caller has no lock.
func (c *CQ) raise(fire bool) {
	if fire && c.OnEvent != nil {
		c.OnEvent()
	}
}

// earlierLocked looks for a completion that is there already and that the queue is armed for,
// and reports whether it raises the event. While the caller of PollNotes stores what it got,
// neither the queue nor Earlier has all completions: Hold(false) looks afterwards.
func (c *CQ) earlierLocked() bool {
	if c.Earlier == nil || c.armed == notArmed || c.held || c.reopening {
		return false // while reopening, no poll can return a completion: awaitReopened raises the event
	}
	event, only := c.fired+1, c.armed == armedSolicited
	found := c.Earlier(event, only)
	for i := 0; !found && i < c.ring.len(); i++ {
		note := &c.ring.at(i).note
		if found = note.Event == 0 && (note.Solicited || !only); found {
			note.Event = event
		}
	}
	if found {
		c.armed, c.fired = notArmed, event
	}
	return found
}

// Resize replaces the ring by one of n entries. It returns false, and changes
// nothing, if more than n completions wait.
func (c *CQ) Resize(n int) bool {
	slots := make([]entry, n)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ring.len() > n {
		return false
	}
	c.ring.moveTo(slots)
	return true
}

// Remove drops the completions of a queue pair that is reset or destroyed
// (IBA 10.2.4.4 lets the provider do so; a number that is reused must not
// find old completions).
func (c *CQ) Remove(qpn uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := 0
	for i := range c.ring.len() {
		e := *c.ring.at(i)
		if e.wc.QPN != qpn {
			*c.ring.at(kept) = e
			kept++
		} else {
			c.dropLocked(e.inline)
		}
	}
	c.ring.truncate(kept) // clears the other slots, so that they do not refer to the queue pair
}
