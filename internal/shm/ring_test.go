package shm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// newRing returns the two ends of a ring, in two mappings of one segment.
func newRing(t testing.TB, size int) (*Writer, *Reader, []byte) {
	t.Helper()
	fd, a, err := newSegment("verbena-test", controlPage+size)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.CloseFD(fd)
	b, err := sys.MapMemfd(fd, controlPage+size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sys.Unmap(a); sys.Unmap(b) })
	return newWriter(a), newReader(b), a
}

// fill makes the contents of a record from its number.
func fill(p []byte, number uint64) {
	x := number*0x9e3779b97f4a7c15 | 1
	for len(p) >= 8 {
		binary.NativeEndian.PutUint64(p, x)
		x += 0x1234567
		p = p[8:]
	}
	for i := range p {
		p[i] = byte(x >> (8 * i))
	}
}

// filled reports whether p is what fill makes.
func filled(p []byte, number uint64) bool {
	x := number*0x9e3779b97f4a7c15 | 1
	for len(p) >= 8 {
		if binary.NativeEndian.Uint64(p) != x {
			return false
		}
		x += 0x1234567
		p = p[8:]
	}
	for i := range p {
		if p[i] != byte(x>>(8*i)) {
			return false
		}
	}
	return true
}

// A ring compared with a queue, in any order of the operations that one writer and one reader
// may do.
func TestRingModel(t *testing.T) {
	type rec struct {
		typ    byte
		number uint64
		n      int
	}
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, size := range []int{MinRing, 3 * RingUnit, 64 << 10} {
		w, r, _ := newRing(t, size)
		var reserved, visible []rec
		var number uint64
		var held [][]byte // returned by Next, not released
		var heldRecs []rec
		wraps, full := 0, 0
		for step := range 200_000 {
			switch rng.IntN(12) {
			case 0, 1, 2, 3:
				n := rng.IntN(200)
				switch rng.IntN(20) {
				case 0:
					n = rng.IntN(w.MaxRecord() + 1)
				case 1:
					n = w.MaxRecord()
				case 2:
					n = 0
				}
				before := w.pos
				p, ok := w.Reserve(byte(number), n)
				if w.Err() != nil {
					t.Fatalf("step %d: %v", step, w.Err())
				}
				if !ok {
					// With everything read and given back there is room.
					if full++; len(reserved) == 0 && len(visible) == 0 && len(held) == 0 {
						t.Fatalf("step %d: no room for %d bytes in an empty ring", step, n)
					}
					continue
				}
				if len(p) != n || cap(p) != n {
					t.Fatalf("step %d: %d bytes of capacity %d for %d", step, len(p), cap(p), n)
				}
				if w.pos < before {
					wraps++
				}
				fill(p, number)
				reserved = append(reserved, rec{byte(number), number, n})
				number++
			case 4, 5:
				if w.Commit() != (len(reserved) > 0) {
					t.Fatalf("step %d: commit of %d", step, len(reserved))
				}
				visible = append(visible, reserved...)
				reserved = nil
			case 6:
				if rng.IntN(4) == 0 {
					w.Abort()
					reserved = nil
				}
			case 7, 8, 9:
				ready := r.Ready()
				typ, p, ok := r.Next()
				if ok != (len(visible) > 0) || ok && !ready || r.Err() != nil {
					t.Fatalf("step %d: next %v, ready %v, %d are there, %v", step, ok, ready, len(visible), r.Err())
				}
				if ok {
					if want := visible[0]; typ != want.typ || len(p) != want.n {
						t.Fatalf("step %d: type %d, %d bytes, should be %+v", step, typ, len(p), want)
					}
					held, heldRecs = append(held, p), append(heldRecs, visible[0])
					visible = visible[1:]
				}
			case 10:
				for i, p := range held {
					if !filled(p, heldRecs[i].number) {
						t.Fatalf("step %d: record %+v was overwritten", step, heldRecs[i])
					}
				}
				wanted := r.read-r.told >= uint64(size/8) && w.want.Load() != 0
				if got := r.Release(); got != wanted {
					t.Fatalf("step %d: a signal is wanted: %v, should be %v", step, got, wanted)
				}
				held, heldRecs = nil, nil
			case 11:
				if rng.IntN(8) == 0 {
					w.Arm()
				}
			}
		}
		if wraps < 100 || full < 100 {
			t.Errorf("ring of %d: only %d wraps, full %d times", size, wraps, full)
		}
	}
}

