package link

// Long payloads that lie in memory which both processes can map: copied straight
// from there to where they go, without a system call. The record names the segment,
// besides the addresses that it can be fetched from (reference.go). The first record of a
// segment makes the receiver ask for it; what comes before it has the answer is
// fetched.
//
// The receiver gets a descriptor that can only be read from, and of the very file
// that the sender's memory is. Rights to where the bytes go are checked as ever.

import (
	"sync"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// maxMapped is how many segments of others are mapped at most.
const maxMapped = 256

// segmentKey is a segment of another process.
type segmentKey struct {
	c  *shm.Channel
	id uint64
}

// grantKey is a segment that lanes lead to.
type grantKey struct {
	segmentKey
	write bool // it is mapped to be written to
}

// segmentMaps are the segments of others. Who polls looks them up; those who ask for them
// leave them in arrived.
type segmentMaps struct {
	byKey map[segmentKey][]byte // nil: asked for, or not to be had; Poll's own

	mu      sync.Mutex // guards what follows
	arrived map[segmentKey][]byte
	grants  map[grantKey]*mapping // see grant.go
	asked   map[*bool]segmentKey  // by mapGranted, which is not there yet
}

// ask notes that somebody asks for a segment, and returns what tells whether it was dropped
// meanwhile: both guarded by mu.
func (m *segmentMaps) ask(k segmentKey) (forgotten *bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.asked == nil {
		m.asked = make(map[*bool]segmentKey)
	}
	forgotten = new(bool)
	m.asked[forgotten] = k
	return forgotten
}

// findSegment returns the bytes of a segment, if it is mapped. If it is not, it asks for it.
func (s *Shared) findSegment(c *shm.Channel, id uint64) []byte {
	k := segmentKey{c, id}
	b, asked := s.segments.byKey[k]
	if b != nil {
		return b
	}
	if !asked {
		s.dropSegments(func(k segmentKey) bool { return k.c.Err() != nil })
		if len(s.segments.byKey) >= maxMapped {
			return nil
		}
		if s.segments.byKey == nil {
			s.segments.byKey = make(map[segmentKey][]byte)
		}
		s.segments.byKey[k] = nil
		t := c.Tag().(*tag)
		s.start(func() { s.askSegment(k, t) })
		return nil
	}
	s.segments.mu.Lock()
	defer s.segments.mu.Unlock()
	if b = s.segments.arrived[k]; b != nil {
		delete(s.segments.arrived, k)
		s.segments.byKey[k] = b
	}
	return b
}

// askSegment gets a segment for findSegment.
func (s *Shared) askSegment(k segmentKey, t *tag) {
	b, err := mapSegment(k, t, false)
	if err != nil {
		return // it is fetched as before
	}
	s.segments.mu.Lock()
	defer s.segments.mu.Unlock()
	if s.segments.arrived == nil {
		s.segments.arrived = make(map[segmentKey][]byte)
	}
	s.segments.arrived[k] = b
}

// mapSegment gets a segment from its process and maps it.
func mapSegment(k segmentKey, t *tag, write bool) ([]byte, error) {
	fd, err := t.dev.Segment(t.process, k.id, write)
	if err != nil {
		return nil, err
	}
	b, err := sys.MapMemfdWhole(fd, write)
	_ = sys.CloseFD(fd) // the mapping stays
	if err != nil {
		return nil, err
	}
	if err := k.c.Check(); err != nil { // another process may have its number, and have answered
		_ = sys.Unmap(b) // it was mapped: it cannot fail
		return nil, err
	}
	return b, nil
}

// dropSegments gives up the segments that match, and the memory that was opened (opened.go).
// The goroutine that polls calls it, or any other when none polls any more.
func (s *Shared) dropSegments(match func(segmentKey) bool) {
	s.unmapSegments(match)
	s.dropOpened(match)
}

func (s *Shared) unmapSegments(match func(segmentKey) bool) {
	s.segments.mu.Lock()
	defer s.segments.mu.Unlock()
	for _, m := range []map[segmentKey][]byte{s.segments.byKey, s.segments.arrived} {
		for k, b := range m {
			if !match(k) {
				continue
			}
			delete(m, k)
			if b != nil {
				_ = sys.Unmap(b) // it was mapped: it cannot fail
			}
		}
	}
	for forgotten, k := range s.segments.asked {
		*forgotten = *forgotten || match(k)
	}
	for k, m := range s.segments.grants {
		if match(k.segmentKey) {
			delete(s.segments.grants, k)
			m.close()
		}
	}
}

// forgetSegment tells all other processes that a segment of this one is gone. One
// that does not hear it keeps the memory until the channel ends.
func (s *Shared) forgetSegment(id uint64) {
	s.mu.Lock()
	devices := []*device{s.home}
	for _, d := range s.devices {
		devices = append(devices, d.Value())
	}
	closed := s.closed
	s.mu.Unlock()
	for _, d := range devices {
		if d == nil || closed {
			continue
		}
		for i := range d.channels {
			c := d.channels[i].Load()
			if c == nil || !c.Begin() {
				continue
			}
			c.Tag().(*tag).reached.Delete(id)
			if b, ok := c.Reserve(recForget, 8); ok {
				le.PutUint64(b, id)
				c.Commit()
			}
			c.End()
		}
	}
}

// PassSegment is for who is asked for a segment of this process: it returns a
// descriptor, which is the caller's to close. It can only be read from, unless it was
// asked for to write to and has been opened for that.
func PassSegment(id uint64, write bool) (fd int, err error) {
	err = mem.ErrNoSegment
	mem.SegmentFile(id, func(own int, writable bool) {
		switch {
		case !write:
			fd, err = sys.ReopenRead(own)
		case writable:
			fd, err = sys.DupFD(own)
		}
	})
	if err != nil {
		return -1, err
	}
	return fd, nil
}
