package shm

import (
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
)

// Why a channel is down.
var (
	ErrClosed     = errors.New("channel closed")
	ErrPeerClosed = errors.New("peer closed the channel")
	ErrPeerDied   = errors.New("peer ended without closing the channel")
)

// ErrFull means that there is no room in the ring now.
var ErrFull = errors.New("ring is full")

// Channel is a connection to another process: a ring in each direction.
//
// To send, take the channel with Begin, Reserve room for one or more records,
// fill them, make them visible with Commit, and let go with End. What arrives
// is handed to the sink of Inbox.Poll.
type Channel struct {
	tag   any
	in    *Inbox
	slot  int // in our inbox
	peer  peer
	tx    txEnd
	rx    rxEnd
	bell  *bell // the peer's
	limit int   // of a record, to the peer

	blocked atomic.Bool // a Reserve found no room; counted in Inbox.blocked

	down atomic.Pointer[cause]

	mu     sync.Mutex // guards conn and life against use after close
	conn   *net.UnixConn
	life   *life // the peer process's
	closed bool
}

type txEnd struct {
	endLock
	ring *Writer
}

type rxEnd struct {
	endLock
	ring *Reader
}

type cause struct{ err error }

// peer describes the other process.
type peer struct {
	pid       int    // in our numbering; 0: unknown
	nonce     uint64 // the word at nonceAddr in its memory
	nonceAddr uint64
	canRead   bool // we can read its memory
	readsUs   bool // it can read our memory
}

// Tag returns what Dial or Accept was given.
func (c *Channel) Tag() any { return c.tag }

// MaxRecord returns the longest record that can be sent.
func (c *Channel) MaxRecord() int { return c.limit }

// Err returns why the channel is down, or nil if it is not.
func (c *Channel) Err() error {
	if d := c.down.Load(); d != nil {
		return d.err
	}
	return nil
}

// Begin takes the channel for sending, and waits for another sender's End. It reports false if
// the channel is down. The caller must not block before it calls End.
func (c *Channel) Begin() bool {
	if !c.tx.enter() {
		return false
	}
	if c.down.Load() != nil {
		c.tx.leave()
		return false
	}
	return true
}

// Reserve returns room for a record of n bytes, at most MaxRecord. If it is not ok, Err
// returns why the channel is down, or nil if there is no room until the peer has read: Poll
// then calls the sink's Room when there may be some.
func (c *Channel) Reserve(typ byte, n int) (p []byte, ok bool) { return c.ReserveLeaving(typ, n, 0) }

// ReserveLeaving is Reserve, but finds no room unless about leave bytes stay free for other
// records. leave is at most half of the ring, so that an empty ring has room.
func (c *Channel) ReserveLeaving(typ byte, n, leave int) (p []byte, ok bool) {
	w := c.tx.ring
	for {
		if leave == 0 || w.Has(leave+n) {
			if p, ok = w.Reserve(typ, n); ok {
				return p, true
			}
		}
		if err := w.Err(); err != nil {
			c.fail(err)
			return nil, false
		}
		// block comes before Arm: Poll passes on the peer's signal only for channels
		// that are counted as blocked.
		c.block()
		if !w.Arm() {
			return nil, false
		}
	}
}

// PeerTicket returns what the peer's Ticket is now. A sink may call it while Poll hands it a
// record of the channel.
func (c *Channel) PeerTicket() uint64 { return c.bell.ticket.Load() }

// PeerRemaps returns what the peer's Remaps is now. The caller keeps the inbox mapped (Hold).
func (c *Channel) PeerRemaps() uint64 { return c.bell.remaps.Load() }

// PeerWords are the words of a peer's inbox that we may read: its ticket and its leases. They
// stay mapped as long as the PeerWords are reachable.
type PeerWords struct{ bell *bell }

// PeerWords returns the words of the peer. A sink may call it while Poll hands it a record of
// the channel.
func (c *Channel) PeerWords() *PeerWords {
	w := &PeerWords{c.bell}
	c.Hold()
	runtime.AddCleanup(w, (*bell).drop, c.bell)
	return w
}

// Ticket returns the peer's Inbox.Ticket.
func (w *PeerWords) Ticket() *atomic.Uint64 { return w.bell.ticket }

// Lease returns the peer's Inbox.Lease, or nil if i is out of range.
func (w *PeerWords) Lease(i int) *atomic.Uint64 {
	if i < 0 || i >= MaxLeases {
		return nil
	}
	return word(w.bell.mem, leasesAt+8*i)
}

// Has reports whether about n bytes of the ring are free; a record takes somewhat more than
// its bytes. It is called between Begin and End.
func (c *Channel) Has(n int) bool { return c.tx.ring.Has(n) }

// Given returns how many bytes the peer has given back since the ring was made, as of the
// latest Reserve or Has that had to look. It is called between Begin and End.
func (c *Channel) Given() uint64 { return c.tx.ring.given }

// Commit makes visible what was reserved since Begin or the latest Commit, and signals the
// peer.
func (c *Channel) Commit() {
	if c.tx.ring.Commit() {
		c.bell.record()
	}
}

// End lets go of the channel. What was not committed is given up.
func (c *Channel) End() {
	c.tx.ring.Abort()
	if c.tx.shut.Load() {
		c.unblock() // the sender may have blocked after Close had unblocked the channel
	}
	c.tx.leave()
}

// Send sends one record that consists of the pieces. The error is ErrFull, or why the channel
// is down.
func (c *Channel) Send(typ byte, pieces ...[]byte) error {
	n := 0
	for _, p := range pieces {
		n += len(p)
	}
	if !c.Begin() {
		return c.Err()
	}
	defer c.End()
	b, ok := c.Reserve(typ, n)
	if !ok {
		if err := c.Err(); err != nil {
			return err
		}
		return ErrFull
	}
	for _, p := range pieces {
		b = b[copy(b, p):]
	}
	c.Commit()
	return nil
}

func (c *Channel) block() {
	if !c.blocked.Swap(true) {
		c.in.blocked.Add(1)
	}
}

// unblock reports whether the channel was waiting for room.
func (c *Channel) unblock() bool {
	if !c.blocked.Swap(false) {
		return false
	}
	c.in.blocked.Add(-1)
	return true
}
