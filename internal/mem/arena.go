package mem

// arena hands out ranges of a space of addresses, for device memory. What is free
// is kept in bins by size, 16 for each power of two, so that a range is found and
// given back in a time that does not depend on how many there are; neighbours that
// are free become one at once. The arena writes nothing into the space itself.
//
// The ways through it:
//
//  1. alloc takes the smallest bin whose every range is large enough; if there is
//     none, it looks at those that may be, one by one, so that it fails only if
//     there really is no room.
//  2. carve splits off what is in front of the alignment and behind the end.
//  3. release joins a range with its neighbours and puts it into its bin.

import "math/bits"

const (
	binBits = 4 // bins for each power of two, as a power of two
	binCols = 1 << binBits
	binRows = 64 - binBits + 1
)

// extent is a range of the space. Those in use are in no bin.
type extent struct {
	off, n        uint64
	used          bool
	before, after *extent // the neighbours
	prev, next    *extent // in the bin
}

// arena is not safe for concurrent use.
type arena struct {
	size  uint64
	rows  uint64 // bit set: which rows have a range
	cols  [binRows]uint16
	bins  [binRows][binCols]*extent
	spare *extent // extents to use again, by next
	inUse uint64  // bytes
	holes int     // free ranges
}

func (a *arena) init(size uint64) {
	a.size = size
	if size > 0 {
		a.insert(&extent{n: size})
	}
}

// binOf returns the bin that a free range of n bytes belongs to.
func binOf(n uint64) (row, col int) {
	if n < binCols {
		return 0, int(n)
	}
	top := bits.Len64(n) - 1
	return top - binBits + 1, int(n>>(top-binBits)) & (binCols - 1)
}

// alloc takes n bytes, not zero, whose offset is a multiple of align, a power of
// two. It returns nil if there is no such range.
func (a *arena) alloc(n, align uint64) *extent {
	if n > a.size || align > a.size {
		return nil // and no sum below passes the end
	}
	e := a.find(n + align - 1)
	if e == nil {
		e = a.search(n, align)
	}
	if e == nil {
		return nil
	}
	a.remove(e)
	return a.carve(e, n, align)
}

// find returns a free range of at least n bytes, from the first bin that has only
// such.
func (a *arena) find(n uint64) *extent {
	if n >= binCols {
		up := uint64(1)<<(bits.Len64(n)-1-binBits) - 1
		if n > ^up {
			return nil
		}
		n += up // the bin of this many has none that are smaller than n
	}
	row, col := binOf(n)
	if cols := a.cols[row] >> col << col; cols != 0 {
		return a.bins[row][bits.TrailingZeros16(cols)]
	}
	rows := a.rows >> (row + 1) << (row + 1)
	if rows == 0 {
		return nil
	}
	row = bits.TrailingZeros64(rows)
	return a.bins[row][bits.TrailingZeros16(a.cols[row])]
}

// search looks at every free range that may do.
func (a *arena) search(n, align uint64) *extent {
	row, col := binOf(n)
	for ; row < binRows; row, col = row+1, 0 {
		for ; col < binCols; col++ {
			for e := a.bins[row][col]; e != nil; e = e.next {
				if pad := e.pad(align); pad <= e.n && n <= e.n-pad {
					return e
				}
			}
		}
	}
	return nil
}

// pad returns how many bytes lie before the first multiple of align.
func (e *extent) pad(align uint64) uint64 { return -e.off & (align - 1) }

// carve makes a range, which is in no bin, one of n bytes in use.
func (a *arena) carve(e *extent, n, align uint64) *extent {
	if pad := e.pad(align); pad > 0 {
		front := e
		e = a.split(front, pad)
		a.insert(front)
	}
	if e.n > n {
		a.insert(a.split(e, n))
	}
	e.used = true
	a.inUse += e.n
	return e
}

// split makes two ranges of one and returns the second.
func (a *arena) split(e *extent, at uint64) *extent {
	rest := a.spare
	if rest == nil {
		rest = new(extent)
	} else {
		a.spare = rest.next
	}
	*rest = extent{off: e.off + at, n: e.n - at, before: e, after: e.after}
	if rest.after != nil {
		rest.after.before = rest
	}
	e.n, e.after = at, rest
	return rest
}

// release gives a range back.
func (a *arena) release(e *extent) {
	e.used = false
	a.inUse -= e.n
	if b := e.before; b != nil && !b.used {
		a.remove(b)
		e = a.join(b)
	}
	if n := e.after; n != nil && !n.used {
		a.remove(n)
		a.join(e)
	}
	a.insert(e)
}

// join makes a range and the one behind it one.
func (a *arena) join(e *extent) *extent {
	rest := e.after
	e.n += rest.n
	if e.after = rest.after; e.after != nil {
		e.after.before = e
	}
	*rest = extent{next: a.spare}
	a.spare = rest
	return e
}

// insert puts a free range into its bin.
func (a *arena) insert(e *extent) {
	row, col := binOf(e.n)
	e.prev, e.next = nil, a.bins[row][col]
	if e.next != nil {
		e.next.prev = e
	}
	a.bins[row][col] = e
	a.cols[row] |= 1 << col
	a.rows |= 1 << row
	a.holes++
}

// remove takes a free range out of its bin.
func (a *arena) remove(e *extent) {
	row, col := binOf(e.n)
	if e.next != nil {
		e.next.prev = e.prev
	}
	if e.prev != nil {
		e.prev.next = e.next
	} else if a.bins[row][col] = e.next; e.next == nil {
		if a.cols[row] &^= 1 << col; a.cols[row] == 0 {
			a.rows &^= 1 << row
		}
	}
	e.prev, e.next = nil, nil
	a.holes--
}
