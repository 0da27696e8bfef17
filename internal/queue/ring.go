package queue

import "sync/atomic"

// ring is a first-in, first-out queue of a fixed size. The lock of its owner guards
// it; len alone may be called without the lock.
type ring[T any] struct {
	count atomic.Int64 // elements in it
	slots []T
	head  int // the slot of the oldest element
}

func (r *ring[T]) len() int { return int(r.count.Load()) }

// at returns element i, counted from the oldest. Those from len up to the size of the
// ring are free: an element is written there before add makes it part of the ring.
func (r *ring[T]) at(i int) *T { return &r.slots[r.slot(i)] }

// slot returns the index of the slot of element i.
func (r *ring[T]) slot(i int) int {
	if i += r.head; i >= len(r.slots) {
		i -= len(r.slots)
	}
	return i
}

// add appends the n elements that were written behind the last.
func (r *ring[T]) add(n int) { r.count.Store(r.count.Load() + int64(n)) }

// drop removes the n oldest elements. Their slots keep what they hold.
func (r *ring[T]) drop(n int) {
	r.head = r.slot(n)
	r.add(-n)
}

// truncate removes all but the n oldest elements, and clears the slots of the others.
func (r *ring[T]) truncate(n int) {
	var none T
	for i := n; i < r.len(); i++ {
		*r.at(i) = none
	}
	r.count.Store(int64(n))
}

// moveTo makes slots, to which the elements are copied, the slots of the ring.
func (r *ring[T]) moveTo(slots []T) {
	for i := range r.len() {
		slots[i] = *r.at(i)
	}
	r.slots, r.head = slots, 0
}
