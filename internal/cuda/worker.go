package cuda

// A worker is a thread with a stream for each direction, so that a short copy one way does not wait
// for long ones the other way. It queues copies on the streams as they come, records an event behind
// some of them, and ends operations when the event behind them has happened.
//
// Operations of one queue pair have one worker, and take effect one after the other: a stream keeps
// their order, and one in another direction is not queued before those in front of it are over
// (order.go).

import (
	"encoding/binary"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
)

const (
	// workers is how many a card has.
	workers = 4
	// events is how many events a worker has: so many parts of its queue are under way.
	events = 32
	// perEvent is the number of bytes behind which an event is recorded, if there is more.
	perEvent = 512 << 10
	// linger is how long a worker looks for more to do before it sleeps: to be woken takes longer
	// than the engine needs for a small copy.
	linger = 50 * time.Microsecond
	// wordSize is what the bytes of a message that are stored last are within.
	wordSize = 8
)

// job is an operation, and the memory that it is about.
type job struct {
	*mem.Op
	memory *Memory
	order  *order          // of the queue pair
	passed *sync.WaitGroup // not nil: it is no operation, but is told when those before it are over
	last   bool            // with passed: the context is about to go, and all that comes later fails
}

// flight is operations that end with an event.
type flight struct {
	event uintptr
	jobs  []job
	since time.Time
}

// lane is a stream, and what is under way on it.
type lane struct {
	stream  uintptr
	queued  []job // without an event behind them
	bytes   uint64
	flights []flight // oldest first
}

type worker struct {
	card *card
	word []byte // page-locked: bounce bytes for throughHost, and behind them a word for atomics

	queued atomic.Int32 // len(queue)

	mu     sync.Mutex // guards what follows
	queue  []job
	asleep bool
	ended  bool
	wake   chan struct{}
	gone   chan struct{}

	// What follows is the thread's own.
	lanes   [directions]lane
	idle    []uintptr // events
	flights int       // of all lanes
	landed  bool      // operations have ended since waiting was looked at
	waiting []job     // for operations before them that go in another direction; oldest first
	spare   []job
	broken  bool // the context is not usable any more
	torn    bool // tearDown was called

	saidLate bool // see late
}

// startWorker starts a worker, and waits until it is ready.
func (c *card) startWorker() (*worker, Result) {
	w := &worker{card: c, wake: make(chan struct{}, 1), gone: make(chan struct{})}
	ready := make(chan Result)
	go w.run(ready)
	return w, <-ready
}

func (w *worker) run(ready chan<- Result) {
	defer close(w.gone)
	w.card.drv.enterThread()
	r := w.setUp()
	ready <- r
	if r != success {
		w.tearDown()
		return
	}
	for {
		jobs, more := w.take()
		if !more && w.flights == 0 {
			w.tearDown()
			return
		}
		w.submit(jobs)
		w.reap()
		w.submitWaiting()
	}
}

// setUp makes all that the worker needs: later, to make something might wait for the GPU.
func (w *worker) setUp() Result {
	d := w.card.drv
	r := d.setCurrent(w.card.ctx)
	if r != success {
		return r
	}
	for i := range w.lanes {
		if w.lanes[i].stream, r = d.newStream(); r != success {
			return r
		}
	}
	for range events {
		e, r := d.newEvent()
		if r != success {
			return r
		}
		w.idle = append(w.idle, e)
	}
	if w.word, r = w.card.newWord(); r == success {
		w.firstUse()
	}
	return r
}

