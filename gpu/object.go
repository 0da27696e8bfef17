package gpu

// Objects: memory of the GPU, where it lies, and how it moves. An object's life:
//
//  1. newObject gives it addresses and a place, in VRAM if there is room or if room can be made.
//  2. Uses (use) put it at the end of the list of least recently used objects.
//  3. Under pressure an object is evicted: others' importers are told, its bytes are copied to
//     system memory, and a Kernel fence is pending meanwhile.
//  4. Its next use brings it back if there is room, or if it is used more often than what lies in
//     VRAM. Otherwise the use is served in system memory: the GPU reaches that, too.
//  5. release takes it away from importers, and gives the memory back.
//
// Locks: an object's reservation lock guards its place; the card's mu guards lists and free space, is
// held for moments, and is taken last. Who holds one reservation lock takes another one only if
// that is free.

import (
	"container/list"
	"context"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
)

// Placement is where an object should lie.
type Placement uint8

const (
	InVRAM Placement = iota // in VRAM; in system memory when others need the VRAM more
	InHost                  // in system memory, which the GPU reaches, too
)

// Alignments of addresses: of objects that are at least so long.
const (
	middleAlign = 64 << 10
	largeAlign  = 2 << 20
)

// patience is how long a move waits for importers, and for operations that use the object.
const patience = 10 * time.Second

// object is an allocation.
type object struct {
	card       *card
	id         uint64
	addr       uint64 // of its first byte, for the GPU and for peers
	size, span uint64 // what was asked for; whole pages
	opts       AllocOptions
	resv       *dmabuf.Reservation
	refs       atomic.Int64 // Buffers, and operations that are queued
	handles    atomic.Int64 // of IPC, that were made

	imported *imported // another exporter's memory; nil: the card's own

	mu      sync.Mutex       // guards whole and exports
	whole   *dmabuf.Buffer   // of all of the object; nil: nobody has it
	exports []*dmabuf.Buffer // of the object, and of parts of it

	// What follows is guarded by the reservation lock.
	place   *place       // nil: the memory is given back
	pins    atomic.Int64 // importers and programs that hold it in place; it is read without the lock, too
	shown   int          // of them, those for whom the CPU sees it at its address
	revoked bool

	// What follows is guarded by the card's mu.
	element   *list.Element // in lru; nil: it does not lie in VRAM
	lowest    uint64        // where in VRAM it begins, if it lies there
	used      uint64        // when it was used last, by the card's clock
	before    uint64        // when it was used the time before
	evictedAt uint64        // 0: it was not, or has returned
}

var objectIDs atomic.Uint64

// AllocOptions are wishes about memory; the zero value has none.
type AllocOptions struct {
	Placement  Placement
	Contiguous bool // in one piece of VRAM
	// CPU: the CPU can load and store at the memory's address ([Buffer.Bytes]). The memory stays
	// where it is, in the BAR's part of the VRAM.
	CPU bool
}

func (c *card) newObject(op string, size uint64, opts AllocOptions) (*object, error) {
	switch {
	case size == 0:
		return nil, ib.Errorf(op, syscall.EINVAL, "no bytes")
	case opts.Placement > InHost:
		return nil, ib.Errorf(op, syscall.EINVAL, "placement %d", opts.Placement)
	case size > max(c.cfg.VRAM, c.cfg.Host), opts.Placement == InVRAM && size > c.cfg.VRAM:
		return nil, fail(op, ErrOutOfMemory, "%d bytes, the GPU has %d", size, c.cfg.VRAM)
	}
	o := &object{card: c, id: objectIDs.Add(1), size: size, span: roundUp(size, page), opts: opts, resv: dmabuf.NewReservation()}
	o.refs.Store(1)
	p := c.firstPlace(o)
	if p == nil {
		return nil, fail(op, ErrOutOfMemory, "%d bytes", size)
	}
	c.clear(p)
	o.place = p
	if !c.enter(o) {
		c.give(p, false)
		return nil, fail(op, ErrOutOfMemory, "no addresses for %d bytes", size)
	}
	return o, nil
}

