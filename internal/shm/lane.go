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
//	counts    the peer's: what it has done with this pass (LaneCounts)

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// MaxLanes is how many lanes an inbox has.
	MaxLanes = 1024

	lanesAt   = inboxPage
	laneBytes = 2 * line
	insideAt  = line
	countsAt  = insideAt + 8
)

// LaneCounts is what a peer has done by a lane.
type LaneCounts [6]uint64

// Indexes of LaneCounts. Packets are those that it would have been.
const (
	LaneWrites = iota
	LaneWritePackets
	LaneWritten // bytes
	LaneReads
	LaneReadPackets // of the answers
	LaneRead        // bytes
)

// Less returns what came since.
func (c LaneCounts) Less(before *LaneCounts) LaneCounts {
	for i := range c {
		c[i] -= before[i]
	}
	return c
}

// lanes are those of an inbox.
type lanes struct {
	free []int  // have been used before; guarded by the inbox's lock, as is what follows
	used int    // have ever been
	last uint64 // pass
}

// Lane is the owner's end of a lane.
type Lane struct {
	in    *Inbox
	life  *life // the peer's
	index int
	pass  uint64
	words laneWords
	over  atomic.Bool // see Over
}

type laneWords struct {
	pass, inside *atomic.Uint64
	counts       []byte
}

func laneOf(mem []byte, index int) laneWords {
	b := mem[lanesAt+index*laneBytes:][:laneBytes]
	return laneWords{pass: word(b, 0), inside: word(b, insideAt), counts: b[countsAt:]}
}

// NewLane opens a lane to our inbox for the peer, or returns nil if there is none left, or
// the channel is closed. The peer does not know of it yet.
func (c *Channel) NewLane() *Lane {
	if !c.life.hold() {
		return nil
	}
	l := c.in.newLane()
	if l == nil {
		c.life.drop()
		return nil
	}
	l.life = c.life
	return l
}

func (in *Inbox) newLane() *Lane {
	in.mu.Lock()
	defer in.mu.Unlock()
	k := &in.lanes
	if in.closed || len(k.free) == 0 && k.used == MaxLanes {
		return nil
	}
	l := &Lane{in: in, index: k.used}
	if n := len(k.free); n > 0 {
		l.index = k.free[n-1]
		k.free = k.free[:n-1]
	} else {
		k.used++
	}
	k.last++
	l.pass, l.words = k.last, laneOf(in.mem, l.index)
	for i := range (LaneCounts{}) {
		word(l.words.counts, 8*i).Store(0) // nobody is inside who would count
	}
	l.words.inside.Store(0) // nor is anybody, but one who came in vain and ended there
	l.words.pass.Store(l.pass)
	return l
}

// Number and Pass are what the peer must be told.
func (l *Lane) Number() int  { return l.index }
func (l *Lane) Pass() uint64 { return l.pass }

// Shut takes the pass away. Who is inside may still store; nobody else will.
func (l *Lane) Shut() { l.words.pass.CompareAndSwap(l.pass, 0) }

// Open tells whether the pass is still shown.
func (l *Lane) Open() bool { return l.words.pass.Load() == l.pass }

// Inside tells whether the peer is inside.
func (l *Lane) Inside() bool { return l.words.inside.Load() == l.pass }

// Over reports whether the peer will neither store nor count any more: the lane is shut,
// and since then the peer was seen outside, or has ended. (It may seem to be inside again
// for a moment, if it tries to enter in vain.) Whether the channel works says nothing.
func (l *Lane) Over() bool {
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
func (l *Lane) Await() {
	if !l.life.hold() {
		return // the lane is freed: it was over
	}
	defer l.life.drop()
	pause := minLaneLook
	for i := 0; l.Inside() && !l.over.Load(); i++ {
		if i < laneSpins {
			runtime.Gosched()
			continue
		}
		if l.Over() {
			return
		}
		time.Sleep(pause)
		pause = min(2*pause, maxLaneLook)
	}
	l.over.Store(true)
}

// Await first gives way laneSpins times, and then sleeps between two looks: a copy is soon
// done, a peer that is stopped may stay for hours.
const (
	laneSpins   = 64
	minLaneLook = 50 * time.Microsecond
	maxLaneLook = 2 * time.Millisecond
)

// Counts returns what the peer has done.
func (l *Lane) Counts() (c LaneCounts) {
	for i := range c {
		c[i] = word(l.words.counts, 8*i).Load()
	}
	return c
}

// Free gives the lane back, once. It is over, or the peer was never told of it.
func (l *Lane) Free() {
	defer l.life.drop()
	l.in.mu.Lock()
	defer l.in.mu.Unlock()
	if l.in.closed {
		return // the words may be gone
	}
	l.Shut()
	l.words.inside.CompareAndSwap(l.pass, 0)
	l.in.lanes.free = append(l.in.lanes.free, l.index)
}

// PeerLane is the peer's end: one user at a time.
type PeerLane struct {
	pass   uint64
	words  laneWords
	counts LaneCounts
}

// PeerLane returns a lane that the peer has given us, nil if there is no such. It is
// used between Hold and Release.
func (c *Channel) PeerLane(number int, pass uint64) *PeerLane {
	if number < 0 || number >= MaxLanes || pass == 0 {
		return nil
	}
	return &PeerLane{pass: pass, words: laneOf(c.bell.mem, number)}
}

// Enter reports whether we may access the memory now; then Leave follows.
func (l *PeerLane) Enter() bool {
	if !l.Shown() || !l.words.inside.CompareAndSwap(0, l.pass) {
		return false
	}
	if l.Shown() {
		return true
	}
	l.back()
	return false
}

// back ends an Enter in vain. The lane may be somebody else's already, who is inside.
func (l *PeerLane) back() { l.words.inside.CompareAndSwap(l.pass, 0) }

// Shown tells whether the pass is still good.
func (l *PeerLane) Shown() bool { return l.words.pass.Load() == l.pass }

// Count counts a message of so many packets and bytes, which has been stored or loaded,
// before Leave: what is LaneWrites or LaneReads. It reports false, and counts nothing, if
// the pass was taken away meanwhile: the owner may have moved the memory, and the message
// has to go by the ring.
//
// The compare-and-swap changes nothing. It is a full barrier between the copy and the look
// at the pass: an owner that takes the pass away after that look finds everything stored.
func (l *PeerLane) Count(what, packets, bytes int) bool {
	if !l.words.inside.CompareAndSwap(l.pass, l.pass) || !l.Shown() {
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
func (l *PeerLane) Leave() { l.words.inside.Store(0) } // and with it is seen what was stored

// Hold keeps the peer's inbox mapped, until Release. A sink may call it while it is
// given a record of the channel.
func (c *Channel) Hold()    { c.bell.uses.Add(1) }
func (c *Channel) Release() { c.bell.drop() }
