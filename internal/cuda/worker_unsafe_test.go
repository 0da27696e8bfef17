package cuda

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/verbena-rdma/verbena/internal/mem"
)

// script is a driver that notes what is queued, and does nothing: a test says when the copies of a
// stream are over.
type script struct {
	drv *Driver

	mu      sync.Mutex // guards what follows
	streams int
	queued  []string         // copies, as "to+bytes", "from+bytes" or "within+bytes"; nothing is taken out
	on      map[uintptr]int  // copies that were queued on a stream
	over    map[uintptr]int  // how many of them are over
	behind  map[uintptr]mark // events
	ways    map[string]uintptr
	events  uintptr
	refuse  bool          // copies fail
	ids     uint64        // the number of all allocations
	asked   int           // questions about addresses
	silent  chan struct{} // not nil: those are not answered before it is closed
}

// mark is a place in a stream.
type mark struct {
	stream uintptr
	n      int
}

// copied notes a copy.
func (s *script) copied(way string, n, stream uintptr) uintptr {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuse {
		return uintptr(invalidContext)
	}
	s.queued = append(s.queued, fmt.Sprintf("%s+%d", way, n))
	s.on[stream]++
	s.ways[way] = stream
	return 0
}

// land ends all copies in a direction that are queued.
func (s *script) land(way string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stream := s.ways[way]
	s.over[stream] = s.on[stream]
}

// await waits until copies are queued, in this order.
func (s *script) await(t *testing.T, want ...string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		s.mu.Lock()
		got := slices.Clone(s.queued)
		s.mu.Unlock()
		if slices.Equal(got, want) {
			return
		}
		if len(got) > len(want) || time.Now().After(end) {
			t.Fatalf("%q is queued, want %q", got, want)
		}
	}
}

var (
	scripted     sync.Mutex // guards theScript
	theScript    *script
	scriptedAt   map[function]uintptr
	scriptedOnce sync.Once
)

func now() *script {
	scripted.Lock()
	defer scripted.Unlock()
	return theScript
}

// store writes a value where the worker wants it. It is sound: call passes the address of a variable
// that stays where it is during the call.
func store(to uintptr, v uintptr) {
	*(*uintptr)(*(*unsafe.Pointer)(unsafe.Pointer(&to))) = v
}

// hostBytes is page-locked memory.
var hostBytes [4 * (bounce + wordSize)]byte

// newScript returns a driver that does what a test says. Callbacks live as long as the process: there
// are as many for all tests together as there are functions.
func newScript() *script {
	s := &script{on: make(map[uintptr]int), over: make(map[uintptr]int), behind: make(map[uintptr]mark), ways: make(map[string]uintptr)}
	scripted.Lock()
	theScript = s
	scripted.Unlock()
	scriptedOnce.Do(func() {
		nothing := purego.NewCallback(func() uintptr { return 0 })
		scriptedAt = map[function]uintptr{
			fnCtxSetCurrent: nothing, fnStreamDestroy: nothing, fnEventDestroy: nothing, fnMemFreeHost: nothing, fnExchangeCaptureMode: nothing,
			fnMemHostAlloc: purego.NewCallback(func(to, _, _ uintptr) uintptr {
				store(to, uintptr(unsafe.Pointer(&hostBytes)))
				return 0
			}),
			fnStreamCreate: purego.NewCallback(func(to, _ uintptr) uintptr {
				s := now()
				s.mu.Lock()
				defer s.mu.Unlock()
				s.streams++
				store(to, uintptr(s.streams))
				return 0
			}),
			fnEventCreate: purego.NewCallback(func(to, _ uintptr) uintptr {
				s := now()
				s.mu.Lock()
				defer s.mu.Unlock()
				s.events++
				store(to, s.events)
				return 0
			}),
			fnEventRecord: purego.NewCallback(func(e, stream uintptr) uintptr {
				s := now()
				s.mu.Lock()
				defer s.mu.Unlock()
				s.behind[e] = mark{stream, s.on[stream]}
				return 0
			}),
			fnEventQuery: purego.NewCallback(func(e uintptr) uintptr {
				s := now()
				s.mu.Lock()
				defer s.mu.Unlock()
				if m := s.behind[e]; s.over[m.stream] < m.n {
					return uintptr(notReady)
				}
				return 0
			}),
			fnPointerGetAttribute: purego.NewCallback(func(to, attribute, _ uintptr) uintptr {
				s := now()
				s.mu.Lock()
				s.asked++
				id, silent := s.ids, s.silent
				s.mu.Unlock()
				if silent != nil {
					<-silent
				}
				if attribute == attrBufferID {
					store(to, uintptr(id))
				}
				return 0
			}),
			fnHtoDAsync: purego.NewCallback(func(_, _, n, stream uintptr) uintptr { return now().copied("to", n, stream) }),
			fnDtoHAsync: purego.NewCallback(func(_, _, n, stream uintptr) uintptr { return now().copied("from", n, stream) }),
			fnDtoDAsync: purego.NewCallback(func(_, _, n, stream uintptr) uintptr { return now().copied("within", n, stream) }),
		}
	})
	s.drv = &Driver{room: true}
	for f, at := range scriptedAt {
		s.drv.at[f] = at
	}
	return s
}

