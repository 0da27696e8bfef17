package gpu

import (
	"context"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
)

// Buffer is memory of a GPU, or a part of it. Its methods may be called by several goroutines.
type Buffer struct {
	dev    *Device
	obj    *object
	off, n uint64
	freed  atomic.Bool

	mu    sync.Mutex // guards what follows
	pins  int        // that this Buffer holds
	shown int        // of them, those of Map
}

// Alloc allocates memory, all zero. Where VRAM is full, objects that were not used for longest are
// evicted to system memory; if that is not possible the new object lies there. It comes to VRAM when
// it is used and there is room.
//
// Errors: EINVAL for no bytes; [ErrOutOfMemory] if there are too few, or the object is larger than the
// VRAM; [ErrClosed].
func (d *Device) Alloc(n uint64) (*Buffer, error) { return d.AllocWith(n, AllocOptions{}) }

// AllocWith is Alloc with wishes about the memory. With CPU set it fails with [ErrOutOfMemory] if
// the part of VRAM that the BAR shows is full.
func (d *Device) AllocWith(n uint64, opts AllocOptions) (*Buffer, error) {
	const op = "gpu_alloc"
	if err := d.begin(op, 1); err != nil {
		return nil, err
	}
	defer d.card.unuse()
	o, err := d.card.newObject(op, n, opts)
	if err != nil {
		return nil, err
	}
	b, err := d.newBuffer(op, o, 0, n)
	if err == nil && opts.CPU {
		if _, err = b.Map(); err != nil {
			_ = b.Free() // the first error says more
		}
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}

// newBuffer makes a Buffer, which takes over the caller's reference.
func (d *Device) newBuffer(op string, o *object, off, n uint64) (*Buffer, error) {
	b := &Buffer{dev: d, obj: o, off: off, n: n}
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		o.put()
		return nil, fail(op, ErrClosed, "%s", d.card.name)
	}
	d.buffers[b] = true
	d.mu.Unlock()
	return b, nil
}

// Free frees the memory: when the last Buffer of it is freed, and the operations that were queued
// before are executed, importers lose it (accesses of peers end in access errors) and others get it.
//
// Freeing a Buffer twice fails with [ErrFreed].
func (b *Buffer) Free() error {
	const op = "gpu_free"
	if b == nil {
		return ib.Errorf(op, syscall.EINVAL, "nil buffer")
	}
	if b.freed.Swap(true) {
		return fail(op, ErrFreed, "object %d", b.obj.id)
	}
	b.dev.mu.Lock()
	delete(b.dev.buffers, b)
	b.dev.mu.Unlock()
	b.mu.Lock()
	pins, shown := b.pins, b.shown
	b.pins, b.shown = 0, 0
	b.mu.Unlock()
	if pins > 0 {
		b.obj.resv.Lock()
		b.obj.pins.Add(int64(shown - pins))
		for ; shown > 0 && b.obj.hideLocked() == nil; shown-- {
			continue // what cannot be hidden stays shown, and so stays where it is
		}
		b.obj.resv.Unlock()
	}
	b.obj.put()
	return nil
}

// hideLocked ends one Map and its pin. The reservation is locked.
func (o *object) hideLocked() error {
	if o.shown == 1 {
		if err := o.card.space.HideAt(o.addr-o.card.space.Base(), o.span); err != nil {
			return err
		}
	}
	o.shown--
	o.pins.Add(-1)
	return nil
}

// Sub returns a part of the memory as a Buffer of its own. The memory lives until both are freed.
//
// Errors: [ErrFreed], [ErrClosed], [ErrRange].
func (b *Buffer) Sub(off, n uint64) (*Buffer, error) {
	const op = "gpu_sub"
	if err := b.ok(op); err != nil {
		return nil, err
	}
	if err := b.inside(op, off, n); err != nil {
		return nil, err
	}
	if !b.obj.get() {
		return nil, fail(op, ErrFreed, "object %d", b.obj.id)
	}
	return b.dev.newBuffer(op, b.obj, b.off+off, n)
}

func (b *Buffer) ok(op string) error {
	switch {
	case b == nil:
		return ib.Errorf(op, syscall.EINVAL, "nil buffer")
	case b.freed.Load():
		return fail(op, ErrFreed, "object %d", b.obj.id)
	}
	return b.dev.ok(op)
}

