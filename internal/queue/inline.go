package queue

// Inline receive ("scatter to CQE"): the bytes of a short message wait beside its
// completion, and are copied to where they belong when that is polled.
//
//  1. Whoever completes makes a Late and pushes it with the completion.
//  2. Poll takes a completion when its bytes are written. If they have to be fetched
//     first, it returns what comes before; if that is nothing, it fetches them, with no
//     lock held. The completion stays where it is meanwhile, as do those behind it:
//     others who poll wait, too.
//  3. Whoever cannot wait for a poll has them written before (Settle).

import (
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// MaxInlineData is the longest message that waits in the completion queue.
const MaxInlineData = 64

// InlineData is bytes that are to be placed when their completion is polled.
type InlineData struct {
	Table *mem.Table
	Actor mem.Actor
	SGE   ib.SGE // where they go: all of them
	// Failed is told that they could not be placed, and says what the completion is
	// to say about it.
	Failed  func(mem.Fault) (vendor uint16)
	Waiting *Waiting // what they wait with
	Data    [MaxInlineData]byte
	N       uint8

	placed  bool          // they have been written
	fetches uint8         // how often a poll has had them fetched
	fault   mem.FaultKind // why they cannot be written
	next    uint32        // those that wait behind them; of a place that is free: the next one
}

// Waiting is all the bytes that wait in one completion queue on behalf of one side
// of a queue pair, in the order of their completions. The zero value is none.
type Waiting struct {
	n           atomic.Int32
	first, last uint32 // numbers; guarded by the queue's lock
}

// None reports whether none wait.
func (w *Waiting) None() bool { return w.n.Load() == 0 }

// PushInline appends the completion of a receive whose bytes are to be placed when it
// is polled; PushInlineSend that of a send request, whose result they are.
func (c *CQ) PushInline(wc *ib.WC, solicited bool, l *InlineData) bool {
	return c.push(wc, solicited, nil, 0, l)
}

// PushInlineSend is explained at PushInline.
func (c *CQ) PushInlineSend(wc *ib.WC, freed *Freed, upto uint32, l *InlineData) bool {
	return c.push(wc, false, freed, upto, l)
}

// keepLocked keeps bytes until their completion is polled, and returns their number.
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

// dropLocked forgets bytes.
func (c *CQ) dropLocked(i uint32) {
	if i == 0 {
		return
	}
	c.writtenLocked(i)
	c.inline[i-1] = InlineData{next: c.inlineFree}
	c.inlineFree = i
}

// writtenLocked tells that bytes wait no longer. They are the first that did: what
// comes before them was settled, polled or removed before.
func (c *CQ) writtenLocked(i uint32) {
	if l := &c.inline[i-1]; !l.placed {
		l.placed = true
		l.Waiting.first = l.next
		l.Waiting.n.Add(-1)
	}
}

// maxFetches is how often bytes are fetched that were gone again when they were to be
// written.
const maxFetches = 16

// fetchLocked is told that the bytes of the first completion have to be fetched. It
// reports whether the caller is to do so, and then to say fetched; otherwise somebody
// else has done it.
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

func (c *CQ) fetched() {
	c.mu.Lock()
	c.fetching = false
	c.mu.Unlock()
	c.fetchDone.Broadcast()
}

// awaitReopened has the event of an armed queue raised when memory is open again that the
// bytes of the first completion go to: whoever polled in vain may have gone to sleep.
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

// End ends what the queue has under way, before it is forgotten. Nobody polls any more.
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

// WriteBack writes bytes that wait, in their order, though nobody has polled. A fault is
// what it has met: those before were written.
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

// writeLocked writes bytes, once. What is wrong with them remains so, for all to hear.
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

// writer is what writing needs and must not allocate.
type writer struct {
	raw      [1][]byte
	sges     [1]ib.SGE
	to, from mem.List
}
