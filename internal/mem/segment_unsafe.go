package mem

// Segments: memory of this process that other processes of this host may map. They copy
// payload by reference straight from there, without asking this process for it.
//
// The address of a slice is only compared with those of segments here; nothing makes
// a pointer of a number again, so this is sound.

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// ErrNoSegment means that a segment is not there any more.
var ErrNoSegment = errors.New("mem: no such segment")

// Segment is a sealed memory file that is mapped here from its start.
type Segment struct {
	id   uint64
	fd   int
	base uintptr
	size uint64

	writable atomic.Bool // others may write to it
}

// segments are all of them. The list is sorted by address and never changes: it is
// replaced, under mu.
var segments struct {
	list atomic.Pointer[[]*Segment]

	mu       sync.Mutex // guards what follows, and changes of list
	last     uint64
	watchers map[*func(id uint64)]bool
}

// AddSegment makes a segment of memory that is a memory file, sealed against shrinking and
// mapped from its start; fd is its descriptor. The descriptor and the mapping must stay until
// Close.
func AddSegment(mapped []byte, fd int) *Segment {
	segments.mu.Lock()
	defer segments.mu.Unlock()
	segments.last++
	s := &Segment{id: segments.last, fd: fd, base: uintptr(unsafe.Pointer(unsafe.SliceData(mapped))), size: uint64(len(mapped))}
	list := append(slices.Clone(allSegments()), s)
	slices.SortFunc(list, func(a, b *Segment) int {
		if a.base < b.base {
			return -1
		}
		return 1
	})
	segments.list.Store(&list)
	return s
}

func allSegments() []*Segment {
	if l := segments.list.Load(); l != nil {
		return *l
	}
	return nil
}

// Close ends the segment, and has other processes that have mapped it give it up. The caller
// unmaps it after that. It is idempotent.
func (s *Segment) Close() {
	segments.mu.Lock()
	list := slices.Clone(allSegments())
	i := slices.Index(list, s)
	if i < 0 {
		segments.mu.Unlock()
		return
	}
	list = slices.Delete(list, i, i+1)
	segments.list.Store(&list)
	segments.mu.Unlock()
	tellSegmentGone(s.id)
}

// tellSegmentGone calls the functions that WatchSegments was given.
func tellSegmentGone(id uint64) {
	segments.mu.Lock()
	tell := make([]func(uint64), 0, len(segments.watchers))
	for w := range segments.watchers {
		tell = append(tell, *w)
	}
	segments.mu.Unlock()
	for _, f := range tell {
		f(id)
	}
}

// WatchSegments has f called with the number of every segment that is closed, and of every
// closed memory that other processes may have opened (shared.go), until stop is called.
func WatchSegments(f func(id uint64)) (stop func()) {
	segments.mu.Lock()
	defer segments.mu.Unlock()
	if segments.watchers == nil {
		segments.watchers = make(map[*func(uint64)]bool)
	}
	segments.watchers[&f] = true
	return func() {
		segments.mu.Lock()
		defer segments.mu.Unlock()
		delete(segments.watchers, &f)
	}
}

// SegmentOf returns the number of the segment that b lies in, and where in it; 0 if there is
// none. It does not allocate.
func SegmentOf(b []byte) (id, off uint64) {
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	list := allSegments()
	lo, hi := 0, len(list)
	for lo < hi { // the last that begins at or before at
		if mid := (lo + hi) / 2; list[mid].base <= at {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 {
		return 0, 0
	}
	return list[lo-1].Of(b)
}

// Of returns the segment's number, and where in it b lies; 0 if b lies elsewhere.
func (s *Segment) Of(b []byte) (id, off uint64) {
	at, n := uintptr(unsafe.Pointer(unsafe.SliceData(b))), uint64(len(b))
	if off = uint64(at - s.base); off > s.size || n > s.size-off {
		return 0, 0
	}
	return s.id, off
}

// SegmentFile calls f with the descriptor of a segment, which stays open meanwhile, and
// whether other processes may write to it. It reports whether there is such a segment.
func SegmentFile(id uint64, f func(fd int, writable bool)) bool {
	segments.mu.Lock()
	defer segments.mu.Unlock()
	for _, s := range allSegments() {
		if s.id == id {
			f(s.fd, s.writable.Load())
			return true
		}
	}
	return false
}

// OpenSegment lets other processes write to a segment, from now on.
func OpenSegment(id uint64) {
	for _, s := range allSegments() {
		if s.id == id {
			s.writable.Store(true)
		}
	}
}
