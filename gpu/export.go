package gpu

// The exporter: objects as dma-bufs, with the rules of the kernel's amdgpu driver.
//
//  1. attach asks how far away the importer is. Who is too far, or cannot deal with memory without
//     pages, is no peer.
//  2. A peer's mapping may lie in the BAR's part of the VRAM or in system memory. For an importer that
//     is no peer the object moves to system memory, and stays there as long as that is attached. An
//     importer in another process is none, but reaches objects that the CPU sees (Buffer.Map): these stay.
//  3. pin holds the object in VRAM if every importer is a peer, otherwise in system memory.
//  4. A move tells the importers first; its copy is a Kernel fence.
//  5. When the object is freed, the buffer is revoked.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
)

// isPeer is what attach has found, kept with the attachment.
type isPeer bool

// DMABuf returns the memory as a dma-buf, with a reference for the caller ([dmabuf.Buffer.Put]), and
// where in it the Buffer begins. All Buffers of one object have one dma-buf, whose size is that of the
// object in whole pages. When the memory is freed it is revoked.
//
// Errors: [ErrFreed], [ErrClosed].
func (b *Buffer) DMABuf() (buf *dmabuf.Buffer, off uint64, err error) {
	const op = "gpu_export"
	if err := b.ok(op); err != nil {
		return nil, 0, err
	}
	o := b.obj
	if !o.get() {
		return nil, 0, fail(op, ErrFreed, "object %d", o.id)
	}
	defer o.put()
	if o.imported != nil {
		if !o.imported.attachment.Buffer().Get() {
			return nil, 0, fail(op, ErrFreed, "object %d", o.id)
		}
		return o.imported.attachment.Buffer(), b.off, nil
	}
	buf, err = o.dmaBuf(op)
	return buf, b.off, err
}

// PartDMABuf returns a dma-buf of the Buffer's bytes alone, with a reference for the caller: whoever has it
// reaches no others. They begin and end at pages. Each call makes another dma-buf.
//
// Errors: [ErrFreed], [ErrClosed]; EINVAL if the bytes do not begin and end at pages; EOPNOTSUPP for imported memory.
func (b *Buffer) PartDMABuf() (*dmabuf.Buffer, error) {
	const op = "gpu_export"
	if err := b.ok(op); err != nil {
		return nil, err
	}
	o := b.obj
	switch {
	case o.imported != nil:
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "imported memory has its exporter's dma-buf")
	case b.off%page != 0 || b.n%page != 0:
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes at %d do not begin and end at pages", b.n, b.off)
	case !o.get():
		return nil, fail(op, ErrFreed, "object %d", o.id)
	}
	defer o.put()
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.exportLocked(op, b.off, b.n)
}

// dmaBuf returns the object's dma-buf, with a reference. The caller has one of the object.
func (o *object) dmaBuf(op string) (*dmabuf.Buffer, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.whole != nil && o.whole.Get() {
		return o.whole, nil
	}
	buf, err := o.exportLocked(op, 0, o.span)
	if err == nil {
		o.whole = buf
	}
	return buf, err
}

// exportLocked makes a dma-buf of a part of the object. The object's lock is held.
func (o *object) exportLocked(op string, off, n uint64) (*dmabuf.Buffer, error) {
	x := &exporter{object: o, off: off, n: n}
	buf, err := dmabuf.Export(dmabuf.Config{Size: n, Exporter: "softgpu", Reservation: o.resv, Priv: x, Ops: dmabuf.Ops{
		Attach: x.attach, Detach: x.detach, Pin: x.pin, Unpin: x.unpin, Map: x.mapping, Unmap: x.unmap, Release: x.dropped,
	}})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	x.buf = buf
	o.exports = append(o.exports, buf)
	return buf, nil
}

// attachments returns the attachments of all dma-bufs of the object.
func (o *object) attachments() (all []*dmabuf.Attachment) {
	o.mu.Lock()
	exports := slices.Clone(o.exports)
	o.mu.Unlock()
	for _, b := range exports {
		all = append(all, b.Attachments()...)
	}
	return all
}

// invalidate tells the importers that the object is about to move, or is freed. The caller has locked the
// reservation.
func (o *object) invalidate() {
	o.mu.Lock()
	exports := slices.Clone(o.exports)
	o.mu.Unlock()
	for _, b := range exports {
		b.InvalidateMappings()
	}
}

// held reports whether an importer has pinned the object, and cannot be told that it is freed.
func (o *object) held() bool {
	return slices.ContainsFunc(o.attachments(), func(a *dmabuf.Attachment) bool { return a.Pinned() && !a.Revocable() })
}

// Region returns what a device registers of the memory: the dma-buf, with a reference for the caller, where
// in it the memory begins, how long it is, and its address. Package verbs calls it (PD.RegGPU).
func (b *Buffer) Region() (buf *dmabuf.Buffer, off, n, addr uint64, err error) {
	buf, off, err = b.DMABuf()
	return buf, off, b.n, b.Addr(), err
}