func (b *Buffer) inside(op string, off, n uint64) error {
	if n == 0 || off > b.n || n > b.n-off {
		return fail(op, ErrRange, "%d bytes at %d of %d", n, off, b.n)
	}
	return nil
}

// Len returns the number of bytes.
func (b *Buffer) Len() uint64 { return b.n }

// Addr returns the address of the first byte: for the GPU, and for requests of peers. It stays the
// same when the memory moves. A load of the CPU from it faults, unless the memory is mapped
// ([Buffer.Map]).
func (b *Buffer) Addr() uint64 { return b.obj.addr + b.off }

// ID returns the number of the object that the memory is a part of. No other object of the process
// gets it, also if it gets the address.
func (b *Buffer) ID() uint64 { return b.obj.id }

// Device returns the device that has allocated the memory.
func (b *Buffer) Device() *Device { return b.dev }

// Resident reports whether the memory lies in VRAM now.
func (b *Buffer) Resident() bool {
	b.obj.resv.Lock()
	defer b.obj.resv.Unlock()
	return b.obj.place != nil && b.obj.place.heap == b.obj.card.vram
}

// Pin holds the memory in VRAM, where peers reach it, until Unpin.
//
// Errors: [ErrBAR] if the BAR's part of the VRAM has no room for it; [ErrPinned] if it is held in
// system memory; [ErrFreed]; EOPNOTSUPP for imported memory.
func (b *Buffer) Pin() error {
	return b.pin("gpu_pin", false)
}

