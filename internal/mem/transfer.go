package mem

// Copies to, from and between memory that the CPU does not address. A Transfer goes
// through both lists, as the copy loop does, and does for each run of bytes that is
// contiguous on both sides
//
//   - a store, if the CPU does not address the target: from staging bytes, to which the
//     source's are copied first, or from the source itself where it stays in place;
//   - a load, if the CPU does not address the source: to staging bytes, which Wait copies
//     to the target, or to the target itself where it stays in place;
//   - a copy, if it addresses neither and both have the same owner; a load and a store if
//     they have not;
//   - what the copy loop does, if it addresses both: a list may have pieces of all kinds.
//
// Begin begins the operations and Wait waits for them, so that those of several transfers
// are under way together. Both may block: their caller holds no lock and has no section
// open. Transfers of one stream are begun and waited for in the same order, by one
// goroutine at a time.

import (
	"math"

	"github.com/verbena-rdma/verbena/ib"
)

// Transfer is a copy that engines take part in.
type Transfer struct {
	Dst, Src *List // as for Copy; the caller leaves them alone until the transfer is over
	N        uint64
	Last     bool
	Stream   *Stream
	Link     Link // its place in a chain

	// Ahead: transfers that were begun before are not over. If staging bytes are short, Begin then returns, for the
	// caller to wait for those, which have some, and to call Begin again (Short). Otherwise Begin waits itself.
	Ahead bool

	begun uint64 // bytes whose operations have begun
	owner any    // of the engine that the last of them was begun on
	parts []part // operations under way, oldest first
	fault Fault
	side  Side

	short bool // staging bytes were short when Begin was called last
	ahead []filled

	// Most transfers are one operation.
	op   Op
	used bool // op is taken
	one  [1]part
}

// newOp returns an operation of the transfer's, to be filled in.
func (t *Transfer) newOp() *Op {
	if t.used {
		return new(Op)
	}
	t.used = true
	return &t.op
}

// unused takes back an operation that was not begun.
func (t *Transfer) unused(op *Op) {
	if op == &t.op {
		t.op, t.used = Op{}, false
	}
}

// part is one operation of a transfer.
type part struct {
	*Op
	staging []byte // to give back when it is over
	off, n  uint64 // which of the transfer's bytes
	out     bool   // staging is to be copied to the target when it is over
	copied  bool   // it was: see copyOver
	from    Kind   // what it was loaded from
}

// Join appends a transfer that has not begun to this one, if this one has not begun either and
// the bytes of next lie right behind its own on both sides. It reports whether it did.
func (t *Transfer) Join(next *Transfer) bool {
	if t.begun != 0 || t.Last || t.N > math.MaxUint32-next.N || !t.Dst.continues(next.Dst, t.N) || !t.Src.continues(next.Src, t.N) {
		return false
	}
	t.Dst.lengthen(t.N + next.N)
	t.Src.lengthen(t.N + next.N)
	t.N += next.N
	t.Last = next.Last
	return true
}

// continues reports whether another list begins where n bytes of this one end, so that lengthen
// can make one list of both.
func (l *List) continues(next *List, n uint64) bool {
	if l.Table == nil || l.Table != next.Table || l.Actor != next.Actor || l.Access != next.Access || len(l.SGEs) != 1 || len(next.SGEs) != 1 {
		return false
	}
	a, b := &l.SGEs[0], &next.SGEs[0]
	return a.LKey == b.LKey && a.Addr+l.Off+n == b.Addr+next.Off && l.Off+n <= math.MaxUint32-uint64(b.Length)
}

// lengthen makes a list of one piece have n bytes at least.
func (l *List) lengthen(n uint64) {
	e := &l.SGEs[0]
	e.Length = uint32(max(uint64(e.Length), l.Off+n))
}