// Writer and reader at the same time, in two goroutines.
func TestRingConcurrent(t *testing.T) {
	w, r, _ := newRing(t, 16<<10)
	const count = 200_000
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	var wg sync.WaitGroup
	wg.Go(func() {
		rng := rand.New(rand.NewPCG(seed, 1))
		for number := uint64(0); number < count; {
			batch := 1 + rng.IntN(4)
			for range batch {
				n := rng.IntN(300)
				if rng.IntN(64) == 0 {
					n = rng.IntN(w.MaxRecord() + 1)
				}
				p, ok := w.Reserve(byte(number), n)
				if !ok {
					if w.Err() != nil {
						t.Error(w.Err())
						return
					}
					break
				}
				fill(p, number)
				number++
			}
			if !w.Commit() {
				runtime.Gosched()
			}
		}
	})
	for number := uint64(0); number < count; {
		typ, p, ok := r.Next()
		if !ok {
			if r.Err() != nil {
				t.Fatal(r.Err())
			}
			runtime.Gosched()
			continue
		}
		if typ != byte(number) || !filled(p, number) {
			t.Fatalf("record %d: type %d, %d bytes", number, typ, len(p))
		}
		number++
		r.Release()
	}
	wg.Wait()
}

// What a hostile writer can put in front of a reader.
func TestReaderRefuses(t *testing.T) {
	const size = MinRing
	rec := func(n int) uint64 { return uint64(recordHeader(7, n)) }
	for _, c := range []struct {
		name  string
		words map[int]uint64 // by offset in the ring
		good  int            // records before it breaks
	}{
		{"no mark", map[int]uint64{0: 5}, 0},
		{"unknown mark", map[int]uint64{0: 3 << markBits}, 0},
		{"bits above the mark", map[int]uint64{0: rec(5) | 1<<63}, 0},
		{"behind the end", map[int]uint64{0: rec(size)}, 0},
		{"one byte behind the end", map[int]uint64{0: rec(size - headerBytes + 1)}, 0},
		{"length of all ones", map[int]uint64{0: rec(0) | 1<<lengthBits - 1}, 0},
		{"second behind the end", map[int]uint64{0: rec(100), 128: rec(size - 128 - headerBytes + 1)}, 1},
		{"filler at the start", map[int]uint64{0: uint64(filler)}, 0},
		{"filler with a length", map[int]uint64{0: rec(1), 64: uint64(filler) | 8}, 1},
		{"two fillers", map[int]uint64{0: rec(1), 64: uint64(filler)}, 1}, // the second is put there below
		{"round and round", map[int]uint64{0: rec(size - headerBytes)}, 1},
	} {
		testReaderRefuses(t, c.name, c.words, c.good, false)
		if c.name != "round and round" { // a reader that releases may find the same records again
			testReaderRefuses(t, c.name, c.words, c.good, true)
		}
	}
}

func testReaderRefuses(t *testing.T, name string, words map[int]uint64, want int, release bool) {
	t.Run(fmt.Sprintf("%s/release=%v", name, release), func(t *testing.T) {
		_, r, mem := newRing(t, MinRing)
		for off, v := range words {
			word(mem, controlPage+off).Store(v)
		}
		good := 0
		for {
			_, p, ok := r.Next()
			if !ok {
				break
			}
			if good++; good > want {
				t.Fatalf("record %d of %d bytes was accepted", good, len(p))
			}
			if name == "two fillers" {
				word(mem, controlPage).Store(uint64(filler))
			}
			if release {
				r.Release()
			}
		}
		if good != want || !errors.Is(r.Err(), ErrBroken) {
			t.Errorf("%d records, then %v", good, r.Err())
		}
		if _, _, ok := r.Next(); ok || r.Ready() {
			t.Error("a broken ring went on")
		}
	})
}

func TestWriterRefuses(t *testing.T) {
	for _, freed := range []uint64{1, 63, 128, 1 << 63, ^uint64(0), ^uint64(63)} {
		w, _, mem := newRing(t, MinRing)
		p, ok := w.Reserve(1, 10) // takes 64 bytes
		if !ok || len(p) != 10 {
			t.Fatal(ok, len(p))
		}
		w.Commit()
		word(mem, freedAt).Store(freed)
		for i := 0; i < 1000 && ok; i++ {
			_, ok = w.Reserve(1, 10)
		}
		if ok || !errors.Is(w.Err(), ErrBroken) {
			t.Errorf("%#x given back: %v", freed, w.Err())
		}
		if _, ok := w.Reserve(1, 0); ok || w.Arm() {
			t.Error("a broken ring went on")
		}
	}
	// Nor can the count go back.
	w, r, mem := newRing(t, MinRing)
	for range 2 {
		w.Reserve(1, 1000)
		w.Commit()
		r.Next()
		r.Release()
		w.Arm()
	}
	word(mem, freedAt).Store(1024)
	if w.Arm() || !errors.Is(w.Err(), ErrBroken) {
		t.Errorf("taken back: %v", w.Err())
	}
}

