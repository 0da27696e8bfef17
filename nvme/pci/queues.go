package pci

// Queues. Each submission queue has a goroutine, which takes commands from it in order: fetch, find the data, execute,
// post the completion. A completion queue belongs to nobody; whoever posts to it holds its lock.

import (
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/nvme"
)

const (
	sqEntry = 64
	cqEntry = 16
)

// completionQueue is where commands of some submission queues complete.
type completionQueue struct {
	id        uint16
	base      uint64
	size      uint32
	vector    int
	interrupt bool
	users     int // submission queues; guarded by Controller.mu

	mu         sync.Mutex // guards what follows
	room       *sync.Cond // the host has taken entries, or a poster has to stop
	head, tail uint32
	phase      bool
}

func newCQ(id uint16, base uint64, size uint32, vector int, interrupt bool) *completionQueue {
	q := &completionQueue{id: id, base: base, size: size, vector: vector, interrupt: interrupt, phase: true}
	q.room = sync.NewCond(&q.mu)
	return q
}

// used returns how many entries the host has not taken.
func (q *completionQueue) usedLocked() uint32 { return (q.tail + q.size - q.head) % q.size }

// take is the host's doorbell: it has taken the entries before head. It reports whether that is possible.
func (q *completionQueue) take(head uint32) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if head >= q.size || head == q.head || (head+q.size-q.head)%q.size > q.usedLocked() {
		return false
	}
	q.head = head
	q.room.Broadcast()
	return true
}

// wake wakes posters that wait for room, so that they see that they have to stop.
func (q *completionQueue) wake() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.room.Broadcast()
}

// waiting reports whether the host has entries to take.
func (q *completionQueue) waiting() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.usedLocked() > 0
}

// post writes a completion, as soon as there is room. It returns false if the submission queue was stopped before, or
// if the memory of the completion queue is gone.
func (q *completionQueue) post(s *submissionQueue, done nvme.Completion) bool {
	c := s.mapper.c
	q.mu.Lock()
	for q.usedLocked() == q.size-1 && !s.stopped.Load() {
		q.room.Wait()
	}
	if s.stopped.Load() {
		q.mu.Unlock()
		return false
	}
	b, _ := c.whole(q.base+cqEntry*uint64(q.tail), cqEntry)
	if b == nil {
		q.mu.Unlock()
		c.fatal()
		return false
	}
	done.Phase = q.phase
	done.Publish((*[cqEntry]byte)(b))
	if q.tail++; q.tail == q.size {
		q.tail, q.phase = 0, !q.phase
	}
	q.mu.Unlock()
	if q.interrupt {
		c.raise(q.vector)
	}
	return true
}

// submissionQueue is where the host puts commands.
type submissionQueue struct {
	id   uint16
	base uint64
	size uint32
	cq   *completionQueue

	head, tail atomic.Uint32 // the goroutine's, and the doorbell's
	stopped    atomic.Bool
	kick       chan struct{} // holds one token if there may be something to do
	done       chan struct{} // closed when the goroutine has ended
	mapper     mapper        // the goroutine's
}

func (c *Controller) newSQ(id uint16, base uint64, size uint32, cq *completionQueue, at place, page uint64) *submissionQueue {
	return &submissionQueue{id: id, base: base, size: size, cq: cq,
		kick: make(chan struct{}, 1), done: make(chan struct{}),
		mapper: mapper{c: c, page: page, queue: at}}
}

// ring is the host's doorbell: commands before tail are there. It reports whether that is possible.
func (s *submissionQueue) ring(tail uint32) bool {
	old := s.tail.Load()
	if tail >= s.size || tail == old {
		return false
	}
	added, used := (tail+s.size-old)%s.size, (old+s.size-s.head.Load())%s.size
	if added > s.size-1-used {
		return false
	}
	s.tail.Store(tail)
	s.wake()
	return true
}

func (s *submissionQueue) wake() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// halt has the goroutine end; it ends after the command that it is at.
func (s *submissionQueue) halt() {
	s.stopped.Store(true)
	s.cq.wake()
	s.wake()
}

// run executes commands until the queue is halted. ctrl is the controller that the queue was made for.
func (s *submissionQueue) run(ctrl *nvme.Controller) {
	defer close(s.done)
	for range s.kick {
		for !s.stopped.Load() {
			if s.id == 0 && !s.postEvents() {
				return
			}
			head := s.head.Load()
			if head == s.tail.Load() {
				break
			}
			if !s.next(ctrl, head) {
				return
			}
		}
		if s.stopped.Load() {
			return
		}
	}
}

// postEvents posts the async event requests that have completed since.
func (s *submissionQueue) postEvents() bool {
	for _, done := range s.mapper.c.takeEvents() {
		if !s.post(done) {
			return false
		}
	}
	return true
}

func (s *submissionQueue) post(done nvme.Completion) bool {
	done.SQHead, done.SQID = uint16(s.head.Load()), s.id
	return s.cq.post(s, done)
}

// next executes the command at head.
func (s *submissionQueue) next(ctrl *nvme.Controller, head uint32) bool {
	c := s.mapper.c
	b, _ := c.whole(s.base+sqEntry*uint64(head), sqEntry)
	if b == nil {
		c.fatal()
		return false
	}
	raw := [sqEntry]byte(b) // the host may change the entry as soon as it knows that it was fetched
	s.head.Store((head + 1) % s.size)
	c.commands.Add(1)
	cmd := nvme.ParseCommand(&raw)
	admin := s.id == 0
	if admin {
		if done, ok := c.queueCommand(ctrl, &cmd); ok {
			return s.post(done)
		}
	}
	n, dir, st := ctrl.Transfer(admin, &cmd)
	var data [][]byte
	if st == nvme.StatusSuccess && n > 0 {
		data, st = s.mapper.mapData(admin, &cmd, n, dir)
	}
	if st != nvme.StatusSuccess {
		return s.post(nvme.Completion{CID: cmd.CID, Status: st})
	}
	done, ok := ctrl.Execute(admin, &cmd, data)
	return !ok || s.post(done)
}
