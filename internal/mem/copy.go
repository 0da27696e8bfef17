package mem

// The way of bytes, top-down:
//
//  1. Copy walks two lists at once, each with a cursor; those of one piece that lies
//     together need none (CopyWhole).
//  2. A cursor opens a read section on the next piece of its list, for a
//     quantum at most, and offers the bytes.
//  3. move, in move_unsafe.go, copies what both cursors offer.
//  4. Sections close as soon as their bytes are used up, and bytes are counted
//     by the kinds of memory they went between.
//
// Check walks a list with the same cursor, and so does Gather, in gather.go.

// Quantum is the most bytes that are moved in one read section: it bounds how
// long the closing of a region waits.
const Quantum = 256 << 10

// Copy copies n bytes from one list to another. On a fault it says on which
// side, and bytes before it may have been copied already, as on hardware.
//
// last says that a message ends with these bytes: then what lies in their last
// aligned word is stored after everything else, with release order, and in one
// piece if it fills the word. A receiver that spins on the end of a buffer, and
// never asks the device, sees the message whole once it sees the end.
//
// What lists that overlap in memory contain afterwards is undefined, as on
// hardware.
//
// It is CopyWhole where that will do, and CopyPieces or copyFar where not.
func Copy(dst, src *List, n uint64, last bool) (Fault, Side) {
	switch {
	case src.Far != nil:
		return copyFar(dst, src, n, last)
	case CopyWhole(dst, src, n, last):
		return Fault{}, 0
	}
	return CopyPieces(dst, src, n, last)
}

// CopyPieces is Copy for lists of any shape, of memory that is near.
func CopyPieces(dst, src *List, n uint64, last bool) (f Fault, side Side) {
	var d, s cursor
	d.list, d.skip = dst, dst.Off
	s.list, s.skip = src, src.Off
	moved := 0 // bytes that are not counted yet, all between the same two sections
	for n > 0 {
		if len(d.b) == 0 {
			if d.left == 0 {
				moved = count(&d, &s, moved)
			}
			if !d.fill(n) {
				side = Dst
				break
			}
		}
		if len(s.b) == 0 {
			if s.left == 0 && src.Table != nil {
				moved = count(&d, &s, moved)
			}
			if !s.fill(n) {
				side = Src
				break
			}
		}
		k := min(len(d.b), len(s.b))
		if k >= longPiece && crooked(d.b, s.b) {
			k = aside
		}
		end := last && uint64(k) == n
		if d.solid() && s.solid() {
			move(d.b[:k], s.b[:k], end)
		} else if bad := moveGuarded(d.b[:k], s.b[:k], end); bad != 0 {
			if side = gone(&d, &s, bad); side != 0 {
				break
			}
			continue // they are back, and none of them is certain to have been moved
		}
		if d.kind() == KindForeign && !d.store(k, end) {
			side = Dst
			break
		}
		moved += k
		d.b, s.b = d.b[k:], s.b[k:]
		n -= uint64(k)
	}
	count(&d, &s, moved)
	d.close()
	s.close()
	switch side {
	case Dst:
		f = d.fault
	case Src:
		f = s.fault
	}
	return f, side
}

// CopyWhole is Copy for memory that is near and lies together on both sides, as most does:
// it needs no cursors. It reports whether it could; if not, it may have copied bytes.
func CopyWhole(dst, src *List, n uint64, last bool) bool {
	to, d := dst.whole(n)
	if d == nil {
		return false
	}
	from, s := src.whole(n)
	ok := s != nil && moveWhole(to, from, d, s, last)
	if from != nil {
		from.exit()
	}
	if to != nil {
		to.exit()
	}
	return ok
}

