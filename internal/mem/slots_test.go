package mem

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

func TestPerm24(t *testing.T) {
	const numbers = 1 << 24
	keys := []PermKey{RandomPermKey(), {}, SeededPermKey(1)}
	if RaceEnabled {
		keys = keys[:1]
	}
	for _, key := range keys {
		p := NewPerm24(key)
		var seen [numbers / 64]uint64
		for slot := range uint32(numbers) {
			index := p.Index(slot)
			if index >= numbers || seen[index/64]&(1<<(index%64)) != 0 {
				t.Fatalf("key %x: slot %#x has index %#x, which is not its own", key, slot, index)
			}
			seen[index/64] |= 1 << (index % 64)
			if back := p.Slot(index); back != slot {
				t.Fatalf("key %x: slot %#x, index %#x, slot %#x", key, slot, index, back)
			}
		}
	}
}

// The index of a slot must not disclose that of its neighbour: over many
// keys, the distance between the first two is as often small as chance has it.
func TestPerm24Spreads(t *testing.T) {
	const keys = 1 << 16
	near, same := 0, make(map[uint32]int)
	for range keys {
		p := NewPerm24(RandomPermKey())
		d := (p.Index(1) - p.Index(0)) & (1<<24 - 1)
		if d < 1<<18 || d > 1<<24-1<<18 { // one in 32
			near++
		}
		same[d]++
	}
	if near < keys/32/2 || near > keys/32*2 {
		t.Errorf("%d of %d distances are small, should be about %d", near, keys, keys/32)
	}
	for d, n := range same {
		if n > 64 {
			t.Errorf("the distance %#x occurs %d times in %d", d, n, keys)
		}
	}
}

// add puts an object in the table that does not contain its index.
func (s *Slots[T]) add(object *T) (index uint32, ok bool) {
	return s.AddFunc(func(uint32) *T { return object })
}

func TestSlots(t *testing.T) {
	const max = 5000
	reserved := func(index uint32) bool { return index%3 == 0 }
	s := NewSlots[int](max, reserved, SeededPermKey(3))
	rng := rand.New(rand.NewPCG(1, 2))
	model := make(map[uint32]*int)
	var indexes []uint32
	for step := range 100_000 {
		if rng.IntN(5) < 3 {
			object := &step
			index, ok := s.add(object)
			if ok != (len(model) < max) {
				t.Fatalf("Add to %d of %d: %v", len(model), max, ok)
			}
			if !ok {
				continue
			}
			if model[index] != nil || reserved(index) || index >= 1<<24 {
				t.Fatalf("index %#x is taken or reserved", index)
			}
			model[index] = object
			indexes = append(indexes, index)
			continue
		}
		if len(indexes) == 0 {
			continue
		}
		k := rng.IntN(len(indexes))
		index := indexes[k]
		indexes[k] = indexes[len(indexes)-1]
		indexes = indexes[:len(indexes)-1]
		if got := s.Remove(index); got != model[index] {
			t.Fatalf("Remove(%#x) returned another object", index)
		}
		delete(model, index)
		if s.Get(index) != nil || s.Remove(index) != nil {
			t.Fatalf("%#x is there after Remove", index)
		}
	}
	if s.Len() != len(model) {
		t.Fatalf("Len is %d, should be %d", s.Len(), len(model))
	}
	seen := 0
	for index, object := range s.All() {
		if model[index] != object {
			t.Fatalf("All: %#x is another object", index)
		}
		seen++
	}
	if seen != len(model) {
		t.Fatalf("All saw %d objects of %d", seen, len(model))
	}
	for range s.All() { // ends at the break
		break
	}
	for _, index := range []uint32{1 << 24, 1<<32 - 1, 1<<31 | indexes[0]} {
		if s.Get(index) != nil || s.Remove(index) != nil {
			t.Fatalf("there is an object at %#x", index)
		}
	}
}

// A freed index comes back only after a thousand others have been freed, and
// then in the order of freeing.
func TestSlotsReuseLate(t *testing.T) {
	s := NewSlots[int](0, nil, RandomPermKey())
	var freed []uint32
	object := new(int)
	for range 3 * quarantine {
		index, _ := s.add(object)
		for age, old := range freed[max(0, len(freed)-quarantine):] {
			if old == index {
				t.Fatalf("index %#x came back %d frees later", index, quarantine-age)
			}
		}
		s.Remove(index)
		freed = append(freed, index)
	}
	if s.fresh.Load() > 2*quarantine {
		t.Errorf("%d slots for one object: freed ones are not used again", s.fresh.Load())
	}
}

// The last slots of the largest table: chunks end exactly there.
func TestSlotsChunks(t *testing.T) {
	next := uint32(0)
	for c := range numChunks {
		for place := range uint32(firstChunk << c) {
			if place > 2 && place < firstChunk<<c-2 {
				next++
				continue
			}
			if gotChunk, gotPlace := chunkOf(next); gotChunk != c || gotPlace != place {
				t.Fatalf("slot %d is at %d, %d, should be at %d, %d", next, gotChunk, gotPlace, c, place)
			}
			next++
		}
	}
	if next != MaxSlots {
		t.Fatalf("the chunks hold %d slots, not %d", next, MaxSlots)
	}
}

