package device

// Which goroutine does the work when. A post sends in its caller. A poll that finds its
// completion queue empty reads the sockets of the queue pairs of that queue itself. The
// background goroutine of each shard (background.go) watches whether the program polls, and
// blocks in the kernel for packets and timers while it does not. So no work goes from
// goroutine to goroutine while the program polls, and a passive target makes progress all the
// same.

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
)

const (
	// timerPolls is after how many polls of an empty completion queue one looks at the clock.
	timerPolls = 32
	// rxBudget is how many packets are read before they are answered.
	rxBudget = 128
)

// shard is a part of a device that makes progress by itself: a receiver with sockets of its
// own, and the queue pairs whose packets come there, with their timers. The kernel steers by
// the queue pair's number. What does not come by packets (rings, the loop link), datagrams and
// multicast belong to the device's first shard. shards.go has how queue pairs are spread.
type shard struct {
	dev      *Device
	number   int // among the shards of the device, from 0
	receiver link.Receiver
	places   *host.Places   // of its sockets; nil if no other process can share the device
	qps      *mem.Slots[QP] // the queue pairs that have numbers with these places
	load     int            // guarded by Device.spread: those of them that may send many packets

	done chan struct{} // closed when the background goroutine has ended
	// onlyMADs: of what the background goroutine, which has the field, received last, all was for queue
	// pair 1.
	onlyMADs bool

	deferred   atomic.Bool  // there are answers that a poll has left
	sleepUntil atomic.Int64 // qp.Time until which the background goroutine blocks; 0: it does not

	arms     atomic.Uint32 // how often the program has armed a completion queue that polls this shard
	watching atomic.Bool   // the background goroutine leaves the sockets to pollers, and sleeps
	armed    chan struct{} // ends that sleep: see programSleeps; has room for one value

	_     [64]byte      // keeps what every post reads off the cache lines that every empty poll writes
	polls atomic.Uint64 // polls that read the sockets
	skips atomic.Int32  // how many more calls of help skip this shard
	idle  atomic.Int32  // how many did so the latest time; 0: it had something to do

	helpers atomic.Int32  // calls of help that look at this shard, which stop waits for
	posts   atomic.Uint64 // posts that left something for the link
	rx      struct {
		sync.Mutex // guards the receiver; it is only ever tried
		receiver
	}
	_ [64]byte

	timers timerHeap
	ready  struct {
		sync.Mutex           // guards list
		list       ring[*QP] // have more to send
		some       atomic.Bool
	}
}

// run starts the background goroutine. It is called once for each shard.
func (s *shard) run() {
	if s.places != nil {
		changeRunning(func(all []*shard) []*shard { return append(all, s) })
	}
	go s.runBackground()
}

// stop ends the background goroutines.
func (d *Device) stop() {
	d.stopped.Store(true)
	changeRunning(func(all []*shard) []*shard {
		return slices.DeleteFunc(all, func(s *shard) bool { return s.dev == d })
	})
	for _, s := range d.shards() {
		s.receiver.Wake()
		<-s.done
		for s.helpers.Load() > 0 { // pollers of other devices, which wait for nothing
			runtime.Gosched()
		}
	}
}

// poll makes progress for a poller that found cq empty, and returns how many completions
// there are then. Answers to what arrived wait until the poller has seen it: it may post an
// answer of its own, and both go out together. They leave with the poller's next post, its
// next poll, or by the background goroutine. got is that something arrived.
func (s *shard) poll(cq *CQ, wcs []ib.WC, notes []Note) (n int, got bool) {
	if s.polls.Add(1)%timerPolls == 0 {
		if t := s.timers.first(); t != 0 && t <= s.dev.now() {
			s.fireTimers() // the background goroutine may sleep while the program polls
		}
	}
	if s.rx.TryLock() {
		s.rx.now = 0 // most polls find nothing, and need no time
		got = s.receiver.Poll(&s.rx.receiver, rxBudget) > 0
		left := got && len(s.rx.touched) > 0
		if left {
			s.deferred.Store(true)
		}
		mads := s.rx.mads
		s.rx.mads = 0
		s.rx.Unlock()
		if mads > 0 {
			s.dev.management.queue.notify()
		}
		if left {
			s.wakeBefore(0) // the poller may not come back: then the background goroutine sends the answers
		}
	}
	if s.ready.some.Load() {
		s.runReady(1)
	}
	return cq.CQ.PollNotes(wcs, notes), got
}

// flushDeferred sends the answers that a poll has left.
func (s *shard) flushDeferred() {
	if !s.rx.TryLock() {
		return
	}
	s.deferred.Store(false)
	s.rx.now = s.dev.now()
	s.rx.flush()
	s.rx.Unlock()
}

// receive reads the sockets, and reports whether anything came; busy is that another goroutine
// reads them. Answers are left, as by poll, if the program has followed each of the last
// messages with a post of its own. Datagrams for queue pair 1 are served if background is set.
func (s *shard) receive(background bool) (got, busy bool) {
	if !s.rx.TryLock() {
		return false, true
	}
	s.rx.now = s.dev.now()
	s.rx.urgent = false
	n := s.receiver.Poll(&s.rx.receiver, rxBudget)
	if n > 0 && len(s.rx.touched) > 0 {
		s.deferred.Store(!s.rx.urgent)
		if s.rx.urgent {
			s.rx.flush()
		}
	}
	mads := s.rx.mads
	s.rx.mads = 0
	s.rx.Unlock()
	if background {
		s.onlyMADs = n > 0 && mads == n
	}
	switch {
	case mads == 0:
	case background:
		s.dev.management.serveFew(mads)
	default:
		s.dev.management.queue.notify()
	}
	return n > 0, false
}

// runReady goes on with up to n queue pairs that have more to send.
func (s *shard) runReady(n int) {
	for range n {
		s.ready.Lock()
		if s.ready.list.len() == 0 {
			s.ready.Unlock()
			return
		}
		q := s.ready.list.pop()
		s.ready.some.Store(s.ready.list.len() > 0)
		s.ready.Unlock()
		q.queued.Store(false)
		s.dev.transmit(q, s.dev.now())
	}
}
