package device

// Who does the work when. Posting sends in the caller. Receiving is done by
// whoever is there: a poller that finds its completion queue empty reads the
// link itself; one background goroutine watches whether anybody polls, and
// blocks in the kernel for packets and timers when nobody does. So there is no
// hand-off while somebody polls, and a passive target makes progress all the
// same.

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/qp"
)

const (
	// watchInterval is how often the background goroutine looks whether
	// somebody still polls.
	watchInterval = 200 * time.Microsecond
	// Looking takes one watchShare-th of its time, or 200 µs become longer, up to
	// maxWatch. A look takes some 2 µs, and in an emulated machine 50 and more.
	watchShare = 64
	maxWatch   = 5 * time.Millisecond
	// lingerTime is how long the background goroutine waits for more without
	// sleeping.
	lingerTime = 20 * time.Microsecond
	// timerPolls is how many polls in vain it takes for a look at the clock.
	timerPolls = 32
	// rxBudget is how many packets are read before they are answered.
	rxBudget = 128
)

type progress struct {
	polls      atomic.Uint64 // polls that read the link
	posts      atomic.Uint64 // posts that left something for the link
	stopped    atomic.Bool
	deferred   atomic.Bool   // there are answers that a poll has left
	done       chan struct{} // closed when the background goroutine has ended
	sleepUntil atomic.Int64  // qp.Time until which it sleeps, when it blocks

	rx struct {
		sync.Mutex // guards the receiver; only ever tried by pollers
		receiver
	}

	stalled struct {
		sync.Mutex       // guards list
		list       []*QP // hold trains until the link is less busy
	}
	patience time.Duration // of datagrams among those trains

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
	go d.background()
}

func (d *Device) stop() {
	d.stopped.Store(true)
	d.link.Wake()
	<-d.done
}

