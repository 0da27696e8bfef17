package device

import (
	"math/rand/v2"
	"sync"

	"github.com/verbena-rdma/verbena/internal/cm"
)

// maxMADs is how many requests, and how many other datagrams, wait to be served. Further ones are lost,
// and their senders repeat them.
const maxMADs = 512

// madQueue holds the datagrams that wait to be served, by one goroutine at a time. Answers come first: a
// flood of requests must not keep out what connections in the making wait for.
type madQueue struct {
	wake chan struct{} // has room for one value, which is there if the queue may not be empty

	mu                sync.Mutex // guards what follows
	serving           bool       // a goroutine has one of the queue, and comes back for the next
	calls             []func()   // one for each queue pair at most: see management.AwaitData
	answers, requests madRing
	closed            bool
}

// madRing is a queue of at most maxMADs datagrams.
type madRing struct {
	all         []*mad // nil until the first one
	first, used int
}

func (r *madRing) at(i int) **mad { return &r.all[(r.first+i)%maxMADs] }

func (r *madRing) push(d *mad) {
	if r.all == nil {
		r.all = make([]*mad, maxMADs)
	}
	*r.at(r.used) = d
	r.used++
}

func (r *madRing) pop() *mad {
	if r.used == 0 {
		return nil
	}
	p := r.at(0)
	d := *p
	*p = nil
	r.first, r.used = (r.first+1)%maxMADs, r.used-1
	return d
}

// put adds a datagram, which the caller then serves, or calls notify for. It reports false if one is
// lost. Of answers that is the new one. A request takes the place of a random one: those that come all at
// once are not lost all at once.
func (q *madQueue) put(d *mad) bool {
	_, id, _, _ := cm.Classify(d.bytes[:])
	kept := true
	q.mu.Lock()
	switch r := q.ring(id); {
	case r.used < maxMADs:
		r.push(d)
	case r == &q.requests:
		*r.at(rand.N(maxMADs)) = d
		kept = false
	default:
		kept = false
	}
	q.mu.Unlock()
	return kept
}

// putCall adds a call.
func (q *madQueue) putCall(f func()) {
	q.mu.Lock()
	q.calls = append(q.calls, f)
	q.mu.Unlock()
	q.notify()
}

func (q *madQueue) notify() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// ring returns where a datagram with a communication id waits. Those without one are requests and what
// withdraws them, which must not overtake them.
func (q *madQueue) ring(id uint32) *madRing {
	if id == 0 {
		return &q.requests
	}
	return &q.answers
}

// begin returns the first datagram, to be served by the caller; nil if there is none, or another goroutine
// serves. With what it returns the caller calls next.
func (q *madQueue) begin() *mad {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.serving {
		return nil
	}
	return q.popLocked()
}

// next returns the next datagram to the goroutine that has served the one before; nil if there is none.
func (q *madQueue) next() *mad {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.popLocked()
}

// end ends the service by a goroutine that does not call next any more.
func (q *madQueue) end() {
	q.mu.Lock()
	q.serving = false
	q.mu.Unlock()
	q.notify()
}

func (q *madQueue) popLocked() (d *mad) {
	if len(q.calls) > 0 {
		d = &mad{call: q.calls[0]}
		q.calls = q.calls[1:]
	}
	for _, r := range [...]*madRing{&q.answers, &q.requests} {
		if d == nil {
			d = r.pop()
		}
	}
	q.serving = d != nil
	return d
}

// wait waits until the queue may not be empty. It reports false if the queue is closed.
func (q *madQueue) wait() bool {
	<-q.wake
	q.mu.Lock()
	defer q.mu.Unlock()
	return !q.closed
}

// close ends the queue. Nobody puts anything into it any more.
func (q *madQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.notify()
}
