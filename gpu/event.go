package gpu

import (
	"reflect"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
)

// Fence is work that ends some time, which a stream can wait for: a *[dmabuf.Fence], a *[NamedFence] or an
// *[Event].
type Fence interface {
	ib.Fence
	// OnSignal has do called when the fence is signalled.
	OnSignal(do func(error)) (cancel func() bool)
}

// NamedFence is a fence with a name, which takes part in the search for waits that cannot end also where a queue
// pair of package verbs waits for it or signals it.
type NamedFence struct {
	dmabuf.Fence
	name string
}

// NewFence returns a pending fence. The name is for people.
func NewFence(name string) *NamedFence { return &NamedFence{name: name} }

// String returns the name.
func (f *NamedFence) String() string { return f.name }

// Queued notes that a queue pair waits for the fence or signals it: see [ib.QueuedFence].
func (f *NamedFence) Queued(queue any, name string, signals bool, limit time.Duration) error {
	return waits.enter(queue, name, f, signals, limit)
}

// Event is a place in a stream: a fence that is signalled when the stream comes to it.
type Event struct {
	dmabuf.Fence
	stream string
	at     atomic.Int64 // when, in nanoseconds since started; 0: not yet
}

// String names the event.
func (e *Event) String() string { return "an event of " + e.stream }

// Queued notes that a queue pair waits for the event: see [ib.QueuedFence].
func (e *Event) Queued(queue any, name string, signals bool, limit time.Duration) error {
	if signals {
		return ib.Errorf("post_send", syscall.EINVAL, "%v is signalled by its stream alone", e)
	}
	return waits.enter(queue, name, e, signals, limit)
}

// started is what the times of events are counted from.
var started = time.Now()

// Record queues an event. It is signalled, with the stream's error, when everything is executed that was queued
// before. It fails with [ErrClosed].
func (s *Stream) Record() (*Event, error) {
	e := &Event{stream: s.name}
	err := s.submit(&operation{name: "gpu_record", run: nil, signal: stamped{e}})
	if err != nil {
		return nil, err
	}
	return e, nil
}

// stamped is an event as its stream signals it: with the time.
type stamped struct{ *Event }

func (s stamped) Signal(err error) bool {
	s.at.Store(int64(time.Since(started)))
	return s.Event.Signal(err)
}

// Elapsed returns how much time lay between two events. It fails with EAGAIN if one of them is not signalled.
func (e *Event) Elapsed(later *Event) (time.Duration, error) {
	from, to := e.at.Load(), later.at.Load()
	if from == 0 || to == 0 {
		return 0, ib.Errorf("gpu_elapsed", syscall.EAGAIN, "an event is not signalled yet")
	}
	return time.Duration(to - from), nil
}

// Wait queues a wait: what is queued behind it begins when the fence is signalled. If the fence's work has failed,
// the stream fails.
//
// Errors: [ErrClosed]; EINVAL for no fence.
func (s *Stream) Wait(f Fence) error {
	if isNil(f) {
		return ib.Errorf("gpu_wait", syscall.EINVAL, "no fence")
	}
	return s.submit(&operation{name: "gpu_wait", wait: f})
}

// Signal queues a signal: the fence is signalled when everything that was queued before is executed, with the
// stream's error if it has failed.
//
// Errors: [ErrDeadlock] if the fence can never be signalled, as something in front waits, by whatever detours, for
// this signal; [ErrClosed]; EINVAL for no fence.
func (s *Stream) Signal(f Fence) error {
	if isNil(f) {
		return ib.Errorf("gpu_signal", syscall.EINVAL, "no fence")
	}
	return s.submit(&operation{name: "gpu_signal", signal: f})
}

// Call queues a function of the program. The stream stands still while it runs; it must not wait for the stream.
// It is called with the stream's error.
func (s *Stream) Call(do func(error)) error {
	if do == nil {
		return ib.Errorf("gpu_call", syscall.EINVAL, "no function")
	}
	return s.submit(&operation{name: "gpu_call", call: do})
}

// isNil reports whether there is no fence: neither a value nor what it points to.
func isNil(f Fence) bool {
	v := reflect.ValueOf(f)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}
