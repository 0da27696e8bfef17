package sys

// Accesses to watched memory, bracketed so that whoever changes a mapping can wait for
// them. An access that Enter has let in is over before an munmap, madvise or brk of
// watched memory returns, and before a closed range (notifier_close.c) is changed. The
// C side of it is notifier_access.c.

import (
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Enter counts an access to watched memory as under way, unless a change of mappings is
// announced that is not applied yet. Then it reports false, nothing is counted, and the
// caller takes what there is (Take), applies it and tries again.
//
// Between Enter and Leave the caller looks whether its memory is stale, and copies: a
// look before Enter is worth nothing, since a change may have been announced and applied
// in between. The section must be short, and must contain neither another Enter nor a
// Take nor a wait for anybody: those who unmap memory wait for it.
//
// The shard spreads the counts over cache lines: any number that goroutines which run at
// the same time do not share. Leave gets the same one.
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

// accessEnded takes one from the accesses under way and adds one to those that have
// ended.
const accessEnded = 1<<32 - 1

// Overruns returns how often a change of mappings has gone on without having waited for
// all accesses that were under way, because they took longer than a tenth of a second.
// Such an access may have reached what is mapped there now.
func (n *Notifier) Overruns() uint64 { return n.r.overruns.Load() }

// Closings returns how often a range was closed before a system call.
func (n *Notifier) Closings() uint64 { return n.r.closings.Load() }

// MaxTickets is how many words can be counted up.
const MaxTickets = ticketSlots

// AddTicket has a word counted up by one before any change of mappings that is announced
// goes on, by the thread that reads events or by whoever closes a range. Other processes
// that read memory of this one compare the word before and after: what they have read
// counts only if it is the same. The word lies outside the Go heap and is mapped until
// RemoveTicket has returned. The error is ENOSPC: there are too many.
func (n *Notifier) AddTicket(word *atomic.Uint64) error {
	at := addressOf(word)
	for i := range n.r.tickets {
		if n.r.tickets[i].CompareAndSwap(0, at) {
			return nil
		}
	}
	return unix.ENOSPC
}

// RemoveTicket ends AddTicket. When it returns nobody uses the word any more.
func (n *Notifier) RemoveTicket(word *atomic.Uint64) {
	at := addressOf(word)
	for i := range n.r.tickets {
		if n.r.tickets[i].CompareAndSwap(at, 0) {
			break
		}
	}
	for n.r.moving.Load() != 0 { // for some nanoseconds: it waits for nobody
		runtime.Gosched()
	}
}

// noteWatched notes the units of a range. They stay noted when they are not watched any
// more: to close a range in vain costs some microseconds, to miss one costs the program
// its memory.
func (r *ring) noteWatched(start, end uintptr) {
	first, last := uint64(start)>>unitBits, uint64(end-1)>>unitBits
	last = min(last, unitWords*64-1) // what lies above counts as watched anyway
	for u := first; u <= last; u++ {
		word, mask := &r.units[u/64], ^uint64(0)<<(u%64)
		if u/64 == last/64 {
			mask &= ^uint64(0) >> (63 - last%64)
		}
		if word.Load()&mask != mask {
			word.Or(mask)
		}
		u |= 63 // the next one is in the next word
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
