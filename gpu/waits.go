package gpu

// The search for waits that cannot end. Queues (streams, and queue pairs that wait for fences of this package) are
// lists of waits and signals. A signal is executed after all waits in front of it. So a fence depends on the fences
// of those waits, and a fence that depends on itself is never signalled. Only a new signal can close such a
// circle: a new wait has nothing behind it yet.
//
// What a program or another process signals is not known here. A fence that no queue is to signal is taken for one
// of those.
//
// Most fences get their signal queued before anybody waits for them: then there is nothing to search for. Otherwise
// the queues are gone through, each as far as it comes, which takes as long as they have entries.

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

var waits waitGraph

type waitGraph struct {
	mu      sync.Mutex // guards what follows
	queues  map[any]*waitQueue
	signals map[any][]*waitQueue // by fence: the queues that are to signal it, once for each signal
	waiting map[any]int          // by fence: how many waits for it are queued
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
		g.queues, g.signals, g.waiting = make(map[any]*waitQueue), make(map[any][]*waitQueue), make(map[any]int)
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
		g.waiting[f]++
		return nil
	}
	g.signals[f] = append(g.signals[f], q)
	if g.waiting[f] == 0 {
		return nil
	}
	if why := g.stuckLocked(f); why != "" {
		g.removeLocked(queue, q, len(q.list)-1)
		return fail("gpu_signal", ErrDeadlock, "%s", why)
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
	if i == 0 {
		q.list[0] = waitEntry{}
		q.list = q.list[1:]
	} else {
		q.list = slices.Delete(q.list, i, i+1)
	}
	if !e.signals {
		if g.waiting[e.fence]--; g.waiting[e.fence] == 0 {
			delete(g.waiting, e.fence)
		}
	} else if by := g.signals[e.fence]; len(by) == 1 {
		delete(g.signals, e.fence)
	} else {
		j := slices.Index(by, q)
		g.signals[e.fence] = slices.Delete(by, j, j+1)
	}
	if len(q.list) == 0 {
		delete(g.queues, queue)
	}
}

// stuckLocked returns why a fence that a queue is to signal is never signalled; "" if it may be.
func (g *waitGraph) stuckLocked(f Fence) string {
	var (
		signaled = make(map[Fence]bool)
		held     = make(map[Fence][]*waitQueue) // by the fence that they wait for
		at       = make(map[*waitQueue]int)     // how far they have come
		todo     = slices.Collect(maps.Values(g.queues))
	)
	for len(todo) > 0 {
		q := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for ; at[q] < len(q.list); at[q]++ {
			e := &q.list[at[q]]
			if e.signals {
				signaled[e.fence] = true
				todo = append(todo, held[e.fence]...)
				delete(held, e.fence)
			} else if !signaled[e.fence] && len(g.signals[e.fence]) > 0 && !e.over() {
				held[e.fence] = append(held[e.fence], q)
				break
			}
		}
	}
	var why []string
	for seen := make(map[Fence]bool); !signaled[f] && !seen[f]; {
		seen[f] = true
		q := g.signals[f][0]
		before := q.list[at[q]].fence
		why = append(why, fmt.Sprintf("%s waits for %v before it signals %v", q.name, nameOf(before), nameOf(f)))
		f = before
	}
	slices.Reverse(why)
	return strings.Join(why, ", ")
}

func nameOf(f Fence) string {
	if s, ok := f.(fmt.Stringer); ok {
		return fmt.Sprintf("%q", s.String())
	}
	return fmt.Sprintf("the fence %p", f)
}
