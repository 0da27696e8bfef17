package device

// The background goroutine makes progress when the program does not poll. It is in
// one of two modes:
//
//   - It receives (receiveOrBlock): it reads the sockets, and blocks on them when nothing
//     came. It stays in this mode as long as it gets packets that way.
//   - It watches (watchPollers): pollers get the packets first. To wake up for each
//     packet would be in vain, and take a core from the pollers. So it leaves the link
//     to them and looks from time to time whether they still poll. A program that polls
//     now and then, and waits for its memory to change in between, leaves packets
//     unread: after one such finding the goroutine receives again. A program that arms
//     a completion queue is about to sleep: the goroutine receives again at once.
//
// Answers that the background goroutine or a poll has deferred wait for the program's own
// post, so that a ping-pong by memory is one train each way. A program that waits for the
// completion of its own message gets the peer's next message with it, and does not need
// this goroutine at all.

import (
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/internal/qp"
)

const (
	// tolerance is how often in a row the background goroutine wakes up in vain
	// before it leaves the link to the pollers.
	tolerance = 3
	// manyPolls is how many polls since the background goroutine was last awake prove
	// that the program is polling, though it is not seen to poll: with one processor
	// the two never run at the same time.
	manyPolls = 8
	// steadyPolls is how many polls between two looks prove that the program polls all
	// the time.
	steadyPolls = 512
	// lingerTime is how long the background goroutine waits for more packets without
	// sleeping.
	lingerTime = 20 * time.Microsecond
	// watchInterval is how often the background goroutine looks whether the program
	// still polls.
	watchInterval = 200 * time.Microsecond
	// The interval grows, up to maxWatch, until looking takes at most one
	// watchShare-th of the time. A look takes some 2 µs, and in an emulated machine 50
	// and more.
	watchShare = 64
	maxWatch   = 5 * time.Millisecond
)

// background is what the background goroutine remembers from one round to the next.
type background struct {
	shard   *shard
	watch   watcher
	lingers backoff
	vain    int    // wake-ups in vain, in a row; from tolerance on the goroutine watches
	polls   uint64 // shard.polls when it last looked
	posts   uint64 // shard.posts when it last looked
	arms    uint32 // shard.arms when it last looked
	// recent: the last round received something besides messages of the connection manager. Those
	// come one at a time, and what they wake, which answers them, needs the processor.
	recent bool
	// unanswered: something came, and the program has posted nothing since the round
	// before that. A program that goes on posting will poll, and one that answers each
	// message watches for the next: both need the processor.
	unanswered bool
}

// runBackground is the background goroutine.
func (s *shard) runBackground() {
	defer close(s.done)
	b := background{shard: s, watch: watcher{interval: watchInterval}}
	for !s.dev.stopped.Load() {
		next := s.fireTimers()
		if b.vain < tolerance {
			b.receiveOrBlock()
		} else {
			b.watchPollers(next)
		}
	}
}

// receiveOrBlock reads the link, and blocks on it if nothing came.
func (b *background) receiveOrBlock() {
	s := b.shard
	b.watch.woke = 0
	s.runReady(1)
	got, busy := s.receive(true)
	armed := b.newArms()
	if got && armed {
		runtime.Gosched() // to the goroutine that waits for what came: to wake another thread for it takes longer
	}
	polls := b.newPolls()
	b.notePosts(got)
	b.noteVain(got, busy, armed, polls)
	switch {
	case busy:
	case s.deferred.Load():
		s.block(b.watch.interval)
		if s.deferred.Load() {
			s.flushDeferred()
		}
	case got:
	case polls == 0 && b.unanswered && b.recent && b.lingers.try(s.linger):
	default:
		s.block(forever)
	}
	b.recent = got && !s.onlyMADs
}

// watchPollers sleeps, and then ends the watch if the program does not poll any more,
// is about to sleep, or polls so rarely that a packet was left unread.
func (b *background) watchPollers(next time.Duration) {
	s := b.shard
	if s.deferred.Load() {
		s.flushDeferred()
	}
	b.watch.sleep(s, next, b.arms)
	polls := b.newPolls()
	if b.newArms() || polls == 0 || polls < steadyPolls && !s.polling() && s.unread() {
		b.vain = 0
	}
}

// newArms reports whether the program has armed a completion queue since newArms was last called.
func (b *background) newArms() bool {
	before := b.arms
	b.arms = b.shard.arms.Load()
	return b.arms != before
}

// newPolls returns the number of polls since it was last called.
func (b *background) newPolls() uint64 {
	before := b.polls
	b.polls = b.shard.polls.Load()
	return b.polls - before
}

// notePosts brings unanswered up to date.
func (b *background) notePosts(got bool) {
	before := b.posts
	b.posts = b.shard.posts.Load()
	b.unanswered = b.posts == before && (got || b.unanswered)
}

