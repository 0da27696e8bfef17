package dmabuf

import (
	"fmt"
	"slices"
	"sort"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Direction is which way data moves through a mapping.
type Direction uint8

const (
	Bidirectional Direction = iota
	ToDevice                // the device reads
	FromDevice              // the device writes
)

// Writes reports whether the device may write.
func (d Direction) Writes() bool { return d != ToDevice }

// Reads reports whether the device may read.
func (d Direction) Reads() bool { return d != FromDevice }

func (d Direction) valid() bool { return d <= FromDevice }

var directionNames = [...]string{"bidirectional", "to the device", "from the device"}

// String names the direction.
func (d Direction) String() string {
	if d.valid() {
		return directionNames[d]
	}
	return fmt.Sprintf("Direction(%d)", uint8(d))
}

// Table is where a buffer's bytes are: a list of segments, each of which is contiguous. It is
// what the kernel calls a scatter table.
type Table struct {
	segments [][]byte
	ends     []uint64 // where in the buffer each segment ends
	flat     []byte   // the segment, if there is only one: most tables are looked up for each copy

	owner any       // what the package itself keeps with a table that it has made
	file  *fileSpan // where another process finds the bytes; nil: nowhere
}

// fileSpan is a memory file, and where in it the segments of a table lie.
type fileSpan struct {
	fd       int
	segments []extent
}

// NewTable makes a table of segments, in the order of the buffer. Segments without bytes are
// left out.
func NewTable(segments ...[]byte) *Table {
	t := &Table{segments: slices.DeleteFunc(slices.Clone(segments), func(s []byte) bool { return len(s) == 0 })}
	end := uint64(0)
	for _, s := range t.segments {
		end += uint64(len(s)) // cannot wrap: the segments are distinct memory, or few
		t.ends = append(t.ends, end)
	}
	if len(t.segments) == 1 {
		t.flat = t.segments[0]
	}
	return t
}

// NewFileTable is NewTable for segments that lie in a memory file, all of which the exporter has
// mapped at file: importers in other processes find the bytes there. fd is the file's descriptor,
// which stays open as long as the table is in use. The file is sealed against changes of its size.
//
// It panics if a segment is not a part of file.
func NewFileTable(fd int, file []byte, segments ...[]byte) *Table {
	t := NewTable(segments...)
	span := &fileSpan{fd: fd}
	for _, s := range t.segments {
		off := sys.OffsetIn(file, s)
		if off < 0 {
			panic("dmabuf: NewFileTable with a segment outside the file")
		}
		span.segments = append(span.segments, extent{off, len(s)})
	}
	t.file = span
	return t
}

// Len returns the number of bytes.
func (t *Table) Len() uint64 {
	if len(t.ends) == 0 {
		return 0
	}
	return t.ends[len(t.ends)-1]
}

// Segments returns the segments.
func (t *Table) Segments() [][]byte { return t.segments }

// At returns the bytes at off that lie together: at least one and at most n, if off is inside
// the table and n is not 0; none otherwise.
func (t *Table) At(off, n uint64) []byte {
	if off < uint64(len(t.flat)) {
		b := t.flat[off:]
		return b[:min(n, uint64(len(b)))]
	}
	return t.search(off, n)
}

// search is At for tables of several segments, and for offsets outside.
func (t *Table) search(off, n uint64) []byte {
	i := sort.Search(len(t.ends), func(i int) bool { return t.ends[i] > off })
	if i == len(t.ends) {
		return nil
	}
	s := t.segments[i]
	in := off - (t.ends[i] - uint64(len(s)))
	return s[in:][:min(n, uint64(len(s))-in)]
}