// poll makes progress for somebody who polls, and returns how many completions
// he found then. Answers to what arrived wait until he has seen it: he may have
// an answer of his own, and both go out together. They leave with his next post,
// his next poll, or by the background goroutine.
func (d *Device) poll(cq *CQ, wcs []ib.WC, notes []Note) int {
	if d.polls.Add(1)%timerPolls == 0 {
		if t := d.timers.first(); t != 0 && t <= d.now() {
			d.fireTimers() // the background goroutine may sleep while somebody polls
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
			d.wakeBefore(0) // were it asleep, nobody might send them
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

// receive reads the link, and reports whether anything came. It is busy if somebody
// else does so. Answers are left, as by poll, where the program has answered the
// messages before with some of its own.
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

// later leaves the rest of a queue pair's work to whoever makes progress next.
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

// background is the goroutine that makes progress when nobody polls. It blocks
// on the link, as long as it gets packets that way. When pollers get them
// first, it only wakes up for nothing, and takes from them a core; then it
// watches from time to time whether they still poll. A program that polls now
// and then, and waits for its memory to change in between, leaves packets
// unread: one such finding, and it blocks again.
//
// Answers that it or a poll has left wait for the program's own post, so that a
// ping-pong by memory is one train each way, and who waits for the completion of
// his own message gets the next one with it: then nobody needs this goroutine.
func (d *Device) background() {
	defer close(d.done)
	var seen, posted uint64
	watch := watcher{interval: watchInterval}
	recent := false // something came since the last time it lingered
	// Nothing was posted since, nor between that and what came before. Who posts at length
	// will poll, who answers each message watches for the next: both need the processor.
	quiet := false
	for vain := 0; !d.stopped.Load(); {
		next := d.fireTimers()
		if vain < tolerance {
			watch.woke = 0
			d.runReady(1)
			got, busy := d.receive()
			n := d.polls.Load()
			alone := n == seen
			posts := d.posts.Load()
			quiet = posts == posted && (got || quiet)
			posted = posts
			switch {
			case busy: // at this very moment: the link is theirs, and to spin until they are done would take a core from them
				vain = tolerance
			case !alone && (!got || n-seen >= manyPolls || d.polling()):
				vain++ // somebody else is here, and would have got it
			case got:
				vain = 0
			}
			seen = n
			switch {
			case busy:
			case d.deferred.Load():
				d.block(watch.interval)
				if d.deferred.Load() {
					d.flushDeferred()
				}
			case !got && !(alone && quiet && recent && d.linger()):
				d.block(forever)
			}
			recent = got
			continue
		}
		if d.deferred.Load() {
			d.flushDeferred()
		}
		watch.sleep(d, next)
		n := d.polls.Load()
		if n == seen || n-seen < steadyPolls && !d.polling() && d.unread() {
			vain = 0
		}
		seen = n
	}
}

// linger waits for more where something came just now, for about as long as it takes
// to fall asleep and be woken: a peer that sends at the pace of our answers is not
// made to wake us for each. It reports whether there is something, or somebody polls.
func (d *Device) linger() bool {
	polls := d.polls.Load()
	for start, looks := d.now(), 0; ; looks++ {
		if t := d.now() - start; t >= lingerTime || t == 0 && looks > 8 { // time stands still in simulations
			return false
		}
		got, busy := d.receive()
		if got || busy || d.polls.Load() != polls || d.ready.some.Load() || d.stopped.Load() {
			return true
		}
	}
}

// unread reads what lies there, and reports whether there was something.
func (d *Device) unread() bool {
	got, _ := d.receive()
	return got
}

// watcher paces the looks of the background goroutine while others poll.
type watcher struct {
	interval time.Duration
	woke     qp.Time // when it was last woken, 0: not since it began to watch
}

// sleep sleeps for the interval, or until next. The interval is watchInterval,
// unless the machine is so slow, or so busy, that looking takes a good part of
// that: who polls needs the processor more.
func (w *watcher) sleep(d *Device, next time.Duration) {
	if w.woke != 0 { // half of the way there, since one look says little
		w.interval = min(max((w.interval+watchShare*(d.now()-w.woke))/2, watchInterval), maxWatch)
	}
	time.Sleep(min(w.interval, next))
	w.woke = d.now()
}

// manyPolls is from how many polls on, since the background goroutine was last awake,
// somebody is taken to be polling who is not seen to: on one processor he cannot be.
const manyPolls = 8

// steadyPolls is how many polls between two looks of his are somebody's who polls all
// the time.
const steadyPolls = 512

// tolerance is how often in a row the background goroutine wakes up in vain
// before it leaves the link to those who poll.
const tolerance = 3

// polling reports whether somebody polls just now: again within a few
// microseconds. It counts looks, not time, which stands still in simulations.
func (d *Device) polling() bool {
	n := d.polls.Load()
	for range 4000 {
		if d.polls.Load() != n {
			return true
		}
	}
	return false
}

// block waits for packets, timers or work, and not longer than most: for ever
// only if no answers are left to be sent. It announces until when it sleeps
// before it looks for work a last time, so that whoever brings some either is
// seen or sees that it must wake.
func (d *Device) block(most qp.Time) {
	d.sleepUntil.Store(int64(forever))
	wait := time.Duration(-1)
	if most != forever {
		wait = most
	}
	if t := d.timers.first(); t != 0 {
		d.sleepUntil.Store(int64(t))
		wait = min(max(0, t-d.now()), most)
	}
	if !d.ready.some.Load() && (most != forever || !d.deferred.Load()) && !d.stopped.Load() {
		d.link.Wait(wait)
	}
	d.sleepUntil.Store(0)
}

const forever = qp.Time(1<<63 - 1)

// wakeBefore wakes the background goroutine if it would sleep longer than
// until t.
func (d *Device) wakeBefore(t qp.Time) {
	if d.sleepUntil.Load() > int64(t) {
		d.link.Wake()
	}
}
