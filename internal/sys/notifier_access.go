package sys

// Accesses to watched memory, bracketed by Enter and Leave so that a thread that changes
// a mapping can wait for them. An access that Enter has let in is over before an munmap,
// madvise or brk of watched memory returns, and before a closed range (notifier_close.c)
// is changed. The C side is notifier_access.c.

import (
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Enter counts an access to watched memory as under way and returns true, unless a change
// of mappings is announced that is not applied yet. Then it returns false and counts
// nothing; the caller takes the changes (Take), applies them and tries again.
//
// Between Enter and Leave the caller checks whether its memory is stale, and copies. A
// check before Enter is worth nothing, since a change may be announced and applied after
// it. The section must be short, and must contain neither another Enter nor a Take nor
// any wait: threads that unmap memory wait for it.
//
// The shard spreads the counts over cache lines: goroutines that run at the same time
// should have different ones. Leave gets the same shard.
func (n *Notifier) Enter(shard uint32) bool {
	n.r.accesses[shard%accessShards].word.Add(1)
	return n.r.moved.Load() == n.r.consumed.Load() || n.turnBack(shard)
}

func (n *Notifier) turnBack(shard uint32) bool {
	n.Leave(shard)
	return false
}

// Leave ends what Enter has begun.
func (n *Notifier) Leave(shard uint32) { n.r.accesses[shard%accessShards].word.Add(accessEnded) }

// accessEnded, added to an access count, takes one from the accesses under way (the low
// half) and adds one to those that have ended (the high half).
const accessEnded = 1<<32 - 1

// Overruns returns how often a change of mappings has gone on while accesses were still
// under way, because they took longer than a tenth of a second. Such an access may have
// reached what was mapped there next.
func (n *Notifier) Overruns() uint64 { return n.r.overruns.Load() }

// Closings returns how often a range was closed before a system call.
func (n *Notifier) Closings() uint64 { return n.r.closings.Load() }

// MaxTickets is how many tickets there can be at a time.
const MaxTickets = ticketSlots

// AddTicket makes a word a ticket: each announced change of mappings adds one to it
// before the change goes on. (The thread that reads events adds it, or the thread that
// closes a range.) Other processes that read memory of this one compare the ticket
// before and after: what they have read is valid only if the ticket is the same. The word
// must lie outside the Go heap and stay mapped until RemoveTicket has returned. The error
// is ENOSPC: there are too many.
func (n *Notifier) AddTicket(word *atomic.Uint64) error {
	at := addressOf(word)
	for i := range n.r.tickets {
		if n.r.tickets[i].CompareAndSwap(0, at) {
			return nil
		}
	}
	return unix.ENOSPC
}

// RemoveTicket ends AddTicket. When it returns no thread uses the word any more.
func (n *Notifier) RemoveTicket(word *atomic.Uint64) {
	at := addressOf(word)
	for i := range n.r.tickets {
		if n.r.tickets[i].CompareAndSwap(at, 0) {
			break
		}
	}
	for n.r.moving.Load() != 0 { // some nanoseconds: a thread that adds to tickets never waits
		runtime.Gosched()
	}
}

// noteWatched sets the bits of a range's units, so that changes there close ranges first.
// The bits stay set when the range is not watched any more: closing a range in vain costs
// some microseconds, but missing one corrupts the program's memory.
func (r *ring) noteWatched(start, end uintptr) {
	first, last := uint64(start)>>unitBits, uint64(end-1)>>unitBits
	last = min(last, unitWords*64-1) // addresses above always count as watched
	for u := first; u <= last; u++ {
		word, mask := &r.units[u/64], ^uint64(0)<<(u%64)
		if u/64 == last/64 {
			mask &= ^uint64(0) >> (63 - last%64)
		}
		if word.Load()&mask != mask {
			word.Or(mask)
		}
		u |= 63 // the loop goes on in the next word
	}
	lower(&r.low, first/64)
	raise(&r.high, last/64+1)
}

func lower(word *atomic.Uint64, to uint64) {
	for old := word.Load(); old > to && !word.CompareAndSwap(old, to); old = word.Load() {
	}
}

func raise(word *atomic.Uint64, to uint64) {
	for old := word.Load(); old < to && !word.CompareAndSwap(old, to); old = word.Load() {
	}
}
