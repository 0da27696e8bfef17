package cuda

// Calls of the driver that do not return. One that waits for a lock of the driver's, which another thread of the program
// holds until a kernel has ended, can keep the kernel from ever ending: so which call it is, is reported while it waits.

import (
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"
)

// callSlots is how many calls are seen at a time; others are not reported.
const callSlots = 32

// calls are the calls of the driver that are under way.
type calls struct {
	at   [callSlots]callSlot
	next atomic.Uint32
	stop chan struct{} // ends watch; guarded by the driver's mu
	gone chan struct{}
}

// callSlot is a call that is under way, if since is not 0.
type callSlot struct {
	since atomic.Int64 // nanoseconds since started
	f     atomic.Uint32
	args  [4]atomic.Uint64
}

// started is what times of calls count from.
var started = time.Now()

// enter notes a call, and returns where; nil if there is no room.
func (c *calls) enter(f function, args []uintptr, now time.Time) *callSlot {
	for range 4 {
		s := &c.at[c.next.Add(1)%callSlots]
		if !s.since.CompareAndSwap(0, max(1, int64(now.Sub(started)))) {
			continue
		}
		s.f.Store(uint32(f))
		for i := range s.args {
			v := uint64(0)
			if i < len(args) {
				v = uint64(args[i])
			}
			s.args[i].Store(v)
		}
		return s
	}
	return nil
}

func (s *callSlot) leave() {
	if s != nil {
		s.since.Store(0)
	}
}

// watch reports calls that do not return, until stop is closed. Each is reported once, with all others that are under way.
func (c *calls) watch(stop <-chan struct{}, gone chan<- struct{}, every, limit time.Duration) {
	defer close(gone)
	t := time.NewTicker(every)
	defer t.Stop()
	var told [callSlots]int64
	for {
		select {
		case <-stop:
			return
		case <-t.C:
		}
		now := int64(time.Since(started))
		late := false
		for i := range c.at {
			since := c.at[i].since.Load()
			if since != 0 && now-since > int64(limit) && told[i] != since {
				told[i], late = since, true
			}
		}
		if late {
			slog.Warn("verbena: a call of CUDA's driver does not return: another thread of the program may have the driver's lock and wait for bytes which this call is to bring",
				"calls", c.underWay(now))
		}
	}
}

// underWay lists the calls that are under way, with their first arguments.
func (c *calls) underWay(now int64) string {
	var b strings.Builder
	for i := range c.at {
		s := &c.at[i]
		since := s.since.Load()
		if since == 0 {
			continue
		}
		fmt.Fprintf(&b, "%s(%#x, %#x, %#x, %#x) for %v; ", names[s.f.Load()], s.args[0].Load(), s.args[1].Load(), s.args[2].Load(), s.args[3].Load(),
			time.Duration(now-since).Round(time.Millisecond))
	}
	return strings.TrimSuffix(b.String(), "; ")
}
