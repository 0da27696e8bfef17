package device

// ring is a first-in first-out queue that grows when it must and does not
// allocate otherwise. Its owner locks it.
type ring[T any] struct {
	buf     []T
	head, n int
}

func (r *ring[T]) len() int { return r.n }

func (r *ring[T]) at(i int) *T { return &r.buf[(r.head+i)%len(r.buf)] }

func (r *ring[T]) push(v T) {
	if r.n == len(r.buf) {
		grown := make([]T, max(8, 2*r.n))
		for i := range r.n {
			grown[i] = *r.at(i)
		}
		r.buf, r.head = grown, 0
	}
	r.n++
	*r.at(r.n - 1) = v
}

// pop takes the oldest item. There must be one.
func (r *ring[T]) pop() T {
	v := *r.at(0)
	clear(r.buf[r.head : r.head+1])
	r.head = (r.head + 1) % len(r.buf)
	r.n--
	return v
}

// remove drops the items that match, keeping the order of the others.
func (r *ring[T]) remove(match func(T) bool) {
	for range r.n {
		if v := r.pop(); !match(v) {
			r.push(v)
		}
	}
}