// pin pins the memory, and shows it to the CPU if show is set.
func (b *Buffer) pin(op string, show bool) error {
	if err := b.ok(op); err != nil {
		return err
	}
	o := b.obj
	if o.imported != nil {
		return ib.Errorf(op, syscall.EOPNOTSUPP, "imported memory is its exporter's to hold")
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	o.resv.Lock()
	defer o.resv.Unlock()
	if err := o.pin(ctx, op, o.opts.Placement == InVRAM); err != nil {
		return err
	}
	if show {
		if err := o.showLocked(op); err != nil {
			o.pins.Add(-1)
			return err
		}
	}
	b.mu.Lock()
	freed := b.freed.Load() // if not, Free finds the pin
	if !freed {
		b.pins++
		if show {
			b.shown++
		}
	}
	b.mu.Unlock()
	switch {
	case !freed:
		return nil
	case show:
		_ = o.hideLocked() // what cannot be hidden stays shown
	default:
		o.pins.Add(-1)
	}
	return fail(op, ErrFreed, "object %d", o.id)
}

// Unpin ends a Pin. It fails with EINVAL if there was none.
func (b *Buffer) Unpin() error {
	const op = "gpu_unpin"
	if err := b.ok(op); err != nil {
		return err
	}
	b.mu.Lock()
	had := b.pins > b.shown
	if had {
		b.pins--
	}
	b.mu.Unlock()
	if !had {
		return ib.Errorf(op, syscall.EINVAL, "the memory is not pinned")
	}
	b.obj.resv.Lock()
	b.obj.pins.Add(-1)
	b.obj.resv.Unlock()
	return nil
}

// Map shows the memory to the CPU, at its address, and holds it in the BAR's part of the VRAM until
// Unmap. The bytes are good until then.
//
// Errors: those of Pin.
func (b *Buffer) Map() ([]byte, error) {
	if err := b.pin("gpu_map", true); err != nil {
		return nil, err
	}
	c := b.obj.card
	return c.space.Bytes(b.Addr()-c.space.Base(), b.n), nil
}

// showLocked shows a pinned object to the CPU, once more. The reservation is locked.
func (o *object) showLocked(op string) error {
	c := o.card
	if o.shown == 0 {
		base := o.addr - c.space.Base()
		at := base
		for _, e := range o.place.extents {
			if _, err := c.space.MapAt(at, o.place.heap.fd, int64(e.off), e.n); err != nil {
				_ = c.space.HideAt(base, o.span) // the first error says more
				return fail(op, ErrOutOfMemory, "%v", err)
			}
			at += e.n
		}
	}
	o.shown++
	return nil
}

// Unmap ends a Map: a load of the CPU faults afterwards. It fails with EINVAL if there was none.
func (b *Buffer) Unmap() error {
	const op = "gpu_unmap"
	if err := b.ok(op); err != nil {
		return err
	}
	b.mu.Lock()
	had := b.shown > 0
	if had {
		b.shown--
		b.pins--
	}
	b.mu.Unlock()
	if !had {
		return ib.Errorf(op, syscall.EINVAL, "the memory is not mapped")
	}
	b.obj.resv.Lock()
	defer b.obj.resv.Unlock()
	if err := b.obj.hideLocked(); err != nil {
		return ib.Errorf(op, syscall.ENOMEM, "%v", err)
	}
	return nil
}

// Bytes returns the memory as the CPU sees it: nil unless it is mapped ([Buffer.Map], AllocOptions.CPU). The bytes
// are good until it is not any more.
func (b *Buffer) Bytes() []byte {
	if b.ok("") != nil {
		return nil
	}
	o, c := b.obj, b.obj.card
	o.resv.Lock()
	defer o.resv.Unlock()
	if o.shown == 0 {
		return nil
	}
	return c.space.Bytes(o.addr-c.space.Base()+b.off, b.n)
}

// ReadAt reads the memory with the CPU, and WriteAt writes it: by the BAR, and where that does not show
// it by the GPU's help. They wait until the bytes are there, and order themselves by no fence.
//
// Errors: [ErrRange], [ErrFreed], [ErrClosed]; ENODEV if imported memory is revoked.
func (b *Buffer) ReadAt(p []byte, off int64) (int, error) {
	return b.access("gpu_read", p, off, false)
}

// WriteAt is explained at ReadAt.
func (b *Buffer) WriteAt(p []byte, off int64) (int, error) {
	return b.access("gpu_write", p, off, true)
}

func (b *Buffer) access(op string, p []byte, off int64, write bool) (int, error) {
	if err := b.ok(op); err != nil {
		return 0, err
	}
	if len(p) == 0 && off >= 0 && uint64(off) <= b.n {
		return 0, nil
	}
	if off < 0 {
		return 0, fail(op, ErrRange, "offset %d", off)
	}
	if err := b.inside(op, uint64(off), uint64(len(p))); err != nil {
		return 0, err
	}
	if !b.obj.get() {
		return 0, fail(op, ErrFreed, "object %d", b.obj.id)
	}
	defer b.obj.put()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	start, used := time.Now(), dmabuf.NewFence()
	t, _, err := b.obj.use(ctx, op, write, used)
	if err != nil {
		return 0, err
	}
	at := b.off + uint64(off)
	for done := uint64(0); done < uint64(len(p)); {
		run := t.At(at+done, uint64(len(p))-done)
		if write {
			copy(run, p[done:])
		} else {
			copy(p[done:], run)
		}
		done += uint64(len(run))
	}
	b.obj.card.cfg.Costs.BAR.spend(start, uint64(len(p)))
	used.Signal(nil)
	b.obj.after()
	return len(p), nil
}

// Pointer is what is known of an address.
type Pointer struct {
	GPU      string // its name
	ID       uint64 // of the object: see Buffer.ID
	Base     uint64 // the object's address
	Size     uint64 // the object's, as it was asked for
	Offset   uint64 // of the address in the object
	Resident bool   // in VRAM, now
	CPU      bool   // the CPU can load from the address
	Imported bool
}

// Lookup finds the object that an address is a part of, of whatever GPU of this process. It fails with
// [ErrForeign] if there is none.
func Lookup(addr uint64) (Pointer, error) {
	const op = "gpu_lookup"
	o := find(addr)
	if o == nil {
		return Pointer{}, fail(op, ErrForeign, "address %#x", addr)
	}
	defer o.put()
	p := Pointer{GPU: o.card.name, ID: o.id, Base: o.addr, Size: o.size, Offset: addr - o.addr, Imported: o.imported != nil}
	if !p.Imported {
		o.resv.Lock()
		p.Resident, p.CPU = o.place != nil && o.place.heap == o.card.vram, o.shown > 0
		o.resv.Unlock()
	}
	return p, nil
}

// Reserved reports whether an address is one that a GPU of this process gives to its memory, also if no memory
// has it now. Other memory of the process does not lie there.
func Reserved(addr uint64) bool {
	cards.mu.Lock()
	defer cards.mu.Unlock()
	for _, c := range cards.by {
		if addr-c.space.Base() < c.space.Size() {
			return true
		}
	}
	return false
}

// find returns the object of an address, with a reference; nil if there is none.
func find(addr uint64) *object {
	cards.mu.Lock()
	defer cards.mu.Unlock()
	for _, c := range cards.by {
		if o := c.find(addr); o != nil {
			return o
		}
	}
	return nil
}

// BufferAt returns the memory of this GPU at an address as a Buffer, which the caller frees. n is how
// many bytes; 0: all that the object has from there on.
//
// Errors: [ErrForeign] if the address is none of this GPU's objects; [ErrRange] if the object has not so
// many bytes there; [ErrClosed].
func (d *Device) BufferAt(addr, n uint64) (*Buffer, error) {
	const op = "gpu_buffer_at"
	if err := d.ok(op); err != nil {
		return nil, err
	}
	o := d.card.find(addr)
	if o == nil {
		return nil, fail(op, ErrForeign, "address %#x", addr)
	}
	off := addr - o.addr
	if n == 0 {
		n = o.size - off
	}
	if n > o.size-off {
		o.put()
		return nil, fail(op, ErrRange, "%d bytes at %d of %d", n, off, o.size)
	}
	return d.newBuffer(op, o, off, n)
}

// Evict moves the memory to system memory, as happens when others need the VRAM. A use brings it back if there is
// room.
//
// Errors: [ErrPinned]; [ErrOutOfMemory] if there is no system memory; [ErrFreed]; EOPNOTSUPP for imported memory;
// ETIMEDOUT if the context ends before operations and importers have left it.
func (b *Buffer) Evict(ctx context.Context) error { return b.migrate(ctx, "gpu_evict", false) }

// Prefetch brings the memory to VRAM, and evicts others for that if it has to. Errors: those of Evict.
func (b *Buffer) Prefetch(ctx context.Context) error { return b.migrate(ctx, "gpu_prefetch", true) }

func (b *Buffer) migrate(ctx context.Context, op string, vram bool) error {
	if err := b.ok(op); err != nil {
		return err
	}
	if b.obj.imported != nil {
		return ib.Errorf(op, syscall.EOPNOTSUPP, "imported memory is its exporter's to move")
	}
	return b.obj.migrate(ctx, op, vram, false)
}

// migrate moves an object to VRAM, or to system memory. If it is there already it stays, or, if anyway is set,
// moves to another place.
func (o *object) migrate(ctx context.Context, op string, vram, anyway bool) error {
	c := o.card
	if err := o.resv.LockContext(ctx); err != nil {
		return ib.Errorf(op, syscall.ETIMEDOUT, "the object's reservation lock: %v", err)
	}
	defer o.resv.Unlock()
	there := o.place != nil && (o.place.heap == c.vram) == vram
	switch {
	case o.place == nil:
		return fail(op, ErrFreed, "object %d", o.id)
	case there && !anyway:
		return nil
	case o.pins.Load() > 0:
		return fail(op, ErrPinned, "object %d", o.id)
	}
	var to *place
	if vram {
		to = c.room(o, c.cfg.VRAM, !c.cfg.NoEvict)
	} else {
		to = c.hostRoom(o)
	}
	if to == nil {
		return fail(op, ErrOutOfMemory, "%d bytes", o.size)
	}
	if err := o.moveTo(ctx, op, to); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case there:
	case vram:
		c.stats.Returns++
	default:
		c.stats.Evictions++
	}
	return nil
}

// Move moves the object to another place, of the kind that it was allocated in. Move and Evict are for storms,
// which package dmabuf makes (VERBENA_DMABUF_STORM).
func (o *object) Move(ctx context.Context) error {
	return o.migrate(ctx, "gpu_move", o.opts.Placement == InVRAM, true)
}

// Evict moves the object to system memory.
func (o *object) Evict(ctx context.Context) error { return o.migrate(ctx, "gpu_evict", false, false) }