// Begin begins what has not begun. FaultPending means that memory is out of reach for a
// moment, or has to be fetched: after Fault.Await the caller calls Begin again, which goes on.
// Any other fault ends the transfer, but the caller still waits for what has begun.
func (t *Transfer) Begin() (Fault, Side) {
	t.short = false
	for t.begun < t.N && !t.short {
		if t.Link.Broken() {
			return Fault{Kind: FaultDead}, Dst
		}
		n, f, side := t.next(t.begun, t.N-t.begun)
		if !f.OK() {
			return f, side
		}
		t.begun += n
	}
	return Fault{}, 0
}

// next begins an operation on at most n bytes from off on, and returns how many it is about.
func (t *Transfer) next(off, n uint64) (uint64, Fault, Side) {
	dst, n, f := t.Dst.reach(off, n)
	if !f.OK() {
		return 0, f, Dst
	}
	src, n, f := t.Src.reach(off, n)
	if !f.OK() {
		dst.close()
		return 0, f, Src
	}
	engine := dst.engine
	if engine == nil {
		engine = src.engine
	}
	if engine != nil && len(t.parts) > 0 && engine.Owner() != t.owner {
		// Engines of different owners keep no order among each other.
		if f, side := t.waitAll(); !f.OK() {
			dst.close()
			src.close()
			return 0, f, side
		}
	}
	switch {
	case dst.engine == nil && src.engine == nil:
		return t.byHand(off, n)
	case src.engine == nil:
		return t.store(dst, off, n)
	case dst.engine == nil:
		return t.load(src, off, n)
	case dst.engine.Owner() == src.engine.Owner():
		op := t.newOp()
		op.Kind, op.Off, op.From, op.FromOff, op.N, op.Last = OpCopy, dst.at, src.engine, src.at, n, t.ends(off, n)
		op.sections = [2]place{dst.place, src.place}
		dst.region.count(src.region.kind, dst.region.kind, int(n))
		t.begin(dst.engine, op, part{off: off, n: n})
		return n, Fault{}, 0
	}
	return t.carry(dst, src, off, min(n, Quantum))
}

// ends reports whether the message ends with n bytes at off.
func (t *Transfer) ends(off, n uint64) bool { return t.Last && off+n == t.N }

func (t *Transfer) begin(e Engine, op *Op, p part) {
	p.Op, t.owner = op, e.Owner()
	op.Stream, op.link = t.Stream, t.Link
	e.Begin(op)
	if t.parts == nil {
		t.parts = t.one[:0]
	}
	t.parts = append(t.parts, p)
}

// store begins to store bytes of the source, which the CPU reaches.
func (t *Transfer) store(dst reached, off, n uint64) (uint64, Fault, Side) {
	op := t.newOp()
	op.Kind, op.Off = OpStore, dst.at
	p := part{off: off}
	if b := t.Src.own(off, n); b != nil {
		op.Bytes = b
	} else if b, from := t.Src.still(off, n, dst.engine); b != nil {
		op.Bytes, op.InPlace, op.sections[1], n = b, true, from, uint64(len(b))
	} else {
		var f Fault
		var side Side
		if p.staging, f, side = t.fill(off, n); p.staging == nil {
			t.unused(op)
			dst.close()
			return 0, f, side
		}
		op.Bytes, n = p.staging, uint64(len(p.staging))
	}
	op.sections[0], op.Last, p.n = dst.place, t.ends(off, n), n
	dst.region.count(t.Src.kindAt(off), dst.region.kind, int(n))
	t.begin(dst.engine, op, p)
	return n, Fault{}, 0
}

// filled is staging bytes that have bytes of the source from off on.
type filled struct {
	off   uint64
	bytes []byte
}

// maxFilled is how many pieces of the source are copied to staging bytes ahead of those whose operation begins. The engine
// moves some meanwhile.
const maxFilled = 16

