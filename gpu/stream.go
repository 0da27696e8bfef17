package gpu

// Streams and the engine that executes them.
//
//  1. A call on a stream checks its operation, takes references of the memory, and queues it.
//  2. A stream that has work goes to the engine's list. The engine starts a worker if it has fewer than
//     it may; a worker that finds no stream ends. So what is idle has no goroutine.
//  3. The worker executes the stream's operations in order. At a wait whose fence is pending it leaves the
//     stream; the fence's signal puts it back on the list.
//  4. After a failure the operations behind it are not executed: they end with its error.

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
)

// engine executes the streams of a card.
type engine struct {
	limit             int // workers
	operations, bytes atomic.Uint64

	mu      sync.Mutex // guards what follows
	ready   []*Stream
	workers int
	group   sync.WaitGroup
}

func (e *engine) init(limit int) { e.limit = limit }

// schedule has a stream executed.
func (e *engine) schedule(s *Stream) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ready = append(e.ready, s)
	if e.workers < e.limit {
		e.workers++
		e.group.Go(e.work)
	}
}

func (e *engine) work() {
	for {
		e.mu.Lock()
		if len(e.ready) == 0 {
			e.workers--
			e.mu.Unlock()
			return
		}
		s := e.ready[0]
		e.ready[0] = nil
		e.ready = e.ready[1:]
		e.mu.Unlock()
		if s.run() {
			e.schedule(s)
		}
	}
}

// othersWait reports whether a stream waits for a worker.
func (e *engine) othersWait() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.ready) > 0
}

// wait waits until no worker is left. Nothing is scheduled any more.
func (e *engine) wait() { e.group.Wait() }

// Stream is a queue of operations, which the GPU executes in order, beside the program and beside other
// streams. Its methods may be called by several goroutines.
type Stream struct {
	dev  *Device
	name string

	mu     sync.Mutex // guards what follows
	queue  []*operation
	active bool          // a worker has the stream, or is to have it, or a fence is waited for
	cancel func() bool   // keeps the fence's signal from waking the stream; nil: none is waited for
	err    error         // of the first operation that failed
	closed bool          // Close was called
	idle   chan struct{} // closed when the queue is empty; nil: nobody waits for that
}

// operation is what a stream executes.
type operation struct {
	name string
	mems []Mem // with references
	// run executes the operation on where its memory is. nil: it is none on memory.
	run  func(at []span) error
	cost func(at []span) (Cost, uint64)
	call func(error) // is called with the stream's error, in order; for fences and events

	wait   Fence // is waited for
	signal Fence // is signalled with the stream's error
}

var streamNumbers atomic.Uint64

// NewStream makes a stream. It fails with [ErrClosed].
func (d *Device) NewStream() (*Stream, error) {
	const op = "gpu_new_stream"
	s := &Stream{dev: d, name: fmt.Sprintf("stream %d of %s", streamNumbers.Add(1), d.card.name)}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fail(op, ErrClosed, "%s", d.card.name)
	}
	d.streams[s] = true
	return s, nil
}

// String names the stream.
func (s *Stream) String() string { return s.name }

// submit queues an operation.
func (s *Stream) submit(op *operation) error {
	for i := range op.mems {
		if err := op.mems[i].hold(op.name); err != nil {
			op.mems = op.mems[:i]
			op.letGo()
			return err
		}
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		op.letGo()
		return fail(op.name, ErrClosed, "%s", s.name)
	}
	if f, signals := op.fence(); f != nil {
		if err := waits.enter(s, s.name, f, signals, 0); err != nil {
			s.mu.Unlock()
			op.letGo()
			return err
		}
	}
	s.queue = append(s.queue, op)
	start := !s.active
	s.active = true
	s.mu.Unlock()
	if start {
		s.dev.card.engine.schedule(s)
	}
	return nil
}

// fence returns the fence that an operation waits for or signals.
func (op *operation) fence() (f Fence, signals bool) {
	if op.wait != nil {
		return op.wait, false
	}
	return op.signal, true
}

func (op *operation) letGo() {
	for i := range op.mems {
		op.mems[i].letGo()
	}
	op.mems = nil
}

