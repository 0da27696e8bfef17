package shm

// Lanes: how a peer accesses memory of ours by itself, while we let it.
//
// The owner of an inbox gives a peer a lane with a pass, a number that is never used
// again, and shows the pass on the lane. The peer enters the lane with it, looks
// whether it is still shown, stores or loads, looks again, counts and leaves. The owner
// takes the pass away and then looks whether the peer is inside: one of the two sees the
// other, so when the owner has seen nobody, nobody is in there and nobody will be.
//
// An owner that only moves the memory elsewhere need not wait for a peer that is inside.
// What the peer counts, it has stored or loaded before the pass was taken away; the rest
// it does not count, and repeats it by the ring.
//
// A lane is used again for other peers. One that comes with an old pass may get in the
// way of the new one, who then goes another way for once; it stores nothing.
//
// Each lane has two cache lines, of which each side writes one:
//
//	pass      the owner's: who may enter; 0: nobody
//	inside    the peer's: the pass of who is inside; 0: nobody
//	counts    the peer's: what it has done with this pass (GrantCounts)

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// MaxGrants is how many lanes an inbox has.
	MaxGrants = 1024

	grantsAt   = inboxPage
	grantBytes = 2 * line
	insideAt   = line
	countsAt   = insideAt + 8
)

// GrantCounts is what a peer has done by a lane.
type GrantCounts [6]uint64

// Indexes of GrantCounts. Packets are those that it would have been.
const (
	GrantWrites = iota
	GrantWritePackets
	GrantWritten // bytes
	GrantReads
	GrantReadPackets // of the answers
	GrantRead        // bytes
)

// Less returns what came since.
func (c GrantCounts) Less(before *GrantCounts) GrantCounts {
	for i := range c {
		c[i] -= before[i]
	}
	return c
}

// lanes are those of an inbox.
type grantSlots struct {
	free []int  // have been used before; guarded by the inbox's lock, as is what follows
	used int    // have ever been
	last uint64 // pass
}

// Grant is the owner's end of a lane.
type Grant struct {
	in     *Inbox
	life   *life // the peer's
	index  int
	serial uint64
	words  grantWords
	over   atomic.Bool // see Over
}

type grantWords struct {
	serial, inside *atomic.Uint64
	counts         []byte
}

func grantWordsOf(mem []byte, index int) grantWords {
	b := mem[grantsAt+index*grantBytes:][:grantBytes]
	return grantWords{serial: word(b, 0), inside: word(b, insideAt), counts: b[countsAt:]}
}

// NewGrant opens a lane to our inbox for the peer, or returns nil if there is none left, or
// the channel is closed. The peer does not know of it yet.
func (c *Channel) NewGrant() *Grant {
	if !c.life.hold() {
		return nil
	}
	l := c.in.newGrant()
	if l == nil {
		c.life.drop()
		return nil
	}
	l.life = c.life
	return l
}

func (in *Inbox) newGrant() *Grant {
	in.mu.Lock()
	defer in.mu.Unlock()
	k := &in.grants
	if in.closed || len(k.free) == 0 && k.used == MaxGrants {
		return nil
	}
	l := &Grant{in: in, index: k.used}
	if n := len(k.free); n > 0 {
		l.index = k.free[n-1]
		k.free = k.free[:n-1]
	} else {
		k.used++
	}
	k.last++
	l.serial, l.words = k.last, grantWordsOf(in.mem, l.index)
	for i := range (GrantCounts{}) {
		word(l.words.counts, 8*i).Store(0) // nobody is inside who would count
	}
	l.words.inside.Store(0) // nor is anybody, but one who came in vain and ended there
	l.words.serial.Store(l.serial)
	return l
}

// Number and Pass are what the peer must be told.
func (l *Grant) Number() int    { return l.index }
func (l *Grant) Serial() uint64 { return l.serial }

// Shut takes the pass away. Who is inside may still store; nobody else will.
func (l *Grant) Shut() { l.words.serial.CompareAndSwap(l.serial, 0) }

// Open tells whether the pass is still shown.
func (l *Grant) Open() bool { return l.words.serial.Load() == l.serial }

// Inside tells whether the peer is inside.
func (l *Grant) Inside() bool { return l.words.inside.Load() == l.serial }

