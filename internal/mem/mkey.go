package mem

// Indirect keys (user-mode memory registration): keys of the same table whose
// bytes are those of other regions, in another order. A key's life:
//
//  1. CreateMKey gives it a place in the table, and room for its pieces. It is
//     free: it opens nothing.
//  2. Configure, which a queue pair executes in the order of its send queue,
//     checks every piece, borrows the regions that they lie in, and opens the key.
//     A region that is borrowed can be neither closed nor changed nor
//     invalidated; but it can be suspended and revoked.
//  3. Every access opens a section on the key. find leads from an offset to a piece,
//     and bottom through indirect keys among the pieces to one of a leaf, on which
//     the access opens a section too while it is in that leaf (place.go).
//  4. Invalidate and Close keep new sections out, wait for the open ones, and give
//     the regions back. Then the key can be configured again. With ib.MKeyInPlace
//     Configure does all that itself.
//
// A list and an interleaved pattern are the same thing: rounds of pieces, of which
// a list has one. No key can be part of itself, at any remove: what is configured is
// free, and what is borrowed is not.

import (
	"math/bits"
	"sort"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// MaxMKeyDepth is how many indirect keys stand on each other at most.
const MaxMKeyDepth = 8

// MaxMKeyPieces is how many pieces or sources a key can have. Room for more than
// promptPieces is made when they come.
const (
	MaxMKeyPieces = 1 << 24
	promptPieces  = 1 << 12
)

// mkeyAccess are the rights that an indirect key can have.
const mkeyAccess = ib.AccessLocalWrite | ib.AccessRemote | ib.AccessFlush | ib.AccessZeroBased |
	ib.AccessRelaxedOrdering | ib.AccessRemoteInvalidate

// MKey is an indirect key.
type MKey struct {
	r      Region // its place in the table: key, state, and when configured bounds and rights
	layout layout
	max    int
	// sheltered: peers cannot invalidate it. It is set before the key is given out.
	sheltered bool
}

// Layout is what an indirect key is to be made of.
type Layout struct {
	Key    uint32
	Access ib.Access
	Addr   uint64 // of the first byte in requests
	Repeat uint64 // rounds; a list has one
	Pieces []ib.Stride
	Update ib.MKeyUpdate
}

// layout is a Backing that is made of others. It changes only while no section can
// be open on the key, under the lock of the key's region.
type layout struct {
	key    *MKey
	pieces []piece
	round  uint64 // bytes of a round
	repeat uint64
	depth  int // 1, or one more than the deepest of the keys that it stands on
}

// piece is a source of bytes in each round.
type piece struct {
	start  uint64  // bytes of the round before it
	n      uint64  // its bytes
	off    uint64  // where in the backing they lie, in the first round
	step   uint64  // and how much farther on in each of the next
	region *Region // whose bytes they are
	flat   []byte  // all bytes of the region's backing, if they are always there
	lent   bool    // the region was borrowed for it; otherwise for a piece before it
}

// CreateMKey makes an indirect key of at most so many pieces, in a protection
// domain.
func (t *Table) CreateMKey(pd uint32, pieces int) (*MKey, error) {
	const op = "create_mkey"
	if pieces < 1 || pieces > MaxMKeyPieces {
		return nil, ib.Errorf(op, syscall.EINVAL, "%d pieces: 1 to %d are possible", pieces, MaxMKeyPieces)
	}
	m := &MKey{max: pieces}
	m.layout.key, m.layout.pieces = m, make([]piece, 0, min(pieces, promptPieces))
	m.r.table, m.r.pd, m.r.mkey = t, pd, m
	m.r.kind = KindIndirect
	m.r.state.Store(stateInvalidated)
	if !t.add(&m.r) {
		return nil, ib.Errorf(op, syscall.ENOMEM, "the device has its %d regions and windows already", t.slots.max)
	}
	return m, nil
}

// Key returns the local and remote key, which never changes.
func (m *MKey) Key() uint32 { return m.r.Key() }

// Free reports whether the key is free to be configured.
func (m *MKey) Free() bool { return !m.r.Alive() }

// Shelter keeps peers from invalidating the key. It is called before the key is given out.
func (m *MKey) Shelter() { m.sheltered = true }

// Configure configures an indirect key, on behalf of a queue pair. On a fault it is
// free, unless it cannot be touched at all; the fault names the key that was at fault,
// that of a piece or the indirect one.
func (t *Table) Configure(l *Layout, who Actor) Fault {
	r := t.Lookup(l.Key)
	if r == nil || r.mkey == nil {
		return Fault{Kind: FaultKey, Key: l.Key}
	}
	m := r.mkey
	r.mu.Lock()
	defer r.mu.Unlock()
	if kind := m.mayConfigureLocked(l, who); kind != FaultNone {
		return Fault{Kind: kind, Key: l.Key}
	}
	free := r.backing == nil
	if kind, left := m.suspendLocked(); left != nil {
		return leaving(l.Key, left)
	} else if kind != FaultNone {
		return Fault{Kind: kind, Key: l.Key}
	}
	if free { // there is nothing to keep
		r.access, r.iova, r.length = 0, l.Addr, 0
	}
	if f := m.changeLocked(l, who); !f.OK() {
		m.forgetLocked()
		return f
	}
	r.told.Store(false)
	r.state.And(^uint64(stateInvalidated))
	return Fault{}
}

// changeLocked changes what is to be changed, while no section can be open on the key.
func (m *MKey) changeLocked(l *Layout, who Actor) Fault {
	r := &m.r
	if l.Update&ib.MKeyKeepAccess != 0 {
		l.Access = r.access
	}
	switch {
	case l.Access&^mkeyAccess != 0:
		return Fault{Kind: FaultAccess, Key: l.Key}
	case l.Update&ib.MKeyKeepLayout == 0:
		m.forgetLocked()
		if f := m.layLocked(l, who); !f.OK() {
			return f
		}
		r.iova, r.length = l.Addr, m.layout.Len()
	case !m.layout.allows(l.Access):
		return Fault{Kind: FaultAccess, Key: l.Key}
	}
	if r.access = l.Access; l.Access&ib.AccessZeroBased != 0 {
		r.iova = 0
	}
	r.backing = &m.layout
	return Fault{}
}

// layLocked makes the layout of a key that has none.
func (m *MKey) layLocked(l *Layout, who Actor) Fault {
	if len(l.Pieces) > m.max || l.Repeat == 0 {
		return Fault{Kind: FaultLayout, Key: l.Key}
	}
	b := builder{table: m.r.table, who: who, want: l, to: &m.layout, neverFaults: true}
	for i := range l.Pieces {
		if p := &l.Pieces[i]; p.Bytes > 0 {
			if kind := b.add(p); kind != FaultNone {
				return Fault{Kind: kind, Key: p.LKey, Extent: Extent{p.Addr, p.Bytes}}
			}
		}
	}
	m.r.neverFaults = b.neverFaults
	m.r.byEngine.Store(b.byEngine)
	return Fault{Kind: b.finish(), Key: l.Key}.orNone()
}

// mayConfigureLocked checks what concerns the indirect key alone.
func (m *MKey) mayConfigureLocked(l *Layout, who Actor) FaultKind {
	switch {
	case m.r.state.Load()&stateDead != 0:
		return FaultDead
	case m.r.pd != who.PD:
		return FaultDomain
	case l.Update&ib.MKeyInPlace == 0 && m.r.state.Load()&stateInvalidated == 0:
		return FaultNotFree
	}
	return FaultNone
}

// builder makes a layout.
type builder struct {
	table       *Table
	who         Actor
	want        *Layout
	to          *layout
	last        *Region // of the piece before
	key         uint32  // by which that was found
	flat        []byte  // of the same region
	neverFaults bool
	// byEngine is set if there is a piece that the CPU does not address.
	byEngine bool
}

// flatBytes returns all bytes of a region that are always there and in one piece, so
// that accesses need not ask for them.
func flatBytes(r *Region) []byte {
	switch b := r.backing.(type) {
	case *deviceBacking:
		return b.b
	case *Host:
		if b.inHeap {
			return bytesAt(b.addr, int(b.length))
		}
	}
	return nil
}

// add checks a piece and borrows the region that it lies in. Pieces of the same
// region, one behind the other, borrow it once.
func (b *builder) add(p *ib.Stride) FaultKind {
	span, ok := reach(p, b.want.Repeat)
	if !ok {
		return FaultBounds
	}
	l := b.to
	next := piece{start: l.round, n: p.Bytes, step: p.Bytes + p.Skip} // reach has seen that it does not wrap
	if r := b.last; r != nil && p.LKey == b.key {
		if next.off = p.Addr - r.iova; next.off > r.length || span > r.length-next.off {
			return FaultBounds
		}
	} else {
		r, off, kind := b.table.borrow(p.LKey, p.Addr, span, b.want.Access, b.who)
		if kind != FaultNone {
			return kind
		}
		next.off, next.lent = off, true
		b.last, b.key, b.flat = r, p.LKey, flatBytes(r)
	}
	next.region, next.flat = b.last, b.flat
	l.pieces = append(l.pieces, next)
	l.round += p.Bytes
	if l.round < p.Bytes {
		return FaultLayout
	}
	b.neverFaults = b.neverFaults && b.last.neverFaults
	b.byEngine = b.byEngine || b.last.byEngine.Load()
	if m := b.last.mkey; m != nil {
		if l.depth = max(l.depth, m.layout.depth); l.depth >= MaxMKeyDepth {
			return FaultDepth
		}
	}
	return FaultNone
}

// reach returns how many bytes lie between the first and the last that a source
// gives, in all rounds; false if no memory is as long.
func reach(p *ib.Stride, repeat uint64) (uint64, bool) {
	step := p.Bytes + p.Skip
	over, before := bits.Mul64(step, repeat-1)
	if step < p.Bytes || over != 0 || before > ^p.Bytes {
		return 0, false
	}
	return before + p.Bytes, true
}

// finish checks the whole.
func (b *builder) finish() FaultKind {
	l := b.to
	l.repeat = b.want.Repeat
	if len(l.pieces) == 1 && l.pieces[0].step == l.pieces[0].n { // nothing lies between
		p := &l.pieces[0]
		p.n *= l.repeat // as reach has seen
		l.round, l.repeat = p.n, 1
	}
	over, total := bits.Mul64(l.round, l.repeat)
	if over != 0 || total == 0 || total > ^b.want.Addr {
		return FaultLayout
	}
	l.depth++
	return FaultNone
}

// borrow finds the region of a piece, checks that a key with such rights may stand
// on it, and keeps it as it is until it is given back.
func (t *Table) borrow(key uint32, addr, n uint64, access ib.Access, who Actor) (*Region, uint64, FaultKind) {
	// A section keeps the region as it is while it is looked at. Windows give none:
	// they have no local rights.
	p, off, kind := t.open(key, addr, n, 0, who, shutToLooks)
	if kind != FaultNone {
		return nil, 0, kind
	}
	defer p.leave()
	if !p.carries(access) {
		return nil, 0, FaultAccess
	}
	return p, off, p.lend()
}

// carries reports whether a key with such rights may stand on the region: one that can
// be written needs a region that can. For the rest the key's rights are its own: the right
// of peers to write does not need that of the program (mlx5dv_wr_mkey_configure(3)).
func (r *Region) carries(access ib.Access) bool {
	return (access&writing == 0 || r.access&ib.AccessLocalWrite != 0) && access&ib.AccessFlush&^r.access == 0
}

// grants reports whether the key could have such rights.
func (l *layout) allows(access ib.Access) bool {
	for i := range l.pieces {
		if p := &l.pieces[i]; p.lent && !p.region.carries(access) {
			return false
		}
	}
	return true
}

// giveBack gives back what was borrowed, and forgets all pieces.
func (l *layout) giveBack() {
	for i := range l.pieces {
		if p := &l.pieces[i]; p.lent {
			p.region.bound.Add(-1)
		}
	}
	clear(l.pieces) // nothing is kept alive
	l.pieces, l.round, l.repeat, l.depth = l.pieces[:0], 0, 0, 0
}

// invalidateLocked is Invalidate for indirect keys. One that is free stays so.
func (m *MKey) invalidateLocked(forPeer bool) (FaultKind, <-chan struct{}) {
	if forPeer && m.sheltered {
		return FaultNotInvalidatable, nil
	}
	kind, left := m.suspendLocked()
	if kind == FaultNone {
		m.forgetLocked()
	}
	return kind, left
}

// suspendLocked makes the key useless and waits for the accesses under way, but not for those
// of engines (Region.invalidateLocked).
func (m *MKey) suspendLocked() (FaultKind, <-chan struct{}) {
	r := &m.r
	if !r.bound.CompareAndSwap(0, taken) {
		return FaultNotInvalidatable, nil // another key stands on it
	}
	defer r.giveLocked()
	if r.byEngine.Load() {
		if left := r.invalidateLocked(); left != nil {
			return FaultPending, left
		}
	} else if r.state.Load()&stateInvalidated == 0 {
		r.killLocked(stateInvalidated)
	}
	return FaultNone, nil
}

// forgetLocked gives back what a key stands on, when no section can be open on it.
func (m *MKey) forgetLocked() {
	m.layout.giveBack()
	m.r.backing = nil
}

// Close ends the key: when it returns, no access to memory through it is under way.
// It fails with EBUSY while another key stands on it. Closing again does nothing.
func (m *MKey) Close() error {
	r := &m.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state.Load()&stateDead != 0 {
		return nil
	}
	if err := r.takeLocked("destroy_mkey"); err != nil {
		return err
	}
	r.killLocked(stateDead)
	m.forgetLocked()
	r.remove()
	return nil
}

// Kind returns KindIndirect.
func (l *layout) Kind() Kind { return KindIndirect }

// Len returns the number of bytes.
func (l *layout) Len() uint64 { return l.round * l.repeat }

// Close does nothing: the key gives back what it stands on.
func (l *layout) Close() error { return nil }

// Run is never called: place.run goes on to the leaf.
func (l *layout) Run(uint64, uint64, ib.Access) ([]byte, FaultKind) {
	panic("mem: the bytes of an indirect key are those of its leaves")
}

// bottom returns the piece of a leaf that the byte at off lies in, through indirect keys
// among the pieces; and as find does where it lies in the leaf, and how many bytes there
// are from there on. hint is about the first of the keys. Inside a section.
func (l *layout) bottom(off uint64, hint *int) (p *piece, at, left uint64) {
	p, at, left = l.find(off, hint)
	for p.region.mkey != nil {
		below, n, first := &p.region.mkey.layout, left, 0
		p, at, left = below.find(at, &first)
		left = min(left, n)
	}
	return p, at, left
}

// find returns the piece that the byte at off lies in, where it lies in the piece's
// region, and how many bytes there are from there on.
func (l *layout) find(off uint64, hint *int) (p *piece, at, left uint64) {
	round := uint64(0)
	if l.repeat > 1 {
		round = off / l.round
		off -= round * l.round
	}
	p = l.pieceAt(off, hint)
	in := off - p.start
	return p, p.off + round*p.step + in, p.n - in
}

// pieceAt returns the piece of an offset in a round: usually the last one, or the
// next.
func (l *layout) pieceAt(off uint64, hint *int) *piece {
	if i := *hint; i < len(l.pieces) {
		if p := &l.pieces[i]; off-p.start < p.n {
			return p
		}
		if i++; i == len(l.pieces) {
			i = 0
		}
		if p := &l.pieces[i]; off-p.start < p.n {
			*hint = i
			return p
		}
	}
	*hint = sort.Search(len(l.pieces), func(i int) bool { return l.pieces[i].start > off }) - 1
	return &l.pieces[*hint]
}

// Gone is called when bytes were not there: the leaf's backing may bring them back.
func (l *layout) Gone(off, n uint64, acc ib.Access) FaultKind {
	hint := 0
	p, at, left := l.bottom(off, &hint)
	if b, ok := p.region.backing.(paged); ok {
		return b.Gone(at, min(n, left), acc)
	}
	return FaultStale
}

// Await fetches bytes, piece by piece. Outside any section the key may be taken away
// or become another between two of them: then something else is fetched, or nothing.
func (l *layout) Await(off, n uint64, acc ib.Access) FaultKind {
	first := true
	kind := FaultNone
	l.each(off, n, func(leaf *Region, b Backing, at, n uint64) bool {
		leaf.awaitReopened()
		if p, ok := b.(paged); ok {
			if k := p.Await(at, n, acc); k != FaultNone {
				if first {
					kind = k
				}
				return false
			}
		}
		first = false
		return true
	})
	return kind
}

// Durable returns true: a key with the right to be made persistent has it from all its pieces.
func (l *layout) Durable() bool { return true }

// Persist brings bytes to storage, piece by piece; see Await.
func (l *layout) Persist(off, n uint64) (err error) {
	l.each(off, n, func(_ *Region, b Backing, at, n uint64) bool {
		d, ok := b.(durable)
		if !ok {
			err = syscall.ENOMEM
			return false
		}
		err = d.Persist(at, n)
		return err == nil
	})
	return err
}

// each calls f with the leaves that n bytes at off lie in, and their backings. It is
// called outside any section, and opens one to look at each piece, not for f.
func (l *layout) each(off, n uint64, f func(leaf *Region, b Backing, at, n uint64) bool) {
	r := &l.key.r
	for n > 0 {
		if r.enter(shutToLooks) != FaultNone {
			return
		}
		if off >= r.length {
			r.leave()
			return
		}
		hint := 0
		p, at, left := l.bottom(off, &hint)
		leaf, b, k := p.region, p.region.backing, min(n, left) // the leaf is borrowed, and so does not change
		r.leave()
		if !f(leaf, b, at, k) {
			return
		}
		off, n = off+k, n-k
	}
}