// one returns a worker, which is the only one of a card, and memory of that card.
func (s *script) one(t *testing.T) *Memory {
	t.Helper()
	c := &card{drv: s.drv}
	w, r := c.startWorker()
	if r != success {
		t.Fatal(r)
	}
	c.workers = []*worker{w}
	t.Cleanup(w.end)
	return &Memory{card: c, addr: 1 << 40, n: 1 << 30}
}

// queuePair begins operations of a queue pair; their lengths tell them apart.
type queuePair struct {
	m      *Memory
	stream mem.Stream
}

func (q *queuePair) begin(kind mem.OpKind, n int) {
	op := &mem.Op{Kind: kind, Stream: &q.stream}
	switch kind {
	case mem.OpCopy:
		op.From, op.N = q.m, uint64(n)
	case mem.OpLoad, mem.OpStore:
		op.Bytes = make([]byte, n)
	}
	q.m.Begin(op)
}

// A copy one way does not wait for copies of other queue pairs the other way. What one queue pair has
// begun takes effect in order: one in another direction is queued when those before it are over, and
// those behind it come after it.
func TestDirections(t *testing.T) {
	s := newScript()
	m := s.one(t)
	a, b := &queuePair{m: m}, &queuePair{m: m}
	a.begin(mem.OpStore, 1000001)
	a.begin(mem.OpStore, 1000002)
	s.await(t, "to+1000001", "to+1000002")
	a.begin(mem.OpLoad, 1) // a flush: it waits for what it is to flush
	a.begin(mem.OpStore, 2)
	b.begin(mem.OpLoad, 3)
	so := []string{"to+1000001", "to+1000002", "from+3"}
	s.await(t, so...)
	b.begin(mem.OpCopy, 4)
	b.begin(mem.OpLoad, 5) // not before the copy
	s.land("from")
	so = append(so, "within+4") // the load of b is over, the stores of a are not
	s.await(t, so...)
	s.land("within")
	so = append(so, "from+5")
	s.await(t, so...)
	s.land("to")
	so = append(so, "from+1")
	s.await(t, so...)
	s.land("from")
	so = append(so, "to+2")
	s.await(t, so...)
	s.land("to")
}

// An atomic comes behind what its queue pair has begun, and what comes later behind it; the copies of
// another queue pair, that end meanwhile, let go what waits for them.
func TestDirectionsAtomic(t *testing.T) {
	s := newScript()
	m := s.one(t)
	a, b := &queuePair{m: m}, &queuePair{m: m}
	a.begin(mem.OpStore, 100001)
	b.begin(mem.OpCopy, 100002)
	s.await(t, "to+100001", "within+100002")
	a.begin(mem.OpAtomic, 8)
	a.begin(mem.OpStore, 3)
	b.begin(mem.OpLoad, 4)
	s.land("to")
	so := []string{"to+100001", "within+100002", "from+8"}
	s.await(t, so...) // the atomic loads
	s.land("within")
	s.land("from")
	so = append(so, "to+8")
	s.await(t, so...) // and stores
	s.land("to")
	awaitSet(t, s, append(so, "to+3", "from+4"))
	s.land("to")
	s.land("from")
}

