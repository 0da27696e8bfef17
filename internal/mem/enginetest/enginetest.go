// Package enginetest is a model of a device whose memory the CPU does not address: an
// engine that takes a while for each operation, moves so many bytes in a second, and has
// a few operations under way at a time. Tests and benchmarks put regions on it.
package enginetest

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Config is how fast an engine is. The zero value takes no time.
type Config struct {
	Latency   time.Duration // of each operation
	Bandwidth float64       // bytes a second, of all operations together; 0: no limit
	Width     int           // operations under way at a time; 0: as many as there are

	// Idle says that the engine takes its time and moves nothing but the first and the
	// last bytes of each operation: what the rest of the software does can be measured
	// where no CPU copies as fast as the engine.
	Idle bool

	// Name, if set, is what engines of other processes, and of this one, know the memory by:
	// they open it (mem.Sharing). One engine has it at a time.
	Name string

	// Reaches says that the engine reads and writes memory of the host by itself.
	Reaches bool

	// Locks says that the engine has staging bytes page-locked (mem.LockStaging), until
	// Close, and counts operations that have others (Unlocked).
	Locks bool
}

// Engine is a device with memory.
type Engine struct {
	cfg Config

	mu    sync.Mutex // guards what follows
	queue []job      // oldest first
	slots []time.Time
	bus   time.Time // until when bytes are moved
	runs  bool      // the goroutine is there
	held  bool
	free  *sync.Cond // of mu: held ends

	begun  atomic.Int64
	opened atomic.Int64 // memories that are open
	stop   []func()     // see Close

	// What is copied.
	to, from mem.List
	raw      [2][]byte

	locking  sync.Mutex        // guards locked
	locked   map[uint64]uint64 // staging bytes that are page-locked: from where to where
	unlocked atomic.Int64
}

// Name is what other processes know the engine by.
func (e *Engine) Name() string { return e.cfg.Name }

// Close ends an engine that has a name, or locks pages: nothing more is opened or locked.
func (e *Engine) Close() {
	for _, stop := range e.stop {
		stop()
	}
}

// lock page-locks staging bytes.
func (e *Engine) lock(b []byte) (unlock func(), err error) {
	from := sys.AddrOf(b)
	e.locking.Lock()
	defer e.locking.Unlock()
	e.locked[from] = from + uint64(len(b))
	return func() {
		e.locking.Lock()
		defer e.locking.Unlock()
		delete(e.locked, from)
	}, nil
}

// IsLocked reports whether bytes are page-locked.
func (e *Engine) IsLocked(b []byte) bool {
	from := sys.AddrOf(b)
	e.locking.Lock()
	defer e.locking.Unlock()
	for start, end := range e.locked {
		if start <= from && from+uint64(len(b)) <= end {
			return true
		}
	}
	return false
}

// Locked returns how many pieces of staging bytes are page-locked, and Unlocked how many
// operations had bytes that are not.
func (e *Engine) Locked() int {
	e.locking.Lock()
	defer e.locking.Unlock()
	return len(e.locked)
}

// Unlocked is described with Locked.
func (e *Engine) Unlocked() int64 { return e.unlocked.Load() }

// Opened returns how many memories of others are open.
func (e *Engine) Opened() int64 { return e.opened.Load() }

// open opens memory of another process.
func (e *Engine) open(what []byte, fd int) (mem.Engine, error) {
	if fd < 0 {
		return nil, errNoFile
	}
	b, err := sys.MapMemfdWhole(fd, true)
	if err != nil {
		_ = sys.CloseFD(fd) // it was open: it cannot fail
		return nil, err
	}
	e.opened.Add(1)
	return &Memory{engine: e, Bytes: b, mapped: b, fd: fd, other: true}, nil
}

var errNoFile = errors.New("enginetest: memory without a file")

// job is an operation that was begun.
type job struct {
	*mem.Op
	memory *Memory
	at     time.Time // when it is over
}

