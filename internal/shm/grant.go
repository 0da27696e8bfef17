package shm

// Grants: while a grant is open, a peer accesses memory of the owner process by itself.
//
// The owner of an inbox gives a grant a serial, a number that is never used again, and shows
// the serial in a slot of the inbox. The peer enters: it writes the serial to the slot's
// inside word and checks that the serial is still shown. Then it stores or loads, checks
// again, counts and leaves. To revoke the grant, the owner clears the serial and then reads
// the inside word. Each side writes its own word before it reads the other's, so at least one
// of the two sees the other: if the owner finds the peer outside, the peer is not accessing
// the memory and will not access it again.
//
// An owner that only moves the memory elsewhere need not wait for a peer that is inside. The
// peer counts only what it has stored or loaded before the serial was cleared; what it could
// not count, it repeats by the ring.
//
// A slot is used again for other peers. A peer that still has an old serial stores nothing,
// but its attempt to enter may keep the new peer out once: the new peer then uses the ring.
//
// Each slot has two cache lines. The owner writes the first, the peer the second:
//
//	serial    the owner's: the serial of the open grant; 0: no peer may enter
//	inside    the peer's: the serial of the grant that it is inside; 0: none
//	counts    the peer's: what it has done by this grant (GrantCounts)

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// MaxGrants is how many grants an inbox has room for.
	MaxGrants = 1024

	grantsAt   = inboxPage
	grantBytes = 2 * line
	insideAt   = line
	countsAt   = insideAt + 8
)

// GrantCounts is what a peer has done by a grant.
type GrantCounts [6]uint64

// Indexes of GrantCounts. Packets are those that the messages would have taken on a network.
const (
	GrantWrites = iota
	GrantWritePackets
	GrantWritten // bytes
	GrantReads
	GrantReadPackets // of the responses
	GrantRead        // bytes
)

// Since returns what was counted since the counts were before.
func (c GrantCounts) Since(before *GrantCounts) GrantCounts {
	for i := range c {
		c[i] -= before[i]
	}
	return c
}

// grantSlots are the slots of an inbox for grants. The inbox's lock guards them.
type grantSlots struct {
	free []int  // indexes of free slots that have been used before
	used int    // slots below this index have been used
	last uint64 // the latest serial
}

// Grant is the owner's end of a grant.
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

// NewGrant opens a grant in our inbox for the peer. It returns nil if no slot is free, or the
// channel or the inbox is closed. The caller sends the peer Number and Serial.
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
		word(l.words.counts, 8*i).Store(0) // no peer counts here: the slot's last grant was over
	}
	l.words.inside.Store(0) // left by a peer that died in an Enter with an old serial
	l.words.serial.Store(l.serial)
	return l
}

// Number and Serial are what the peer needs for Channel.PeerGrant.
func (l *Grant) Number() int    { return l.index }
func (l *Grant) Serial() uint64 { return l.serial }

// Shut clears the serial. A peer that is inside may still store; no other can enter.
func (l *Grant) Shut() { l.words.serial.CompareAndSwap(l.serial, 0) }

// Open reports whether the serial is still shown.
func (l *Grant) Open() bool { return l.words.serial.Load() == l.serial }

// Inside reports whether the peer is inside.
func (l *Grant) Inside() bool { return l.words.inside.Load() == l.serial }

// Over reports whether the peer will neither store nor count any more: the grant is shut, and
// since then the peer was seen outside, or its process has ended. (Inside may be true again
// for a moment, while the peer tries to enter in vain.) That the channel is down proves
// nothing: the process may live on.
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

// Await waits until a grant that is shut is over. A peer stays inside for the time of a copy.
// For a peer process that is stopped inside, Await waits until it goes on or is killed: until
// then it may store to the memory.
func (l *Grant) Await() {
	if !l.life.hold() {
		return // the grant was freed, so it was over
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

// Await first yields grantSpins times, and then sleeps between two looks: a copy is soon
// done, but a peer that is stopped may stay inside for hours.
const (
	grantSpins   = 64
	minGrantLook = 50 * time.Microsecond
	maxGrantLook = 2 * time.Millisecond
)

// Counts returns what the peer has counted.
func (l *Grant) Counts() (c GrantCounts) {
	for i := range c {
		c[i] = word(l.words.counts, 8*i).Load()
	}
	return c
}

// Free gives the slot back. It is called once, when the grant is over or if the peer never
// got its number.
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

// PeerGrant is the peer's end of a grant. One goroutine at a time uses it.
type PeerGrant struct {
	serial uint64
	words  grantWords
	counts GrantCounts
}

// PeerGrant returns our end of a grant that the peer has opened for us, or nil if the number
// or the serial is out of range. The caller uses it between Hold and Release.
func (c *Channel) PeerGrant(number int, serial uint64) *PeerGrant {
	if number < 0 || number >= MaxGrants || serial == 0 {
		return nil
	}
	return &PeerGrant{serial: serial, words: grantWordsOf(c.bell.mem, number)}
}

// Enter reports whether we may access the memory now. If so, the caller must call Leave.
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

// back undoes an Enter that came too late. The slot may belong to a new grant already, whose
// peer is inside: its serial stays.
func (l *PeerGrant) back() { l.words.inside.CompareAndSwap(l.serial, 0) }

// Shown reports whether the owner still shows our serial.
func (l *PeerGrant) Shown() bool { return l.words.serial.Load() == l.serial }

// Count counts a message that the caller has stored or loaded since Enter; what is GrantWrites
// or GrantReads. It reports false, and counts nothing, if the owner has cleared the serial
// meanwhile: the owner may have moved the memory, and the message has to go by the ring.
//
// The compare-and-swap changes nothing. It is a full barrier between the copy and the check
// of the serial: an owner that clears the serial after that check finds everything stored.
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
func (l *PeerGrant) Leave() { l.words.inside.Store(0) } // after the copy: Store is a barrier

// Hold keeps the peer's inbox mapped until Release. Only a sink that is being called with a
// record of the channel, or a caller that keeps the inbox mapped already, may call it.
func (c *Channel) Hold()    { c.bell.uses.Add(1) }
func (c *Channel) Release() { c.bell.drop() }
