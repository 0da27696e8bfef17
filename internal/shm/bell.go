package shm

import (
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// The inbox segment is a page of words that its owner polls and its peers set, and
// the slots of grants (grant.go).
//
//	pending  a bit for each slot: its ring may hold records
//	sleep    odd: the owner sleeps, or is about to. It counts up with every
//	         sleep, so that a peer that is late to end one sleep does not end the
//	         next
//	room     a bit for each slot: the peer has read from the owner's ring to it, where
//	         there may be room again
//	nonce    a random number that only this process has at this address
//	ticket   a number that only the owner writes and its peers read
//	remaps   another one, beside the ticket: how often mappings of the owner have changed
//	leases   more such numbers, for single queue pairs
//
// pending and sleep share a cache line, which neither the owner nor a peer writes while
// records keep coming: the owner leaves the bits of busy rings set.
const (
	inboxPage  = 4096
	inboxBytes = inboxPage + MaxGrants*grantBytes

	pendingAt = 0
	sleepAt   = slotWords * 8
	roomAt    = line
	nonceAt   = 2 * line
	ticketAt  = 3 * line
	remapsAt  = ticketAt + 8
	leasesAt  = 4 * line

	slotWords = 4

	// MaxPeers is how many channels an inbox has at most.
	MaxPeers = slotWords*64 - 1

	// MaxLeases is how many leases an inbox has.
	MaxLeases = (inboxPage - leasesAt) / 8
)

// inboxWords are the words of an inbox segment.
type inboxWords struct {
	pending, room [slotWords]*atomic.Uint64
	sleep, nonce  *atomic.Uint64
}

func wordsOf(mem []byte) (w inboxWords) {
	for i := range slotWords {
		w.pending[i] = word(mem, pendingAt+8*i)
		w.room[i] = word(mem, roomAt+8*i)
	}
	w.sleep, w.nonce = word(mem, sleepAt), word(mem, nonceAt)
	return w
}

// slotBit returns where the bit of a slot is.
func slotBit(slot int) (index int, bit uint64) { return slot / 64, 1 << (slot % 64) }

// bell is the part of the peer's inbox that one channel uses.
type bell struct {
	pending, room *atomic.Uint64 // the words with our bit
	sleep         *atomic.Uint64
	bit           uint64
	event         *sys.Event

	ticket, remaps *atomic.Uint64

	mem  []byte
	uses atomic.Int32 // the two ends of rings, and each Hold; the last drop closes
}

// newBell makes a bell of a mapped inbox and its event, for a channel of two
// rings. The caller has checked the slot.
func newBell(mem []byte, event *sys.Event, slot int) *bell {
	index, bit := slotBit(slot)
	w := wordsOf(mem)
	b := &bell{pending: w.pending[index], room: w.room[index], sleep: w.sleep, bit: bit, event: event,
		ticket: word(mem, ticketAt), remaps: word(mem, remapsAt), mem: mem}
	b.uses.Store(2)
	return b
}

// record signals the peer that there is a record. The caller has just stored it with a full
// barrier: either the peer sees it in its last look, after it has cleared our bit or announced
// its sleep, or we see here that the bit is clear or the peer sleeps.
func (b *bell) record() { b.ring(b.pending) }

// roomAgain signals the peer that its ring to us has room.
func (b *bell) roomAgain() { b.ring(b.room) }

func (b *bell) ring(w *atomic.Uint64) {
	if w.Load()&b.bit == 0 {
		w.Or(b.bit)
	}
	if s := b.sleep.Load(); s&1 != 0 {
		// First the event, then the word: if this process is killed or stopped in
		// between, other processes still see that the peer sleeps, and wake it.
		b.event.Signal()
		b.sleep.CompareAndSwap(s, s+1)
	}
}

// drop gives up one use.
func (b *bell) drop() {
	if b.uses.Add(-1) == 0 {
		_ = sys.Unmap(b.mem) // it was mapped: it cannot fail
		_ = b.event.Close()  // an event holds nothing that could be lost
	}
}