// New makes an engine.
func New(cfg Config) *Engine {
	e := &Engine{cfg: cfg}
	e.free = sync.NewCond(&e.mu)
	if cfg.Name != "" {
		e.stop = append(e.stop, mem.AddOpener(cfg.Name, e.open))
	}
	if cfg.Locks {
		e.locked = make(map[uint64]uint64)
		e.stop = append(e.stop, mem.LockStaging(e.lock))
	}
	if cfg.Width > 0 {
		e.slots = make([]time.Time, cfg.Width)
	}
	return e
}

// Begun returns how many operations were begun.
func (e *Engine) Begun() int64 { return e.begun.Load() }

// Hold keeps the engine from doing operations until Release; one that it is at is done.
func (e *Engine) Hold() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.held = true
}

// Release ends Hold.
func (e *Engine) Release() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.held = false
	e.free.Broadcast()
}

// Memory is memory of the device. The owner sees it in Bytes, under Lock.
type Memory struct {
	engine     *Engine
	sync.Mutex // guards Bytes
	Bytes      []byte
	mapped     []byte
	fd         int
	other      bool // it is another process's, and was opened
	failing    atomic.Uint32
}

// Alloc makes n bytes of memory, outside the Go heap: who looks there does so as the owner
// of a device would. Free gives them up.
func (e *Engine) Alloc(n uint64) *Memory {
	fd, err := sys.NewMemfd("verbena-engine", int(n))
	if err != nil {
		panic(err) // there is no memory
	}
	b, err := sys.MapMemfd(fd, int(n))
	if err != nil {
		panic(err)
	}
	return &Memory{engine: e, Bytes: b, mapped: b, fd: fd}
}

// Share tells other processes how to open the memory.
func (m *Memory) Share() (opener string, what []byte, fd int, err error) {
	if m.engine.cfg.Name == "" {
		return "", nil, -1, errNoName
	}
	fd, err = sys.DupFD(m.fd)
	return m.engine.cfg.Name, nil, fd, err
}

var errNoName = errors.New("enginetest: others do not know the engine")

// Free gives the memory up, when no region stands on it any more and nobody looks there.
func (m *Memory) Free() {
	m.Bytes = nil
	if err := sys.Unmap(m.mapped); err != nil {
		panic(err) // it was freed before
	}
	_ = sys.CloseFD(m.fd) // it was open: it cannot fail
}

// Fail makes all operations on the memory end in a fault from now on; FaultNone ends that.
func (m *Memory) Fail(kind mem.FaultKind) { m.failing.Store(uint32(kind)) }

// Kind returns KindImported: the memory is not the host's.
func (m *Memory) Kind() mem.Kind { return mem.KindImported }

// Len returns the number of bytes.
func (m *Memory) Len() uint64 { return uint64(len(m.Bytes)) }

// NeverFaults tells that no fault of the CPU's is to be expected.
func (m *Memory) NeverFaults() bool { return true }

// Run is never called.
func (m *Memory) Run(uint64, uint64, ib.Access) ([]byte, mem.FaultKind) {
	panic("enginetest: the CPU does not address this memory")
}

// Close leaves the memory to Free, unless it is another process's.
func (m *Memory) Close() error {
	if m.other {
		m.Free()
		m.engine.opened.Add(-1)
	}
	return nil
}

// Owner is the engine.
func (m *Memory) Owner() any { return m.engine }

// Reaches reports whether the engine accesses memory of the host by itself.
func (m *Memory) Reaches([]byte) bool { return m.engine.cfg.Reaches }

var errBounds = errors.New("enginetest: an operation that is out of bounds")

