package mem

// Numbers that peers see (keys, queue pair numbers) and the objects behind
// them, top-down:
//
//  1. Add takes a slot: one that was freed long ago, or a fresh one.
//  2. Perm24 hides the slot's number: the index that goes out does not disclose
//     how many there are or which comes next (predictable keys and
//     queue pair numbers are a known attack on RoCE).
//  3. Get goes back from index to slot to object: no lock and no hashing.
//  4. Remove frees the slot, to be used again as late as possible.

import (
	"crypto/rand"
	"encoding/binary"
	"iter"
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// PermKey is the key of a Perm24.
type PermKey [permRounds + 1]uint64

const permRounds = 4

// RandomPermKey returns an unpredictable key.
func RandomPermKey() PermKey {
	var k PermKey
	var b [8]byte
	for i := range k {
		rand.Read(b[:]) // never fails: it ends the program instead
		k[i] = binary.LittleEndian.Uint64(b[:])
	}
	return k
}

// SeededPermKey returns the same key for the same seed: for tests.
func SeededPermKey(seed uint64) PermKey {
	var k PermKey
	for i := range k {
		seed = splitmix(seed)
		k[i] = seed
	}
	return k
}

// splitmix is one step of a generator that is good enough to spread seeds.
func splitmix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Perm24 is a keyed permutation of the numbers below 2^24: a balanced Feistel
// network on two halves of 12 bits, whose round function is the top of a
// product with a random 64-bit factor. It is meant to hide an order from peers
// at the price of a few nanoseconds; it is no cipher, and nothing but the
// difficulty of guessing rests on it: rights are checked at every access all
// the same.
type Perm24 struct {
	factor [permRounds]uint64
	white  uint32 // is added (xor) first, because zero times anything is zero
}

// NewPerm24 returns the permutation that a key selects.
func NewPerm24(key PermKey) Perm24 {
	p := Perm24{white: uint32(key[permRounds]) % (1 << indexBits)}
	for i := range p.factor {
		p.factor[i] = key[i] | 1 // an even factor would lose bits
	}
	return p
}

// mix is the round function: 12 bits from 12 bits.
func mix(half, factor uint64) uint64 { return half * factor >> 52 }

// Index returns the number that goes out for a slot. The slot is below 2^24.
func (p *Perm24) Index(slot uint32) uint32 {
	x := uint64(slot ^ p.white)
	l, r := x>>12, x&0xfff
	l ^= mix(r, p.factor[0])
	r ^= mix(l, p.factor[1])
	l ^= mix(r, p.factor[2])
	r ^= mix(l, p.factor[3])
	return uint32(l<<12 | r)
}

// Slot is the inverse of Index. The index is below 2^24.
func (p *Perm24) Slot(index uint32) uint32 {
	x := uint64(index)
	l, r := x>>12, x&0xfff
	r ^= mix(l, p.factor[3])
	l ^= mix(r, p.factor[2])
	r ^= mix(l, p.factor[1])
	l ^= mix(r, p.factor[0])
	return uint32(l<<12|r) ^ p.white
}

// placePerm is a keyed permutation of the numbers below 2^24 for numbers by which the kernel
// chooses a socket (sys.Place): the top bits of a slot are a socket's place, and those below
// them are permuted as by Perm24, in halves of 8 bits.
type placePerm struct{ Perm24 }

const lowSlot = 1<<PlaceSlotBits - 1

func (p *placePerm) Index(slot uint32) uint32 {
	x := uint64((slot ^ p.white) & lowSlot)
	l, r := x>>8, x&0xff
	l ^= mix8(r, p.factor[0])
	r ^= mix8(l, p.factor[1])
	l ^= mix8(r, p.factor[2])
	r ^= mix8(l, p.factor[3])
	return sys.PlaceNumber(slot>>PlaceSlotBits, uint32(l<<8|r))
}

func (p *placePerm) Slot(index uint32) uint32 {
	x := uint64(index & lowSlot)
	l, r := x>>8, x&0xff
	r ^= mix8(l, p.factor[3])
	l ^= mix8(r, p.factor[2])
	r ^= mix8(l, p.factor[1])
	l ^= mix8(r, p.factor[0])
	return sys.Place(index)<<PlaceSlotBits | (uint32(l<<8|r)^p.white)&lowSlot
}

// mix8 is mix for 8 bits.
func mix8(half, factor uint64) uint64 { return half * factor >> 56 }

const (
	indexBits  = 24
	firstChunk = 64 // slots in the first chunk; each further one has twice as many
	numChunks  = 18

	// MaxSlots is the most objects that Slots hold: all chunks together, which
	// is 64 less than there are indexes.
	MaxSlots = firstChunk<<numChunks - firstChunk

	// quarantine is how many slots are freed after a slot before it is used
	// again, while there are fresh ones.
	quarantine = 1024

	// RangeBits: a table that shares its indexes with others gets slots in
	// ranges of so many bits; there are NumRanges of them. They are small, so that
	// most slots of a range are used before the next process gets another one.
	RangeBits = 4
	NumRanges = 1 << (indexBits - RangeBits)
	// PlaceSlotBits: each place of a socket has so many bits of slots.
	PlaceSlotBits = 16
)

// Slots maps unpredictable 24-bit indexes to objects. Lookups take no lock and
// never wait; a looked-up object may have been removed by the time the caller
// uses it, so objects carry a state of their own.
type Slots[T any] struct {
	perm     Perm24
	max      int
	reserved func(index uint32) bool
	ranges   *ranges // nil: all slots are this table's

	// chunks are allocated when first needed and never move. A chunk is there
	// before fresh includes one of its slots: a reader that has loaded fresh may
	// read the chunks of the slots below it. Chunk c holds firstChunk<<c slots.
	chunks [numChunks][]slot[T]
	fresh  atomic.Uint32 // slots that have ever been used, or skipped

	mu         sync.Mutex // guards everything below, and all writes to fresh, chunks and slots
	used       int        // objects in the table
	free       int        // slots in the queue of freed ones
	head, tail uint32     // the queue: the oldest and the youngest freed slot
}

type slot[T any] struct {
	object atomic.Pointer[T]
	next   uint32 // in the queue of freed slots
	memo   uint16 // what the last object left for the next one; 0: there was none
}

// NewSlots returns an empty table for at most max objects (0, and anything
// above it: MaxSlots). Indexes for which reserved, if not nil,
// returns true are never given out.
func NewSlots[T any](max int, reserved func(index uint32) bool, key PermKey) *Slots[T] {
	if max <= 0 || max > MaxSlots {
		max = MaxSlots
	}
	return &Slots[T]{perm: NewPerm24(key), max: max, reserved: reserved}
}

// ranges maps the slots of a table to those of all tables that share the
// indexes: the table's first range of slots is the first that it was given, and
// so on.
type ranges struct {
	all  atomic.Pointer[[]uint32] // the ranges of this table; nil: none. What is in the list never changes
	mine [sys.NumPlaces]atomic.Pointer[placeRanges]
}

// placeRanges has the ranges of a place: which one of this table each is, plus 1; 0: none of
// this table.
type placeRanges [1 << (PlaceSlotBits - RangeBits)]atomic.Uint32

// list returns the ranges of the table.
func (r *ranges) list() []uint32 {
	if all := r.all.Load(); all != nil {
		return *all
	}
	return nil
}

// find returns which range of this table has a slot of the shared ones, plus 1; 0: none.
func (r *ranges) find(slot uint32) uint32 {
	p := r.mine[slot>>PlaceSlotBits].Load()
	if p == nil {
		return 0
	}
	return p[slot&lowSlot>>RangeBits].Load()
}

// NewSharedSlots returns an empty table that has no slots of its own: Extend
// gives it some. Tables with the same key whose ranges differ give out different
// indexes.
func NewSharedSlots[T any](max int, reserved func(index uint32) bool, key PermKey) *Slots[T] {
	s := NewSlots[T](max, reserved, key)
	s.ranges = new(ranges)
	return s
}

// Short reports whether the table would have to use a slot again too early, or
// has none at all: then it wants another range.
func (s *Slots[T]) Short() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used < s.max && s.free <= quarantine && s.fresh.Load() >= s.limit()
}