// whole returns the n bytes of a list of one piece, if they are there and lie together,
// with the region whose section is open then; that is nil for raw bytes.
func (l *List) whole(n uint64) (r *Region, b []byte) {
	if n == 0 || n > Quantum {
		return nil, nil
	}
	if l.Table == nil {
		if len(l.Raw) == 1 && !l.Frail && holds(uint64(len(l.Raw[0])), l.Off, n) {
			b = l.Raw[0][l.Off : l.Off+n]
		}
		return nil, b
	}
	if len(l.SGEs) != 1 || !holds(uint64(l.SGEs[0].Length), l.Off, n) {
		return nil, nil
	}
	e := &l.SGEs[0]
	addr := e.Addr + l.Off
	if r = l.find(e.LKey); r == nil || addr < e.Addr {
		return nil, nil
	}
	off, kind := r.open(e.LKey, addr, n, l.Access, l.Actor)
	if kind != FaultNone {
		return nil, nil
	}
	if r.kind == KindPinned || r.kind == KindDevice {
		if b, kind = r.backing.Run(off, n, l.Access); kind == FaultNone && uint64(len(b)) == n {
			return r, b
		}
	}
	r.exit()
	return nil, nil
}

// holds reports whether n bytes from off on are within size.
func holds(size, off, n uint64) bool { return off <= size && n <= size-off }

// moveWhole moves bytes between two sections, of which either may be nil: raw bytes. It
// reports whether they were there, and not better moved in pieces.
func moveWhole(to, from *Region, d, s []byte, last bool) bool {
	toKind, fromKind, solid, counts := KindRaw, KindRaw, true, from
	if from != nil {
		fromKind, solid = from.kind, from.solid
	}
	if to != nil {
		toKind, solid, counts = to.kind, solid && to.solid, to
	}
	if len(d) >= longPiece && crooked(d, s) {
		return false
	}
	if solid {
		move(d, s, last)
	} else if moveGuarded(d, s, last) != 0 {
		return false
	}
	if counts != nil {
		counts.count(fromKind, toKind, len(d))
	}
	return true
}

// gone deals with an address that could not be accessed: it asks the side that
// it belongs to to bring it back, and returns that side if it cannot.
func gone(d, s *cursor, bad uintptr) Side {
	c, side := s, Src
	if within(bad, d.b) {
		c, side = d, Dst
	}
	if f := c.gone(bad); !f.OK() {
		c.fault = f
		return side
	}
	return 0
}

// count adds k bytes to the counters of the target's table, or of the source's
// where the target is raw. It returns 0: that nothing is left to count.
func count(d, s *cursor, k int) int {
	if k == 0 {
		return 0
	}
	r := d.region
	if r == nil {
		r = s.region
	}
	if r != nil {
		r.count(s.kind(), d.kind(), k)
	}
	return 0
}

// count counts bytes that were copied to the region, or from it to raw bytes.
func (r *Region) count(from, to Kind, k int) {
	r.table.moved[r.Key()>>tagBits%counterShards].bytes[from][to].Add(uint64(k))
}

// cursor is a place in a list, with the section that is open there.
type cursor struct {
	list   *List
	next   int     // the piece that is used next
	skip   uint64  // bytes to skip from its start
	region *Region // where the bytes in use lie, if in a region: the open section
	off    uint64  // how far its bytes have been offered in b
	left   uint64  // bytes of the section that have not
	b      []byte  // bytes that are offered and not used yet
	lost   int     // how often they were gone when they were used
	piece  int     // in an indirect key: the piece that was used last
	fault  Fault   // why it cannot go on
}

// close closes the section that is open, if any.
func (c *cursor) close() {
	if c.region != nil {
		c.region.exit()
		c.region = nil
	}
}

// fill makes b the next bytes of the list: between 1 and n of them. It reports false if
// there is a fault.
func (c *cursor) fill(n uint64) bool {
	if c.left == 0 {
		c.close()
		if c.list.Table == nil {
			return c.fillRaw(n)
		}
		if !c.open(min(n, Quantum)) {
			return false
		}
	}
	var kind FaultKind
	if m := c.region.mkey; m != nil {
		c.b, kind = m.layout.run(c.off, c.left, c.list.Access, &c.piece)
	} else {
		c.b, kind = c.region.backing.Run(c.off, c.left, c.list.Access)
	}
	if kind != FaultNone {
		return c.fail(c.region.fault(kind, c.off, c.left, c.list.Access))
	}
	if len(c.b) == 0 {
		panic("mem: a backing returned neither bytes nor a fault")
	}
	c.off += uint64(len(c.b))
	c.left -= uint64(len(c.b))
	return true
}