// fill returns staging bytes that have the source's bytes from off on, a Quantum of n at most. Those behind are copied to
// others at the same time, for the next calls. Nil: there are none (stage), or the source cannot be read.
func (t *Transfer) fill(off, n uint64) ([]byte, Fault, Side) {
	if len(t.ahead) > 0 && t.ahead[0].off == off && uint64(len(t.ahead[0].bytes)) <= n {
		b := t.ahead[0].bytes
		t.ahead = t.ahead[1:]
		return b, Fault{}, 0
	}
	t.forgetAhead()
	b, f, side := t.stage(int(min(n, Quantum)))
	if b == nil {
		return nil, f, side
	}
	if n <= Quantum || t.Src.Ref != nil || helpers.Load() <= 0 {
		if f, side = copyOut(b, t.Src, off); !f.OK() {
			staging.put(b)
			return nil, f, side
		}
		return b, Fault{}, 0
	}
	pieces := append(make([]filled, 0, maxFilled), filled{off, b})
	for at := off + Quantum; at < off+n && len(pieces) < maxFilled; at += Quantum {
		more := staging.tryGet(int(min(off+n-at, Quantum)))
		if more == nil {
			break
		}
		pieces = append(pieces, filled{at, more})
	}
	faults := make([]Fault, len(pieces))
	sides := make([]Side, len(pieces))
	together(len(pieces), func(i int) {
		from := *t.Src
		from.Memo = nil // it is for one goroutine
		faults[i], sides[i] = copyOut(pieces[i].bytes, &from, pieces[i].off)
	})
	good := 0
	for good < len(pieces) && faults[good].OK() {
		good++
	}
	t.ahead = pieces[good:]
	t.forgetAhead() // they are tried again when those before them have begun
	if good == 0 {
		return nil, faults[0], sides[0]
	}
	t.ahead = pieces[1:good]
	return b, Fault{}, 0
}

// forgetAhead gives back staging bytes whose operation does not begin.
func (t *Transfer) forgetAhead() {
	for i := range t.ahead {
		staging.put(t.ahead[i].bytes)
	}
	t.ahead = nil
}

// load begins to load bytes for the target, which the CPU reaches.
func (t *Transfer) load(src reached, off, n uint64) (uint64, Fault, Side) {
	op := t.newOp()
	op.Kind, op.Off = OpLoad, src.at
	p := part{off: off}
	if op.Bytes = t.Dst.own(off, n); op.Bytes == nil {
		var to place
		if op.Bytes, to = t.Dst.still(off, n, src.engine); op.Bytes != nil {
			op.InPlace, op.sections[1], op.Last = true, to, t.ends(off, uint64(len(op.Bytes)))
			to.region.count(src.region.kind, to.region.kind, len(op.Bytes))
		} else {
			var f Fault
			var side Side
			if p.staging, f, side = t.stage(int(min(n, Quantum))); p.staging == nil {
				t.unused(op)
				src.close()
				return 0, f, side
			}
			op.Bytes, p.out = p.staging, true
		}
	}
	n = uint64(len(op.Bytes))
	p.n = n
	op.sections[0] = src.place
	if t.Dst.Table == nil {
		src.region.count(src.region.kind, KindRaw, int(n))
	}
	p.from = src.region.kind
	t.begin(src.engine, op, p)
	return n, Fault{}, 0
}

// stage returns n staging bytes. If their pages are locked and all are in use, it returns none and notes that they
// are short where others may be waited for (Ahead). Otherwise it waits for operations of the transfer, which have some;
// without any it returns bytes that are not locked.
func (t *Transfer) stage(n int) ([]byte, Fault, Side) {
	if len(t.parts) >= maxStaged {
		if f, side := t.waitOldest(); !f.OK() {
			return nil, f, side
		}
	}
	for {
		if b := staging.tryGet(n); b != nil {
			return b, Fault{}, 0
		}
		if t.Ahead {
			t.short = true
			return nil, Fault{}, 0
		}
		if len(t.parts) == 0 {
			return staging.get(n), Fault{}, 0
		}
		if f, side := t.waitOldest(); !f.OK() {
			return nil, f, side
		}
	}
}

// maxStaged is how many operations of a transfer are under way at most that have staging bytes: half of the pieces are left to
// others, who would else have bytes that are not locked.
const maxStaged = 32

// Short reports whether Begin has returned before all has begun, because staging bytes were short.
func (t *Transfer) Short() bool { return t.short }

