package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/device"
)

// completionQueue moves completions from the device's queue to the ring that the
// program polls.
type completionQueue struct {
	inContext
	*device.CQ
	cookie C.uint64_t
	ring   *C.struct_vbe_ring

	// Two write the ring's tail: take, which the device's queue calls with its lock held;
	// and fillLocked, from PollNotes until Hold(false), while the device's queue does not
	// call take.

	mu    sync.Mutex // serializes polls; guards what follows
	wcs   [batch]ib.WC
	notes [batch]device.Note
}

// batch is how many completions are moved at a time.
const batch = 32

var cqs = table[completionQueue]{kind: C.VBE_CQ}

// clock returns a function that reads CLOCK_MONOTONIC by way of Go's own clock, which is
// cheaper to read.
var clock = sync.OnceValue(func() func() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // it cannot fail
	base := time.Now()
	offset := ts.Nano()
	return func() int64 { return offset + int64(time.Since(base)) }
})

//export vbe_create_cq
func vbe_create_cq(h C.uint64_t, entries C.int64_t, ring *C.struct_vbe_ring, cookie C.uint64_t, flags C.uint32_t) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	cq, err := c.shared.dev.CreateCQ(int(entries), nil)
	if err != nil {
		return failed(err)
	}
	q := &completionQueue{inContext: inContext{c}, CQ: cq.(*device.CQ), cookie: cookie, ring: ring}
	if flags&C.VBE_CQ_TIMES != 0 {
		q.Clock = clock()
	}
	if flags&C.VBE_CQ_EVENTS != 0 { // the front has the channel
		q.OnEvent = func() { C.call_cq_event(cookie) }
		q.Earlier = q.earlier
	}
	q.Taker = q.take
	c.shared.cqs.add(q.Number(), q)
	return newHandle(&cqs, c, q)
}

func (q *completionQueue) close() error {
	if err := q.CQ.Close(); err != nil {
		return err
	}
	q.ctx.shared.cqs.remove(q.Number(), q)
	q.mu.Lock()  // no poll writes into the ring any more,
	q.Hold(true) // nor does take
	q.ring = nil
	q.mu.Unlock()
	return nil
}

// room returns how many completions the ring has room for.
func (q *completionQueue) room() int {
	return C.VBE_RING - int(atomic.LoadUint32(word(&q.ring.tail))-atomic.LoadUint32(word(&q.ring.head)))
}

// putLocked adds completions to the ring.
func (q *completionQueue) putLocked(n int) {
	tail := uint32(q.ring.tail)
	for i := range n {
		putWC(&q.ring.slot[(tail+uint32(i))%C.VBE_RING], &q.wcs[i], &q.notes[i])
	}
	atomic.StoreUint32(word(&q.ring.tail), tail+uint32(n))
}

// take puts a completion into the ring when it is made, and reports whether it did. It
// leaves batch slots free, since a poll may have counted them as its room.
func (q *completionQueue) take(wc *ib.WC, note *device.Note) bool {
	if q.room() <= batch {
		return false
	}
	tail := uint32(q.ring.tail)
	putWC(&q.ring.slot[tail%C.VBE_RING], wc, note)
	atomic.StoreUint32(word(&q.ring.tail), tail+1)
	return true
}

// earlier assigns an event to the first completion in the ring that has raised none, and
// reports whether there is one. If the program polls that completion meanwhile, the event
// announces nothing new, as may happen with an adapter.
func (q *completionQueue) earlier(event uint32, solicitedOnly bool) bool {
	tail := uint32(q.ring.tail)
	for at := atomic.LoadUint32(word(&q.ring.head)); at != tail; at++ {
		wc := &q.ring.slot[at%C.VBE_RING]
		if wc.event == 0 && (wc.solicited != 0 || !solicitedOnly) {
			atomic.StoreUint32(word(&wc.event), event)
			return true
		}
	}
	return false
}

// vbe_poll_cq makes progress, as a poll does, and moves completions to the ring. The front
// calls it when the ring is empty, or has too few for a program that has armed the queue.
//
//export vbe_poll_cq
func vbe_poll_cq(h C.uint64_t) C.int64_t {
	q := cqs.get(uint64(h))
	if q == nil {
		return failed(errStale)
	}
	q.mu.Lock()
	err := q.fillLocked()
	q.mu.Unlock()
	return result(err)
}

// fillLocked moves completions to the ring, as many as it has room for.
func (q *completionQueue) fillLocked() error {
	if q.ring == nil {
		return nil
	}
	room := q.room()
	if room == 0 {
		return nil
	}
	n, err := q.PollNotes(q.wcs[:min(batch, room)], q.notes[:])
	if n > 0 {
		q.putLocked(n)
		q.Hold(false)
	}
	return err
}

//export vbe_arm_cq
func vbe_arm_cq(h C.uint64_t, solicitedOnly C.uint32_t) C.int64_t {
	q := cqs.get(uint64(h))
	if q == nil {
		return failed(errStale)
	}
	q.Arm(solicitedOnly != 0)
	return 0
}

//export vbe_resize_cq
func vbe_resize_cq(h C.uint64_t, entries C.int64_t) C.int64_t {
	q := cqs.get(uint64(h))
	if q == nil {
		return failed(errStale)
	}
	if entries < 1 {
		return failed(ib.Errorf("resize_cq", syscall.EINVAL, "%d entries", entries))
	}
	return result(q.Resize(int(entries)))
}