// Extend gives the table a range of the shared slots.
func (s *Slots[T]) Extend(r uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r >= NumRanges || s.ranges.find(r<<RangeBits) != 0 {
		return
	}
	all := append(s.ranges.list(), r)
	p := &s.ranges.mine[r>>(PlaceSlotBits-RangeBits)]
	if p.Load() == nil {
		p.Store(new(placeRanges))
	}
	p.Load()[r<<RangeBits&lowSlot>>RangeBits].Store(uint32(len(all)))
	s.ranges.all.Store(&all)
}

// limit is how many slots may be used.
func (s *Slots[T]) limit() uint32 {
	if s.ranges == nil {
		return MaxSlots
	}
	return min(uint32(len(s.ranges.list()))<<RangeBits, MaxSlots)
}

// index returns the index of a slot.
func (s *Slots[T]) index(number uint32) uint32 {
	if s.ranges == nil {
		return s.perm.Index(number)
	}
	p := placePerm{s.perm}
	return p.Index(s.ranges.list()[number>>RangeBits]<<RangeBits | number&(1<<RangeBits-1))
}

// number is the inverse of index; ok is false if the slot is another table's.
func (s *Slots[T]) number(index uint32) (number uint32, ok bool) {
	if s.ranges == nil {
		return s.perm.Slot(index), true
	}
	p := placePerm{s.perm}
	number = p.Slot(index)
	r := s.ranges.find(number)
	return (r-1)<<RangeBits | number&(1<<RangeBits-1), r != 0
}