// carry moves bytes from the memory of one owner to that of another: it waits for the load, and
// begins the store.
func (t *Transfer) carry(dst, src reached, off, n uint64) (uint64, Fault, Side) {
	b := staging.get(int(n))
	load := &Op{Kind: OpLoad, Off: src.at, Bytes: b, sections: [2]place{src.place}}
	load.Stream = t.Stream
	src.engine.Begin(load)
	if kind := load.wait(); kind != FaultNone {
		staging.put(b)
		dst.close()
		return 0, t.Src.faultAt(off, n, kind), Src
	}
	op := &Op{Kind: OpStore, Off: dst.at, Bytes: b, Last: t.ends(off, n), sections: [2]place{dst.place}}
	dst.region.count(src.region.kind, dst.region.kind, int(n))
	t.begin(dst.engine, op, part{staging: b, off: off, n: n})
	return n, Fault{}, 0
}

// byHand moves bytes with the copy loop, after all operations begun before are over.
func (t *Transfer) byHand(off, n uint64) (uint64, Fault, Side) {
	if f, side := t.waitAll(); !f.OK() {
		return 0, f, side
	}
	if t.Link.Broken() {
		return 0, Fault{Kind: FaultDead}, Dst
	}
	n = min(n, Quantum) // the sections are open while bytes are copied
	d, s := *t.Dst, *t.Src
	d.Off += off
	s.Off += off
	f, side := Copy(&d, &s, n, t.ends(off, n))
	return n, f, side
}

// Wait waits for what has begun, and returns the first fault, if any. After FaultPending and
// Fault.Await the caller calls Wait again, which goes on.
func (t *Transfer) Wait() (Fault, Side) {
	t.forgetAhead() // if Begin has returned a fault
	if f, side := t.waitAll(); !f.OK() {
		return f, side
	}
	return t.fault, t.side
}

// GiveUp ends the transfer: nothing more begins, and what was loaded to staging bytes does not
// reach the target. The caller still waits for what has begun.
func (t *Transfer) GiveUp() {
	if t.fault.OK() {
		t.fault, t.side = Fault{Kind: FaultDead}, Dst
	}
	t.N = t.begun
}

// Over reports whether all is done: Wait would not wait.
func (t *Transfer) Over() bool {
	for i := range t.parts {
		if !t.parts[i].over.Load() {
			return false
		}
	}
	return t.begun == t.N
}

// waitAll waits for the operations under way, and copies what they have loaded to the target.
// After FaultPending it is called again.
func (t *Transfer) waitAll() (Fault, Side) {
	for len(t.parts) > 0 {
		if f, side := t.waitOldest(); f.Kind == FaultPending {
			return f, side
		}
	}
	return t.fault, t.side
}

// waitOldest waits for the oldest operation under way, and copies what it has loaded to the
// target. After FaultPending it is called again. Any other fault is the transfer's.
func (t *Transfer) waitOldest() (Fault, Side) {
	p := &t.parts[0]
	kind := p.wait()
	if kind != FaultNone && t.fault.OK() {
		l, side := t.Dst, Dst
		if p.Kind == OpLoad {
			l, side = t.Src, Src
		}
		t.fault, t.side = l.faultAt(p.off, p.n, kind), side
	}
	if p.out && t.fault.OK() && t.Link.Broken() {
		t.fault, t.side = Fault{Kind: FaultDead}, Dst
	}
	if p.out && !p.copied && t.fault.OK() {
		t.copyOver()
	}
	if p.out && !p.copied && t.fault.OK() {
		if f, side := copyIn(t.Dst, p.off, p.staging, p.from, t.ends(p.off, p.n)); f.Kind == FaultPending {
			return f, side
		} else if !f.OK() {
			t.fault, t.side = f, side
		}
	}
	if p.staging != nil {
		staging.put(p.staging)
	}
	*p = part{}
	t.parts = t.parts[1:]
	return t.fault, t.side
}

// maxOver is how many parts are copied to the target at a time.
const maxOver = 16

