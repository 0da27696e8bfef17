package device

import (
	"context"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// fifo is an unbounded queue that any number of goroutines may wait on. It
// holds events: few, and none may be lost.
type fifo[T any] struct {
	ready chan struct{} // has a token while items or closed are set

	mu     sync.Mutex // guards what follows
	items  ring[T]
	closed bool
}

func (f *fifo[T]) init() { f.ready = make(chan struct{}, 1) }

func (f *fifo[T]) signal() {
	select {
	case f.ready <- struct{}{}:
	default:
	}
}

func (f *fifo[T]) push(v T) {
	f.mu.Lock()
	f.items.push(v)
	f.mu.Unlock()
	f.signal()
}

// pop takes the oldest item and reports whether there was one.
func (f *fifo[T]) pop() (v T, ok, closed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.items.len() > 0 {
		v, ok = f.items.pop(), true
	}
	if f.items.len() > 0 || f.closed {
		f.signal() // for the next goroutine that waits
	}
	return v, ok, f.closed
}

// wait takes the oldest item, waiting for one.
func (f *fifo[T]) wait(ctx context.Context) (v T, closed bool, err error) {
	for {
		v, ok, closed := f.pop()
		if ok {
			return v, false, nil
		}
		if closed {
			return v, true, nil
		}
		select {
		case <-f.ready:
		case <-ctx.Done():
			return v, false, ctx.Err()
		}
	}
}

// remove drops the items that match.
func (f *fifo[T]) remove(match func(T) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.items.remove(match)
}

func (f *fifo[T]) close() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.signal()
}

// eventQueue holds the asynchronous events of a device.
type eventQueue struct{ fifo[ib.AsyncEvent] }

func (q *eventQueue) next(ctx context.Context) (ib.AsyncEvent, error) {
	ev, closed, err := q.wait(ctx)
	if closed {
		return ev, ib.Errorf("get_async_event", syscall.ENODEV, "the device is closed")
	}
	return ev, err
}
