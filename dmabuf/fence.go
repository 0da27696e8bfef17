package dmabuf

import (
	"context"
	"maps"
	"slices"
	"sync"
)

// Fence is work that ends some time: it is signalled once, for ever. A fence that is pending
// costs memory and nothing else; no goroutine belongs to it.
//
// The zero value is a pending fence.
type Fence struct {
	imported bool // FenceFromFD has made it

	mu       sync.Mutex // guards what follows
	signaled bool
	err      error
	done     chan struct{}          // closed when it is signalled; nil: Done was not called yet
	calls    map[uint64]func(error) // those of OnSignal, by their number; nil: none
	next     uint64                 // the number of the next one
}

// NewFence returns a pending fence.
func NewFence() *Fence { return new(Fence) }

// Signal ends the work that the fence stands for; err is not nil if the work failed. It
// reports whether the fence was pending: a fence keeps its first signal.
//
// The functions of OnSignal run on the caller's goroutine, in the order in which they came, before
// Signal returns.
func (f *Fence) Signal(err error) bool {
	f.mu.Lock()
	if f.signaled {
		f.mu.Unlock()
		return false
	}
	f.signaled, f.err = true, err
	calls := f.calls
	f.calls = nil
	if f.done != nil {
		close(f.done)
	}
	f.mu.Unlock()
	for _, number := range slices.Sorted(maps.Keys(calls)) {
		calls[number](err)
	}
	return true
}

// Signaled reports whether the fence was signalled.
func (f *Fence) Signaled() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.signaled
}

// Err returns what the fence was signalled with; nil if it is pending.
func (f *Fence) Err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// Done returns a channel that is closed when the fence is signalled.
func (f *Fence) Done() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.done == nil {
		f.done = make(chan struct{})
		if f.signaled {
			close(f.done)
		}
	}
	return f.done
}

// OnSignal has do called when the fence is signalled; at once, before OnSignal returns, if it
// was already. do must not block. cancel reports whether it has kept do from being called.
func (f *Fence) OnSignal(do func(error)) (cancel func() bool) {
	f.mu.Lock()
	if f.signaled {
		err := f.err
		f.mu.Unlock()
		do(err)
		return func() bool { return false }
	}
	number := f.next
	f.next++
	if f.calls == nil {
		f.calls = make(map[uint64]func(error))
	}
	f.calls[number] = do
	f.mu.Unlock()
	return func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		_, had := f.calls[number]
		delete(f.calls, number)
		return had
	}
}

// Wait waits until the fence is signalled, and returns its error; or the context's, if that
// ends first.
func (f *Fence) Wait(ctx context.Context) error {
	select {
	case <-f.Done():
		return f.Err()
	default:
	}
	select {
	case <-f.Done():
		return f.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