// noteVain counts the wake-up if it was in vain: a poller would have received what
// came. If the program has armed a completion queue, the polls were the last ones before it
// sleeps.
func (b *background) noteVain(got, busy, armed bool, polls uint64) {
	switch {
	case armed:
		b.vain = 0
	case busy: // a poller reads the link now; to spin until it is done would take a core from it
		b.vain = tolerance
	case polls > 0 && (!got || polls >= manyPolls || b.shard.polling()):
		b.vain++
	case got:
		b.vain = 0
	}
}

// linger waits for more packets where some came just now, for about as long as it takes
// to fall asleep and be woken: a peer that sends at the pace of our answers need not
// wake this goroutine for each. It reports whether there is something to do, or the
// program polls.
func (s *shard) linger() bool {
	runtime.Gosched() // to whoever got something of the last packets, for which another thread would be woken
	polls := s.polls.Load()
	for start, looks := s.dev.now(), 0; ; looks++ {
		if t := s.dev.now() - start; t >= lingerTime || t == 0 && looks > 8 { // time stands still in simulations
			return false
		}
		got, busy := s.receive(true)
		if got || busy || s.polls.Load() != polls || s.ready.some.Load() || s.dev.stopped.Load() {
			return true
		}
	}
}

// backoff spares attempts that were in vain: after one that was, so many are left out, and twice
// as many after the next one.
type backoff struct{ vain, skips int }

// mostLeftOut is how many attempts are left out in a row, at most.
const mostLeftOut = 31

// try makes an attempt, or leaves it out. It reports whether the attempt was made and succeeded.
func (b *backoff) try(attempt func() bool) bool {
	switch {
	case b.skips > 0:
		b.skips--
		return false
	case attempt():
		b.vain = 0
		return true
	}
	b.vain = min(2*b.vain+1, mostLeftOut)
	b.skips = b.vain
	return false
}

// unread reads the link, and reports whether a packet lay there.
func (s *shard) unread() bool {
	got, _ := s.receive(true)
	return got
}

// polling reports whether the program polls just now: again within a few
// microseconds. It counts looks, not time, which stands still in simulations.
func (s *shard) polling() bool {
	n := s.polls.Load()
	for range 4000 {
		if s.polls.Load() != n {
			return true
		}
	}
	return false
}

// watcher paces the looks of the background goroutine while the program polls.
type watcher struct {
	interval time.Duration
	woke     qp.Time     // when sleep last returned; 0: not since the watch began
	timer    *time.Timer // nil before the first sleep
}

// sleep sleeps for the interval, or until next, or until the program arms a completion queue:
// arms is how often it has. The interval is watchInterval, unless the machine is so slow, or so
// busy, that looking takes a good part of that: the pollers need the processor more.
func (w *watcher) sleep(s *shard, next time.Duration, arms uint32) {
	if w.woke != 0 { // half of the way to the new value, since one look may be an exception
		w.interval = min(max((w.interval+watchShare*(s.dev.now()-w.woke))/2, watchInterval), maxWatch)
	}
	if t := min(w.interval, next); w.timer == nil {
		w.timer = time.NewTimer(t)
	} else {
		w.timer.Reset(t)
	}
	// Either sleep sees here that the program has armed a queue, or programSleeps sees that this
	// goroutine watches.
	s.watching.Store(true)
	if s.arms.Load() == arms {
		select {
		case <-w.timer.C:
		case <-s.armed:
		}
	}
	s.watching.Store(false)
	w.timer.Stop()
	w.woke = s.dev.now()
}

// programSleeps is called when the program has armed a completion queue. It ends the watch: nobody
// else would receive what the program sleeps for before the next look.
func (s *shard) programSleeps() {
	s.arms.Add(1)
	if s.watching.Load() {
		select {
		case s.armed <- struct{}{}:
		default:
		}
	}
}

// block waits for packets, timers or work, and not longer than most: forever only while no
// answers are deferred. It announces until when it sleeps before it looks for work a last
// time. So either block sees new work, or the goroutine that brings it sees that it must
// wake this one (wakeBefore).
func (s *shard) block(most qp.Time) {
	s.sleepUntil.Store(int64(forever))
	wait := time.Duration(-1)
	if most != forever {
		wait = most
	}
	if t := s.timers.first(); t != 0 {
		s.sleepUntil.Store(int64(t))
		wait = min(max(0, t-s.dev.now()), most)
	}
	if !s.ready.some.Load() && (most != forever || !s.deferred.Load()) && !s.dev.stopped.Load() {
		s.receiver.Wait(wait)
	}
	s.sleepUntil.Store(0)
}

const forever = qp.Time(1<<63 - 1)

// wakeBefore wakes the background goroutine if it would sleep longer than
// until t.
func (s *shard) wakeBefore(t qp.Time) {
	if s.sleepUntil.Load() > int64(t) {
		s.receiver.Wake()
	}
}