// RegionAt returns what a device registers of the memory at an address: the dma-buf, with a reference for the caller, and
// where in it the memory begins. Package verbs calls it (PD.RegMRAttr).
//
// Errors: those of [Device.BufferAt]; [ErrRange] for no bytes.
func (d *Device) RegionAt(addr, n uint64) (buf *dmabuf.Buffer, off uint64, err error) {
	if n == 0 {
		return nil, 0, fail("gpu_region_at", ErrRange, "no bytes")
	}
	b, err := d.BufferAt(addr, n)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, b.Free()) }()
	return b.DMABuf()
}

// exporter has an object's operations as the exporter of a part of it, or of all.
type exporter struct {
	*object
	off, n uint64
	buf    *dmabuf.Buffer // guarded by the object's mu
	taken  bool           // Revoke was called; guarded by the reservation
}

func (x *exporter) attach(a *dmabuf.Attachment) error {
	distance := x.card.cfg.Distance
	a.ExporterPriv = isPeer(a.PeerToPeer() && (distance == nil || distance(a.Device()) >= 0))
	return nil
}

func (x *exporter) detach(*dmabuf.Attachment) {}

// reaches reports whether an importer reaches the VRAM: a peer does, and so does another process if the CPU does. The
// caller has locked the reservation.
func (o *object) reaches(a *dmabuf.Attachment) bool {
	return a.ExporterPriv == isPeer(true) || o.shown > 0 && a.OtherProcess()
}

// farImporter reports whether an importer is attached that does not reach the VRAM. The caller has locked the
// reservation.
func (o *object) farImporter() bool {
	return slices.ContainsFunc(o.attachments(), func(a *dmabuf.Attachment) bool { return !o.reaches(a) })
}

func (x *exporter) pin(a *dmabuf.Attachment) error {
	if x.revoked || x.taken {
		return errRevoked
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// The one who pins may not be in the list yet.
	vram := x.opts.Placement == InVRAM && x.reaches(a) && !x.farImporter()
	return x.object.pin(ctx, "dma_buf_pin", vram)
}

func (x *exporter) unpin(*dmabuf.Attachment) { x.pins.Add(-1) }

var errRevoked = ib.Errorf("dma_buf_map_attachment", syscall.ENODEV, "the GPU's memory is freed or revoked")

func (x *exporter) mapping(a *dmabuf.Attachment, _ dmabuf.Direction) (*dmabuf.Table, error) {
	const op = "dma_buf_map_attachment"
	if x.revoked || x.taken {
		return nil, errRevoked
	}
	o, c := x.object, x.card
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	limit := c.bar.Load()
	if o.reaches(a) {
		o.settle(ctx, limit)
	}
	if o.place.heap == c.vram && (!o.reaches(a) || o.place.end() > limit) {
		// The importer does not reach the VRAM, or not this part of it.
		if o.pins.Load() > 0 {
			return nil, fail(op, ErrPinned, "object %d is in VRAM that the importer cannot reach", o.id)
		}
		to := c.hostRoom(o)
		if to == nil {
			return nil, fail(op, ErrOutOfMemory, "%d bytes of system memory", o.size)
		}
		if err := o.moveTo(ctx, op, to); err != nil {
			return nil, err
		}
	}
	c.uses.Add(1)
	if x.n < o.span {
		return o.place.table.Part(x.off, x.n), nil
	}
	return o.place.table, nil
}

func (x *exporter) unmap(*dmabuf.Attachment, *dmabuf.Table, dmabuf.Direction) { x.card.unuse() }

// Revoke takes the dma-buf away from its importers for good. The object stays, and can be exported again. It is for
// storms, as Move and Evict are.
func (x *exporter) Revoke(ctx context.Context) error {
	const op = "gpu_revoke"
	if err := x.resv.LockContext(ctx); err != nil {
		return ib.Errorf(op, syscall.ETIMEDOUT, "%v", err)
	}
	defer x.resv.Unlock()
	x.mu.Lock()
	buf := x.buf
	x.mu.Unlock()
	if slices.ContainsFunc(buf.Attachments(), func(a *dmabuf.Attachment) bool { return a.Pinned() && !a.Revocable() }) {
		return fail(op, ErrPinned, "object %d", x.id)
	}
	x.taken = true
	buf.InvalidateMappings()
	x.mu.Lock()
	if x.whole == buf {
		x.whole = nil
	}
	x.mu.Unlock()
	return nil
}

// dropped is called when the last reference of a dma-buf is gone.
func (x *exporter) dropped(b *dmabuf.Buffer) {
	o := x.object
	o.mu.Lock()
	o.exports = slices.DeleteFunc(o.exports, func(e *dmabuf.Buffer) bool { return e == b })
	if o.whole == b {
		o.whole = nil
	}
	o.mu.Unlock()
	o.resv.Lock()
	if o.revoked && !o.held() { // an importer has held what was freed
		o.giveUpLocked()
	}
	o.resv.Unlock()
}
