package mem

// The way of bytes, top-down:
//
//  1. Copy walks two lists at once, each with a cursor; lists of one piece that is
//     contiguous in this process need none (CopyWhole).
//  2. A cursor opens a read section on the next piece of its list, for a
//     quantum at most, and offers the bytes.
//  3. move, in move_unsafe.go, copies what both cursors offer. Memory that the program
//     may remap meanwhile is copied inside a bracket that the notifier sees
//     (remap.go); staging bytes are stored after each step. A cursor offers no bytes of
//     payload by reference: they are read into the target's (reference.go).
//  4. Sections close as soon as their bytes are used up, and bytes are counted
//     by the kinds of memory they went between.
//
// Check walks a list with the same cursor, and so does Gather, in gather.go.

// Quantum is the most bytes that are moved in one read section: it bounds how
// long the closing of a region waits.
const Quantum = 256 << 10

// Copy copies n bytes from one list to another. On a fault it returns its side,
// and bytes before it may have been copied already, as on hardware.
//
// last is set if a message ends with these bytes: then what lies in their last
// aligned word is stored after everything else, with release order, and in one
// piece if it fills the word. A receiver that spins on the end of a buffer, and
// polls no completion queue, sees the message whole once it sees the end.
//
// What lists that overlap in memory contain afterwards is undefined, as on
// hardware.
//
// It calls CopyWhole, and CopyPieces where that cannot.
func Copy(dst, src *List, n uint64, last bool) (Fault, Side) {
	if src.Ref == nil && CopyWhole(dst, src, n, last) {
		return Fault{}, 0
	}
	return CopyPieces(dst, src, n, last)
}