// copyOver copies what the oldest parts have loaded to the target, as far as they are over, if there are several and others
// help. What cannot be copied, and the end of a message, is left to waitOldest.
func (t *Transfer) copyOver() {
	k := 0
	for k < len(t.parts) && k < maxOver {
		p := &t.parts[k]
		if !p.out || p.copied || !p.over.Load() || p.fault != FaultNone || t.ends(p.off, p.n) {
			break
		}
		k++
	}
	if k < 2 || helpers.Load() <= 0 {
		return
	}
	together(k, func(i int) {
		p := &t.parts[i]
		to := *t.Dst
		to.Memo = nil // it is for one goroutine
		f, _ := copyIn(&to, p.off, p.staging, p.from, false)
		p.copied = f.OK()
	})
}

// faultAt makes a Fault of a kind that an engine has found in n bytes of a list, from off on.
func (l *List) faultAt(off, n uint64, kind FaultKind) Fault {
	f := Fault{Kind: kind, Extent: Extent{Len: n}}
	e, in := l.pieceAt(off)
	if e == nil {
		return f
	}
	f.Key, f.Addr = e.LKey, e.Addr+in
	if r := l.Table.Lookup(e.LKey); r != nil {
		return r.report(f)
	}
	return f
}

// pieceAt returns the piece of a list that the byte at off lies in, and where in it; nil if
// the list has none.
func (l *List) pieceAt(off uint64) (e *ib.SGE, in uint64) {
	in = l.Off + off
	for i := range l.SGEs {
		if e = &l.SGEs[i]; in < uint64(e.Length) {
			return e, in
		}
		in -= uint64(e.Length)
	}
	return nil, 0
}

// reached is what some bytes of a list are.
type reached struct {
	place         // with open sections; none if the CPU reaches the bytes
	engine Engine // the leaf's
	at     uint64 // where in the leaf
}

// reach returns what the bytes of a list from off on are, and how many of them, n at most, are
// of one kind and contiguous.
func (l *List) reach(off, n uint64) (reached, uint64, Fault) {
	if l.Table == nil {
		return reached{}, n, Fault{}
	}
	c := cursor{list: l, skip: l.Off + off}
	if c.skip < off { // it wraps: no list is as long
		return reached{}, 0, Fault{Kind: FaultBounds, Extent: Extent{Len: n}}
	}
	if !c.enter(n, shutToBytes) {
		return reached{}, 0, c.fault
	}
	n = c.left
	at := c.off
	if m := c.region.mkey; m != nil {
		piece, in, left := m.layout.bottom(c.off, &c.piece)
		if f := c.step(piece.region, c.off, n); !f.OK() {
			c.close()
			return reached{}, 0, f
		}
		at, n = in, min(n, left)
	}
	if !c.leaf.byEngine.Load() {
		c.close()
		return reached{}, n, Fault{}
	}
	return reached{c.place, c.leaf.backing.(Engine), at}, n, Fault{}
}

// own returns n bytes at off of a list of raw bytes of one piece that never fault, nil for other
// lists: an engine uses them in place.
func (l *List) own(off, n uint64) []byte {
	if l.Table != nil || l.Ref != nil || l.MayFault || len(l.Raw) != 1 || !holds(uint64(len(l.Raw[0])), l.Off+off, n) {
		return nil
	}
	return l.Raw[0][l.Off+off:][:n]
}

// reaching is an Engine that may access memory of the host by itself.
type reaching interface {
	// Reaches reports whether the engine can read and write b in place. The bytes stay where
	// they are until the operation is over.
	Reaches(b []byte) bool
}

// locking is a reaching Engine that can tell whether bytes of the program's stay where they are,
// because their pages are locked. It may lock those of memory that the library has allocated
// (Own), for the next time.
type locking interface {
	Locks(b []byte) bool
}

// maxInPlace is how many bytes of the host an operation is about: those of other streams come in between.
const maxInPlace = 16 << 20