func TestReserveTooLong(t *testing.T) {
	w, _, _ := newRing(t, MinRing)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	w.Reserve(0, w.MaxRecord()+1)
}

// FuzzReader: a ring filled with anything, and changed while it is read. The
// reader must stay inside the ring and come to an end.
func FuzzReader(f *testing.F) {
	good := func(ns ...int) []byte {
		var b []byte
		for _, n := range ns {
			at := len(b)
			b = append(b, make([]byte, slot(n))...)
			binary.NativeEndian.PutUint64(b[at:], uint64(recordHeader(3, n)))
		}
		return b
	}
	f.Add(good(0, 10, 100, 3000), []byte{})
	f.Add(append(good(100, 200), binary.NativeEndian.AppendUint64(nil, uint64(filler))...), []byte{0, 1, 2})
	f.Add(bytes.Repeat([]byte{0xff}, 200), []byte{9, 9})
	f.Fuzz(func(t *testing.T, content, script []byte) {
		_, r, mem := newRing(t, MinRing)
		data := mem[controlPage:]
		copy(data, content)
		before := bytes.Clone(mem[:controlPage])
		total := 0
		for step := 0; ; step++ {
			typ, p, ok := r.Next()
			if !ok {
				break
			}
			_ = typ
			// The record is in the mapping and not too long: writing to it does not fault.
			if len(p) > len(data)-headerBytes {
				t.Fatalf("%d bytes of %d", len(p), len(data))
			}
			for i := range p {
				p[i] ^= 0x5a
			}
			if total += slot(len(p)); total > len(data) && step >= len(script) {
				t.Fatalf("%d bytes in use of %d", total, len(data))
			}
			if step < len(script) { // the writer goes on, and the reader releases
				op := int(script[step])
				if op&1 != 0 {
					r.Release()
					total = 0
				}
				at := op >> 1 * line % len(data)
				copy(data[at:], content)
			}
		}
		mem[freedAt], before[freedAt] = 0, 0
		binary.NativeEndian.PutUint64(before[freedAt:], 0)
		binary.NativeEndian.PutUint64(mem[freedAt:], 0)
		if !bytes.Equal(mem[:controlPage], before) {
			t.Error("the control page was written")
		}
	})
}

// FuzzWriter: a reader that gives back anything at any time. The writer must
// stay inside the ring, and no two records in use may overlap.
func FuzzWriter(f *testing.F) {
	f.Add([]byte{1, 2, 3, 200, 100, 0, 7}, uint64(64))
	f.Add([]byte{255, 254, 253, 128, 128}, ^uint64(0))
	f.Fuzz(func(t *testing.T, script []byte, freed uint64) {
		w, _, mem := newRing(t, MinRing)
		for i, op := range script {
			switch op % 4 {
			case 0, 1:
				n := int(op) * w.MaxRecord() / 255
				p, ok := w.Reserve(op, n)
				if !ok && w.Err() == nil {
					continue
				}
				if len(p) != n && ok {
					t.Fatalf("%d bytes for %d", len(p), n)
				}
				clear(p)
			case 2:
				w.Commit()
			case 3:
				if op > 128 {
					word(mem, freedAt).Store(freed + uint64(i)*line)
				} else {
					word(mem, freedAt).Store(w.committed) // what a good reader does
				}
			}
			if used := w.reserved - w.given; used > uint64(len(w.data))-line {
				t.Fatalf("%d bytes in use of %d", used, len(w.data))
			}
		}
	})
}

func TestRingAllocs(t *testing.T) {
	w, r, _ := newRing(t, 64<<10)
	msg := make([]byte, 100)
	if n := testing.AllocsPerRun(1000, func() {
		p, _ := w.Reserve(1, len(msg))
		copy(p, msg)
		w.Commit()
		r.Next()
		r.Release()
	}); n != 0 {
		t.Errorf("%v allocations a record", n)
	}
}

// A writer that leaves part of the ring free (link.Shared does, for retransmissions) finds all
// room that the reader has given back, though the reader publishes it only now and then.
func TestRingHas(t *testing.T) {
	const size, n = 64 << 10, 3000
	w, r, _ := newRing(t, size)
	if !w.Has(size) || w.Has(size+1) {
		t.Fatal("an empty ring is free as a whole")
	}
	for i := range 200 {
		if !w.Has(size/2 + n) {
			t.Fatalf("record %d: an empty ring has no room for %d bytes beside half of it", i, n)
		}
		if _, ok := w.Reserve(1, n); !ok {
			t.Fatalf("record %d does not fit", i)
		}
		w.Commit()
		if w.Has(size) {
			t.Fatalf("record %d takes no room", i)
		}
		if _, _, ok := r.Next(); !ok {
			t.Fatalf("record %d has not come", i)
		}
		r.Release()
	}
}
