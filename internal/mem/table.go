package mem

import (
	"crypto/rand"
	"iter"
	mathrand "math/rand/v2"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
)

// The way of a key, top-down: Register, in region.go, takes a slot and gives it
// out; open finds the region again and opens a section on it; Invalidate makes the key
// useless, on behalf of a peer; the counters come last.

// A key is 32 bits: a 24-bit index, which is the permuted number of a slot, and
// an 8-bit tag, which is another one for each of the 256 keys that the slot has one
// after the other (Table.add). The program chooses the tag of a type 2 window, at each
// bind.
const tagBits = 8

// DefaultMaxRegions is the limit of a table whose configuration has none.
const DefaultMaxRegions = 1 << 20

// TableConfig configures a key table; the zero value is good.
type TableConfig struct {
	MaxRegions int    // regions and windows at the same time; 0 means DefaultMaxRegions, and there can be no more than MaxSlots
	Seed       uint64 // tests: makes the keys repeatable; 0 means unpredictable ones
	// Killed, if set, is called when a region is closed, invalidated, revoked, changed
	// or suspended: it ends the accesses that other processes make to the memory
	// themselves. With wait it returns when they are over, and the memory may be used for
	// something else. Without, Killed does not wait: the memory is suspended, and about to
	// move to other pages, and Resumed is called when the suspension is over; or its owner
	// may move it at any time (Movable), and must not wait for another process. Then Left is
	// called before the call that closes or changes the region returns.
	Killed  func(r *Region, wait bool)
	Resumed func(r *Region)
	// Invalidated, if set, is called instead when a region is invalidated, which happens
	// under the locks of queue pairs: it does not wait. If other processes still access
	// the memory it returns a channel that is closed when they do not any more.
	Invalidated func(r *Region) <-chan struct{}
	// Inside and Left, if set, are about other processes that Killed was told not to wait for.
	// Inside reports whether one of them may still access the memory. Left waits until none
	// does; it is called without the lock of the region.
	Inside func(r *Region) bool
	Left   func(r *Region)
}

// Table is the key table of a device: it gives out keys for regions and finds
// the regions again.
type Table struct {
	slots  *Slots[Region]
	random func() uint32 // 16 bits: a slot's first tag and its step; called under the table's lock

	killed      func(r *Region, wait bool)
	resumed     func(r *Region)
	invalidated func(r *Region) <-chan struct{}
	peersInside func(r *Region) bool
	peersLeft   func(r *Region)

	stale  atomic.Uint64
	paging Paging
	moved  [counterShards]atomic.Pointer[movedBytes] // each made when it is first needed
}

// Regions iterates over the regions, without windows. Those that come and go
// meanwhile may be missed or seen.
func (t *Table) Regions() iter.Seq[*Region] {
	return func(yield func(*Region) bool) {
		for _, r := range t.slots.All() {
			if r.window == nil && r.Alive() && !yield(r) {
				return
			}
		}
	}
}

// Windows iterates over the windows in the same way.
func (t *Table) Windows() iter.Seq[*Window] {
	return func(yield func(*Window) bool) {
		for _, r := range t.slots.All() {
			if r.window != nil && !r.Closed() && !yield(r.window) {
				return
			}
		}
	}
}

// counterShards is how many copies of the byte counters there are: threads
// that work on different regions then seldom share a cache line.
const counterShards = 64

// movedBytes counts bytes by kind of source and of target.
type movedBytes struct {
	bytes [NumKinds][NumKinds]atomic.Uint64
	_     [64]byte // keeps neighbours off the cache line
}

// NewTable returns an empty table.
func NewTable(cfg TableConfig) *Table {
	if cfg.MaxRegions <= 0 {
		cfg.MaxRegions = DefaultMaxRegions
	}
	key, random := RandomPermKey(), randomTag
	if cfg.Seed != 0 {
		key = SeededPermKey(cfg.Seed)
		random = mathrand.New(mathrand.NewPCG(cfg.Seed, 0)).Uint32
	}
	// The index 0 stays unused, so that no key is 0: programs take a zero key
	// for "none".
	zero := func(index uint32) bool { return index == 0 }
	return &Table{slots: NewSlots[Region](cfg.MaxRegions, zero, key), random: random, killed: cfg.Killed, resumed: cfg.Resumed, invalidated: cfg.Invalidated, peersInside: cfg.Inside, peersLeft: cfg.Left}
}

func randomTag() uint32 {
	var b [2]byte
	rand.Read(b[:]) // never fails: it ends the program instead
	return uint32(b[0]) | uint32(b[1])<<8
}

// Len returns the number of regions and windows that hold a key, dead or alive.
func (t *Table) Len() int { return t.slots.Len() }

// Lookup returns the region with a key, or nil. It may be dead by the time the
// caller looks at it.
func (t *Table) Lookup(key uint32) *Region {
	r := t.slots.Get(key >> tagBits)
	if r == nil || r.key.Load() != key {
		return nil
	}
	return r
}

