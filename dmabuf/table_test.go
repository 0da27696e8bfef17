package dmabuf

import (
	"bytes"
	"math"
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
