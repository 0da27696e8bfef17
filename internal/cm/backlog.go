package cm

// Requests that no program has seen yet, and the memory of those that found no room.
//
// A flood of forged requests fills every backlog. What tells a real request from a forged one is that
// its sender repeats it. So the core remembers those that it has turned away, in a few bits each, and a
// request that comes again goes before those that come for the first time.

import (
	"encoding/binary"
	"hash/maphash"
	"net/netip"
	"time"
)

// Backlog holds the requests to a listener that its program has not seen, at most Max of them. One more
// takes the place of a random one, as the comment of Core.makeRoom says. The peer of that one hears
// nothing: it will repeat its request.
type Backlog struct {
	Max int

	fresh, again pool
}

// Len returns how many requests there are.
func (b *Backlog) Len() int { return len(b.fresh.conns) + len(b.again.conns) }

// pool returns the part for requests that come again, or for those that do not.
func (b *Backlog) pool(again bool) *pool {
	if again {
		return &b.again
	}
	return &b.fresh
}

// hasRoom reports whether a request with a communication id of its sender finds room, and makes it. A
// request that finds none is remembered.
func (c *Core) hasRoom(now Time, b *Backlog, q *Request, id uint32) bool {
	if b == nil {
		return true
	}
	h := c.turnedAway.hash(q.Path.Remote, q.GUID, id)
	q.Again = c.turnedAway.has(now, h)
	if c.makeRoom(now, b, q.Again) {
		return true
	}
	c.turnedAway.add(now, h)
	return false
}

// await lets a request wait for the program.
func (n *Conn) await(b *Backlog) {
	if b == nil {
		n.core.admit(n)
		return
	}
	n.backlog = b
	b.pool(n.request.Again).add(n)
}

// makeRoom makes room for one more request, and reports whether there is any: one in eight requests that
// come for the first time takes the place of a random one of its kind. If each did, none would be more
// likely to be seen, and a flood would cost more. One that comes again takes the place of a random one
// that does not, or, if there is none, of a random one of its kind.
func (c *Core) makeRoom(now Time, b *Backlog, again bool) bool {
	if b.Len() < b.Max {
		return true
	}
	from := &b.fresh
	if len(from.conns) == 0 && again {
		from = &b.again
	}
	if len(from.conns) == 0 || !again && c.cfg.Rand()%8 != 0 {
		return false
	}
	old := from.random(c.cfg.Rand())
	c.turnedAway.add(now, c.turnedAway.hash(old.path.Remote, old.guid, old.remoteID))
	c.drop(old)
	return true
}

// drop forgets a request. The program gets EventDropped if it has the event of the request.
func (c *Core) drop(old *Conn) {
	known := old.unseen == nil
	old.idle()
	if known {
		c.emit(Event{Type: EventDropped, Conn: old})
	}
}

// Seen takes a request out of its listener's backlog: the program is at work on it.
func (n *Conn) Seen() {
	if n.backlog == nil || n.pool == nil {
		return
	}
	n.pool.remove(n)
	n.backlog = nil
	n.core.admit(n)
}

// The memory of requests that were turned away: two generations of bits, of which the younger one is
// written. A request is remembered for at least generation, which is longer than peers wait before they
// repeat it (4.6 s), and for at most twice as long.
const (
	generation = 8 * time.Second
	turnedBits = 24 // 2 MiB each; of a flood of 100,000 requests a second, at most one in 500 is taken for one that comes again
	turnedKeys = 4  // bits of each request
)

// turned is such a memory. It takes no room before the first request is turned away, nor when none was
// for some time.
type turned struct {
	seed     maphash.Seed
	since    Time // when the younger generation began
	now, old []uint64
}

// hash returns the hash of a request. Its seed is secret, so that nobody can make two that are equal.
func (t *turned) hash(from netip.Addr, guid uint64, id uint32) uint64 {
	var b [28]byte
	a := from.As16()
	copy(b[:], a[:])
	binary.LittleEndian.PutUint64(b[16:], guid)
	binary.LittleEndian.PutUint32(b[24:], id)
	return maphash.Bytes(t.seed, b[:])
}

// turn begins new generations when it is time.
func (t *turned) turn(now Time) {
	if t.now == nil && t.old == nil || now-t.since < generation {
		return
	}
	if now-t.since >= 2*generation {
		t.now = nil // it is as old as the other one
	}
	t.now, t.old, t.since = nil, t.now, t.since+generation
}

// add remembers a request.
func (t *turned) add(now Time, h uint64) {
	t.turn(now)
	if t.now == nil {
		t.now = make([]uint64, 1<<turnedBits/64)
		if t.old == nil {
			t.since = now
		}
	}
	for i := range uint64(turnedKeys) {
		bit := bitOf(h, i)
		t.now[bit/64] |= 1 << (bit % 64)
	}
}

// has reports whether a request was turned away before. Now and then it takes another one for it.
func (t *turned) has(now Time, h uint64) bool {
	t.turn(now)
	return hasBits(t.now, h) || hasBits(t.old, h)
}

func hasBits(bits []uint64, h uint64) bool {
	if bits == nil {
		return false
	}
	for i := range uint64(turnedKeys) {
		if bit := bitOf(h, i); bits[bit/64]&(1<<(bit%64)) == 0 {
			return false
		}
	}
	return true
}

// bitOf returns the number of one of a request's bits: two halves of the hash make all of them.
func bitOf(h, i uint64) uint64 {
	return (h + i*(h>>32|1)) % (1 << turnedBits)
}
