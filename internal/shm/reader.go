package shm

import (
	"fmt"
	"sync/atomic"
)

// Reader is the reading end of a ring. It is used by one goroutine at a time;
// it never waits and, unless the ring is broken, never allocates.
type Reader struct {
	data        []byte
	freed, want *atomic.Uint64 // shared, see ring.go

	// All of this is private. Counts are of bytes since the ring was made.
	pos      int    // where the next record starts
	read     uint64 // count of what Next has returned
	released uint64 // count of what has been released
	told     uint64 // count that has been published in freed

	err error
}

// newReader makes the reader of a ring that has just been made. mem is the
// whole segment.
func newReader(mem []byte) *Reader {
	return &Reader{data: mem[controlPage:], freed: word(mem, freedAt), want: word(mem, wantAt)}
}

// Next returns the next record. It is not ok if there is none, or if the ring
// is broken: see Err.
//
// The bytes lie in shared memory, and a peer that misbehaves may change them at
// any time: what is checked must be copied first. They stay until Release.
func (r *Reader) Next() (typ byte, p []byte, ok bool) {
	h := r.peek()
	if h == 0 || r.err != nil {
		return 0, nil, false
	}
	if h == filler && r.pos > 0 { // no correct writer fills a whole ring
		if !r.advance(len(r.data) - r.pos) {
			return 0, nil, false
		}
		if h = r.peek(); h == 0 {
			return 0, nil, false
		}
	}
	at := r.pos
	n := h.length()
	if !h.isRecord() || n > uint64(len(r.data)-at-headerBytes) {
		r.fail(h)
		return 0, nil, false
	}
	if !r.advance(slot(int(n))) {
		return 0, nil, false
	}
	return h.typ(), r.data[at+headerBytes:][:n:n], true
}

// Ready reports whether Next would return a record or find the ring broken. It may be only
// filler that is there.
func (r *Reader) Ready() bool { return r.peek() != 0 && r.err == nil }

func (r *Reader) peek() header { return header(word(r.data, r.pos).Load()) }

// advance goes on by n bytes, which end in the ring. It fails if more bytes than the ring has
// would be in use.
func (r *Reader) advance(n int) bool {
	if uint64(n) > uint64(len(r.data))-(r.read-r.released) {
		r.err = fmt.Errorf("%w: the writer has overtaken the reader at %d", ErrBroken, r.pos)
		return false
	}
	r.read += uint64(n)
	if r.pos += n; r.pos == len(r.data) {
		r.pos = 0
	}
	return true
}

func (r *Reader) fail(h header) {
	r.err = fmt.Errorf("%w: %v at %d of %d", ErrBroken, h, r.pos, len(r.data))
}

// Release gives back the room of all records that Next has returned. It publishes that to the
// writer once it is at least publishEvery bytes, and then reports whether the writer has asked
// for a signal (see Writer.Arm), which the caller sends.
func (r *Reader) Release() (wanted bool) {
	r.released = r.read
	return r.released-r.told >= uint64(publishEvery(len(r.data))) && r.publish()
}

func (r *Reader) publish() (wanted bool) {
	r.told = r.released
	r.freed.Store(r.told)
	// freed is stored before want is loaded: a writer that sets want and then reads freed
	// either finds the new value, or its want is seen here.
	if r.want.Load() == 0 {
		return false
	}
	r.want.Store(0)
	return true
}

// Err returns what is wrong with the ring: nothing, or an ErrBroken.
func (r *Reader) Err() error { return r.err }
