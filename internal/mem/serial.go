package mem

// Engines without hardware of their own, whose operations are system calls that may block. A
// goroutine does those of one stream one after the other, and ends when there are none left.

import "sync"

// serial is what such an engine keeps for a stream.
type serial struct {
	mu    sync.Mutex // guards what follows
	queue []*Op
	runs  bool
}

// inOrder has a goroutine do an operation after those begun before it of the same stream and
// owner. It returns at once.
func inOrder(owner any, op *Op, do func(*Op) FaultKind) {
	s := op.Stream.State(owner, func() any { return new(serial) }).(*serial)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = append(s.queue, op)
	if !s.runs {
		s.runs = true
		go s.run(do) // ends with the queue; the region's section is open until then
	}
}

func (s *serial) run(do func(*Op) FaultKind) {
	for {
		s.mu.Lock()
		if len(s.queue) == 0 {
			s.runs, s.queue = false, nil
			s.mu.Unlock()
			return
		}
		op := s.queue[0]
		s.queue = s.queue[1:]
		s.mu.Unlock()
		kind := FaultDead
		if !op.Dropped() {
			kind = do(op)
		}
		op.End(kind)
	}
}
