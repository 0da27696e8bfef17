package shm

// How the owner of an inbox sleeps: it announces the sleep, looks at the rings again, and
// blocks on the event. A sender stores its record, then looks whether the owner sleeps. Each
// side's store is ordered before its load, so at least one of the two sees the other.

import (
	"math/bits"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Announce announces to the peers that the owner is about to block on Event. It reports false
// if Poll would find something; otherwise Awake must follow. One goroutine at a time calls it,
// possibly while another is in Poll.
func (in *Inbox) Announce() bool {
	in.epoch += 2
	in.words.sleep.Store(in.epoch | 1)
	if in.ready() {
		in.Awake()
		return false
	}
	return true
}

// Awake ends the sleep that Announce announced.
func (in *Inbox) Awake() { in.words.sleep.Store(in.epoch) }

// Event is signalled when something arrives after Announce. It can be waited
// for beside sockets: see sys.NewPoller.
func (in *Inbox) Event() *sys.Event { return in.event }

// ready reports whether Poll would find something.
func (in *Inbox) ready() bool {
	for index := range int(in.inUse.Load()) {
		set := in.active[index].Load() | in.words.pending[index].Load()
		for ; set != 0; set &= set - 1 {
			if c := in.channel(index*64 + bits.TrailingZeros64(set)); c != nil && c.ready() {
				return true
			}
		}
	}
	if in.blocked.Load() > 0 {
		for _, w := range in.words.room {
			if w.Load() != 0 {
				return true
			}
		}
	}
	return false
}

// ready reports whether a visit may find something. It may if another goroutine holds the
// reading end, since that goroutine may leave records behind.
func (c *Channel) ready() bool {
	if !c.rx.tryEnter() {
		return !c.rx.shut.Load()
	}
	defer c.rx.leave()
	return c.rx.ring.Ready() || c.rx.ring.Err() != nil || c.down.Load() != nil
}
