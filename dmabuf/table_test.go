package dmabuf

import (
	"bytes"
	"math"
	"slices"
	"testing"
)

// Tables of random segments, empty ones among them, return the bytes that the segments have
// together.
func TestTable(t *testing.T) {
	rng := random(t)
	for range 300 {
		var segments [][]byte
		var all []byte
		for range rng.IntN(6) {
			s := make([]byte, rng.IntN(4)*rng.IntN(20))
			for i := range s {
				s[i] = byte(rng.Uint32())
			}
			segments = append(segments, s)
			all = append(all, s...)
		}
		table := NewTable(segments...)
		if table.Len() != uint64(len(all)) {
			t.Fatalf("%d bytes, should be %d", table.Len(), len(all))
		}
		if got := bytes.Join(table.Segments(), nil); !bytes.Equal(got, all) {
			t.Fatal("the segments are others")
		}
		for off := range uint64(len(all)) {
			for _, n := range []uint64{1, 1 + rng.Uint64N(100), math.MaxUint64} {
				b := table.At(off, n)
				if len(b) == 0 || uint64(len(b)) > n || !bytes.HasPrefix(all[off:], b) {
					t.Fatalf("%d bytes at %d of %d: %d bytes", n, off, len(all), len(b))
				}
			}
			n := rng.Uint64N(uint64(len(all)) - off + 1)
			if part := table.Part(off, n); part.Len() != n || !bytes.Equal(bytes.Join(part.Segments(), nil), all[off:][:n]) {
				t.Fatalf("the part of %d bytes at %d has %d others", n, off, part.Len())
			}
			if b := table.At(off, 0); len(b) != 0 {
				t.Fatalf("no bytes at %d: %d bytes", off, len(b))
			}
		}
		for _, off := range []uint64{table.Len(), table.Len() + 1, math.MaxUint64} {
			if b := table.At(off, 1); b != nil {
				t.Fatalf("%d bytes at %d of %d", len(b), off, len(all))
			}
		}
	}
}

func TestDirections(t *testing.T) {
	for _, c := range []struct {
		dir           Direction
		reads, writes bool
		name          string
	}{
		{Bidirectional, true, true, "bidirectional"}, {ToDevice, true, false, "to the device"},
		{FromDevice, false, true, "from the device"}, {9, true, true, "Direction(9)"},
	} {
		if c.dir.Reads() != c.reads || c.dir.Writes() != c.writes || c.dir.String() != c.name {
			t.Errorf("%v reads %v, writes %v", c.dir, c.dir.Reads(), c.dir.Writes())
		}
	}
}

// A part of a table of files lies in the same files.
func TestFileTablePart(t *testing.T) {
	table := NewFileTable(FileSegment{FD: 5, Offset: 1000, Bytes: make([]byte, 10)}, FileSegment{FD: 6, Offset: 0, Bytes: make([]byte, 20)},
		FileSegment{FD: 5, Offset: 3000, Bytes: make([]byte, 30)})
	f := table.Part(4, 30).files
	want := []fileExtent{{0, extent{1004, 6}}, {1, extent{0, 20}}, {0, extent{3000, 4}}}
	if !slices.Equal(f.fds, []int{5, 6}) || !slices.Equal(f.segments, want) {
		t.Errorf("it lies in %v at %v, should be at %v", f.fds, f.segments, want)
	}
	if f := table.Part(30, 5).files; !slices.Equal(f.segments, []fileExtent{{0, extent{3000, 5}}}) {
		t.Errorf("the last part lies at %v", f.segments)
	}

	// The exporter hears that another process gets a part of its memory: it does not use the place again.
	m, err := Alloc(MemoryConfig{Size: 2 * 4096})
	check(t, err)
	locked(m.Buffer().Reservation(), func() {
		whole, err := m.mapping(nil, Bidirectional)
		check(t, err)
		whole.Part(4096, 4096).files.show()
		if !m.place.shown.Load() {
			t.Error("the memory does not know that a part of it was shown")
		}
		m.unmap(nil, whole, Bidirectional)
	})
	check(t, m.Close())
}

// That a table is of a device's memory holds for its parts, too.
func TestTableOfDevice(t *testing.T) {
	plain, device := NewTable(make([]byte, 8)), NewTable(make([]byte, 8)).OfDevice()
	if plain.IsDevice() || plain.Part(2, 3).IsDevice() || !device.IsDevice() || !device.Part(2, 3).IsDevice() {
		t.Error("a table does not know whose memory it is of")
	}
}
