package shm

// How the owner of an inbox sleeps: he announces it, looks again, and blocks on
// the event. A sender stores its record, then looks whether he sleeps. Both
// stores are ordered before both loads, so one of the two sees the other.

import (
	"math/bits"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Announce says that the owner is about to block on Event. It reports false if
// there is something to do first; otherwise Awake must follow. One at a time,
// also while somebody polls.
func (in *Inbox) Announce() bool {
	in.epoch += 2
	in.words.sleep.Store(in.epoch | 1)
	if in.ready() {
		in.Awake()
		return false
	}
	return true
}

// Awake ends what Announce began.
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

// ready reports whether a visit would find something. If somebody is inside the
// ring it may, for who is inside may leave something behind.
func (c *Channel) ready() bool {
	if !c.rx.tryEnter() {
		return !c.rx.shut.Load()
	}
	defer c.rx.leave()
	return c.rx.ring.Ready() || c.rx.ring.Err() != nil || c.down.Load() != nil
}