// Readers look up while a writer adds and removes.
func TestSlotsConcurrent(t *testing.T) {
	s := NewSlots[uint32](0, nil, RandomPermKey())
	var index atomic.Uint32
	var stop atomic.Bool
	var found atomic.Int64
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for !stop.Load() {
				i := index.Load()
				if object := s.Get(i); object != nil {
					if *object != i {
						t.Errorf("the object at %#x is for %#x", i, *object)
						return
					}
					found.Add(1)
				}
				runtime.Gosched()
			}
		})
	}
	for n := 0; n < 20_000 || found.Load() == 0; n++ {
		i, _ := s.AddFunc(func(i uint32) *uint32 { return &i })
		index.Store(i)
		if n%7 != 0 {
			s.Remove(i)
		}
	}
	stop.Store(true)
	wg.Wait()
}

// A million regions are possible, and each takes less than 300 bytes with its
// slot and backing; an empty table takes next to nothing.
func TestMillionRegions(t *testing.T) {
	regions := 1_000_000
	if RaceEnabled {
		regions = 50_000
	}
	before := heapInUse()
	table := NewTable(TableConfig{MaxRegions: regions})
	if n := heapInUse() - before; n > 16<<10 {
		t.Errorf("an empty table takes %d bytes", n)
	}
	b := make([]byte, 1)
	before = heapInUse()
	for range regions {
		h, err := NewHostBytes(b, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = table.Register(RegionConfig{Length: 1, Backing: h}); err != nil {
			t.Fatal(err)
		}
	}
	each := (heapInUse() - before) / int64(regions)
	t.Logf("%d bytes for each region", each)
	if each >= 300 {
		t.Errorf("a region takes %d bytes", each)
	}
	h, _ := NewHostBytes(b, 0, 1)
	if _, err := table.Register(RegionConfig{Length: 1, Backing: h}); err == nil {
		t.Error("one more region than the table may hold")
	}
	found := 0
	for index, r := range table.slots.All() {
		if r.Key()>>tagBits != index || table.Lookup(r.Key()) != r {
			t.Fatalf("region %#x is not at its index", r.Key())
		}
		found++
	}
	if found != regions {
		t.Errorf("found %d regions", found)
	}
}

func heapInUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Tables that share their indexes: none is given out twice, and each table finds its
// own alone.
func TestSharedSlots(t *testing.T) {
	key := SeededPermKey(7)
	a, b := NewSharedSlots[int](0, nil, key), NewSharedSlots[int](0, nil, key)
	if _, ok := a.add(new(int)); ok || !a.Short() {
		t.Fatal("a table without a range has a slot")
	}
	owner := map[uint32]*Slots[int]{}
	for i, r := range []uint32{0, 3, NumRanges - 1, 4, 700} {
		s := []*Slots[int]{a, b}[i%2]
		s.Extend(r)
		s.Extend(r) // the second time for nothing
		n := 0
		for ; !s.Short(); n++ {
			index, ok := s.add(&n)
			if !ok || owner[index] != nil {
				t.Fatalf("range %d: slot %d: %v, index %#x given before: %v", r, n, ok, index, owner[index] != nil)
			}
			owner[index] = s
		}
		if n != 1<<RangeBits {
			t.Errorf("range %d has %d slots", r, n)
		}
	}
	for index, s := range owner {
		for _, o := range []*Slots[int]{a, b} {
			if found := o.Get(index) != nil; found != (o == s) {
				t.Fatalf("index %#x: found %v", index, found)
			}
		}
	}
	n := 0
	for index := range a.All() {
		if owner[index] != a || b.Remove(index) != nil || a.Remove(index) == nil {
			t.Fatalf("index %#x", index)
		}
		n++
	}
	if n != 3<<RangeBits || a.Len() != 0 || a.Short() != (n <= quarantine) {
		t.Errorf("%d removed, %d left", n, a.Len())
	}
	if index, ok := a.add(new(int)); !ok || owner[index] != a {
		t.Error("a freed slot is not used again")
	}
}

// A key that was closed stays useless while its slot has other tags to give out: with
// one region at a time for a quarter of a million registrations, and correspondingly
// fewer if each region has several keys.
func TestClosedKeyStaysUseless(t *testing.T) {
	for _, each := range []int{1, 4} {
		guaranteed := (quarantine + 1) << tagBits / each
		table := NewTable(TableConfig{})
		last := make(map[uint32]int, guaranteed*each)
		backing := NewNull()
		for n := range guaranteed + guaranteed/2 {
			r, err := table.Register(RegionConfig{PD: 1, Length: 8, Backing: backing})
			if err != nil {
				t.Fatal(err)
			}
			for left := each; ; {
				if at, was := last[r.Key()]; was && n-at < guaranteed {
					t.Fatalf("%d keys for each region: key %#x is valid again after %d registrations, should be after %d", each, r.Key(), n-at, guaranteed)
				}
				last[r.Key()] = n
				if left--; left == 0 {
					break
				}
				if err := r.Rereg(RegionConfig{PD: 1, Length: 8, Backing: backing}); err != nil {
					t.Fatal(err)
				}
			}
			r.Close()
		}
	}
}