// enter gives an object addresses and enters it in the lists. It reports whether there were any.
func (c *card) enter(o *object) bool {
	align := page
	switch {
	case o.span >= largeAlign:
		align = largeAlign
	case o.span >= middleAlign:
		align = middleAlign
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	off, ok := c.addresses.takeNext(o.span, align)
	if !ok {
		return false
	}
	o.addr = c.space.Base() + off
	i := sort.Search(len(c.objects), func(i int) bool { return c.objects[i].addr > o.addr })
	c.objects = slices.Insert(c.objects, i, o)
	c.clock++
	o.used = c.clock
	c.placedLocked(o)
	c.uses.Add(1)
	return true
}

// firstPlace finds memory for a new object; nil if there is none.
func (c *card) firstPlace(o *object) *place {
	if o.opts.Placement == InVRAM {
		limit := c.cfg.VRAM
		if o.opts.CPU {
			limit = c.bar.Load()
		}
		if p := c.room(o, limit, !c.cfg.NoEvict); p != nil || c.cfg.NoEvict || o.opts.CPU {
			return p
		}
	}
	return c.hostRoom(o)
}

func (c *card) hostRoom(o *object) *place {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.host.placeLocked(o.span, c.cfg.Host, false)
}

// room finds VRAM below limit for an object. If evict is set it evicts others, which are pinned
// or in use never. It returns nil if there is none. The caller may hold the object's reservation.
func (c *card) room(o *object, limit uint64, evict bool) *place {
	var spared map[*object]bool
	for range 4 * maxExtents { // others may take what an eviction has freed: not for ever
		c.mu.Lock()
		p := c.vram.placeLocked(o.span, limit, o.opts.Contiguous)
		var victim *object
		if p == nil && evict {
			victim = c.victimLocked(o, limit, spared)
		}
		c.mu.Unlock()
		if p != nil || victim == nil {
			return p
		}
		if !c.evict(victim) {
			if spared == nil {
				spared = make(map[*object]bool)
			}
			spared[victim] = true
		}
	}
	return nil
}

// victimLocked returns the object to evict for another one: the one that was not used for longest
// and lies below limit. nil: there is none, or evicting all of them would not be enough.
func (c *card) victimLocked(o *object, limit uint64, spared map[*object]bool) (victim *object) {
	var could uint64
	for _, e := range c.vram.spaces.free {
		if e.off < limit {
			could += min(e.end(), limit) - e.off
		}
	}
	for e := c.lru.Front(); e != nil; e = e.Next() {
		v := e.Value.(*object)
		if v == o || spared[v] || v.opts.CPU || v.pins.Load() > 0 {
			continue
		}
		if limit < c.cfg.VRAM && v.lowest >= limit {
			continue
		}
		if victim == nil {
			victim = v
		}
		if could += v.span; could >= o.span {
			return victim
		}
	}
	return nil
}

// evict moves an object to system memory, unless it is pinned or in use. It reports whether it has.
func (c *card) evict(o *object) bool {
	if !o.resv.TryLock() {
		return false
	}
	// An object in use has a fence: it is spared.
	if o.place == nil || o.place.heap != c.vram || o.pins.Load() > 0 || !o.resv.Signaled(dmabuf.Bookkeep) {
		o.resv.Unlock()
		return false
	}
	to := c.hostRoom(o)
	if to == nil {
		o.resv.Unlock()
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	finish, err := o.beginMove(ctx, "gpu_evict", to)
	cancel()
	if err == nil {
		c.mu.Lock()
		c.stats.Evictions++
		o.evictedAt = c.clock
		c.mu.Unlock()
	}
	o.resv.Unlock()
	if err != nil {
		c.give(to, false)
		return false
	}
	finish()
	return true
}

// beginMove begins to move an object: importers are told, operations under way are waited for, and a
// Kernel fence is added. From then on the object lies at its new place, whose bytes are right when the
// fence is signalled: finish, which needs no lock, copies them and signals it. The caller has locked the
// reservation.
func (o *object) beginMove(ctx context.Context, op string, to *place) (finish func(), err error) {
	c := o.card
	o.invalidate()
	if err := o.resv.Wait(ctx, dmabuf.Bookkeep); err != nil {
		return nil, ib.Errorf(op, syscall.ETIMEDOUT, "the object's fences: %v", err)
	}
	from, moved := o.place, dmabuf.NewFence()
	o.resv.Add(moved, dmabuf.Kernel)
	o.place = to
	c.mu.Lock()
	c.stats.Moves++
	c.stats.MovedBytes += o.span
	c.placedLocked(o)
	c.mu.Unlock()
	return func() {
		start := time.Now()
		from.copyTo(to)
		c.wayOf(to.heap == c.vram, from.heap == c.vram).spend(start, o.span)
		moved.Signal(nil)
		c.give(from, false)
	}, nil
}

// placedLocked enters in the lists where an object lies. The card's mu is locked.
func (c *card) placedLocked(o *object) {
	in := o.place != nil && o.place.heap == c.vram
	switch {
	case in && o.element == nil:
		o.element = c.lru.PushBack(o)
	case !in && o.element != nil:
		c.lru.Remove(o.element)
		o.element = nil
	}
	if in {
		o.lowest = o.place.start()
	}
}

// moveTo moves an object, and waits for it. The caller has locked the reservation.
func (o *object) moveTo(ctx context.Context, op string, to *place) error {
	finish, err := o.beginMove(ctx, op, to)
	if err != nil {
		o.card.give(to, false)
		return err
	}
	finish()
	return nil
}

// touchLocked notes a use. The card's mu is locked.
func (c *card) touchLocked(o *object) {
	c.clock++
	o.before, o.used = o.used, c.clock
	if o.element != nil {
		c.lru.MoveToBack(o.element)
	}
}

// settle notes a use of an object, and brings it below limit in VRAM if that is sensible: if there
// is room, or if it was used twice since an object was used that lies there. The caller has locked the
// reservation.
func (o *object) settle(ctx context.Context, limit uint64) {
	c := o.card
	c.mu.Lock()
	c.touchLocked(o)
	inVRAM := o.place.heap == c.vram
	if inVRAM && o.place.end() <= limit {
		c.mu.Unlock()
		return
	}
	evict := inVRAM // what lies beyond the BAR is moved if it can be
	if !inVRAM {
		if o.evictedAt != 0 && c.clock-o.evictedAt <= uint64(c.lru.Len()) {
			c.stats.Thrash++
		}
		if victim := c.victimLocked(o, limit, nil); victim != nil && victim.used < o.before {
			evict = true
		}
	}
	c.mu.Unlock()
	if o.pins.Load() > 0 || o.opts.Placement == InHost || o.farImporter() {
		return
	}
	// An object in use is not moved: the operation may be the one that asks, by another way.
	if !o.resv.Signaled(dmabuf.Bookkeep) {
		return
	}
	if to := c.room(o, limit, evict && !c.cfg.NoEvict); to != nil {
		if o.moveTo(ctx, "gpu_move", to) == nil {
			c.mu.Lock()
			if !inVRAM {
				c.stats.Returns++
				o.evictedAt = 0
			}
			c.mu.Unlock()
			return
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !inVRAM {
		c.stats.InPlace++
		if o.evictedAt != 0 {
			o.evictedAt = 1 // the next use is no thrash: this one was served
		}
	}
}

// use begins an access of the GPU itself, which ends when the fence is signalled. It returns where the
// bytes are until then.
func (o *object) use(ctx context.Context, op string, write bool, f *dmabuf.Fence) (t *dmabuf.Table, vram bool, err error) {
	if err := o.resv.LockContext(ctx); err != nil {
		return nil, false, ib.Errorf(op, syscall.ETIMEDOUT, "the object's reservation lock: %v", err)
	}
	defer o.resv.Unlock()
	if o.imported != nil {
		t, err := o.imported.useLocked(ctx, op, write, f)
		return t, false, err
	}
	if o.place == nil {
		return nil, false, fail(op, ErrFreed, "object %d", o.id)
	}
	o.settle(ctx, o.card.cfg.VRAM)
	if err := o.resv.Wait(ctx, dmabuf.Kernel); err != nil {
		return nil, false, ib.Errorf(op, syscall.ETIMEDOUT, "the object's fences: %v", err)
	}
	usage := dmabuf.Read
	if write {
		usage = dmabuf.Write
	}
	o.resv.Add(f, usage)
	return o.place.table, o.place.heap == o.card.vram, nil
}

// pin holds an object where peers reach it: in the BAR's part of the VRAM, or in system memory. The
// caller has locked the reservation.
func (o *object) pin(ctx context.Context, op string, vram bool) error {
	c := o.card
	if o.place == nil {
		return fail(op, ErrFreed, "object %d", o.id)
	}
	limit := c.bar.Load()
	right := !vram && o.place.heap == c.host || vram && o.place.heap == c.vram && o.place.end() <= limit
	if !right {
		if o.pins.Load() > 0 {
			return fail(op, ErrPinned, "object %d is pinned in the %s", o.id, o.place.heap.name)
		}
		var to *place
		if vram {
			to = c.room(o, limit, true)
			if to == nil {
				return fail(op, ErrBAR, "%d bytes, the BAR shows %d", o.size, limit)
			}
		} else if to = c.hostRoom(o); to == nil {
			return fail(op, ErrOutOfMemory, "%d bytes of system memory", o.size)
		}
		if err := o.moveTo(ctx, op, to); err != nil {
			return err
		}
	}
	o.pins.Add(1)
	return nil
}

// get takes a reference. It reports whether there was still one.
func (o *object) get() bool {
	for {
		n := o.refs.Load()
		if n <= 0 {
			return false
		}
		if o.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// put gives a reference back. The last one releases the object.
func (o *object) put() {
	if o.refs.Add(-1) == 0 {
		o.release()
	}
}

// release takes the object away from importers and gives its memory back. If an importer has pinned it
// that cannot be told, the memory stays until the dma-buf is released.
func (o *object) release() {
	c := o.card
	ipc.forget(o)
	c.mu.Lock()
	i, _ := slices.BinarySearchFunc(c.objects, o.addr, func(o *object, addr uint64) int {
		switch {
		case o.addr < addr:
			return -1
		case o.addr > addr:
			return 1
		}
		return 0
	})
	c.objects = slices.Delete(c.objects, i, i+1)
	if o.imported != nil {
		c.addresses.put(extent{o.addr - c.space.Base(), o.span})
	}
	c.mu.Unlock()
	if o.imported != nil {
		o.imported.leave()
		c.unuse()
		return
	}
	o.resv.Lock()
	o.revoked = true
	held := o.held()
	o.invalidate()
	if held {
		o.resv.Unlock() // dropped, in export.go, gives the memory back
		return
	}
	o.giveUpLocked()
	o.resv.Unlock()
}

// giveUpLocked gives the memory back when nobody accesses it any more. The reservation is locked.
func (o *object) giveUpLocked() {
	p := o.place
	if p == nil {
		return
	}
	c := o.card
	o.place = nil
	if o.shown > 0 {
		o.shown = 0
		_ = c.space.HideAt(o.addr-c.space.Base(), o.span) // the addresses are not used again if it fails
	}
	c.mu.Lock()
	c.placedLocked(o)
	c.addresses.put(extent{o.addr - c.space.Base(), o.span})
	c.mu.Unlock()
	pending := o.resv.Fences(dmabuf.Bookkeep)
	left := new(atomic.Int64)
	left.Store(int64(len(pending)) + 1)
	done := func(error) {
		if left.Add(-1) == 0 {
			c.give(p, true)
			c.unuse()
		}
	}
	for _, f := range pending { // an importer in another process may not answer for long
		f.OnSignal(done)
	}
	done(nil)
}

// find returns the object that an address is a part of, with a reference; nil if there is none.
func (c *card) find(addr uint64) *object {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := sort.Search(len(c.objects), func(i int) bool { return c.objects[i].addr > addr })
	if i == 0 {
		return nil
	}
	o := c.objects[i-1]
	if addr-o.addr >= o.size || !o.get() {
		return nil
	}
	return o
}

// after is called when an access has ended, and its fence is signalled.
func (o *object) after() {
	if o.imported != nil {
		o.imported.settle()
	}
}
