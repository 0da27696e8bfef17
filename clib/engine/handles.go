package main

import (
	"slices"
	"sync"
	"sync/atomic"
)

// Handles are what C has of Go's objects. A handle's number is an index and a
// generation, which makes an old handle a wrong one; its upper half is its kind
// (VBE_* in engine.h).

const (
	indexBits = 20
	chunkBits = 10
	chunkSize = 1 << chunkBits
)

type slot[T any] struct {
	gen uint32
	obj *T
}

type chunk[T any] [chunkSize]atomic.Pointer[slot[T]]

// table holds the objects of one kind. Finding one takes no lock.
type table[T any] struct {
	kind   uint64
	chunks [1 << (indexBits - chunkBits)]atomic.Pointer[chunk[T]]

	mu   sync.Mutex // guards what follows, and changes of the above
	free []uint32   // indexes, oldest first
	next uint32     // the first index never used; 0 is none
	gens []uint16   // by index: of its last use
}

// rest is how many indexes lie idle before one is used again.
const rest = 64

// add gives an object a handle, or 0 if there are no more.
func (t *table[T]) add(obj *T) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	var i uint32
	switch {
	case len(t.free) > rest:
		i, t.free = t.free[0], t.free[1:]
	case t.next < 1<<indexBits-1:
		t.next++
		i = t.next
		for len(t.gens) <= int(i) {
			t.gens = append(t.gens, 0)
		}
	case len(t.free) > 0:
		i, t.free = t.free[0], t.free[1:]
	default:
		return 0
	}
	t.gens[i] = (t.gens[i] + 1) & (1<<(32-indexBits) - 1)
	c := t.chunks[i>>chunkBits].Load()
	if c == nil {
		c = new(chunk[T])
		t.chunks[i>>chunkBits].Store(c)
	}
	gen := uint32(t.gens[i])
	c[i&(chunkSize-1)].Store(&slot[T]{gen, obj})
	return t.kind<<32 | uint64(gen)<<indexBits | uint64(i)
}

// get finds an object, or nil if the handle is not of one.
func (t *table[T]) get(h uint64) *T {
	i := uint32(h) & (1<<indexBits - 1)
	c := t.chunks[i>>chunkBits].Load()
	if h>>32 != t.kind || c == nil {
		return nil
	}
	s := c[i&(chunkSize-1)].Load()
	if s == nil || s.gen != uint32(h)>>indexBits {
		return nil
	}
	return s.obj
}

// remove forgets a handle, and reports whether it was one.
func (t *table[T]) remove(h uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.get(h) == nil {
		return false
	}
	i := uint32(h) & (1<<indexBits - 1)
	t.chunks[i>>chunkBits].Load()[i&(chunkSize-1)].Store(nil)
	t.free = append(t.free, i)
	return true
}

// listeners are the objects that events are for, by the device's number for them: a
// queue pair may be open more than once.
type listeners[T any] struct {
	mu       sync.Mutex // guards byNumber; held while an event is delivered
	byNumber map[uint32][]*T
}

func (l *listeners[T]) add(number uint32, o *T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byNumber == nil {
		l.byNumber = map[uint32][]*T{}
	}
	l.byNumber[number] = append(l.byNumber[number], o)
}

// remove returns when no event is being delivered to the object, nor will be.
func (l *listeners[T]) remove(number uint32, o *T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := slices.DeleteFunc(l.byNumber[number], func(p *T) bool { return p == o })
	if l.byNumber[number] = left; len(left) == 0 {
		delete(l.byNumber, number)
	}
}

func (l *listeners[T]) each(number uint32, f func(*T)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, o := range l.byNumber[number] {
		f(o)
	}
}