// AddFunc puts an object in the table and returns its index; ok is false when the
// table is full. make makes the object: it is called with the index, under the table's
// lock, since the object has to have the index before a lookup can find it.
func (s *Slots[T]) AddFunc(make func(index uint32) *T) (index uint32, ok bool) {
	return s.addNext(func(index uint32, _ uint16) *T { return make(index) })
}

// addNext is AddFunc for an object that continues what the last one in its slot
// has left (removeLeaving): 0 in a fresh slot.
func (s *Slots[T]) addNext(make func(index uint32, memo uint16) *T) (index uint32, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used >= s.max {
		return 0, false
	}
	number, ok := s.takeLocked()
	if !ok {
		return 0, false
	}
	index = s.index(number)
	at := s.at(number)
	at.object.Store(make(index, at.memo))
	s.used++
	return index, true
}

// takeLocked chooses a slot. A freed one rests until quarantine others have
// been freed after it, as long as there are fresh ones: an index that a peer
// may still hold then comes back late.
func (s *Slots[T]) takeLocked() (number uint32, ok bool) {
	for s.free <= quarantine && s.fresh.Load() < s.limit() {
		number = s.fresh.Load()
		if c, _ := chunkOf(number); s.chunks[c] == nil {
			s.chunks[c] = make([]slot[T], firstChunk<<c)
		}
		s.fresh.Store(number + 1)
		if s.reserved == nil || !s.reserved(s.index(number)) {
			return number, true
		}
	}
	if s.free == 0 {
		return 0, false
	}
	number = s.head
	s.head = s.at(number).next
	s.free--
	return number, true
}

// chunkOf splits a slot's number into its chunk and its place in there.
func chunkOf(number uint32) (chunk int, place uint32) {
	n := number + firstChunk
	chunk = bits.Len32(n) - bits.Len32(firstChunk)
	return chunk, n - firstChunk<<chunk
}

// at returns a slot below fresh.
func (s *Slots[T]) at(number uint32) *slot[T] {
	c, i := chunkOf(number)
	return &s.chunks[c][i]
}

// Get returns the object with an index, or nil.
func (s *Slots[T]) Get(index uint32) *T {
	if index>>indexBits != 0 {
		return nil
	}
	number, ok := s.number(index)
	if !ok || number >= s.fresh.Load() {
		return nil
	}
	return s.at(number).object.Load()
}

// Remove takes the object with an index out of the table and returns it, or
// nil if there is none.
func (s *Slots[T]) Remove(index uint32) *T { return s.removeLeaving(index, 0) }

// removeLeaving is Remove, and leaves something for the next object in the slot.
func (s *Slots[T]) removeLeaving(index uint32, memo uint16) *T {
	s.mu.Lock()
	defer s.mu.Unlock()
	object := s.Get(index)
	if object == nil {
		return nil
	}
	number, _ := s.number(index)
	at := s.at(number)
	at.memo = memo
	at.object.Store(nil)
	if s.free == 0 {
		s.head = number
	} else {
		s.at(s.tail).next = number
	}
	s.tail = number
	s.free++
	s.used--
	return object
}

// Len returns the number of objects.
func (s *Slots[T]) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}

// All iterates over the objects, in no order that means anything. Objects that
// are added or removed meanwhile may be missed or seen.
func (s *Slots[T]) All() iter.Seq2[uint32, *T] {
	return func(yield func(uint32, *T) bool) {
		for number := range s.fresh.Load() {
			object := s.at(number).object.Load()
			if object != nil && !yield(s.index(number), object) {
				return
			}
		}
	}
}
