package queue

// Inline receive ("scatter to CQE"): the bytes of a short message wait beside its
// completion, and are copied to where they belong when that is polled.
//
//  1. Whoever completes makes a Late and pushes it with the completion.
//  2. Poll takes both, and places the bytes with no lock held: they may have to be
//     fetched from storage, or their memory may be gone.

import (
	"sync"
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
	Data   [MaxLate]byte
	N      uint8

	next uint32 // of a place that is free: the next one
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
	return i
}

// dropLocked forgets bytes.
func (c *CQ) dropLocked(i uint32) {
	if i == 0 {
		return
	}
	c.late[i-1] = Late{next: c.lateFree}
	c.lateFree = i
}

// place places the bytes with number i of a completion that was polled, without the
// lock, which is held before and after.
func (c *CQ) place(wc *ib.WC, i uint32) {
	p := placers.Get().(*placer)
	p.Late = c.late[i-1]
	c.dropLocked(i)
	c.mu.Unlock()
	if f := p.place(); !f.OK() {
		wc.Status, wc.VendorErr = ib.WCLocProtErr, p.Failed(f)
	}
	p.Late = Late{}
	placers.Put(p)
	c.mu.Lock()
}

// placer is what placing needs and must not allocate.
type placer struct {
	Late
	raw      [1][]byte
	sges     [1]ib.SGE
	to, from mem.List
}

var placers = sync.Pool{New: func() any { return new(placer) }}

// maxFetches is how often bytes are fetched that were gone again when they were to be
// written.
const maxFetches = 16

// place copies the bytes, and waits for memory that has to be fetched first.
func (p *placer) place() (f mem.Fault) {
	p.raw[0], p.sges[0] = p.Data[:p.N], p.SGE
	p.to = mem.List{Table: p.Table, Actor: p.Actor, Access: ib.AccessLocalWrite, SGEs: p.sges[:]}
	p.from = mem.List{Raw: p.raw[:]}
	for range maxFetches {
		f, _ = mem.Copy(&p.to, &p.from, uint64(p.N), true)
		if f.Kind != mem.FaultPending {
			break
		}
		if left := f.Await(); !left.OK() && left.Kind != mem.FaultPending {
			return left
		}
	}
	return f
}