// CopyPieces is Copy for lists of any shape.
func CopyPieces(dst, src *List, n uint64, last bool) (f Fault, side Side) {
	var d, s cursor
	d.list, d.skip = dst, dst.Off
	s.list, s.skip = src, src.Off
	if src.Ref != nil {
		s.beginRef()
	}
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
		if s.ref > 0 {
			var k int
			if k, side = copyRef(&d, &s, n, last); side != 0 {
				break
			}
			moved += k
			n -= uint64(k)
			continue
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
		if k >= longPiece && misaligned(d.b, s.b) {
			k = skew
		}
		end := last && uint64(k) == n
		var bad uintptr
		known := true
		switch {
		case d.remappable() || s.remappable():
			bad, known = moveRemappable(d.b[:k], s.b[:k], end, d.mapped(), s.mapped())
		case d.neverFaults() && s.neverFaults():
			move(d.b[:k], s.b[:k], end)
		default:
			bad = moveGuarded(d.b[:k], s.b[:k], end)
		}
		if !known {
			if side = again(&d, &s); side != 0 {
				break
			}
			continue
		}
		if bad != 0 {
			if side = gone(&d, &s, bad); side != 0 {
				break
			}
			continue // they are back, and any of them may not have been moved
		}
		if d.isStaged() && !d.written(k, uint64(k) == n, last) {
			side = Dst
			break
		}
		moved += k
		d.use(k)
		s.use(k)
		n -= uint64(k)
	}
	if side == Src { // what was copied before the fault
		d.store(0, false)
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

// CopyWhole is Copy for lists without payload by reference whose bytes are contiguous in this
// process on both sides, as most are: it needs no cursors. It reports whether it has copied
// all; if not, it may have copied some.
func CopyWhole(dst, src *List, n uint64, last bool) bool {
	to, d, dAt := dst.whole(n)
	if d == nil {
		return false
	}
	from, s, sAt := src.whole(n)
	ok := s != nil && moveWhole(to, from, d, s, dAt, sAt, last)
	if from != nil {
		from.exit()
	}
	if to != nil {
		to.exit()
	}
	return ok
}

// whole returns the n bytes of a list of one piece, if they are present and contiguous, or
// nil. With them it returns the region, whose section is open then (nil for raw bytes), and
// where in its backing they lie.
func (l *List) whole(n uint64) (r *Region, b []byte, at uint64) {
	if n == 0 || n > Quantum {
		return nil, nil, 0
	}
	if l.Table == nil {
		if len(l.Raw) == 1 && !l.MayFault && holds(uint64(len(l.Raw[0])), l.Off, n) {
			b = l.Raw[0][l.Off : l.Off+n]
		}
		return nil, b, 0
	}
	if len(l.SGEs) != 1 {
		return nil, nil, 0
	}
	if r, at = l.open(n, shutToBytes); r == nil {
		return nil, nil, 0
	}
	if r.plain {
		var kind FaultKind
		if b, kind = r.backing.Run(at, n, l.Access); kind == FaultNone && uint64(len(b)) == n {
			return r, b, at
		}
	}
	r.exit()
	return nil, nil, 0
}

// open opens a section for the n bytes of a list of one piece. It returns nil if they cannot
// be accessed.
func (l *List) open(n, shut uint64) (r *Region, at uint64) {
	e := &l.SGEs[0]
	addr := e.Addr + l.Off
	if !holds(uint64(e.Length), l.Off, n) || addr < e.Addr {
		return nil, 0
	}
	if l.Memo != nil {
		r = l.Memo.region
	}
	if r == nil || r.Key() != e.LKey || r.table != l.Table { // r.open fails if it is closed
		if r = l.find(e.LKey); r == nil {
			return nil, 0
		}
	}
	at, _, kind := r.open(e.LKey, addr, n, l.Access, l.Actor, shut)
	if kind != FaultNone {
		return nil, 0
	}
	return r, at
}

// holds reports whether n bytes from off on are within size.
func holds(size, off, n uint64) bool { return off <= size && n <= size-off }

// moveWhole moves bytes between two regions whose sections are open; nil stands for raw
// bytes. It reports false if bytes were gone or remapped, or if CopyPieces is faster because
// they are misaligned.
func moveWhole(to, from *Region, d, s []byte, dAt, sAt uint64, last bool) bool {
	toKind, fromKind, neverFaults, counts := KindRaw, KindRaw, true, from
	var dst, src mapped
	if from != nil {
		fromKind, neverFaults, src = from.kind, from.neverFaults, mapped{from.pinned, sAt}
	}
	if to != nil {
		toKind, neverFaults, counts, dst = to.kind, neverFaults && to.neverFaults, to, mapped{to.pinned, dAt}
	}
	if len(d) >= longPiece && misaligned(d, s) {
		return false
	}
	switch {
	case neverFaults:
		move(d, s, last)
	case dst.host != nil || src.host != nil:
		if bad, known := moveRemappable(d, s, last, dst, src); bad != 0 || !known {
			return false
		}
	default:
		if moveGuarded(d, s, last) != 0 {
			return false
		}
	}
	if counts != nil {
		counts.count(fromKind, toKind, len(d))
	}
	return true
}

// gone deals with an address that could not be accessed: it has the backing of the side
// that the address belongs to fetch the bytes again, and returns that side if it cannot.
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
// where the target is raw. It returns 0, the bytes that are left to count.
func count(d, s *cursor, k int) int {
	if k == 0 || d.list.uncounted {
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
	at := &r.table.moved[r.Key()>>tagBits%counterShards]
	m := at.Load()
	if m == nil {
		at.CompareAndSwap(nil, new(movedBytes)) // or another goroutine has made it
		m = at.Load()
	}
	m.bytes[from][to].Add(uint64(k))
}

// cursor is a place in a list, with the sections that are open there.
type cursor struct {
	place
	list  *List
	next  int    // the piece that is used next
	skip  uint64 // bytes to skip from its start
	ref   uint64 // bytes of payload by reference that are left, ahead of all pieces
	off   uint64 // in the region: where the bytes begin that b has not offered yet
	left  uint64 // bytes of the section that b has not offered yet
	b     []byte // bytes that are offered and not used yet
	at    uint64 // where in the leaf b begins
	lost  int    // how often they were gone when they were used
	fault Fault  // why it cannot go on

	// unsaved are the staging bytes that were written and not stored yet, which belong to
	// unsavedAt in the leaf.
	unsaved   []byte
	unsavedAt uint64
}

// fill makes b the next bytes of the list: between 1 and n of them. It reports false if
// there is a fault.
func (c *cursor) fill(n uint64) bool {
	if c.left == 0 {
		c.close()
		if c.list.Table == nil {
			return c.fillRaw(n)
		}
		if !c.enter(min(n, Quantum), shutToBytes) {
			return false
		}
	}
	if c.b, c.at = c.flat(c.off, c.left); c.b == nil {
		var f Fault
		if c.b, c.at, f = c.run(c.off, c.left, c.list.Access); !f.OK() {
			return c.fail(f)
		}
	}
	if len(c.b) == 0 {
		panic("mem: a backing returned neither bytes nor a fault")
	}
	c.off += uint64(len(c.b))
	c.left -= uint64(len(c.b))
	return true
}

// use takes the first k of the offered bytes off b.
func (c *cursor) use(k int) {
	c.b = c.b[k:]
	c.at += uint64(k)
}

func (c *cursor) fail(f Fault) bool {
	c.fault = f
	return false
}

// enter opens a section on at most n bytes of the next piece, unless one of the bits of
// shut is set there.
func (c *cursor) enter(n, shut uint64) bool {
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
		r := l.find(e.LKey)
		if r == nil {
			return c.fail(Fault{Kind: FaultKey, Key: e.LKey, Extent: Extent{addr, n}})
		}
		off, f := c.open(r, e.LKey, addr, n, l.Access, l.Actor, shut)
		if !f.OK() {
			return c.fail(f)
		}
		c.off, c.left = off, n
		c.skip += n
		return true
	}
	return c.fail(Fault{Kind: FaultBounds, Extent: Extent{Len: n}}) // the list is too short
}

// find returns the region with a key: the one that is remembered, if it is of this table
// and still has that key. When a region is closed its key may become another's.
func (l *List) find(key uint32) *Region {
	m := l.Memo
	if m == nil {
		return l.Table.Lookup(key)
	}
	r := m.region
	if r == nil || r.Key() != key || r.table != l.Table || r.Closed() {
		r = l.Table.Lookup(key)
		m.region = r
	}
	return r
}

// isStaged reports whether the bytes in use are staging bytes, which the leaf's backing stores.
func (c *cursor) isStaged() bool { return c.leaf != nil && c.leaf.staged }

// written notes that the copy has just written the first k of the bytes in use, which are staging bytes. The leaf's backing
// stores them when all are written, or the copy ends. It reports false if there is a fault.
func (c *cursor) written(k int, end, last bool) bool {
	if c.unsaved == nil {
		c.unsaved, c.unsavedAt = c.b[:0], c.at
	}
	c.unsaved = c.unsaved[:len(c.unsaved)+k]
	if k < len(c.b) && !end {
		return true
	}
	return c.store(k, end && last)
}

// store has the leaf's backing store the staging bytes that were written. The last k of them are still in use. It reports
// false if there is a fault.
func (c *cursor) store(k int, last bool) bool {
	b := c.unsaved
	if b == nil {
		return true
	}
	c.unsaved = nil
	kind := c.leaf.backing.(staged).Store(c.unsavedAt, b, last)
	if kind == FaultNone {
		return true
	}
	return c.fail(c.place.fault(kind, c.off-uint64(len(c.b)-k+len(b)), uint64(len(b)), c.list.Access))
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

// neverFaults reports whether the bytes in use cannot fault.
func (c *cursor) neverFaults() bool {
	if c.leaf == nil {
		return !c.list.MayFault
	}
	return c.leaf.neverFaults
}

// kind returns the kind of the bytes in use.
func (c *cursor) kind() Kind {
	if c.region == nil {
		return c.list.rawKind
	}
	return c.region.kind
}

// Check returns the fault that an access to n bytes of a list would end with, by keys, rights,
// bounds, or memory that was revoked. It touches no bytes: they may have to be fetched, or be
// suspended. What it has found may change at any time.
func Check(l *List, n uint64) Fault {
	f, _ := CheckStaged(l, n)
	return f
}

// CheckStaged is Check, and reports whether there may be bytes that the CPU does not address.
func CheckStaged(l *List, n uint64) (f Fault, staged bool) {
	if len(l.SGEs) == 1 && l.Table != nil && n > 0 { // most have one piece, which needs no cursor
		if r, _ := l.open(n, shutToLooks); r != nil {
			staged = r.byEngine.Load()
			r.exit()
			return Fault{}, staged
		}
	}
	c := cursor{list: l, skip: l.Off}
	for n > 0 {
		if l.Table == nil {
			if !c.fillRaw(n) {
				return c.fault, false
			}
			n -= uint64(len(c.b))
			continue
		}
		if !c.enter(n, shutToLooks) {
			return c.fault, false
		}
		staged = staged || c.region.byEngine.Load()
		c.close()
		n -= c.left
	}
	return Fault{}, staged
}
