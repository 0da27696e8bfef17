package main

import (
	"slices"
	"sync"
	"sync/atomic"
)

// C refers to Go's objects by handles. The upper half of a handle is its kind (VBE_* in
// backend.h). The lower half is an index and a generation: the generation changes each time
// the index is used, so that a stale handle finds nothing.

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
	next uint32     // the highest index used so far; index 0 is never used
	gens []uint16   // by index: the generation of its last use
}

// rest is how many indexes must be free before one is used again.
const rest = 64

// add returns a new handle for an object, or 0 if the table is full.
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

// get returns the object of a handle, or nil if the handle is stale or wrong.
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

// remove removes a handle, and reports whether it was valid.
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

// listeners are the objects that events are for, by the device's number. One number may have
// several: a queue pair can be open more than once.
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

// remove removes an object. No event is delivered to it after remove has returned.
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