// awaitSet is await, in any order.
func awaitSet(t *testing.T, s *script, want []string) {
	t.Helper()
	slices.Sort(want)
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		s.mu.Lock()
		got := slices.Sorted(slices.Values(s.queued))
		s.mu.Unlock()
		if slices.Equal(got, want) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%q is queued, want %q", got, want)
		}
	}
}

// What waits when the context breaks ends with a fault, and so the worker ends.
func TestDirectionsBroken(t *testing.T) {
	s := newScript()
	m := s.one(t)
	a := &queuePair{m: m}
	a.begin(mem.OpStore, 100001)
	s.await(t, "to+100001")
	a.begin(mem.OpLoad, 1)
	a.begin(mem.OpStore, 2)
	s.mu.Lock()
	s.refuse = true
	s.mu.Unlock()
	s.land("to")
	m.card.settle(false) // it comes back when all are over
	if !m.card.said.Load() {
		t.Error("nobody was told that the context is not usable")
	}
	if got := s.queued; !slices.Equal(got, []string{"to+100001"}) {
		t.Errorf("%q was queued", got)
	}
}

// The last word of a message within the GPU comes behind the rest, and the rest of a long one is cut at a round address. All
// bytes are copied once.
func TestCopyAligned(t *testing.T) {
	s := newScript()
	m := s.one(t)
	q := &queuePair{m: m}
	var want []string
	for _, c := range []struct {
		off, n uint64
		parts  []int
	}{
		{0, 8, []int{8}},
		{0, 4096, []int{4088, 8}},
		{4, 10, []int{4, 6}}, // two bytes of the last word
		{0, 1 << 20, []int{1<<20 - 8, 8}},
		{0, 4 << 20, []int{4<<20 - 64<<10, 64<<10 - 8, 8}},
		{24, 4<<20 + 3, []int{4<<20 - 24, 24, 3}},
		{0, 64<<20 + 8, []int{64 << 20, 8}},
	} {
		q.m.Begin(&mem.Op{Kind: mem.OpCopy, Stream: &q.stream, From: m, Off: c.off, N: c.n, Last: true})
		sum := 0
		for _, n := range c.parts {
			want = append(want, fmt.Sprintf("within+%d", n))
			sum += n
		}
		if uint64(sum) != c.n {
			t.Errorf("%d bytes in %v", c.n, c.parts)
		}
	}
	s.await(t, want...)
	s.land("within")
}

// Between the post of a watched program's request and its end the driver is called for copies and events alone.
func TestWatchedAsksNothing(t *testing.T) {
	s := newScript()
	s.silent = make(chan struct{}) // a question would never be answered
	m := s.one(t)
	m.pieces = []piece{{start: m.addr, end: m.addr + m.n, id: 1}}
	s.drv.Watch()
	s.drv.host.known.add(extent{addrOf(hostBytes[:]), addrOf(hostBytes[:]) + uint64(len(hostBytes))}, 0)
	q := &queuePair{m: m}
	b := hostBytes[8:108]
	if !m.Reaches(b) || !m.Locks(b) {
		t.Error("page-locked memory is not used in place")
	}
	m.Begin(&mem.Op{Kind: mem.OpStore, Stream: &q.stream, Bytes: b, InPlace: true})
	s.await(t, "to+100")
	s.land("to")
	m.Begin(&mem.Op{Kind: mem.OpLoad, Stream: &q.stream, Bytes: b, InPlace: true})
	s.await(t, "to+100", "from+100")
	s.land("from")
	m.Begin(&mem.Op{Kind: mem.OpCopy, Stream: &q.stream, From: m, N: 50})
	s.await(t, "to+100", "from+100", "within+50")
	s.land("within")
	m.card.settle(false)
	if s.asked != 0 {
		t.Errorf("the driver was asked %d times", s.asked)
	}
}