// Over reports whether the peer will neither store nor count any more: the lane is shut,
// and since then the peer was seen outside, or has ended. (It may seem to be inside again
// for a moment, if it tries to enter in vain.) Whether the channel works says nothing.
func (l *Grant) Over() bool {
	if l.over.Load() {
		return true
	}
	if l.Open() || l.Inside() && !l.life.ended() {
		return false
	}
	l.over.Store(true)
	return true
}

// Await waits until a lane that is shut is over. A peer stays inside for the time of a
// copy. One that is stopped there keeps us waiting until it goes on, or is killed: the
// memory is not free before.
func (l *Grant) Await() {
	if !l.life.hold() {
		return // the lane is freed: it was over
	}
	defer l.life.drop()
	pause := minGrantLook
	for i := 0; l.Inside() && !l.over.Load(); i++ {
		if i < grantSpins {
			runtime.Gosched()
			continue
		}
		if l.Over() {
			return
		}
		time.Sleep(pause)
		pause = min(2*pause, maxGrantLook)
	}
	l.over.Store(true)
}

// Await first gives way grantSpins times, and then sleeps between two looks: a copy is soon
// done, a peer that is stopped may stay for hours.
const (
	grantSpins   = 64
	minGrantLook = 50 * time.Microsecond
	maxGrantLook = 2 * time.Millisecond
)

// Counts returns what the peer has done.
func (l *Grant) Counts() (c GrantCounts) {
	for i := range c {
		c[i] = word(l.words.counts, 8*i).Load()
	}
	return c
}

// Free gives the lane back, once. It is over, or the peer was never told of it.
func (l *Grant) Free() {
	defer l.life.drop()
	l.in.mu.Lock()
	defer l.in.mu.Unlock()
	if l.in.closed {
		return // the words may be gone
	}
	l.Shut()
	l.words.inside.CompareAndSwap(l.serial, 0)
	l.in.grants.free = append(l.in.grants.free, l.index)
}

// PeerGrant is the peer's end: one user at a time.
type PeerGrant struct {
	serial uint64
	words  grantWords
	counts GrantCounts
}

// PeerGrant returns a lane that the peer has given us, nil if there is no such. It is
// used between Hold and Release.
func (c *Channel) PeerGrant(number int, pass uint64) *PeerGrant {
	if number < 0 || number >= MaxGrants || pass == 0 {
		return nil
	}
	return &PeerGrant{serial: pass, words: grantWordsOf(c.bell.mem, number)}
}

// Enter reports whether we may access the memory now; then Leave follows.
func (l *PeerGrant) Enter() bool {
	if !l.Shown() || !l.words.inside.CompareAndSwap(0, l.serial) {
		return false
	}
	if l.Shown() {
		return true
	}
	l.back()
	return false
}

// back ends an Enter in vain. The lane may be somebody else's already, who is inside.
func (l *PeerGrant) back() { l.words.inside.CompareAndSwap(l.serial, 0) }

// Shown tells whether the pass is still good.
func (l *PeerGrant) Shown() bool { return l.words.serial.Load() == l.serial }

// Count counts a message of so many packets and bytes, which has been stored or loaded,
// before Leave: what is GrantWrites or GrantReads. It reports false, and counts nothing, if
// the pass was taken away meanwhile: the owner may have moved the memory, and the message
// has to go by the ring.
//
// The compare-and-swap changes nothing. It is a full barrier between the copy and the look
// at the pass: an owner that takes the pass away after that look finds everything stored.
func (l *PeerGrant) Count(what, packets, bytes int) bool {
	if !l.words.inside.CompareAndSwap(l.serial, l.serial) || !l.Shown() {
		return false
	}
	c := l.counts[what : what+3 : what+3]
	c[0]++
	c[1] += uint64(packets)
	c[2] += uint64(bytes)
	for i, v := range c {
		store(l.words.counts, 8*(what+i), v)
	}
	return true
}

// Leave ends what Enter began.
func (l *PeerGrant) Leave() { l.words.inside.Store(0) } // and with it is seen what was stored

// Hold keeps the peer's inbox mapped, until Release. A sink may call it while it is
// given a record of the channel.
func (c *Channel) Hold()    { c.bell.uses.Add(1) }
func (c *Channel) Release() { c.bell.drop() }