// firstUse uses the streams and the events once for copies of all kinds. The driver makes what a stream needs for a kind
// of copy when it is first used for that, and takes a lock then which a call of the program's may hold until the
// program's kernels have ended: a kernel that waits for the bytes of the copy would wait for ever. (Seen on an H200:
// PyTorch copies a result to memory that is not page-locked behind a kernel of NCCL's.)
func (w *worker) firstUse() {
	d, at := w.card.drv, w.card.scratch
	if at == 0 {
		return
	}
	half := uint64(scratchSize / 2)
	for n := uint64(wordSize); n <= half; n *= 4 { // one that fails now fails again, and is reported then
		w.store(at, w.word[:n], w.lanes[fromHost].stream)
		d.copyIn(at, w.word[:n], w.lanes[fromHost].stream)
		d.copyOut(w.word[:n], at+half, w.lanes[toHost].stream)
		d.copyWithin(at, at+half, n, w.lanes[within].stream)
	}
	for i, e := range w.idle {
		d.record(e, w.lanes[i%len(w.lanes)].stream)
	}
}

// tearDown gives up what setUp has made, while the context is still there.
func (w *worker) tearDown() {
	if w.torn {
		return
	}
	w.torn, w.broken = true, true
	d := w.card.drv
	w.card.freeWord(w.word)
	for _, e := range w.idle {
		d.destroyEvent(e)
	}
	for i := range w.lanes {
		if s := w.lanes[i].stream; s != 0 {
			d.destroyStream(s)
		}
	}
	d.setCurrent(0)
}

// begin hands the worker an operation.
func (w *worker) begin(j job) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = append(w.queue, j)
	w.queued.Add(1)
	w.rouse()
}

// rouse wakes the worker; the caller holds mu.
func (w *worker) rouse() {
	if w.asleep {
		w.asleep = false
		w.wake <- struct{}{} // there is room for one, and the worker sleeps
	}
}

// end ends the worker when it has done what it was given.
func (w *worker) end() {
	w.mu.Lock()
	w.ended = true
	w.rouse()
	w.mu.Unlock()
	<-w.gone
}

// take returns what was begun since the last call. If nothing is under way it waits for something
// to do; it reports false when there will not be anything.
func (w *worker) take() (jobs []job, more bool) {
	var since time.Time
	for {
		if w.queued.Load() == 0 && w.flights > 0 {
			return nil, true
		}
		w.mu.Lock()
		if len(w.queue) > 0 || w.ended {
			jobs, more = w.queue, !w.ended || len(w.queue) > 0
			w.queue, w.spare = w.spare[:0], jobs
			w.queued.Store(0)
			w.mu.Unlock()
			return jobs, more
		}
		if since.IsZero() {
			since = time.Now()
		}
		if lingers && time.Since(since) < linger {
			w.mu.Unlock()
			for range 100 {
				if w.queued.Load() > 0 {
					break
				}
			}
			continue
		}
		w.asleep = true
		w.mu.Unlock()
		<-w.wake
		since = time.Time{}
	}
}

// lingers: with few processors, one that looks for work keeps others from doing theirs.
var lingers = runtime.NumCPU() >= 8

// submit queues operations, as far as nothing before them keeps them from it.
func (w *worker) submit(jobs []job) {
	for i, j := range jobs {
		jobs[i] = job{}
		switch {
		case j.passed != nil:
			w.drain()
			if j.last {
				w.tearDown()
			}
			j.passed.Done()
		case !j.order.admits(directionOf(j.Op)):
			j.order.waits++
			w.waiting = append(w.waiting, j)
		default:
			w.start(j)
		}
	}
	w.flyAll()
}

// start does an operation, or queues it.
func (w *worker) start(j job) {
	if j.Dropped() || w.broken {
		j.End(mem.FaultDead)
		return
	}
	if kind := j.memory.check(j.Op); kind != mem.FaultNone {
		j.End(kind)
		return
	}
	if j.Kind == mem.OpAtomic {
		j.End(w.atomic(j))
		return
	}
	to := directionOf(j.Op)
	l := &w.lanes[to]
	if r := w.queueCopy(j, l.stream); r != success {
		w.fly(l) // those before it are not at fault
		j.End(w.failed(r))
		return
	}
	j.order.begin(to)
	l.queued = append(l.queued, j)
	if l.bytes += lengthOf(j.Op); l.bytes >= perEvent {
		w.fly(l)
	}
}

