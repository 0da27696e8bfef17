package shm

import (
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// The inbox segment is a page of words that its owner polls and its peers set, and
// lanes (grant.go).
//
//	pending  a bit for each slot: its ring may hold records
//	sleep    odd: the owner sleeps, or is about to. It counts up with every
//	         sleep, so that who wakes up late does not end the next one
//	room     a bit for each slot: the peer has read from the ring to it, and
//	         there may be room again
//	nonce    a random number that only this process has at this address
//	ticket   a number of the owner's own, which its peers can look at
//	leases   more of these, for single queue pairs
//
// pending and sleep share a cache line, which nobody writes while owner and
// peers are busy with each other: the owner leaves the bits of busy rings set.
const (
	inboxPage  = 4096
	inboxBytes = inboxPage + MaxGrants*grantBytes

	pendingAt = 0
	sleepAt   = slotWords * 8
	roomAt    = line
	nonceAt   = 2 * line
	ticketAt  = 3 * line
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

// bell is the peer's inbox, as far as one channel needs it.
type bell struct {
	pending, room *atomic.Uint64 // the words with our bit
	sleep         *atomic.Uint64
	bit           uint64
	event         *sys.Event

	ticket *atomic.Uint64

	mem  []byte
	uses atomic.Int32 // ends of rings that may still ring it, and who holds it; the last one closes
}

// newBell makes a bell of a mapped inbox and its event, for a channel of two
// rings. The slot has been checked.
func newBell(mem []byte, event *sys.Event, slot int) *bell {
	index, bit := slotBit(slot)
	w := wordsOf(mem)
	b := &bell{pending: w.pending[index], room: w.room[index], sleep: w.sleep, bit: bit, event: event,
		ticket: word(mem, ticketAt), mem: mem}
	b.uses.Store(2)
	return b
}

// record tells the peer that there is a record, which has just been stored with
// full order: the peer either sees it when it looks a last time before it
// clears its bit or sleeps, or we see here that it has done so.
func (b *bell) record() { b.ring(b.pending) }

// roomAgain tells the peer that its ring has room.
func (b *bell) roomAgain() { b.ring(b.room) }

func (b *bell) ring(w *atomic.Uint64) {
	if w.Load()&b.bit == 0 {
		w.Or(b.bit)
	}
	if s := b.sleep.Load(); s&1 != 0 {
		// First the event, then the word: were we to die in between, or be
		// stopped, others would still see a peer that sleeps.
		b.event.Signal()
		b.sleep.CompareAndSwap(s, s+1)
	}
}

// drop gives up one use.
func (b *bell) drop() {
	if b.uses.Add(-1) == 0 {
		_ = sys.Unmap(b.mem) // it was mapped: it cannot fail
		_ = b.event.Close()  // there is nothing to lose in it
	}
}
