package dmabuf

import (
	"fmt"
	"slices"
	"sort"
	"sync/atomic"
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

	peer  bool   // the bytes are memory of a device
	owner any    // what the package itself keeps with a table that it has made
	files *files // where another process finds the bytes; nil: nowhere
}

// files are memory files, and where in them the segments of a table lie.
type files struct {
	fds      []int
	segments []fileExtent
	// place is the only file, mapped from its start, if the exporter gives the file up when the
	// buffer leaves it: nothing else will ever be there. nil: it may use the file again.
	place []byte
	shown *atomic.Bool // is set before another process gets a file; nil: the exporter does not ask
}

// show notes that another process gets the files.
func (f *files) show() {
	if f.shown != nil {
		f.shown.Store(true)
	}
}

// fileExtent is a part of one of several files.
type fileExtent struct {
	file int
	extent
}

// FileSegment is a segment of a table that is a part of a memory file.
type FileSegment struct {
	FD     int    // of the file; it stays open until Unmap
	Offset uint64 // of the first byte in the file
	Bytes  []byte // where the part is mapped in this process
}

// NewFileTable is NewTable for segments that lie in memory files (memfd_create(2)). Importers in
// other processes get the descriptors, and map the files themselves; they cannot use what
// NewTable makes. Each file must be sealed against shrinking (F_SEAL_SHRINK), or they are refused
// with EOPNOTSUPP. They can reach all of a file, not only the segments.
func NewFileTable(segments ...FileSegment) *Table {
	t, f := &Table{}, &files{}
	for _, s := range segments {
		if len(s.Bytes) == 0 {
			continue
		}
		i := slices.Index(f.fds, s.FD)
		if i < 0 {
			i = len(f.fds)
			f.fds = append(f.fds, s.FD)
		}
		f.segments = append(f.segments, fileExtent{i, extent{int(s.Offset), len(s.Bytes)}})
		t.segments = append(t.segments, s.Bytes)
	}
	t.files = f
	t.index()
	return t
}

// NewTable makes a table of segments, in the order of the buffer. Segments without bytes are
// left out.
func NewTable(segments ...[]byte) *Table {
	t := &Table{segments: slices.DeleteFunc(slices.Clone(segments), func(s []byte) bool { return len(s) == 0 })}
	t.index()
	return t
}

// index fills in what is looked up.
func (t *Table) index() {
	end := uint64(0)
	for _, s := range t.segments {
		end += uint64(len(s)) // cannot wrap: the segments are distinct memory, or few
		t.ends = append(t.ends, end)
	}
	if len(t.segments) == 1 {
		t.flat = t.segments[0]
	}
}

// Place returns the memory file that all bytes lie in, mapped from its start, and its descriptor,
// if the exporter gives the file up when the buffer leaves it: memory of [Alloc], also that of
// another process. Then an importer may let further processes map the file. What they still write
// there when the buffer has left is lost (see [Attachment.StillWritten]).
func (t *Table) Place() (file []byte, fd int, ok bool) {
	if t.files == nil || t.files.place == nil {
		return nil, -1, false
	}
	t.files.show()
	return t.files.place, t.files.fds[0], true
}

// Len returns the number of bytes.
func (t *Table) Len() uint64 {
	if len(t.ends) == 0 {
		return 0
	}
	return t.ends[len(t.ends)-1]
}

// OfDevice makes the table one of a device's own memory, which importers reach by the bus, as peers. It returns the
// table. Others are of system memory.
func (t *Table) OfDevice() *Table {
	t.peer = true
	return t
}

// IsDevice reports whether the bytes are memory of a device: see OfDevice. In the kernel an importer learns that from
// the pages, or from the addresses that it gets.
func (t *Table) IsDevice() bool { return t.peer }

// Part returns the table of a range that is inside this one.
func (t *Table) Part(off, n uint64) *Table {
	part := &Table{peer: t.peer}
	if t.files != nil {
		part.files = &files{fds: t.files.fds, place: t.files.place, shown: t.files.shown}
	}
	start := uint64(0)
	for i, s := range t.segments {
		from, to := max(off, start), min(off+n, t.ends[i])
		if from < to {
			part.segments = append(part.segments, s[from-start:to-start])
			if t.files != nil {
				f := t.files.segments[i]
				f.extent = extent{f.off + int(from-start), int(to - from)}
				part.files.segments = append(part.files.segments, f)
			}
		}
		start = t.ends[i]
	}
	part.index()
	return part
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
