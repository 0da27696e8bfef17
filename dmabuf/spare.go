package dmabuf

import (
	"sync"
	"time"
)

// spareTime is how long a place is kept for the next move. Memory that moves more often than that
// takes no pages from the kernel for a move: it clears them, which takes longer than the copy.
const spareTime = 100 * time.Millisecond

// spare is a place that the memory has left, for its next move. Its bytes are poison.
type spare struct {
	mu     sync.Mutex  // guards what follows
	place  *place      // nil: there is none
	timer  *time.Timer // frees the place; nil: none was kept yet
	closed bool        // the memory is released
}

// take returns the place, which is the caller's from then on; nil: there is none.
func (s *spare) take() *place {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.place
	s.place = nil
	return p
}

// keep poisons a place that is not mapped here, and keeps it for a while. A place that another
// process may still write to is never used again, but freed at once.
func (s *spare) keep(p *place) {
	if p.ofFile || p.shown.Load() {
		p.discard()
		return
	}
	p.poison()
	p.left = false
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.place != nil {
		p.free()
		return
	}
	s.place = p
	if s.timer == nil {
		s.timer = time.AfterFunc(spareTime, s.drop)
	} else {
		s.timer.Reset(spareTime)
	}
}

// drop frees the place.
func (s *spare) drop() {
	if p := s.take(); p != nil {
		p.free()
	}
}

// close frees the place, and those that would be kept later: the memory is released.
func (s *spare) close() {
	s.mu.Lock()
	s.closed = true
	if s.timer != nil {
		s.timer.Stop()
	}
	s.mu.Unlock()
	s.drop()
}
