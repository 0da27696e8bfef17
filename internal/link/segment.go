package link

// Payload by reference in memory that both processes can map: the receiver copies it from
// its mapping to where it goes, without a system call. The record names the segment besides
// the addresses to fetch the payload from (reference.go). The first record that names a
// segment makes the receiver ask for it; until the segment is mapped, the receiver fetches.
//
// The receiver gets a descriptor of the file that the sender's memory is, for reading only.
// Rights to the destination are checked as for every request.

import (
	"sync"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// maxMapped is the most segments of other processes that each of the maps below holds.
const maxMapped = 256

// segmentKey is a segment of another process.
type segmentKey struct {
	c  *shm.Channel
	id uint64
}

// grantKey is a segment that grants give access to.
type grantKey struct {
	segmentKey
	write bool // it is mapped for writing
}

// segmentMaps are the segments of other processes. The goroutine that polls looks them up in
// byKey; the goroutines that map them leave them in arrived.
type segmentMaps struct {
	byKey map[segmentKey][]byte // nil: asked for, or it could not be mapped; only Poll uses it

	mu      sync.Mutex // guards what follows
	arrived map[segmentKey][]byte
	grants  map[grantKey]*mapping // see grant.go
	asked   map[*bool]segmentKey  // what calls of mapGranted are about to map, see ask
}

// ask notes that mapGranted is about to map a segment. unmapSegments sets *forgotten, under
// mu, if the segment is dropped meanwhile.
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

// findSegment returns the bytes of a segment, or nil if it is not mapped. The first call for
// a segment starts a goroutine that maps it.
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

// askSegment maps a segment for findSegment.
func (s *Shared) askSegment(k segmentKey, t *tag) {
	b, err := mapSegment(k, t, false)
	if err != nil {
		return // its payloads are fetched, as before
	}
	s.segments.mu.Lock()
	defer s.segments.mu.Unlock()
	if s.segments.arrived == nil {
		s.segments.arrived = make(map[segmentKey][]byte)
	}
	s.segments.arrived[k] = b
}

// mapSegment gets the descriptor of a segment from its owner process and maps it.
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
	if err := k.c.Check(); err != nil { // another process may have the number by now, and have answered
		_ = sys.Unmap(b) // cannot fail for a whole mapping
		return nil, err
	}
	return b, nil
}

// dropSegments unmaps the segments that match, and closes the opened memory that does
// (opened.go). Only the goroutine that polls may call it, or Close when none polls any more.
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
				_ = sys.Unmap(b) // cannot fail for a whole mapping
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

// forgetSegment tells all peers that a segment of this process is gone. A peer whose ring is
// full is not told, and keeps the memory mapped until the channel ends.
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

// PassSegment returns a descriptor of a segment of this process, to be passed to the process
// that has asked for it; the caller closes it. The descriptor is for reading only, or with
// write for writing: then PassSegment fails unless mem.OpenSegment has allowed that.
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