// Whole calls f, inside a read section, with all bytes of the region that a key and an
// address name, if they are memory of the host or a dma-buf, in one piece, and there are such
// rights to them.
func (t *Table) Whole(key uint32, addr uint64, acc ib.Access, who Actor, f func(r *Region, b []byte)) {
	r, _, kind := t.open(key, addr, 1, acc, who, shutToBytes)
	if kind != FaultNone {
		return
	}
	defer r.exit()
	if r.window != nil || r.mkey != nil || r.kind != KindPinned && r.kind != KindDMABuf || !r.plain {
		return
	}
	if b, kind := r.backing.Run(0, r.length, acc); kind == FaultNone && uint64(len(b)) == r.length {
		f(r, b)
	}
}

// open finds a region by its key, opens a section on it (region.open) and returns the
// place of a range in its backing.
func (t *Table) open(key uint32, addr, n uint64, acc ib.Access, who Actor, shut uint64) (r *Region, off uint64, kind FaultKind) {
	if r = t.Lookup(key); r == nil {
		return nil, 0, FaultKey
	}
	if off, _, kind = r.open(key, addr, n, acc, who, shut); kind != FaultNone {
		r = nil
	}
	return r, off, kind
}

// open opens a section on a region that was found by a key, and on the region behind a
// window, unless one of the bits of shut is set there. It returns the place of the range
// in the backing, and the leaf: the region whose backing that is, nil for an indirect
// key, which has several. With FaultPending the leaf is the region that is shut.
//
// All checks of an access are made here, in the order state, key, domain, rights,
// bounds, and last whether the memory is there. Operations of no bytes at all do not
// check their key (IBA 9.7.4.1.5, C9-88): their callers do not come here.
func (r *Region) open(key uint32, addr, n uint64, acc ib.Access, who Actor, shut uint64) (off uint64, leaf *Region, kind FaultKind) {
	s := r.state.Load() // both looks are those of enter
	if s&shutToLooks != 0 {
		return 0, r, whyShut(s)
	}
	if s = r.state.Add(1); s&shutToLooks != 0 {
		r.leave()
		return 0, r, whyShut(s)
	}
	// What follows stands inside the section, because a region's key, bounds and
	// rights may change while it is out of use.
	off = addr - r.iova
	switch {
	case r.key.Load() != key:
		kind = FaultKey
	case r.pd != who.PD:
		kind = FaultDomain
	case acc&^r.access != 0:
		kind = FaultAccess
	case off > r.length || n > r.length-off: // addr below iova: off is larger than any length (Register)
		kind = FaultBounds
	case r.window != nil:
		if leaf, kind = r.window.enterParent(acc, who, shut); kind == FaultNone {
			return r.base + off, leaf, FaultNone
		}
	case r.mkey != nil:
		return off, nil, FaultNone
	case s&shut == 0: // shutLocked sees the section from here on
		return off, r, FaultNone
	default:
		leaf, kind = r, whyShut(s)
	}
	r.leave()
	return 0, leaf, kind
}

// IsHost reports whether n bytes can be accessed, as far as is known without touching
// them, and are memory of the host. They may be suspended.
func (t *Table) IsHost(key uint32, addr, n uint64, acc ib.Access, who Actor) bool {
	r, _, kind := t.open(key, addr, n, acc, who, shutToLooks)
	if kind != FaultNone {
		return false
	}
	is := r.kind == KindPinned || r.kind == KindOnDemand || r.kind == KindImplicit
	r.exit()
	return is
}

// Invalidate makes a key useless on behalf of a peer, that is, of SEND with
// invalidate; it returns when no access to the region is under way any more. From then
// on the key faults with FaultDead until the region is closed. Only regions
// that allow it can be invalidated, and doing it again is no fault (IBA
// 10.6.5). FaultPending means that the key is useless, but another process or an engine
// still accesses the memory: the caller invalidates again after Await.
func (t *Table) Invalidate(key uint32, who Actor) Fault { return t.invalidate(key, who, true) }

// InvalidateOwn is Invalidate on behalf of the program, that is, of LOCAL_INV: it may
// do that to indirect keys that are sheltered from peers.
func (t *Table) InvalidateOwn(key uint32, who Actor) Fault { return t.invalidate(key, who, false) }

func (t *Table) invalidate(key uint32, who Actor, forPeer bool) Fault {
	r := t.Lookup(key)
	if r == nil {
		return Fault{Kind: FaultKey, Key: key}
	}
	kind, left := r.invalidate(key, who, forPeer)
	if left != nil {
		return leaving(key, left)
	}
	return Fault{Kind: kind, Key: key}.orNone()
}

// leaving is the fault of an invalidation that has to wait until left is closed: then no other
// process or engine accesses the memory any more.
func leaving(key uint32, left <-chan struct{}) Fault {
	return Fault{Kind: FaultPending, Key: key, wanted: &wanted{left: left, brief: true}}
}

// Moved returns how many bytes have been copied from memory of one kind to
// memory of another, where this table's regions were the target, or the source
// of a copy to raw bytes.
func (t *Table) Moved(from, to Kind) uint64 {
	var sum uint64
	for i := range t.moved {
		if m := t.moved[i].Load(); m != nil {
			sum += m.bytes[from][to].Load()
		}
	}
	return sum
}

// Paging returns the counters of on-demand paging.
func (t *Table) Paging() *Paging { return &t.paging }

// StaleFaults returns how often memory turned out to be gone when it was
// accessed.
func (t *Table) StaleFaults() uint64 { return t.stale.Load() }
