package mem

// A region's life, top-down:
//
//  1. Register checks what was asked, gives out a key and makes it findable.
//  2. enter and leave bracket every access: a read section is one atomic add at
//     each end of it. An access to bytes has a section open on the leaf, the region
//     whose backing they are, also through windows and indirect keys.
//  3. Invalidate and Close set a bit that keeps new sections out, then wait for
//     the open ones. When they return, no access through the region is under way,
//     and none will begin.
//
// suspend.go takes a region's memory away for a moment, or for ever; rereg.go makes
// another region of it; window.go opens a part of it by a key of its own, and
// mkey.go makes one key of several.

import (
	"log/slog"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// accessKnown are the access bits that mean something.
const accessKnown = ib.AccessLocalWrite | ib.AccessRemote | ib.AccessMWBind | ib.AccessZeroBased |
	ib.AccessOnDemand | ib.AccessFlush | ib.AccessRelaxedOrdering | ib.AccessRemoteInvalidate

// RegionConfig is what a new region is made of.
type RegionConfig struct {
	PD            uint32    // the protection domain it belongs to
	Access        ib.Access // the rights it grants
	IOVA          uint64    // the address of its first byte in requests; AccessZeroBased makes it 0
	Length        uint64    // bytes; at most Backing.Len()
	Backing       Backing   // its bytes; the region closes it
	Invalidatable bool      // peers may invalidate it, as with AccessRemoteInvalidate

	// KeepKey: re-registration on the same backing leaves the key as it is.
	KeepKey bool
}

// Region is registered memory: rights, bounds, a key and a state, on a Backing.
type Region struct {
	// state counts the open sections in its low bits; each of the bits above keeps
	// new ones out.
	state atomic.Uint64

	// key, and most of what follows, changes only while mu is held and no section
	// can be open. The key's index never changes.
	key           atomic.Uint32
	byEngine      atomic.Bool // the backing is an Engine: the CPU does not address the bytes; read also without a section
	told          atomic.Bool // report has logged that the memory is gone
	pd            uint32
	access        ib.Access
	kind          Kind
	neverFaults   bool // the bytes cannot fault: move needs no guard
	plain         bool // the CPU accesses the bytes where they lie, mostly in one piece
	invalidatable bool
	pinned        *Host // not nil: the program may remap the bytes, and the kernel reports it
	iova          uint64
	length        uint64
	backing       Backing
	table         *Table

	window *Window // not nil: this is a window's key
	base   uint64  // windows: where in the backing the first byte lies
	mkey   *MKey   // not nil: this is an indirect key
	// bound counts the windows on the region, and what indirect keys have borrowed;
	// taken keeps new ones out.
	bound   atomic.Int32
	staged  bool  // the backing is a staged one: it offers staging bytes, which it stores
	movable bool  // the backing's owner may move the bytes: nobody waits for another process under mu
	step    uint8 // odd: from one tag of the key to the next

	mu      sync.Mutex  // serialises changes of state's bits; held also over waits for other processes, unless the region is movable
	suspend *suspension // nil until the region is first suspended, or a caller waits for its sections
}

const (
	stateDead        = 1 << 63 // closed, or about to be
	stateInvalidated = 1 << 62
	stateRevoked     = 1 << 61 // the owner of the memory has taken it away, for good
	statePaused      = 1 << 60 // is being changed, and will be open again
	stateSuspended   = 1 << 59 // the memory is taken away for a moment
	stateCount       = stateSuspended - 1

	// The bits that keep out accesses to bytes, and those that keep out also a look at
	// the region's rights and bounds.
	shutToBytes = stateDead | stateInvalidated | stateRevoked | statePaused | stateSuspended
	shutToLooks = shutToBytes &^ stateSuspended
)

// Register makes a region and gives it a key. On failure the backing is still
// the caller's.
func (t *Table) Register(cfg RegionConfig) (*Region, error) {
	const op = "reg_mr"
	if err := cfg.check(op); err != nil {
		return nil, err
	}
	r := &Region{
		pd:            cfg.PD,
		access:        cfg.Access,
		invalidatable: cfg.Invalidatable || cfg.Access&ib.AccessRemoteInvalidate != 0,
		iova:          cfg.IOVA,
		length:        cfg.Length,
		table:         t,
	}
	r.stand(cfg.Backing)
	if !t.add(r) {
		return nil, ib.Errorf(op, syscall.ENOMEM, "the device has its %d regions already", t.slots.max)
	}
	return r, nil
}

// stand makes b the region's backing. No section can be open meanwhile.
func (r *Region) stand(b Backing) {
	r.backing, r.kind, r.neverFaults = b, b.Kind(), backingNeverFaults(b)
	r.staged = isStaged(b)
	_, byEngine := b.(Engine)
	r.byEngine.Store(byEngine)
	r.plain = (r.kind == KindPinned || r.kind == KindDevice || r.kind == KindDMABuf || r.kind == KindPeer) && !r.staged && !byEngine
	r.pinned = nil
	if h, ok := b.(interface{ Pinned() *Host }); ok {
		r.pinned = h.Pinned()
	}
	m, movable := b.(Movable)
	if r.movable = movable; movable {
		m.Bind(r)
	}
}

// check returns an error if there cannot be such a region, and sets IOVA to 0 for
// AccessZeroBased.
func (cfg *RegionConfig) check(op string) error {
	if unknown := cfg.Access &^ accessKnown; unknown != 0 {
		return ib.Errorf(op, syscall.EINVAL, "unknown access bits %#x", uint32(unknown))
	}
	// ibv_reg_mr(3): a peer's right to change memory needs the local right.
	if cfg.Access&(ib.AccessRemoteWrite|ib.AccessRemoteAtomic) != 0 && cfg.Access&ib.AccessLocalWrite == 0 {
		return ib.Errorf(op, syscall.EINVAL, "remote write and remote atomic access need local write access")
	}
	if kind := cfg.Backing.Kind(); cfg.Access&ib.AccessOnDemand != 0 != (kind == KindOnDemand || kind == KindImplicit) {
		return ib.Errorf(op, syscall.EINVAL, "on-demand access and %v memory do not fit", kind)
	}
	if cfg.Access&ib.AccessFlushPersistent != 0 && !isDurable(cfg.Backing) {
		return ib.Errorf(op, syscall.EINVAL, "flush to persistence of memory that is not persistent")
	}
	if cfg.Access&ib.AccessZeroBased != 0 {
		cfg.IOVA = 0
	}
	if cfg.Length > math.MaxUint64-cfg.IOVA {
		return ib.Errorf(op, syscall.EINVAL, "%d bytes at %#x pass the end of the address space", cfg.Length, cfg.IOVA)
	}
	if cfg.Length > cfg.Backing.Len() {
		return ib.Errorf(op, syscall.EINVAL, "%d bytes on a backing of %d", cfg.Length, cfg.Backing.Len())
	}
	if cfg.Access&ib.AccessMWBind != 0 && isPeerMemory(cfg.Backing) {
		return ib.Errorf(op, syscall.EOPNOTSUPP, "memory windows cannot be bound to peer memory")
	}
	return nil
}

// backingNeverFaults reports whether a backing's bytes are always there, whatever the
// application does: the Go heap's are, and those of memory that is not the application's.
func backingNeverFaults(b Backing) bool {
	s, ok := b.(interface{ NeverFaults() bool })
	return ok && s.NeverFaults()
}

// Key returns the region's local and remote key.
func (r *Region) Key() uint32 { return r.key.Load() }

// Number returns a number that no other region of the table has, and that does not
// disclose the key. Once the region is closed, another may get the number.
func (r *Region) Number() uint32 {
	number, _ := r.table.slots.number(r.key.Load() >> tagBits)
	return number
}

// add puts a region into the table and gives it its first key.
//
// A slot's first tag is random. Each later key with the slot's index, of this region or
// the next in the slot, has the tag that follows the one before (after). So an old key is
// valid again only after its slot has had 256 keys; and freed slots are reused in order
// (quarantine), so that with few regions this takes some 262,000 registrations.
//
// The key of an implicit region is even. UCX 1.11 to 1.14 have one such region for each domain, and pass it to a function
// that expects other arguments when they close the domain: that takes the key for flags, and by the lowest one it would go
// on to read an address where there is none. Without it, it returns an error that nobody looks at.
func (t *Table) add(r *Region) bool {
	_, ok := t.slots.addNext(func(index uint32, memo uint16) *Region {
		tag, step := uint8(memo), uint8(memo>>tagBits)
		if step == 0 { // a fresh slot
			random := t.random()
			tag, step = uint8(random), uint8(random>>tagBits)|1
		}
		if r.kind == KindImplicit && tag&1 != 0 {
			tag += step
		}
		r.step = step
		r.key.Store(index<<tagBits | uint32(tag))
		return r
	})
	return ok
}

// remove takes the region out of the table.
func (r *Region) remove() {
	key := r.Key()
	r.table.slots.removeLeaving(key>>tagBits, uint16(r.step)<<tagBits|uint16(uint8(r.after(key))))
}

// after returns the key that follows another one of the slot: the same index, the
// next tag. The step between tags is odd, so that a tag is used again only after all
// others; and it is random, so that peers cannot compute the next key.
func (r *Region) after(key uint32) uint32 {
	return key&^(1<<tagBits-1) | uint32(uint8(key)+r.step)
}

// before is the inverse of after.
func (r *Region) before(key uint32) uint32 {
	return key&^(1<<tagBits-1) | uint32(uint8(key)-r.step)
}

// Kind returns the kind of the region's memory.
func (r *Region) Kind() Kind { return r.kind }

// Access returns the rights.
func (r *Region) Access() ib.Access { return r.access }

// IOVA returns the address of the first byte in requests.
func (r *Region) IOVA() uint64 { return r.iova }

// Length returns the number of bytes.
func (r *Region) Length() uint64 { return r.length }

// Snapshot returns what the region is, all of it at one time; the other methods
// are for callers that keep it from changing meanwhile. ok is false if it is
// closed, invalidated, revoked, or being changed.
func (r *Region) Snapshot() (cfg RegionConfig, ok bool) {
	if ok = r.state.Add(1)&shutToLooks == 0; ok {
		cfg = RegionConfig{PD: r.pd, Access: r.access, IOVA: r.iova, Length: r.length, Backing: r.backing, Invalidatable: r.invalidatable}
	}
	r.leave()
	return cfg, ok
}

// Backing returns what the region's bytes are made of.
func (r *Region) Backing() Backing { return r.backing }

// Alive reports whether the key is good: neither invalidated, closed nor being changed.
// Its memory may be suspended or revoked.
func (r *Region) Alive() bool { return r.state.Load()&(stateDead|stateInvalidated|statePaused) == 0 }

// Open reports whether nothing at all keeps accesses out.
func (r *Region) Open() bool { return r.state.Load()&shutToBytes == 0 }

// Closed reports whether the region is closed, for good.
func (r *Region) Closed() bool { return r.state.Load()&stateDead != 0 }

// enter opens a read section, unless one of the bits of shut is set: then it returns
// the fault. It opens none on the region behind a window.
func (r *Region) enter(shut uint64) FaultKind {
	// The first look keeps a peer that uses a dead key again and again from moving
	// the count, which killLocked may be waiting on; the second decides.
	if s := r.state.Load(); s&shut != 0 {
		return whyShut(s)
	}
	if s := r.state.Add(1); s&shut != 0 {
		r.leave()
		return whyShut(s)
	}
	return FaultNone
}

// whyShut returns what an access to a region in such a state ends with.
func whyShut(state uint64) FaultKind {
	switch {
	case state&(stateDead|stateInvalidated|statePaused) != 0:
		return FaultDead
	case state&stateRevoked != 0:
		return FaultRevoked
	}
	return FaultPending
}

// exit closes a read section, and that on the region behind a window.
func (r *Region) exit() {
	if w := r.window; w != nil {
		parent := w.parent // the next Bind may change it once this section is closed
		r.leave()
		parent.leave()
		return
	}
	r.leave()
}

// leave closes a read section on this region alone. The last one out of a region that
// is shut wakes the goroutines that wait for that.
func (r *Region) leave() {
	if s := r.state.Add(^uint64(0)); s != 0 && s&stateCount == 0 {
		r.tellLeft()
	}
}

// spinsBeforeSleep is how often a goroutine that waits for sections yields before it
// sleeps: most sections last no longer than a copy of Quantum bytes.
const spinsBeforeSleep = 32

// killLocked keeps new sections out, for the reason bit, and waits for the open
// ones. It wakes the goroutines that wait for the region to open again, unless bit is
// stateSuspended. It returns the channel of TableConfig.Invalidated.
func (r *Region) killLocked(bit uint64) (left <-chan struct{}) {
	open, left := r.shutLocked(bit)
	for open {
		last := r.lastLeaves()
		if last == nil {
			break
		}
		<-last
	}
	return left
}

// invalidateLocked is killLocked on behalf of a request: it does not wait for engines. If
// operations of engines are under way it returns a channel that is closed when they are over.
func (r *Region) invalidateLocked() (left <-chan struct{}) {
	if !r.byEngine.Load() {
		return r.killLocked(stateInvalidated)
	}
	if r.state.Load()&stateInvalidated == 0 {
		r.shutLocked(stateInvalidated)
	}
	return r.lastLeaves()
}

// shutLocked keeps new sections out, for the reason bit, and reports whether there are open
// ones. left is what TableConfig.Invalidated has returned, if it was called.
func (r *Region) shutLocked(bit uint64) (open bool, left <-chan struct{}) {
	open = r.state.Or(bit)&stateCount != 0
	if bit != stateSuspended {
		r.wakeWaiters()
	}
	switch t := r.table; {
	case r.window != nil: // requests never send from a window
	case bit == stateInvalidated && r.mkey == nil && t.invalidated != nil:
		left = t.invalidated(r)
	case t.killed != nil:
		t.killed(r, bit != stateSuspended && !r.movable)
	}
	return open, left
}

// inside reports whether sections are still open after it has yielded to them for a moment.
func (r *Region) inside() bool {
	for range spinsBeforeSleep {
		if r.state.Load()&stateCount == 0 {
			return false
		}
		runtime.Gosched()
	}
	return true
}

// lastLeaves returns a channel that is closed when the last section of a region that is shut
// is; nil if none is open.
//
// No wake-up is lost: either lastLeaves, having published its channel, sees the count at zero,
// or the section that takes it to zero closes after that and sees the channel (and the bit that
// shuts the region, which was set before).
func (r *Region) lastLeaves() <-chan struct{} {
	if !r.inside() {
		return nil
	}
	waiters.Lock()
	u := r.suspensionLocked()
	if u.left == nil {
		u.left = make(chan struct{})
	}
	c := u.left
	waiters.Unlock()
	if r.state.Load()&stateCount == 0 {
		r.tellLeft() // the last section may have closed before the channel was there
	}
	return c
}

// tellLeft wakes those who wait for the last section.
func (r *Region) tellLeft() {
	waiters.Lock()
	defer waiters.Unlock()
	if u := r.suspend; u != nil && u.left != nil {
		close(u.left)
		u.left = nil
	}
}

// invalidate kills the key on behalf of a peer, or of the program.
func (r *Region) invalidate(key uint32, who Actor, forPeer bool) (kind FaultKind, left <-chan struct{}) {
	for !r.mu.TryLock() {
		// The lock's holder may be waiting for another process. The caller must not.
		if s := r.state.Load(); s&(stateDead|stateRevoked|statePaused) != 0 {
			return whyShut(s), nil
		} else if s&stateSuspended != 0 { // the holder may be waiting for an engine
			if left = r.lastLeaves(); left != nil {
				return FaultPending, left
			}
		}
		runtime.Gosched()
	}
	defer r.mu.Unlock()
	switch {
	case r.state.Load()&stateDead != 0:
		return FaultDead, nil
	case r.Key() != key: // another one since it was found: bound anew, or registered again
		return FaultKey, nil
	case r.pd != who.PD:
		return FaultDomain, nil
	case r.window != nil:
		return r.window.invalidateLocked(who)
	case r.mkey != nil:
		return r.mkey.invalidateLocked(forPeer)
	case !r.invalidatable || !r.bound.CompareAndSwap(0, taken):
		return FaultNotInvalidatable, nil
	}
	left = r.invalidateLocked()
	r.giveLocked()
	if left != nil {
		return FaultPending, left
	}
	return FaultNone, nil
}

// Close ends the region: its key becomes useless at once. When no access through it is
// under way any more, Close closes the backing and frees the key. Closing again does
// nothing. While windows are bound to the region, or indirect keys stand on it, Close
// returns EBUSY.
func (r *Region) Close() error {
	r.mu.Lock()
	if r.state.Load()&stateDead != 0 {
		r.mu.Unlock()
		return nil
	}
	if err := r.takeLocked("dereg_mr"); err != nil {
		r.mu.Unlock()
		return err
	}
	r.killLocked(stateDead)
	movable := r.movable
	r.mu.Unlock()
	if movable {
		r.awaitPeers()
	}
	// Without the lock: giving memory back may take long, and its owner may be moving it, in
	// Suspend. No access uses it.
	err := closeBacking(r.backing)
	r.remove()
	return err
}

// maxGone is how often an access tries again because bytes were gone that had
// just been there. Then it ends in FaultPending, to go on when Fault.Await has returned.
const maxGone = 16

// gone deals with bytes that were not there when they were accessed; it is the
// times-th time in one access. If it returns no fault, they are back.
func (r *Region) gone(off, n uint64, acc ib.Access, times int) Fault {
	kind := FaultStale
	if p, ok := r.backing.(paged); ok {
		if kind = FaultPending; times < maxGone {
			kind = p.Gone(off, n, acc)
		}
	}
	if kind == FaultNone {
		return Fault{}
	}
	return r.fault(kind, off, n, acc)
}

// fault makes a Fault of a kind that a backing has found at off, with the key and the
// address, which a backing does not have. The section is open.
func (r *Region) fault(kind FaultKind, off, n uint64, acc ib.Access) Fault {
	f := Fault{Kind: kind, Key: r.Key(), Extent: Extent{r.iova + off - r.base, n}}
	if kind == FaultPending {
		f.wanted = &wanted{acc: acc, region: r, off: off}
	}
	return r.report(f)
}

// shutFault is the fault of an access that could not open a section. With FaultPending,
// shut is the region to wait for: the key's own, or one behind a window or under an
// indirect key.
func shutFault(shut *Region, kind FaultKind, key uint32, addr, n uint64) Fault {
	f := Fault{Kind: kind, Key: key, Extent: Extent{addr, n}}
	if kind == FaultPending {
		f.wanted = &wanted{shut: shut, brief: true}
	}
	return f
}

// report counts that memory is gone, and logs it once for each region.
func (r *Region) report(f Fault) Fault {
	if f.Kind == FaultStale {
		r.table.stale.Add(1)
		if r.told.CompareAndSwap(false, true) {
			slog.Warn("verbena: registered memory is gone: unmapped, protected or truncated while a region names it",
				"key", f.Key, "addr", f.Addr, "length", f.Len)
		}
	}
	return f
}
