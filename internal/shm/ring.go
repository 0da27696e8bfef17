package shm

// A ring carries records from one writer to one reader.
//
// A record is a header of one word and its bytes behind it, contiguous, in a
// whole number of lines of 64 bytes. No index shows how far the writer is: the header is zero
// until the record is complete, so a short record reaches the reader in a single cache line.
// Before the writer makes a record visible, it clears the header behind it, where the reader
// will look next. (So one line always stays free.) Mostly it has done so before: after a
// record it clears one line ahead, for the record that will be written next, if that is a
// short one. Then it stores nothing between the bytes of that record and its header.
//
// Records written together become visible together, when the first of them
// does: the reader cannot get past it.
//
// Where a record does not fit before the ring's end, filler goes there and the
// record to the start.
//
// In the other direction there is one index, the number of bytes that the
// reader has given back, and one flag, by which the writer asks for a signal when
// that changes. They lie on the control page in front of the records. The reader
// updates the index whenever it has given back an eighth of the ring, so the index
// may stay behind by less than that: a record is at most a quarter of the ring,
// and finds room in what is left even if filler comes first.

import (
	"errors"
	"fmt"
)

// ErrBroken means that a ring holds what no correct peer writes.
var ErrBroken = errors.New("ring is broken")

const (
	line        = 64
	headerBytes = 8
	controlPage = 4096

	freedAt = 0    // bytes that the reader has given back; only the reader writes it
	wantAt  = line // not zero: the writer wants a signal when there is room; the reader resets it

	// MinRing and MaxRing bound the size of a ring, which is a multiple of
	// RingUnit.
	MinRing  = 4 << 10
	MaxRing  = 64 << 20
	RingUnit = 4 << 10
)

// validRing reports whether a ring may have so many bytes.
func validRing(n uint64) bool { return n >= MinRing && n <= MaxRing && n%RingUnit == 0 }

// maxRecord returns the longest record of a ring of n bytes, and publishEvery after how many
// bytes the reader publishes what it has given back. An empty ring must have room for the
// longest record and filler even if almost publishEvery bytes of it are not published yet.
func maxRecord(n int) int    { return n/4 - headerBytes }
func publishEvery(n int) int { return n / 8 }

// header is the word in front of a record: length, type, and a mark that makes
// it differ from zero. All other bits are zero.
type header uint64

const (
	lengthBits = 32
	markBits   = lengthBits + 8

	markRecord = 1
	markFiller = 2
)

func recordHeader(typ byte, n int) header {
	return markRecord<<markBits | header(typ)<<lengthBits | header(n)
}

// filler covers the rest of the ring, so it needs no length.
const filler header = markFiller << markBits

func (h header) isRecord() bool { return h>>markBits == markRecord }
func (h header) typ() byte      { return byte(h >> lengthBits) }
func (h header) length() uint64 { return uint64(h) & (1<<lengthBits - 1) }

func (h header) String() string { return fmt.Sprintf("header %#016x", uint64(h)) }

// slot returns how many bytes of a ring a record of n bytes takes.
func slot(n int) int { return (headerBytes + n + line - 1) &^ (line - 1) }
