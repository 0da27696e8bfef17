package shm

import (
	"fmt"
	"sync/atomic"
)

// Writer is the writing end of a ring. It is used by one goroutine at a time;
// it never waits and never allocates.
type Writer struct {
	data        []byte
	freed, want *atomic.Uint64 // shared, see ring.go

	// All of this is private. Positions are offsets in data; counts are of bytes
	// since the ring was made, and do not wrap in any process's life.
	pos       int    // where the next record goes
	reserved  uint64 // count of what was reserved
	committed uint64 // count of what was made visible
	given     uint64 // count of what the reader has given back, as last read

	first  int    // where the records lie that are not visible yet
	header header // the header that makes them visible; 0: there are none
	clear  int    // where a zero header is, as of the latest Commit or Abort: a line ahead, or at pos

	err error
}

// newWriter makes the writer of a ring that has just been made. mem is the
// whole segment.
func newWriter(mem []byte) *Writer {
	return &Writer{data: mem[controlPage:], freed: word(mem, freedAt), want: word(mem, wantAt)}
}

// MaxRecord returns the longest record that the ring takes.
func (w *Writer) MaxRecord() int { return maxRecord(len(w.data)) }

// Reserve returns room for a record of n bytes, at most MaxRecord of them,
// behind those reserved before. It is not ok if there is no room now, or if the
// ring is broken: see Err.
func (w *Writer) Reserve(typ byte, n int) (p []byte, ok bool) {
	if n < 0 || n > w.MaxRecord() {
		panic(fmt.Sprintf("shm: a record of %d bytes in a ring for %d", n, w.MaxRecord()))
	}
	size := slot(n)
	skip := 0
	if rest := len(w.data) - w.pos; size > rest {
		skip = rest
	}
	if !w.room(skip + size) {
		return nil, false
	}
	if skip > 0 {
		w.put(filler)
		w.advance(skip)
	}
	w.put(recordHeader(typ, n))
	p = w.data[w.pos+headerBytes:][:n:n]
	w.advance(size)
	return p, true
}

// put writes a header at pos, or keeps it for Commit if it is the first that is not visible.
func (w *Writer) put(h header) {
	if w.header == 0 {
		w.first, w.header = w.pos, h
	} else {
		store(w.data, w.pos, uint64(h))
	}
}

func (w *Writer) advance(n int) {
	w.reserved += uint64(n)
	if w.pos += n; w.pos == len(w.data) {
		w.pos = 0
	}
}

// room reports whether n bytes are free, and the line behind them, which is for
// the zero that ends the records.
func (w *Writer) room(n int) bool {
	if w.fits(n) {
		return w.err == nil
	}
	return w.look() && w.fits(n)
}

func (w *Writer) fits(n int) bool {
	return uint64(n)+line <= uint64(len(w.data))-(w.reserved-w.given)
}

// look reads how much the reader has given back. The ring is broken if that is less than
// before, or more than was made visible.
func (w *Writer) look() bool {
	given := w.freed.Load()
	if w.err == nil && (given-w.given > w.committed-w.given || given%line != 0) {
		w.err = fmt.Errorf("%w: the reader gave back %d bytes, after %d, of %d", ErrBroken, given, w.given, w.committed)
	}
	if w.err != nil {
		return false
	}
	w.given = given
	return true
}

// Has reports whether n bytes are free. It reads what the reader has given back only if they
// were not free before.
func (w *Writer) Has(n int) bool {
	free := func() int { return len(w.data) - int(w.reserved-w.given) }
	return n <= free() || w.look() && n <= free()
}

// Arm asks the reader for a signal when it gives something back. It reports whether the reader
// has given something back since the latest Reserve: then the caller tries Reserve again.
func (w *Writer) Arm() bool {
	before := w.given
	w.want.Store(1)
	return w.look() && w.given != before
}

// Commit makes visible what was reserved. It reports whether there was
// anything.
func (w *Writer) Commit() bool {
	if w.header == 0 {
		return false
	}
	if w.pos != w.clear {
		store(w.data, w.pos, 0)
	}
	word(w.data, w.first).Store(uint64(w.header)) // everything before is seen with it
	w.header = 0
	w.committed = w.reserved
	w.clearAhead()
	return true
}

// clearAhead clears the header behind the next record, supposing that it takes
// one line, and there is room for it.
func (w *Writer) clearAhead() {
	w.clear = w.pos // which Commit has cleared
	if !w.fits(line) {
		return
	}
	if w.clear += line; w.clear == len(w.data) {
		w.clear = 0
	}
	store(w.data, w.clear, 0)
}

// Abort gives up what was reserved and not committed.
func (w *Writer) Abort() {
	if w.header != 0 {
		w.pos, w.header = w.first, 0
		w.reserved = w.committed
		w.clear = w.pos // the place ahead may have been written
	}
}

// Err returns what is wrong with the ring: nothing, or an ErrBroken.
func (w *Writer) Err() error { return w.err }
