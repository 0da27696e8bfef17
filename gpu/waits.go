package gpu

// The search for waits that cannot end. Queues (streams, and queue pairs that wait for fences of this package) are
// lists of waits and signals. A signal is executed after all waits in front of it. So a fence depends on the fences
// of those waits, and a fence that depends on itself is never signalled. Only a new signal can close such a
// circle: a new wait has nothing behind it yet.
//
// What a program or another process signals is not known here. A fence that no queue is to signal is taken for one
// of those.

import (
	"fmt"
	"strings"
	"sync"
	"time"
)

var waits waitGraph

type waitGraph struct {
	mu      sync.Mutex // guards what follows
	queues  map[any]*waitQueue
	signals map[any][]*waitQueue // by fence: the queues that are to signal it, once for each signal
}

type waitQueue struct {
	name string
	list []waitEntry
}

// waitEntry is a wait or a signal that is queued.
type waitEntry struct {
	fence   Fence
	signals bool
	until   time.Time // when it is forgotten; zero: its queue says so
}

func (e *waitEntry) over() bool {
	select {
	case <-e.fence.Done():
		return true
	default:
		return !e.until.IsZero() && time.Now().After(e.until)
	}
}

// key makes an event and its stamped form one.
func key(f Fence) Fence {
	if s, ok := f.(stamped); ok {
		return s.Event
	}
	return f
}

// enter notes a wait or a signal of a queue. limit is how long a wait lasts at most, for queues that do not call
// leave; 0: no limit. It returns ErrDeadlock, and notes nothing, if a signal would close a circle.
func (g *waitGraph) enter(queue any, name string, f Fence, signals bool, limit time.Duration) error {
	f = key(f)
	if err := g.add(queue, name, f, signals, limit); err != nil {
		return err
	}
	if limit != 0 { // the queue does not call leave
		f.OnSignal(func(error) { g.leave(queue, f) })
	}
	return nil
}

func (g *waitGraph) add(queue any, name string, f Fence, signals bool, limit time.Duration) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.queues == nil {
		g.queues, g.signals = make(map[any]*waitQueue), make(map[any][]*waitQueue)
	}
	q := g.queues[queue]
	if q == nil {
		if limit != 0 {
			g.forgetLocked()
		}
		q = &waitQueue{name: name}
		g.queues[queue] = q
	}
	e := waitEntry{fence: f, signals: signals}
	if limit != 0 && !signals {
		e.until = time.Now().Add(limit)
	}
	q.list = append(q.list, e)
	if !signals {
		return nil
	}
	g.signals[f] = append(g.signals[f], q)
	if path := g.stuckLocked(f, nil); path != nil {
		g.removeLocked(queue, q, len(q.list)-1)
		return fail("gpu_signal", ErrDeadlock, "%s", strings.Join(path, ", "))
	}
	return nil
}

// forgetLocked forgets waits whose time is over.
func (g *waitGraph) forgetLocked() {
	for queue, q := range g.queues {
		for i := 0; i < len(q.list); {
			if e := &q.list[i]; !e.until.IsZero() && e.over() {
				g.removeLocked(queue, q, i)
			} else {
				i++
			}
		}
	}
}

// leave forgets the first entry of a queue for a fence.
func (g *waitGraph) leave(queue any, f Fence) {
	f = key(f)
	g.mu.Lock()
	defer g.mu.Unlock()
	q := g.queues[queue]
	if q == nil {
		return
	}
	for i := range q.list {
		if q.list[i].fence == f {
			g.removeLocked(queue, q, i)
			return
		}
	}
}

func (g *waitGraph) removeLocked(queue any, q *waitQueue, i int) {
	e := q.list[i]
	q.list = append(q.list[:i], q.list[i+1:]...)
	if e.signals {
		by := g.signals[e.fence]
		for j := range by {
			if by[j] == q {
				by = append(by[:j], by[j+1:]...)
				break
			}
		}
		if len(by) == 0 {
			delete(g.signals, e.fence)
		} else {
			g.signals[e.fence] = by
		}
	}
	if len(q.list) == 0 {
		delete(g.queues, queue)
	}
}

// stuckLocked returns why a fence is never signalled, in words; nil if it may be. path are the fences that depend
// on it.
func (g *waitGraph) stuckLocked(f Fence, path []Fence) (why []string) {
	for _, p := range path {
		if p == f {
			return []string{}
		}
	}
	path = append(path, f)
	found := false
	for _, q := range g.signals[f] {
		words, stuck := g.queueStuckLocked(q, f, path)
		if !stuck {
			return nil // one signal is enough
		}
		if !found {
			why, found = words, true
		}
	}
	if !found {
		return nil // the program, or another process, is to signal it
	}
	return why
}

// queueStuckLocked reports whether a queue never comes to its signal of a fence.
func (g *waitGraph) queueStuckLocked(q *waitQueue, f Fence, path []Fence) (words []string, stuck bool) {
	for i := range q.list {
		e := &q.list[i]
		if e.signals && e.fence == f {
			return nil, false
		}
		if e.signals || e.over() {
			continue
		}
		if words := g.stuckLocked(e.fence, path); words != nil {
			return append(words, fmt.Sprintf("%s waits for %v before it signals %v", q.name, nameOf(e.fence), nameOf(f))), true
		}
	}
	return nil, false
}

func nameOf(f Fence) string {
	if s, ok := f.(fmt.Stringer); ok {
		return fmt.Sprintf("%q", s.String())
	}
	return fmt.Sprintf("the fence %p", f)
}
