package queue

// Inline receive ("scatter to CQE"): the bytes of a short message wait beside its
// completion, and are copied to where they belong when that is polled.
//
//  1. Whoever completes makes a Late and pushes it with the completion.
//  2. Poll takes both, and places the bytes with no lock held: they may have to be
//     fetched from storage, or their memory may be gone.
//  3. Whoever cannot wait for a poll has them written before (Settle).

import (
	"slices"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// MaxLate is the longest message that waits in the completion queue.
const MaxLate = 64

// Late is bytes that are to be placed when their completion is polled.
type Late struct {
	Table *mem.Table
	Actor mem.Actor
	SGE   ib.SGE // where they go: all of them
	// Failed is told that they could not be placed, and says what the completion is
	// to say about it.
	Failed func(mem.Fault) (vendor uint16)
	// Results, if set, counts the results of requests of a queue pair that wait.
	Results *atomic.Int32
	Data    [MaxLate]byte
	N       uint8

	placed bool   // they have been written
	next   uint32 // of a place that is free: the next one
}

// PushLate appends the completion of a receive whose bytes are to be placed when it
// is polled; PushLateSend that of a send request, whose result they are.
func (c *CQ) PushLate(wc *ib.WC, solicited bool, l *Late) bool {
	return c.push(wc, solicited, nil, 0, l)
}

// PushLateSend is explained at PushLate.
func (c *CQ) PushLateSend(wc *ib.WC, freed *atomic.Uint32, upto uint32, l *Late) bool {
	return c.push(wc, false, freed, upto, l)
}

// keepLocked keeps bytes until their completion is polled, and returns their number.
func (c *CQ) keepLocked(l *Late) uint32 {
	i := c.lateFree
	if i == 0 {
		c.late = append(c.late, Late{})
		i = uint32(len(c.late))
	} else {
		c.lateFree = c.late[i-1].next
	}
	c.late[i-1] = *l
	if l.Results != nil {
		l.Results.Add(1)
	}
	return i
}

// dropLocked forgets bytes.
func (c *CQ) dropLocked(i uint32) {
	if i == 0 {
		return
	}
	c.late[i-1].settled()
	c.late[i-1] = Late{next: c.lateFree}
	c.lateFree = i
}

// settled tells that bytes wait no longer.
func (l *Late) settled() {
	if !l.placed && l.Results != nil {
		l.Results.Add(-1)
	}
	l.placed = true
}

// maxFetches is how often bytes are fetched that were gone again when they were to be
// written.
const maxFetches = 16

// place writes the bytes with number i of a completion that was polled. The lock is
// held before and after, and whenever they are written, but not while they have to be
// fetched.
func (c *CQ) place(wc *ib.WC, i uint32) {
	c.placing = append(c.placing, i)
	f := c.writeLocked(i)
	for n := 0; f.Kind == mem.FaultPending && n < maxFetches; n++ {
		c.mu.Unlock()
		left := f.Await()
		c.mu.Lock()
		if f = left; f.OK() || f.Kind == mem.FaultPending {
			f = c.writeLocked(i)
		}
	}
	failed := c.late[i-1].Failed
	c.placing = slices.Delete(c.placing, slices.Index(c.placing, i), slices.Index(c.placing, i)+1)
	c.dropLocked(i)
	if !f.OK() {
		c.mu.Unlock()
		wc.Status, wc.VendorErr = ib.WCLocProtErr, failed(f)
		c.mu.Lock()
	}
}

// Settle writes the bytes that wait and are counted by results, in their order,
// though nobody has polled. A fault is what it has met: those before were written.
func (c *CQ) Settle(results *atomic.Int32) mem.Fault {
	c.mu.Lock()
	defer c.mu.Unlock()
	write := func(i uint32) mem.Fault {
		if i == 0 || c.late[i-1].Results != results {
			return mem.Fault{}
		}
		return c.writeLocked(i)
	}
	for _, i := range c.placing {
		if f := write(i); !f.OK() {
			return f
		}
	}
	for k := range int(c.count.Load()) {
		if results.Load() == 0 {
			break
		}
		if f := write(c.ring[wrap(c.head+k, len(c.ring))].late); !f.OK() {
			return f
		}
	}
	return mem.Fault{}
}

// writeLocked writes bytes, once.
func (c *CQ) writeLocked(i uint32) mem.Fault {
	l := &c.late[i-1]
	if l.placed {
		return mem.Fault{}
	}
	w := &c.writer
	w.raw[0], w.sges[0] = l.Data[:l.N], l.SGE
	w.to = mem.List{Table: l.Table, Actor: l.Actor, Access: ib.AccessLocalWrite, SGEs: w.sges[:]}
	w.from = mem.List{Raw: w.raw[:]}
	f, _ := mem.Copy(&w.to, &w.from, uint64(l.N), true)
	if f.OK() {
		l.settled()
	}
	return f
}

// writer is what writing needs and must not allocate.
type writer struct {
	raw      [1][]byte
	sges     [1]ib.SGE
	to, from mem.List
}
