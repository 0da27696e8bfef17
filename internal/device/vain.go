package device

// What a poll in vain does for others. A program that spins takes a processor: the goroutine
// that it waits for may need this very one.
//
//   - It makes progress for other devices of the process (help): the background goroutine of a
//     passive target runs only when a processor is free, and then late.
//   - It yields after some polls in vain (patience), to goroutines of the program. Threads of C
//     programs yield in the C library, however many of them spin.

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// running are the shards of this process that receive packets and have a background goroutine,
// as a list that never changes: it is replaced, under the lock.
var running struct {
	mu   sync.Mutex // guards changes of list
	list atomic.Pointer[[]*shard]
}

func changeRunning(f func(all []*shard) []*shard) {
	running.mu.Lock()
	defer running.mu.Unlock()
	var all []*shard
	if old := running.list.Load(); old != nil {
		all = slices.Clone(*old)
	}
	all = f(all)
	running.list.Store(&all)
}

const (
	// helpRate: one in so many polls in vain makes progress for another shard.
	helpRate = 2
	// mostSkips is how many such calls skip a shard, at most, that had nothing to do before.
	mostSkips = 255
)

// help makes progress for another shard of the process, one in helpRate times. The shards take
// turns, and one that has nothing to do is skipped more and more often.
func (p *polled) help(own []*shard) {
	n := p.vain.Add(1)
	all := running.list.Load()
	if n%helpRate != 0 || all == nil || len(*all) == 0 {
		return
	}
	s := (*all)[n/helpRate%uint32(len(*all))]
	if slices.Contains(own, s) || s.skips.Add(-1) >= 0 {
		return
	}
	s.helpers.Add(1)
	defer s.helpers.Add(-1)
	if s.dev.stopped.Load() { // else stop, which sets it first, waits for this call
		return
	}
	s.polls.Add(1) // the background goroutine leaves the sockets to those that poll
	if s.deferred.Load() {
		s.flushDeferred()
	}
	got, busy := s.receive(false)
	if s.ready.some.Load() {
		s.runReady(1)
		got = true
	}
	switch {
	case got:
		s.idle.Store(0)
	case !busy:
		s.idle.Store(min(2*s.idle.Load()+1, mostSkips))
	}
	s.skips.Store(s.idle.Load())
}

// patience is when a poller yields: after some polls in vain, if as many pollers spin as there
// are processors for goroutines (else there is one for whoever needs it, and to yield would only
// wake it up). Yielding takes time, and helps nothing if no goroutine waits for the processor: so
// each time doubles the number of polls until the next, and polls that find something reduce it.
type patience struct {
	vain    atomic.Uint32 // polls in vain since the latest yield, or the latest that found something
	until   atomic.Uint32 // how many of them before it yields; 0: leastPatience
	spins   atomic.Bool   // it counts as a poller that spins
	yielded atomic.Bool   // since a poll found something
}

const (
	leastPatience = 16
	mostPatience  = 4096
)

// spinning is how many completion queues of this process are polled in vain.
var spinning atomic.Int32

func (p *patience) foundNothing() {
	until := max(p.until.Load(), leastPatience)
	if p.vain.Add(1) < until {
		return
	}
	p.vain.Store(0)
	if p.spins.CompareAndSwap(false, true) {
		spinning.Add(1)
	}
	if int(spinning.Load()) < runtime.GOMAXPROCS(0) {
		return
	}
	p.until.Store(min(2*until, mostPatience))
	p.yielded.Store(true)
	runtime.Gosched()
}

func (p *patience) foundSome() {
	vain, until := p.vain.Load(), p.until.Load()
	if vain == 0 && until == 0 && !p.spins.Load() {
		return
	}
	switch {
	case p.yielded.Load() && vain < leastPatience: // it came while the poller had yielded, or soon after
		p.until.Store(0)
	case until > leastPatience:
		p.until.Store(until / 2)
	}
	p.vain.Store(0)
	p.yielded.Store(false)
	p.rest()
}

// rest is called when the program does not spin any more, or no longer in vain.
func (p *patience) rest() {
	if p.spins.Load() && p.spins.CompareAndSwap(true, false) {
		spinning.Add(-1)
	}
}