// Begin begins an operation.
func (m *Memory) Begin(op *mem.Op) {
	n := uint64(len(op.Bytes))
	switch op.Kind {
	case mem.OpCopy:
		n = op.N
		if from := op.From.(*Memory); from.engine != m.engine || op.FromOff > from.Len() || n > from.Len()-op.FromOff {
			panic(errBounds)
		}
	case mem.OpAtomic:
		n = 8
	}
	if op.Off > m.Len() || n > m.Len()-op.Off || n == 0 {
		panic(errBounds)
	}
	e := m.engine
	e.begun.Add(1)
	if e.cfg.Locks && len(op.Bytes) > 0 && !e.IsLocked(op.Bytes) {
		e.unlocked.Add(1)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.queue = append(e.queue, job{op, m, e.takes(n)})
	if !e.runs {
		e.runs = true
		go e.run()
	}
}

// takes returns when an operation that begins now is over. Bytes go one after the other, so
// operations end in the order in which they were begun.
func (e *Engine) takes(n uint64) time.Time {
	start := time.Now()
	slot := -1
	for i, free := range e.slots {
		if slot < 0 || free.Before(e.slots[slot]) {
			slot = i
		}
	}
	if slot >= 0 && e.slots[slot].After(start) {
		start = e.slots[slot]
	}
	end := start.Add(e.cfg.Latency)
	if e.bus.After(end) {
		end = e.bus
	}
	if e.cfg.Bandwidth > 0 {
		end = end.Add(time.Duration(float64(n) / e.cfg.Bandwidth * 1e9))
	}
	e.bus = end
	if slot >= 0 {
		e.slots[slot] = end
	}
	return end
}

// run does operations while there are any.
func (e *Engine) run() {
	for {
		e.mu.Lock()
		if len(e.queue) == 0 {
			e.runs = false
			e.mu.Unlock()
			return
		}
		j := e.queue[0]
		e.mu.Unlock()
		for e.cfg.Latency > 0 || e.cfg.Bandwidth > 0 {
			left := time.Until(j.at)
			if left <= 0 {
				break
			}
			if left > 200*time.Microsecond {
				time.Sleep(left - 150*time.Microsecond)
			} else {
				runtime.Gosched()
			}
		}
		e.mu.Lock()
		for e.held {
			e.free.Wait()
		}
		e.mu.Unlock()
		kind := j.do()
		e.mu.Lock()
		e.queue[0] = job{}
		e.queue = e.queue[1:]
		e.mu.Unlock()
		j.End(kind)
	}
}

// do moves the bytes.
func (j *job) do() mem.FaultKind {
	m := j.memory
	if j.Dropped() {
		return mem.FaultDead
	}
	if kind := mem.FaultKind(m.failing.Load()); kind != mem.FaultNone {
		return kind
	}
	m.Lock()
	defer m.Unlock()
	switch j.Kind {
	case mem.OpLoad:
		m.engine.copy(j.Bytes, m.Bytes[j.Off:][:len(j.Bytes)])
	case mem.OpStore:
		m.engine.copy(m.Bytes[j.Off:][:len(j.Bytes)], j.Bytes)
	case mem.OpCopy:
		from := j.From.(*Memory)
		if from != m {
			from.Lock()
			defer from.Unlock()
		}
		m.engine.copy(m.Bytes[j.Off:][:j.N], from.Bytes[j.FromOff:][:j.N])
	case mem.OpAtomic:
		j.Orig = change(m.Bytes[j.Off:][:8], j.Atomic, j.Compare, j.SwapAdd)
	}
	return mem.FaultNone
}

const edge = 64

// copy is outside the memory model of the language, as a device is.
func (e *Engine) copy(to, from []byte) {
	if n := len(to); e.cfg.Idle && n > 2*edge {
		e.move(to[:edge], from[:edge])
		e.move(to[n-edge:], from[n-edge:])
		return
	}
	e.move(to, from)
}

// move is called by the engine's goroutine alone.
func (e *Engine) move(to, from []byte) {
	e.raw[0], e.raw[1] = to, from
	e.to.Raw, e.from.Raw = e.raw[:1], e.raw[1:]
	mem.Copy(&e.to, &e.from, uint64(len(to)), true)
	clear(e.raw[:])
}
