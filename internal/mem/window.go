package mem

// Memory windows (IBA 10.6.7): keys of the same table that open a part of a
// region, to peers alone, with rights of their own. A window's life:
//
//  1. AllocWindow gives it a place in the table. It is free: its key opens
//     nothing.
//  2. Bind, which a queue pair executes in the order of its send queue, checks
//     everything, takes the region so that it cannot be closed, and opens the
//     key.
//  3. Every access opens a section on the window and one on the region behind it
//     (Table.open, enterParent).
//  4. Invalidate, a bind of nothing (type 1), and Close keep new sections out
//     and wait for the open ones, then give the region back.

import (
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// windowAccess are the rights that a window can have.
const windowAccess = ib.AccessRemote | ib.AccessFlush | ib.AccessZeroBased

// peerAccess are the rights that peers use: a window grants nothing else.
const peerAccess = ib.AccessRemote | ib.AccessFlush

// Window is a memory window.
type Window struct {
	r    Region // its place in the table: key, state, and when bound bounds and rights
	typ  ib.MWType
	last atomic.Uint32 // type 1: the key that was promised last

	// These change only while no section can be open, under the lock of r.
	parent *Region // nil: free
	qpn    uint32  // type 2: the only queue pair that may use it
}

// AllocWindow makes a window in a protection domain.
func (t *Table) AllocWindow(pd uint32, typ ib.MWType) (*Window, error) {
	const op = "alloc_mw"
	if typ != ib.MWType1 && typ != ib.MWType2 {
		return nil, ib.Errorf(op, syscall.EINVAL, "%v", typ)
	}
	w := &Window{typ: typ}
	w.r.table, w.r.pd, w.r.window = t, pd, w
	w.r.state.Store(stateInvalidated)
	if !t.add(&w.r) {
		return nil, ib.Errorf(op, syscall.ENOMEM, "the device has its %d regions and windows already", t.slots.max)
	}
	w.last.Store(w.r.Key())
	return w, nil
}

// Key returns the window's key: of type 1 the one that was promised last, of
// type 2 the one that it was bound with last.
func (w *Window) Key() uint32 {
	if w.typ == ib.MWType1 {
		return w.last.Load()
	}
	return w.r.Key()
}

// Bound is where a window is bound to.
type Bound struct {
	Region, QPN  uint32 // their numbers; of type 2 the only queue pair that may use it
	Addr, Length uint64
	Access       ib.Access
}

// Number returns a number that no other window or region has: see Region.Number.
func (w *Window) Number() uint32 { return w.r.Number() }

// Bound returns where the window is bound to. ok is false if it is free.
func (w *Window) Bound() (b Bound, ok bool) {
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	if w.parent == nil {
		return b, false
	}
	return Bound{w.parent.Number(), w.qpn, w.r.iova, w.r.length, w.r.access}, true
}

// Type returns the window's type.
func (w *Window) Type() ib.MWType { return w.typ }

// NextKey promises a key for the next bind of a type 1 window, which is executed
// later: each bind has another.
func (w *Window) NextKey() uint32 {
	for {
		last := w.last.Load()
		if next := w.r.after(last); w.last.CompareAndSwap(last, next) {
			return next
		}
	}
}

// NoKey takes a promise back whose bind was not posted, unless another one has been
// made since: the window's key is then what it was.
func (w *Window) NoKey(key uint32) { w.last.CompareAndSwap(key, w.r.before(key)) }

// Bind binds a window, on behalf of a queue pair. verb is set for a bind by the verb,
// which is for windows of type 1, and not for a work request, which is for those of
// type 2 (IBA 10.6.7.2). On a fault everything is as before.
//
// A window of type 1 may be bound already; it is then taken from where it was.
// Bound to no bytes it is free.
func (t *Table) Bind(b *ib.MWBind, verb bool, who Actor) Fault {
	r := t.slots.Get(b.MW >> tagBits)
	if r == nil || r.window == nil {
		return Fault{Kind: FaultKey, Key: b.MW}
	}
	w := r.window
	r.mu.Lock()
	defer r.mu.Unlock()
	if kind := w.mayBindLocked(b, verb, who); kind != FaultNone {
		return Fault{Kind: kind, Key: b.MW, Extent: Extent{b.Addr, b.Length}}
	}
	var parent *Region
	if b.Length > 0 {
		var kind FaultKind
		if parent, kind = t.lend(b, who); kind != FaultNone {
			return Fault{Kind: kind, Key: b.LKey, Extent: Extent{b.Addr, b.Length}}
		}
	}
	if left := w.freeLocked(); left != nil {
		if parent != nil {
			parent.bound.Add(-1)
		}
		return leaving(b.MW, left)
	}
	r.key.Store(r.Key()&^(1<<tagBits-1) | b.RKey&(1<<tagBits-1))
	if parent == nil {
		return Fault{}
	}
	w.parent = parent
	r.access = b.Access & peerAccess
	r.kind, r.neverFaults, r.backing = parent.kind, parent.neverFaults, parent.backing
	r.staged, r.plain, r.pinned = parent.staged, parent.plain, parent.pinned
	r.byEngine.Store(parent.byEngine.Load())
	r.iova, r.length, r.base = b.Addr, b.Length, b.Addr-parent.iova
	if b.Access&ib.AccessZeroBased != 0 {
		r.iova = 0
	}
	if w.typ == ib.MWType2 {
		w.qpn = who.QPN
	}
	r.state.And(^uint64(stateInvalidated))
	return Fault{}
}

// mayBindLocked checks what concerns the window alone.
func (w *Window) mayBindLocked(b *ib.MWBind, verb bool, who Actor) FaultKind {
	switch {
	case w.r.state.Load()&stateDead != 0:
		return FaultDead
	case w.r.pd != who.PD: // IBA 10.6.7.2: queue pair, window and region are of one domain
		return FaultDomain
	case b.Access&^windowAccess != 0:
		return FaultAccess
	case verb != (w.typ == ib.MWType1):
		return FaultWindow
	case w.typ == ib.MWType1:
		if b.Access&ib.AccessZeroBased != 0 {
			return FaultWindow
		}
	case w.parent != nil || b.Length == 0: // type 2 is to be free before, and not after
		return FaultWindow
	}
	return FaultNone
}

// lend finds the region that a window is to be bound to, checks that it may be,
// and counts the window there.
func (t *Table) lend(b *ib.MWBind, who Actor) (*Region, FaultKind) {
	// A section keeps the region as it is while it is looked at, and then being
	// lent does.
	p, _, kind := t.open(b.LKey, b.Addr, b.Length, 0, who, shutToLooks)
	if kind != FaultNone {
		return nil, kind
	}
	defer p.exit()
	const changes = ib.AccessRemoteWrite | ib.AccessRemoteAtomic
	switch {
	case p.access&ib.AccessMWBind == 0,
		b.Access&changes != 0 && p.access&ib.AccessLocalWrite == 0, // IBA 10.6.7.2: as for the region itself
		b.Access&ib.AccessFlush&^p.access != 0:
		return nil, FaultAccess
	}
	return p, p.lend()
}

// lend counts one more window or indirect key that keeps the region from changing. The caller
// has a section open.
func (r *Region) lend() FaultKind {
	for {
		n := r.bound.Load()
		if n == taken {
			return FaultDead
		}
		if r.bound.CompareAndSwap(n, n+1) {
			return FaultNone
		}
	}
}

// taken is the number of windows and indirect keys on a region that is being closed, or becomes
// another: there are none, and none is bound.
const taken = -1

// takeLocked keeps them away from a region, for ever or until giveLocked. It
// fails if there are some.
func (r *Region) takeLocked(op string) error {
	if r.bound.CompareAndSwap(0, taken) {
		return nil
	}
	return ib.Errorf(op, syscall.EBUSY, "%d memory windows or indirect keys stand on the region", r.bound.Load())
}

func (r *Region) giveLocked() { r.bound.Store(0) }

// enterParent opens a section on the region behind a window, unless one of the bits of
// shut is set there. Inside the window's own section, which keeps the region bound.
func (w *Window) enterParent(acc ib.Access, who Actor, shut uint64) (parent *Region, kind FaultKind) {
	switch {
	case w.qpn != 0 && w.qpn != who.QPN: // only its own queue pair may use a 2B window
		return nil, FaultDomain
	case acc&peerAccess == 0: // the key is no local one
		return nil, FaultAccess
	}
	return w.parent, w.parent.enter(shut)
}

// invalidateLocked is Invalidate for windows: those of type 2, by the queue pair
// that may use them. One that is free stays so.
func (w *Window) invalidateLocked(who Actor) (FaultKind, <-chan struct{}) {
	switch {
	case w.typ != ib.MWType2:
		return FaultNotInvalidatable, nil
	case w.parent == nil:
		return FaultNone, nil
	case w.qpn != who.QPN:
		return FaultDomain, nil
	}
	if left := w.freeLocked(); left != nil {
		return FaultPending, left
	}
	return FaultNone, nil
}

// freeLocked makes the key useless, waits for the accesses under way, and gives the region
// back. It does not wait for engines: if operations of theirs are under way, it returns a
// channel that is closed when they are over, and is to be called again then.
func (w *Window) freeLocked() (left <-chan struct{}) {
	if w.parent == nil {
		return nil
	}
	if left = w.r.invalidateLocked(); left != nil {
		return left
	}
	w.letGoLocked()
	return nil
}

// takeBackLocked is freeLocked for callers that may wait.
func (w *Window) takeBackLocked() {
	if w.parent != nil {
		w.r.killLocked(stateInvalidated)
		w.letGoLocked()
	}
}

func (w *Window) letGoLocked() {
	w.parent.bound.Add(-1)
	w.parent, w.qpn = nil, 0
	w.r.backing = nil
}

// Close frees the window: when it returns, no access through it is under way. Closing
// again does nothing.
func (w *Window) Close() error {
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	if w.r.state.Load()&stateDead != 0 {
		return nil
	}
	w.takeBackLocked()
	w.r.killLocked(stateDead)
	w.r.remove()
	return nil
}

// ReleaseQP frees the windows that only one queue pair may use, which is gone: its
// number will be another's.
func (t *Table) ReleaseQP(qpn uint32) {
	for _, r := range t.slots.All() {
		w := r.window
		if w == nil || w.typ != ib.MWType2 {
			continue
		}
		r.mu.Lock()
		if w.qpn == qpn {
			w.takeBackLocked()
		}
		r.mu.Unlock()
	}
}