// run executes operations. It reports whether the stream is to be scheduled again.
func (s *Stream) run() (again bool) {
	for {
		s.mu.Lock()
		if len(s.queue) == 0 {
			s.active = false
			if s.idle != nil {
				close(s.idle)
				s.idle = nil
			}
			s.mu.Unlock()
			return false
		}
		op, err := s.queue[0], s.err
		if s.closed && err == nil {
			err = fail(op.name, ErrClosed, "%s", s.name)
			s.err = err
		}
		s.mu.Unlock()
		if op.wait != nil && err == nil {
			s.await(op)
			return false // its signal schedules the stream
		}
		if err == nil {
			err = s.execute(op)
		}
		s.done(op, err)
		if s.dev.card.engine.othersWait() {
			return true
		}
	}
}

// await has the stream go on when the operation's fence is signalled.
func (s *Stream) await(op *operation) {
	woken := false // guarded by s.mu
	cancel := op.wait.OnSignal(func(err error) {
		s.mu.Lock()
		woken, s.cancel = true, nil
		s.mu.Unlock()
		if err != nil {
			err = fmt.Errorf("gpu: %s has waited for work that failed: %w", s.name, err)
		}
		s.done(op, err)
		s.dev.card.engine.schedule(s)
	})
	s.mu.Lock()
	closed := s.closed
	if !woken && !closed {
		s.cancel = cancel
	}
	s.mu.Unlock()
	if closed && cancel() {
		s.dev.card.engine.schedule(s)
	}
}

// done ends the first operation of the queue.
func (s *Stream) done(op *operation, err error) {
	s.mu.Lock()
	s.queue[0] = nil
	s.queue = s.queue[1:]
	if s.err == nil {
		s.err = err
	}
	err = s.err
	s.mu.Unlock()
	op.letGo()
	if f, signals := op.fence(); f != nil {
		if signals {
			f.Signal(err)
		}
		waits.leave(s, f)
	}
	if op.call != nil {
		op.call(err)
	}
}

// execute executes an operation on memory.
func (s *Stream) execute(op *operation) error {
	if op.run == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	start, used := time.Now(), dmabuf.NewFence()
	at, err := use(ctx, op.name, op.mems, used)
	if err == nil {
		err = op.run(at)
	}
	if err == nil && at[0].staged != nil {
		err = op.mems[0].store(at[0].staged)
	}
	if err == nil {
		if op.cost != nil {
			cost, n := op.cost(at)
			cost.spend(start, n)
		}
		e := &s.dev.card.engine
		e.operations.Add(1)
		e.bytes.Add(at[0].n)
	}
	used.Signal(nil)
	for i := range at {
		if at[i].used {
			op.mems[i].obj.after()
		}
	}
	return err
}

// Sync waits until all operations that are queued now are executed. It returns the error of the first
// operation of the stream that failed; or the context's, if that ends first.
func (s *Stream) Sync(ctx context.Context) error {
	e, err := s.Record()
	if err != nil {
		return err
	}
	return e.Wait(ctx)
}

// Err returns the error of the first operation that failed; nil if none has.
func (s *Stream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Reset makes a stream that has failed work again, and returns why it had failed.
func (s *Stream) Reset() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.err
	s.err = nil
	return err
}

// Query reports whether everything that was queued is executed.
func (s *Stream) Query() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.queue) == 0
}

// Close ends the stream. An operation that is under way is finished; those behind it fail with
// [ErrClosed], and their fences are signalled with it. Closing again does nothing.
func (s *Stream) Close() error {
	s.mu.Lock()
	s.closed = true
	cancel := s.cancel
	s.cancel = nil
	var idle chan struct{}
	if s.active {
		if s.idle == nil {
			s.idle = make(chan struct{})
		}
		idle = s.idle
	}
	s.mu.Unlock()
	if cancel != nil && cancel() {
		s.dev.card.engine.schedule(s)
	}
	if idle != nil {
		<-idle
	}
	s.dev.mu.Lock()
	delete(s.dev.streams, s)
	s.dev.mu.Unlock()
	return nil
}
