package cuda

import (
	"bytes"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
)

// inPieces returns memory of two allocations, and a driver whose thread answers questions about them.
func inPieces(t *testing.T) (*script, *Memory) {
	t.Helper()
	s := newScript()
	s.ids = 7
	d := s.drv
	d.checks = newThread(d)
	d.checks.start()
	t.Cleanup(d.checks.end)
	m := &Memory{card: &card{drv: d}, addr: 1 << 40, n: 2 << 20,
		pieces: []piece{{start: 1 << 40, end: 1<<40 + 1<<20, id: 7}, {start: 1<<40 + 1<<20, end: 1<<40 + 2<<20, id: 7}}}
	return s, m
}

func (s *script) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// A program that is not watched may have freed memory and got it again: that has another number.
func TestCurrentAsked(t *testing.T) {
	s, m := inPieces(t)
	if kind := m.current(1<<20-8, 16); kind != mem.FaultNone {
		t.Errorf("memory that is there: %v", kind)
	}
	if s.asked != 2 {
		t.Errorf("the driver was asked %d times about two allocations", s.asked)
	}
	s.set(func() { s.ids = 8 })
	if kind := m.current(0, 8); kind != mem.FaultStale {
		t.Errorf("memory that was freed: %v", kind)
	}
	m.gone.Store(true)
	if kind := m.current(0, 8); kind != mem.FaultRevoked {
		t.Errorf("memory that was revoked: %v", kind)
	}
}

// If the driver does not answer, requests go on, and wait once only. When it does again, memory that is gone is noticed.
func TestCurrentNoAnswer(t *testing.T) {
	s, m := inPieces(t)
	answer := make(chan struct{})
	s.set(func() { s.silent, s.ids = answer, 8 })
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			for range 100 {
				if kind := m.current(0, 8); kind != mem.FaultNone {
					t.Errorf("the driver does not answer: %v", kind)
				}
			}
		})
	}
	all.Wait()
	s.set(func() { s.silent = nil })
	close(answer)
	for end := time.Now().Add(time.Minute); m.current(0, 8) != mem.FaultStale; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the driver answers, and nobody asks it")
		}
	}
}

// Before a copy of a watched program's the driver is not asked: it may not answer.
func TestCurrentWatched(t *testing.T) {
	s, m := inPieces(t)
	m.card.drv.Watch()
	s.set(func() { s.ids = 8 })
	if kind := m.current(0, 8); kind != mem.FaultNone {
		t.Errorf("memory that was not revoked: %v", kind)
	}
	m.gone.Store(true)
	if kind := m.current(0, 8); kind != mem.FaultRevoked {
		t.Errorf("memory that was revoked: %v", kind)
	}
	e := extent{addrOf(hostBytes[:]), addrOf(hostBytes[:]) + 4096}
	m.card.drv.host.known.add(e, 0)
	for _, c := range []struct {
		b    []byte
		want bool
	}{{hostBytes[:4096], true}, {hostBytes[4095:4096], true}, {nil, false}} {
		if locked, answered := m.card.drv.holdsLocked(c.b); locked != c.want || !answered {
			t.Errorf("%d bytes are locked: %v, %v", len(c.b), locked, answered)
		}
	}
	if s.asked != 0 {
		t.Errorf("the driver was asked %d times", s.asked)
	}
	m.card.drv.host.leave(e)
	if locked, _ := m.card.drv.holdsLocked(hostBytes[:8]); locked {
		t.Error("what the program frees is used in place")
	}
	m.card.drv.host.note(e, m.card.drv.host.known.now())
	if m.card.drv.host.known.holds(e) {
		t.Error("what the program frees was noted again")
	}
}

// Ranges are as in a table of all places.
func TestLockedRanges(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	const places = 64
	var k lockedRanges
	var of [places]int // the number of the range that a place lies in; 0: none
	last := 0
	forget := func(e extent) {
		for i := e.start; i < e.end; i++ {
			if n := of[i]; n != 0 {
				for j := range of {
					if of[j] == n {
						of[j] = 0
					}
				}
			}
		}
	}
	for range 20000 {
		e := extent{start: r.Uint64N(places)}
		e.end = e.start + 1 + r.Uint64N(min(8, places-e.start))
		switch r.IntN(4) {
		case 0:
			forget(e)
			k.remove(e)
		case 1:
			era := k.now()
			if r.IntN(8) == 0 {
				k.remove(extent{0, 0}) // it touches none, but what was seen before counts no more
				k.add(e, era)
				continue
			}
			last++
			for i := e.start; i < e.end; i++ {
				was := of[i]
				for j, n := range of {
					if n != 0 && n == was {
						of[j] = last
					}
				}
				of[i] = last
			}
			k.add(e, era)
		default:
			want := of[e.start] != 0
			for i := e.start; i < e.end; i++ {
				want = want && of[i] == of[e.start]
			}
			if got := k.holds(e); got != want {
				t.Fatalf("%v is locked: %v, should be %v", e, got, want)
			}
		}
	}
	k.clear()
	k.add(extent{0, 8}, k.now())
	if k.holds(extent{0, 1}) {
		t.Error("a range was added while a context may be destroyed")
	}
}

// lines is a log.
type lines struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A call that does not return is reported once, while it is under way, with the others; one that has returned is not.
func TestCallsWatch(t *testing.T) {
	var log lines
	was := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(was)
	var c calls
	c.enter(fnMemFree, []uintptr{5}, started).leave()
	stop, gone := make(chan struct{}), make(chan struct{})
	c.enter(fnHtoDAsync, []uintptr{1, 2, 3, 4}, time.Now().Add(time.Hour)) // it is not late for an hour
	late := c.enter(fnEventQuery, []uintptr{0x77}, started)
	go c.watch(stop, gone, time.Millisecond, time.Nanosecond)
	for end := time.Now().Add(time.Minute); !strings.Contains(log.String(), "cuEventQuery(0x77"); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("nothing was reported: %s", log.String())
		}
	}
	time.Sleep(20 * time.Millisecond)
	late.leave()
	close(stop)
	<-gone
	text := log.String()
	if n := strings.Count(text, "does not return"); n != 1 || !strings.Contains(text, "cuMemcpyHtoDAsync_v2(0x1, 0x2, 0x3, 0x4)") || strings.Contains(text, "cuMemFree") {
		t.Errorf("%d reports: %s", n, text)
	}
}

// There is room for so many calls; others are made, and not seen.
func TestCallsFull(t *testing.T) {
	var c calls
	var in []*callSlot
	for range 20 * callSlots {
		if s := c.enter(fnInit, nil, time.Now()); s != nil {
			in = append(in, s)
		}
	}
	if len(in) == 0 || len(in) > callSlots {
		t.Fatalf("%d calls at %d places", len(in), callSlots)
	}
	for _, s := range in {
		s.leave()
	}
	(*callSlot)(nil).leave()
	if c.enter(fnInit, nil, time.Now()) == nil {
		t.Error("there is no room when all have returned")
	}
}
