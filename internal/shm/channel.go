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
// is handed out by Inbox.Poll.
type Channel struct {
	tag   any
	in    *Inbox
	slot  int // in our inbox
	peer  peer
	tx    txEnd
	rx    rxEnd
	bell  *bell // the peer's
	limit int   // of a record, to the peer

	blocked atomic.Bool // waits for room, and is counted in the inbox

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

// peer is what we know of the other process.
type peer struct {
	pid       int    // in our numbering; 0: unknown
	nonce     uint64 // the word that it has at nonceAddr
	nonceAddr uint64
	canRead   bool // we can read its memory
	readsUs   bool // it can read ours
}

// Tag returns what Dial or Accept was given.
func (c *Channel) Tag() any { return c.tag }

// MaxRecord returns the longest record that can be sent.
func (c *Channel) MaxRecord() int { return c.limit }

// Err returns why the channel is down, or nil: it was closed by us, or by the peer, or
// it is broken.
func (c *Channel) Err() error {
	if d := c.down.Load(); d != nil {
		return d.err
	}
	return nil
}

// Begin takes the channel for sending, and waits for others that do. It reports
// false if the channel is down. Nothing may be waited for before End.
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

// Reserve returns room for a record of n bytes, at most MaxRecord. If it is not
// ok, Err says why; if that is nil there is no room now, nor will be before the
// peer has read, and the sink's Room will be called when it may be worth
// trying again.
func (c *Channel) Reserve(typ byte, n int) (p []byte, ok bool) { return c.ReserveLeaving(typ, n, 0) }

// ReserveLeaving does so if about that many bytes stay free for others: at most
// half of the ring, which an empty one has.
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
		// In this order: who waits for a signal must be known to wait.
		c.block()
		if !w.Arm() {
			return nil, false
		}
	}
}

// PeerTicket returns what the peer's Ticket is now. A sink may call it while it is
// given a record of the channel.
func (c *Channel) PeerTicket() uint64 { return c.bell.ticket.Load() }

// PeerWords are the words of a peer that it lets us look at. They stay mapped as long as
// they are referred to.
type PeerWords struct{ bell *bell }

// PeerWords returns the words of the peer. A sink may call it while it is given a record of
// the channel.
func (c *Channel) PeerWords() *PeerWords {
	w := &PeerWords{c.bell}
	c.Hold()
	runtime.AddCleanup(w, (*bell).drop, c.bell)
	return w
}

// Ticket returns the peer's Inbox.Ticket.
func (w *PeerWords) Ticket() *atomic.Uint64 { return w.bell.ticket }

// Lease returns the peer's Inbox.Lease, nil if there is no such.
func (w *PeerWords) Lease(i int) *atomic.Uint64 {
	if i < 0 || i >= MaxLeases {
		return nil
	}
	return word(w.bell.mem, leasesAt+8*i)
}

// Has tells whether about n bytes of the ring are free: the room of a record is
// that of its bytes, and somewhat more. It is called between Begin and End.
func (c *Channel) Has(n int) bool { return c.tx.ring.Has(n) }

// Given returns how many bytes the peer has given back since the ring was made, as
// the latest Reserve has found. It is called between Begin and End.
func (c *Channel) Given() uint64 { return c.tx.ring.given }

// Commit makes visible what was reserved since Begin or the latest Commit, and
// tells the peer.
func (c *Channel) Commit() {
	if c.tx.ring.Commit() {
		c.bell.record()
	}
}

// End lets go of the channel. What was not committed is given up.
func (c *Channel) End() {
	c.tx.ring.Abort()
	if c.tx.shut.Load() {
		c.unblock() // Close may have come too early to do so
	}
	c.tx.leave()
}

// Send sends one record: the pieces in a row. The error is ErrFull, or why the
// channel is down.
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