// lengthOf returns the number of bytes of an operation.
func lengthOf(op *mem.Op) uint64 {
	switch op.Kind {
	case mem.OpCopy:
		return op.N
	case mem.OpAtomic:
		return wordSize
	}
	return uint64(len(op.Bytes))
}

// queueCopy queues the copy of an operation. The bytes that a message ends with, within a word,
// are a copy of their own behind the others: a kernel may be looking at them.
func (w *worker) queueCopy(j job, stream uintptr) Result {
	at := j.memory.addr + j.Off
	n := lengthOf(j.Op)
	tail := uint64(0)
	if j.Last && j.Kind != mem.OpLoad {
		tail = (at+n-1)%wordSize + 1
	}
	if tail >= n {
		tail = 0
	}
	if tail > 0 && j.Kind == mem.OpCopy {
		return w.copyAligned(j, at, n, tail, stream)
	}
	if r := w.copyPart(j, at, 0, n-tail, stream); r != success || tail == 0 {
		return r
	}
	if tail == wordSize && n >= 2*wordSize && j.Kind == mem.OpStore {
		tail = 2 * wordSize // two rows of a word each: see store; the word before the last one has its value already
	}
	return w.copyPart(j, at, n-tail, tail, stream)
}

// alignedEnd is where the end of a long copy within the GPU lies, and leastAligned what is long.
const (
	alignedEnd   = 64 << 10
	leastAligned = 4 << 20 // one copy more takes some 4 us
)

// copyAligned queues a copy within the GPU, of which tail bytes come last. A long one is two before those, of which the first
// ends at a round address: the GPU seems to take several times as long for a length that is only a multiple of 8. (Seen on an
// H200: 16 MiB in 45 us, where 64 MiB took 59.)
func (w *worker) copyAligned(j job, at, n, tail uint64, stream uintptr) Result {
	ends := []uint64{n - tail, n}
	if n >= leastAligned {
		ends = []uint64{(at+n-tail)&^(alignedEnd-1) - at, n - tail, n}
	}
	off := uint64(0)
	for _, end := range ends {
		if end == off {
			continue
		}
		if r := w.copyPart(j, at, off, end-off, stream); r != success {
			return r
		}
		off = end
	}
	return success
}

// copyPart queues the copy of n bytes of an operation, from off on.
func (w *worker) copyPart(j job, at, off, n uint64, stream uintptr) Result {
	d := w.card.drv
	switch j.Kind {
	case mem.OpLoad:
		return d.copyOut(j.Bytes[off:off+n], at+off, stream)
	case mem.OpStore:
		return w.store(at+off, j.Bytes[off:off+n], stream)
	default:
		from := j.From.(*Memory).addr + j.FromOff
		if d.room {
			return d.copyWithin(at+off, from+off, n, stream)
		}
		return w.throughHost(at+off, from+off, n, stream)
	}
}

// flyAll records events behind all that is queued.
func (w *worker) flyAll() {
	for i := range w.lanes {
		w.fly(&w.lanes[i])
	}
}

// fly records an event behind operations that are queued.
func (w *worker) fly(l *lane) {
	jobs := l.queued
	l.queued, l.bytes = nil, 0
	if len(jobs) == 0 {
		return
	}
	e := w.event()
	if r := w.card.drv.record(e, l.stream); r != success {
		// Nothing tells when the copies are over: the context is not usable any more.
		w.idle = append(w.idle, e)
		w.land(jobs, w.failed(r))
		return
	}
	l.flights = append(l.flights, flight{e, jobs, time.Now()})
	w.flights++
}

// event returns an event that is not in use.
func (w *worker) event() uintptr {
	for len(w.idle) == 0 {
		w.reap()
	}
	e := w.idle[len(w.idle)-1]
	w.idle = w.idle[:len(w.idle)-1]
	return e
}