func (c *cursor) fail(f Fault) bool {
	c.fault = f
	return false
}

// open opens a section on at most n bytes of the next piece.
func (c *cursor) open(n uint64) bool {
	l := c.list
	for c.next < len(l.SGEs) {
		e := &l.SGEs[c.next]
		size := uint64(e.Length)
		if c.skip >= size {
			c.skip -= size
			c.next++
			continue
		}
		n = min(n, size-c.skip)
		addr := e.Addr + c.skip
		if addr < e.Addr { // the piece passes the end of the address space
			return c.fail(Fault{Kind: FaultBounds, Key: e.LKey, Extent: Extent{e.Addr, size}})
		}
		r, off, kind := l.find(e.LKey), uint64(0), FaultKey
		if r != nil {
			off, kind = r.open(e.LKey, addr, n, l.Access, l.Actor)
		}
		if kind != FaultNone {
			return c.fail(Fault{Kind: kind, Key: e.LKey, Extent: Extent{addr, n}})
		}
		c.region, c.off, c.left = r, off, n
		c.skip += n
		return true
	}
	return c.fail(Fault{Kind: FaultBounds, Extent: Extent{Len: n}}) // the list is too short
}

// find returns the region with a key: the one that is remembered, if it still has that
// key. When a region is closed its key may become another's.
func (l *List) find(key uint32) *Region {
	m := l.Memo
	if m == nil {
		return l.Table.Lookup(key)
	}
	r := m.region
	if r == nil || r.Key() != key || r.Closed() {
		r = l.Table.Lookup(key)
		m.region = r
	}
	return r
}

// store brings the first k of the bytes in use, which have been moved there, to the
// process that they belong to. It reports false if there is a fault.
func (c *cursor) store(k int, last bool) bool {
	off := c.off - uint64(len(c.b))
	kind := c.region.backing.(foreign).Store(off, c.b[:k], last)
	return kind == FaultNone || c.fail(c.region.fault(kind, off, uint64(k), c.list.Access))
}

// fillRaw is fill for a list of raw bytes, which needs no section.
func (c *cursor) fillRaw(n uint64) bool {
	for c.next < len(c.list.Raw) {
		b := c.list.Raw[c.next]
		if c.skip >= uint64(len(b)) {
			c.skip -= uint64(len(b))
			c.next++
			continue
		}
		n = min(n, uint64(len(b))-c.skip)
		c.b = b[c.skip:][:n]
		c.skip += n
		return true
	}
	return c.fail(Fault{Kind: FaultBounds, Extent: Extent{Len: n}})
}

// gone deals with bytes in use that are not there any more, from an address on
// (0: it is not known where). If it returns no fault, they are back.
func (c *cursor) gone(bad uintptr) Fault {
	if c.region == nil {
		return Fault{Kind: FaultStale, Extent: Extent{Len: uint64(len(c.b))}}
	}
	c.lost++
	left := uint64(len(c.b))
	if _, ok := c.region.backing.(paged); ok && bad > addrOf(c.b) {
		left -= min(uint64(bad-addrOf(c.b)), left-1)
	}
	return c.region.gone(c.off-left, left, c.list.Access, c.lost)
}

// solid reports whether the bytes in use cannot fault.
func (c *cursor) solid() bool {
	if c.region == nil {
		return !c.list.Frail
	}
	return c.region.solid
}

// kind returns the kind of the bytes in use.
func (c *cursor) kind() Kind {
	if c.region == nil {
		return KindRaw
	}
	return c.region.kind
}

// Check tells whether n bytes of a list could be accessed: keys, rights and
// bounds. It touches no bytes, and what it found may change at any time.
func Check(l *List, n uint64) Fault {
	c := cursor{list: l, skip: l.Off}
	for n > 0 {
		if l.Table == nil {
			if !c.fillRaw(n) {
				return c.fault
			}
			n -= uint64(len(c.b))
			continue
		}
		if !c.open(n) {
			return c.fault
		}
		c.close()
		n -= c.left
	}
	return Fault{}
}