// still returns bytes at off of a list, at most n of them, that never fault and that the engine
// reads and writes in place, with the open sections that keep them there; nil if there are none.
func (l *List) still(off, n uint64, e Engine) ([]byte, place) {
	r, ok := e.(reaching)
	if !ok || l.Table == nil || l.Ref != nil {
		return nil, place{}
	}
	c := cursor{list: l, skip: l.Off + off}
	if !c.enter(min(n, maxInPlace), shutToBytes) {
		return nil, place{}
	}
	locks, mayLock := e.(locking)
	if leaf := c.leaf; leaf == nil || leaf.staged || leaf.kind == KindRaw || // null memory: many accesses use it at a time
		!leaf.neverFaults && (!mayLock || leaf.kind != KindPinned && leaf.kind != KindDevice) {
		c.close()
		return nil, place{}
	}
	b, _, f := c.run(c.off, c.left, l.Access)
	if f.OK() && (c.leaf.neverFaults && r.Reaches(b) || !c.leaf.neverFaults && locks.Locks(b)) {
		return b, c.place
	}
	c.close()
	return nil, place{}
}

// kindAt returns the kind of memory that a list has at off, KindRaw if its key is gone or the
// region is being changed.
func (l *List) kindAt(off uint64) (kind Kind) {
	e, _ := l.pieceAt(off)
	if e == nil {
		return KindRaw
	}
	r := l.Table.Lookup(e.LKey)
	if r == nil || r.enter(shutToLooks) != FaultNone {
		return KindRaw
	}
	kind = r.kind
	r.leave()
	return kind
}

// copyOut copies bytes of a list from off on to b, copyIn those of b to a list.
func copyOut(b []byte, l *List, off uint64) (Fault, Side) {
	from := *l
	from.Off += off
	return CopyPieces(&List{Raw: [][]byte{b}, uncounted: true}, &from, uint64(len(b)), false)
}

func copyIn(l *List, off uint64, b []byte, from Kind, last bool) (Fault, Side) {
	to := *l
	to.Off += off
	return CopyPieces(&to, &List{Raw: [][]byte{b}, rawKind: from}, uint64(len(b)), last)
}

// CopyWaiting is Copy for callers that may wait for an engine.
func CopyWaiting(dst, src *List, n uint64, last bool, s *Stream) (Fault, Side) {
	f, side := Copy(dst, src, n, last)
	if !f.Staged() {
		return f, side
	}
	t := Transfer{Dst: dst, Src: src, N: n, Last: last, Stream: s}
	f, side = t.Begin()
	if g, at := t.Wait(); f.OK() {
		f, side = g, at
	}
	return f, side
}

// AtomicWaiting is Atomic for callers that may wait for an engine.
func AtomicWaiting(t *Table, who Actor, key uint32, addr uint64, op AtomicOp, compare, swapAdd uint64, s *Stream, link Link) (orig uint64, f Fault) {
	if link.Broken() {
		return 0, Fault{Kind: FaultDead, Key: key, Extent: Extent{addr, 8}}
	}
	if orig, f = Atomic(t, who, key, addr, op, compare, swapAdd); !f.Staged() {
		return orig, f
	}
	if addr%8 != 0 {
		return 0, Fault{Kind: FaultAlign, Key: key, Extent: Extent{addr, 8}}
	}
	acc := ib.AccessRemoteAtomic
	if op == Store {
		acc = ib.AccessRemoteWrite
	}
	l := &List{Table: t, Actor: who, Access: acc, SGEs: []ib.SGE{{Addr: addr, Length: 8, LKey: key}}}
	to, n, f := l.reach(0, 8)
	switch {
	case !f.OK():
		return 0, f
	case to.engine == nil: // the region has another backing by now
		return Atomic(t, who, key, addr, op, compare, swapAdd)
	case n < 8 || to.at%8 != 0:
		to.close()
		return 0, Fault{Kind: FaultAlign, Key: key, Extent: Extent{addr, 8}}
	}
	o := &Op{Kind: OpAtomic, Off: to.at, Atomic: op, Compare: compare, SwapAdd: swapAdd, sections: [2]place{to.place}}
	o.Stream, o.link = s, link
	to.engine.Begin(o)
	if kind := o.wait(); kind != FaultNone {
		return 0, l.faultAt(0, 8, kind)
	}
	return o.Orig, Fault{}
}
