package device

// Timers of queue pairs. A queue pair's deadline moves with every acknowledgement, so the heap
// is not changed each time: it has the time at which to look at the queue pair next, never
// later than its deadline. A look that comes too early sets the next one.

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/qp"
)

type timerHeap struct {
	mu   sync.Mutex // guards heap, and changes of next
	heap entries
	next atomic.Int64 // the earliest time, 0 if there is none
}

// changedLocked brings next up to date.
func (t *timerHeap) changedLocked() {
	at := qp.Time(0)
	if len(t.heap) > 0 {
		at = t.heap[0].at
	}
	t.next.Store(int64(at))
}

type entry struct {
	at qp.Time
	q  *QP
}

// entries is a binary heap by time; each queue pair's timerIndex is its place there.
// (container/heap would allocate for each entry it moves in or out.)
type entries []entry

func (h entries) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].q.timerIndex, h[j].q.timerIndex = i, j
}

// fix moves entry i to where its time belongs.
func (h entries) fix(i int) {
	for i > 0 && h[i].at < h[(i-1)/2].at {
		h.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < len(h); c++ {
			if h[c].at < h[least].at {
				least = c
			}
		}
		if least == i {
			return
		}
		h.swap(i, least)
		i = least
	}
}

func (h *entries) push(e entry) {
	e.q.timerIndex = len(*h)
	*h = append(*h, e)
	h.fix(e.q.timerIndex)
}

func (h *entries) remove(i int) {
	old := *h
	last := len(old) - 1
	old.swap(i, last)
	old[last].q.timerIndex = -1
	old[last] = entry{}
	*h = old[:last]
	if i < last {
		h.fix(i)
	}
}

// set makes the heap look at q at a time, and reports whether that is the
// earliest of all.
func (t *timerHeap) set(q *QP, at qp.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.timerIndex >= 0 {
		t.heap[q.timerIndex].at = at
		t.heap.fix(q.timerIndex)
	} else {
		t.heap.push(entry{at, q})
	}
	t.changedLocked()
	return t.heap[0].q == q
}

func (t *timerHeap) remove(q *QP) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.timerIndex >= 0 {
		t.heap.remove(q.timerIndex)
		t.changedLocked()
	}
}

// first returns the earliest time, 0 if there is none.
func (t *timerHeap) first() qp.Time { return qp.Time(t.next.Load()) }

// due removes and returns a queue pair whose time has come, or returns nil.
func (t *timerHeap) due(now qp.Time) *QP {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.heap) == 0 || t.heap[0].at > now {
		return nil
	}
	q := t.heap[0].q
	t.heap.remove(0)
	t.changedLocked()
	return q
}

// rearmLocked has the heap look at the queue pair by its deadline, if it would look later or
// not at all. The caller holds the queue pair's lock.
func (q *QP) rearmLocked() {
	at := q.core.Deadline()
	if q.heldUntil != 0 {
		at = sooner(at, q.heldUntil)
	}
	if q.heldRetry != 0 {
		at = sooner(at, q.heldRetry)
	}
	if at == 0 || q.armed != 0 && q.armed <= at || q.closed {
		return
	}
	q.armed = at
	if s := q.shard.Load(); s.timers.set(q, at) {
		s.wakeBefore(at)
	}
}

// sooner returns the earlier of two times, of which the first may be 0: never.
func sooner(a, b qp.Time) qp.Time {
	if a == 0 {
		return b
	}
	return min(a, b)
}

// fireTimers ticks the queue pairs whose time has come, and returns how long it is until the
// next one's.
func (s *shard) fireTimers() time.Duration {
	if t := s.timers.first(); t != 0 && t <= s.dev.now() {
		s.receive(false) // if this process had no processor for a while, the awaited answers may lie unread
	}
	for {
		now := s.dev.now()
		q := s.timers.due(now)
		if q == nil {
			break
		}
		q.mu.Lock()
		q.armed = 0
		q.core.Tick(now)
		if q.heldUntil != 0 && q.heldUntil <= now {
			q.heldUntil, q.heldExpired = 0, true
		}
		if q.heldRetry <= now {
			q.heldRetry = 0
		}
		q.rearmLocked()
		q.mu.Unlock()
		s.dev.answer(q, now) // after a timeout its window is smaller: others may use its credits
	}
	if t := s.timers.first(); t != 0 {
		return max(0, t-s.dev.now())
	}
	return forever
}
