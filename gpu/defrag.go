package gpu

import (
	"context"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
)

// Defragment moves objects together, so that the free VRAM lies in one piece if no pinned object is in the way.
// Objects that operations use are waited for. It returns the context's error if that ends first.
func (d *Device) Defragment(ctx context.Context) error {
	const op = "gpu_defragment"
	if err := d.ok(op); err != nil {
		return err
	}
	c := d.card
	c.mu.Lock()
	var objects []*object
	for e := c.lru.Front(); e != nil; e = e.Next() {
		if o := e.Value.(*object); o.get() {
			objects = append(objects, o)
		}
	}
	starts := make(map[*object]uint64, len(objects))
	for _, o := range objects {
		starts[o] = o.lowest
	}
	c.mu.Unlock()
	slices.SortFunc(objects, func(a, b *object) int {
		if starts[a] < starts[b] {
			return -1
		}
		return 1
	})
	var err error
	for _, o := range objects {
		if err == nil {
			err = o.moveDown(ctx, op)
		}
		o.put()
	}
	return err
}

// moveDown moves an object towards the beginning of the VRAM.
func (o *object) moveDown(ctx context.Context, op string) error {
	c := o.card
	if err := o.resv.LockContext(ctx); err != nil {
		return err
	}
	defer o.resv.Unlock()
	if o.place == nil || o.place.heap != c.vram || o.pins.Load() > 0 {
		return nil
	}
	start := o.place.start()
	c.mu.Lock()
	limit := start
	if len(o.place.extents) > 1 {
		limit = c.bar.Load() // in one piece it may be anywhere
		if o.place.end() > limit {
			limit = c.cfg.VRAM
		}
	}
	to := c.vram.placeLocked(o.span, limit, true)
	c.mu.Unlock()
	if to != nil {
		return o.moveTo(ctx, op, to)
	}
	if len(o.place.extents) > 1 {
		return nil
	}
	return o.slide(ctx, op)
}

// slide moves an object that lies in one piece into the free space right in front of it, which is shorter than
// the object. The reservation is locked.
func (o *object) slide(ctx context.Context, op string) error {
	c, old := o.card, o.place.extents[0]
	c.mu.Lock()
	gap := slices.IndexFunc(c.vram.spaces.free, func(e extent) bool { return e.end() == old.off })
	var n, at uint64
	if gap >= 0 {
		at, n = c.vram.spaces.free[gap].off, c.vram.spaces.free[gap].n
		c.vram.spaces.cut(gap, 0, n)
	}
	c.mu.Unlock()
	if gap < 0 {
		return nil
	}
	o.invalidate()
	if err := o.resv.Wait(ctx, dmabuf.Bookkeep); err != nil {
		c.give(c.vram.at([]extent{{at, n}}), false)
		return ib.Errorf(op, syscall.ETIMEDOUT, "the object's fences: %v", err)
	}
	to := c.vram.at([]extent{{at, o.span}})
	copy(c.vram.b[at:][:o.span], c.vram.b[old.off:][:o.span]) // they overlap: copy is for that, too
	o.place = to
	c.mu.Lock()
	c.stats.Moves++
	c.stats.MovedBytes += o.span
	c.placedLocked(o)
	c.mu.Unlock()
	c.give(c.vram.at([]extent{{at + o.span, n}}), false)
	return nil
}

// ResizeBAR changes how much of the VRAM the CPU and other devices reach, from its beginning on: see Config.BAR.
// Importers of objects that lie beyond it are told, and map them where they reach them.
//
// Errors: EINVAL for a size that cannot be; [ErrPinned] if an object lies beyond that is pinned or mapped.
func (d *Device) ResizeBAR(size uint64) error {
	const op = "gpu_resize_bar"
	if err := d.ok(op); err != nil {
		return err
	}
	c := d.card
	limit, err := barLimit(op, size, c.cfg.VRAM)
	if err != nil {
		return err
	}
	c.resizing.Lock()
	defer c.resizing.Unlock()
	old := c.bar.Swap(limit) // from now on nothing new is shown beyond
	if limit >= old {
		return nil
	}
	c.mu.Lock()
	var objects []*object
	for e := c.lru.Front(); e != nil; e = e.Next() {
		if o := e.Value.(*object); o.get() {
			objects = append(objects, o)
		}
	}
	c.mu.Unlock()
	for _, o := range objects {
		o.resv.Lock()
		if o.place != nil && o.place.heap == c.vram && o.place.end() > limit {
			if o.pins.Load() > 0 {
				err = fail(op, ErrPinned, "object %d", o.id)
			} else {
				o.invalidate()
			}
		}
		o.resv.Unlock()
		o.put()
	}
	if err != nil {
		c.bar.Store(old)
	}
	return err
}
