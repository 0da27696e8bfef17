package queue

// Inline data ("scatter to CQE"): the bytes of a short message wait beside their completion,
// and the poll of the completion writes them to the memory that they are for.
//
//  1. The queue pair that completes a request fills an InlineData and pushes it with the
//     completion.
//  2. Poll takes a completion once it has written its inline data. If pages of that memory
//     have to be fetched first, Poll returns the completions before it; if there are none,
//     Poll fetches the pages without holding the lock. The completion and those behind it
//     stay in the queue meanwhile, and other polls wait.
//  3. A queue pair that cannot wait for a poll has its inline data written at once
//     (WriteBack).

import (
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// MaxInlineData is the most bytes that wait beside one completion.
const MaxInlineData = 64

// InlineData is the bytes of a message that wait beside its completion until it is polled.
type InlineData struct {
	Table *mem.Table
	Actor mem.Actor
	SGE   ib.SGE // the memory that they are for, which holds all of them
	// Failed is called, without a lock, by the poll that could not write the bytes. It
	// returns the vendor error of the completion.
	Failed  func(mem.Fault) (vendor uint16)
	Waiting *Waiting // the inline data that they are part of
	Data    [MaxInlineData]byte
	N       uint8

	placed  bool          // the bytes have been written, or dropped
	fetches uint8         // how often a poll has fetched the pages that they are for
	fault   mem.FaultKind // why the bytes cannot be written
	next    uint32        // number of the next in Waiting; in a free place: of the next free place
}

// Waiting is the list of all inline data that wait in one completion queue for one side of a
// queue pair, in the order of their completions. The zero value is empty.
type Waiting struct {
	n           atomic.Int32
	first, last uint32 // numbers, see CQ.inline; guarded by the queue's lock
}

// None reports whether no inline data wait.
func (w *Waiting) None() bool { return w.n.Load() == 0 }

// PushInline appends the completion of a receive, and the inline data that the poll of it
// writes.
func (c *CQ) PushInline(wc *ib.WC, solicited bool, l *InlineData) bool {
	return c.push(wc, solicited, nil, 0, l)
}

// PushInlineSend appends the completion of a send request, as PushSend does, and the inline
// data that the request returned.
func (c *CQ) PushInlineSend(wc *ib.WC, freed *Freed, upto uint32, l *InlineData) bool {
	return c.push(wc, false, freed, upto, l)
}

// keepLocked keeps a copy of inline data until dropLocked, and returns its number.
func (c *CQ) keepLocked(l *InlineData) uint32 {
	i := c.inlineFree
	if i == 0 {
		c.inline = append(c.inline, InlineData{})
		i = uint32(len(c.inline))
	} else {
		c.inlineFree = c.inline[i-1].next
	}
	c.inline[i-1] = *l
	w := l.Waiting
	if w.n.Add(1) == 1 {
		w.first = i
	} else {
		c.inline[w.last-1].next = i
	}
	w.last = i
	return i
}

// dropLocked forgets the inline data of number i; 0 is none.
func (c *CQ) dropLocked(i uint32) {
	if i == 0 {
		return
	}
	c.writtenLocked(i)
	c.inline[i-1] = InlineData{next: c.inlineFree}
	c.inlineFree = i
}

// writtenLocked takes inline data off its Waiting list, once. It is the first there: all
// before it was written back, polled or removed.
func (c *CQ) writtenLocked(i uint32) {
	if l := &c.inline[i-1]; !l.placed {
		l.placed = true
		l.Waiting.first = l.next
		l.Waiting.n.Add(-1)
	}
}

// maxFetches is how often polls fetch the pages for one inline data, if the pages are gone
// again each time it is to be written.
const maxFetches = 16

// fetchLocked is called when pages have to be fetched before the inline data of the first
// completion can be written. If it reports true, the caller fetches them and then calls
// fetched. Otherwise another poll was fetching, and fetchLocked has waited until it was done.
func (c *CQ) fetchLocked(i uint32, f mem.Fault) bool {
	if c.fetching {
		c.fetchDone.Wait()
		return false
	}
	c.fetching = true
	if !f.Brief() {
		c.inline[i-1].fetches++
	}
	return true
}

// fetched ends what fetchLocked began, and wakes the polls that wait.
func (c *CQ) fetched() {
	c.mu.Lock()
	c.fetching = false
	c.mu.Unlock()
	c.fetchDone.Broadcast()
}

// awaitReopened starts a goroutine that raises the event of an armed queue when the suspended
// memory is open again that the first completion's inline data are for: the caller of the
// poll that returned nothing may wait for the event.
func (c *CQ) awaitReopened(reopened <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.ended:
		return
	default:
	}
	if c.reopening {
		return
	}
	c.reopening = true
	c.waits.Go(func() {
		select {
		case <-reopened:
		case <-c.ended:
			return
		}
		c.mu.Lock()
		c.reopening = false
		fire := c.ring.len() > 0 && c.fireLocked(&c.ring.at(0).note)
		c.mu.Unlock()
		c.raise(fire)
	})
}

// End ends the goroutine that awaitReopened started, and waits for it. No goroutine polls the
// queue any more.
func (c *CQ) End() {
	c.mu.Lock()
	select {
	case <-c.ended:
	default:
		close(c.ended)
	}
	c.mu.Unlock()
	c.waits.Wait()
}

// WriteBack writes the inline data on the list, in their order, before their completions are
// polled. It stops at the first that cannot be written, and returns its fault.
func (c *CQ) WriteBack(w *Waiting) mem.Fault {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !w.None() {
		if f := c.writeLocked(w.first); !f.OK() {
			return f
		}
	}
	return mem.Fault{}
}

// writeLocked writes inline data, once. A fault other than FaultPending is final: every later
// call returns it.
func (c *CQ) writeLocked(i uint32) mem.Fault {
	l := &c.inline[i-1]
	if l.placed || l.fault != mem.FaultNone {
		return mem.Fault{Kind: l.fault}
	}
	w := &c.writer
	w.raw[0], w.sges[0] = l.Data[:l.N], l.SGE
	w.to = mem.List{Table: l.Table, Actor: l.Actor, Access: ib.AccessLocalWrite, SGEs: w.sges[:]}
	w.from = mem.List{Raw: w.raw[:]}
	f, _ := mem.Copy(&w.to, &w.from, uint64(l.N), true)
	switch f.Kind {
	case mem.FaultNone:
		c.writtenLocked(i)
	case mem.FaultPending:
	default:
		l.fault = f.Kind
	}
	return f
}

// writer is scratch space of writeLocked, so that it does not allocate.
type writer struct {
	raw      [1][]byte
	sges     [1]ib.SGE
	to, from mem.List
}
