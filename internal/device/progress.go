package device

// Which goroutine does the work when. A post sends in its caller. A poll that finds its
// completion queue empty reads the link itself. One background goroutine (background.go)
// watches whether the program polls, and blocks in the kernel for packets and timers while
// it does not. So no work goes from goroutine to goroutine while the program polls, and a
// passive target makes progress all the same.

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/ib"
)

const (
	// timerPolls is after how many polls of an empty completion queue one looks at the clock.
	timerPolls = 32
	// rxBudget is how many packets are read before they are answered.
	rxBudget = 128
)

type progress struct {
	stopped    atomic.Bool
	deferred   atomic.Bool   // there are answers that a poll has left
	done       chan struct{} // closed when the background goroutine has ended
	sleepUntil atomic.Int64  // qp.Time until which the background goroutine blocks; 0: it does not

	_     [64]byte      // keeps what every post reads off the cache lines that every empty poll writes
	polls atomic.Uint64 // polls that read the link
	posts atomic.Uint64 // posts that left something for the link
	rx    struct {
		sync.Mutex // guards the receiver; it is only ever tried
		receiver
	}
	_ [64]byte

	heldQPs struct {
		sync.Mutex       // guards list
		list       []*QP // that have trains which wait until the link is less busy
	}
	patience time.Duration // how long a datagram among those trains waits

	ready struct {
		sync.Mutex           // guards list
		list       ring[*QP] // have more to send
		some       atomic.Bool
	}
}

func (d *Device) start() {
	d.rx.receiver.dev = d
	d.patience = datagramPatience
	d.done = make(chan struct{})
	go d.runBackground()
}

func (d *Device) stop() {
	d.stopped.Store(true)
	d.link.Wake()
	<-d.done
}

// poll makes progress for a poller that found cq empty, and returns how many completions
// there are then. Answers to what arrived wait until the poller has seen it: it may post an
// answer of its own, and both go out together. They leave with the poller's next post, its
// next poll, or by the background goroutine.
func (d *Device) poll(cq *CQ, wcs []ib.WC, notes []Note) int {
	if d.polls.Add(1)%timerPolls == 0 {
		if t := d.timers.first(); t != 0 && t <= d.now() {
			d.fireTimers() // the background goroutine may sleep while the program polls
		}
	}
	if d.rx.TryLock() {
		d.rx.now = 0 // most polls find nothing, and need no time
		left := d.link.Poll(&d.rx.receiver, rxBudget) > 0 && len(d.rx.touched) > 0
		if left {
			d.deferred.Store(true)
		}
		d.rx.Unlock()
		if left {
			d.wakeBefore(0) // the poller may not come back: then the background goroutine sends the answers
		}
	}
	if d.ready.some.Load() {
		d.runReady(1)
	}
	return cq.CQ.PollNotes(wcs, notes)
}

// flushDeferred sends the answers that a poll has left.
func (d *Device) flushDeferred() {
	if !d.rx.TryLock() {
		return
	}
	d.deferred.Store(false)
	d.rx.now = d.now()
	d.rx.flush()
	d.rx.Unlock()
}

// receive reads the link, and reports whether anything came; busy is that another goroutine
// reads it. Answers are left, as by poll, if the program has followed each of the last
// messages with a post of its own.
func (d *Device) receive() (got, busy bool) {
	if !d.rx.TryLock() {
		return false, true
	}
	d.rx.now = d.now()
	d.rx.urgent = false
	n := d.link.Poll(&d.rx.receiver, rxBudget)
	if n > 0 && len(d.rx.touched) > 0 {
		d.deferred.Store(!d.rx.urgent)
		if d.rx.urgent {
			d.rx.flush()
		}
	}
	d.rx.Unlock()
	return n > 0, false
}

// later lists a queue pair that has more to send: the next poll or the background goroutine
// goes on with it.
func (d *Device) later(q *QP) {
	if !q.queued.CompareAndSwap(false, true) {
		return
	}
	d.ready.Lock()
	d.ready.list.push(q)
	d.ready.some.Store(true)
	d.ready.Unlock()
	d.wakeBefore(0)
}

// runReady goes on with up to n queue pairs that have more to send.
func (d *Device) runReady(n int) {
	for range n {
		d.ready.Lock()
		if d.ready.list.len() == 0 {
			d.ready.Unlock()
			return
		}
		q := d.ready.list.pop()
		d.ready.some.Store(d.ready.list.len() > 0)
		d.ready.Unlock()
		q.queued.Store(false)
		d.transmit(q, d.now())
	}
}