// land ends operations.
func (w *worker) land(jobs []job, kind mem.FaultKind) {
	w.landed = true
	for i := range jobs {
		jobs[i].order.end()
		jobs[i].End(kind)
	}
}

// reap ends operations whose event has happened.
func (w *worker) reap() {
	for i := range w.lanes {
		l := &w.lanes[i]
		n := 0
		for ; n < len(l.flights); n++ {
			f := l.flights[n]
			r := w.card.drv.query(f.event)
			if r == notReady {
				w.late(&f)
				break
			}
			kind := mem.FaultNone
			if r != success {
				kind = w.failed(r)
			}
			w.land(f.jobs, kind)
			w.idle = append(w.idle, f.event)
		}
		if n > 0 {
			k := copy(l.flights, l.flights[n:])
			clear(l.flights[k:])
			l.flights = l.flights[:k]
			w.flights -= n
		}
	}
}

// tooLate is how long a copy takes at most, unless something keeps the GPU from it.
const tooLate = 5 * time.Second

// late says once that a copy does not come to an end.
func (w *worker) late(f *flight) {
	if w.saidLate || time.Since(f.since) < tooLate {
		return
	}
	w.saidLate = true
	op := f.jobs[0].Op
	slog.Warn("verbena: the GPU does not get on with a copy: it may wait behind kernels that wait for its bytes. These may help: CUDA_DEVICE_MAX_CONNECTIONS=16, CUDA_MODULE_LOADING=EAGER",
		"within the GPU", op.Kind == mem.OpCopy, "bytes", lengthOf(op), "operations", len(f.jobs))
}

// failed returns the fault that a failure of the driver means. One that is not about the
// arguments is the end of the context: the program's kernels have destroyed it, or it is gone.
func (w *worker) failed(r Result) mem.FaultKind {
	if r == invalidValue {
		return mem.FaultStale
	}
	w.broken = true
	w.card.told(r)
	return mem.FaultRevoked
}

// atomic changes a word. Nothing else of the device changes it meanwhile: all atomics on the
// memory of a card come one after the other. The GPU's own accesses do not know of it.
func (w *worker) atomic(j job) mem.FaultKind {
	c := w.card
	c.atomics.Lock()
	defer c.atomics.Unlock()
	at, word := j.memory.addr+j.Off, w.word[bounce:][:wordSize]
	if r := c.drv.copyOut(word, at, w.lanes[toHost].stream); r != success {
		return w.failed(r)
	}
	if kind := w.settle(&w.lanes[toHost]); kind != mem.FaultNone {
		return kind
	}
	was := binary.NativeEndian.Uint64(word)
	j.Orig = was
	switch {
	case j.Atomic == mem.FetchAdd:
		was += j.SwapAdd
	case j.Atomic == mem.Store, was == j.Compare:
		was = j.SwapAdd
	default:
		return mem.FaultNone
	}
	binary.NativeEndian.PutUint64(word, was)
	if r := w.store(at, word, w.lanes[fromHost].stream); r != success {
		return w.failed(r)
	}
	return w.settle(&w.lanes[fromHost])
}

// settle waits until all that is queued on a stream is over.
func (w *worker) settle(l *lane) mem.FaultKind {
	w.fly(l)
	e := w.event()
	defer func() { w.idle = append(w.idle, e) }()
	r := w.card.drv.record(e, l.stream)
	if r != success {
		return w.failed(r)
	}
	for {
		if r = w.card.drv.query(e); r != notReady {
			break
		}
		w.reap() // others need not wait
	}
	if r != success {
		return w.failed(r)
	}
	return mem.FaultNone
}

// drain waits until all operations are over.
func (w *worker) drain() {
	w.flyAll()
	for w.flights > 0 {
		w.reap()
		w.submitWaiting()
	}
}
