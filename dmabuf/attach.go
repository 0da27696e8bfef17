package dmabuf

import (
	"context"
	"errors"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// Importer is what a dynamic importer can do.
type Importer struct {
	// AllowPeer2Peer: the importer can deal with memory that has no pages of the host's.
	AllowPeer2Peer bool

	// InvalidateMappings is called with the reservation locked when the exporter wants to move
	// the memory, or takes it away. The importer stops its accesses, or adds a Bookkeep fence
	// for those that it cannot stop at once; it unmaps, there or soon. It must not block for
	// longer than its accesses last. For an importer that has pinned the memory it means that
	// the memory is gone, for ever.
	//
	// nil: the importer can access the memory only while it has pinned it.
	InvalidateMappings func(*Attachment)
}

// Attachment is a device's use of a buffer. Its methods are for the importer; they serialise
// among themselves by the reservation lock.
type Attachment struct {
	buffer   *Buffer
	device   any
	importer *Importer // nil: static

	// Priv and ExporterPriv are the importer's and the exporter's own.
	Priv, ExporterPriv any

	// What follows is guarded by the reservation lock.
	pins     int
	mapped   int // calls of Map without Unmap
	cached   *Table
	cachedTo Direction
	detached bool
}

// Attach attaches a static importer: for as long as it has mapped the buffer, that stays in
// place. device is the importer's, for the exporter to look at.
//
// Errors: the exporter's; EINVAL if the buffer is released.
func (b *Buffer) Attach(device any) (*Attachment, error) { return b.attach(device, nil) }

// DynamicAttach attaches an importer that lets the buffer move.
func (b *Buffer) DynamicAttach(device any, importer Importer) (*Attachment, error) {
	return b.attach(device, &importer)
}

func (b *Buffer) attach(device any, importer *Importer) (*Attachment, error) {
	const op = "dma_buf_attach"
	b.resv.mustNotHold("Attach")
	if !b.Get() {
		return nil, ib.Errorf(op, syscall.EINVAL, "the buffer is released")
	}
	a := &Attachment{buffer: b, device: device, importer: importer}
	if attach := b.cfg.Ops.Attach; attach != nil {
		if err := attach(a); err != nil {
			b.Put()
			return nil, named(op, err)
		}
	}
	b.resv.Lock()
	b.attachments = append(b.attachments, a)
	b.resv.Unlock()
	return a, nil
}

// Detach ends the use of the buffer. The importer has unmapped and unpinned it. Detaching again
// does nothing.
func (a *Attachment) Detach() {
	b := a.buffer
	b.resv.mustNotHold("Detach")
	b.resv.Lock()
	if a.detached {
		b.resv.Unlock()
		return
	}
	if checking.Load() && (a.mapped > 0 || a.pins > 0) {
		b.resv.Unlock()
		panic("dmabuf: Detach of an attachment that is mapped or pinned")
	}
	a.detached = true
	b.attachments = slices.DeleteFunc(b.attachments, func(other *Attachment) bool { return other == a })
	if a.cached != nil {
		b.cfg.Ops.Unmap(a, a.cached, a.cachedTo)
		a.cached = nil
	}
	b.resv.Unlock()
	if detach := b.cfg.Ops.Detach; detach != nil {
		detach(a)
	}
	b.Put()
}

// Buffer returns the buffer.
func (a *Attachment) Buffer() *Buffer { return a.buffer }

// Device returns the importer's device.
func (a *Attachment) Device() any { return a.device }

// Dynamic reports whether the importer lets the buffer move.
func (a *Attachment) Dynamic() bool { return a.importer != nil }

// OtherProcess reports whether the importer is in another process, where the CPU accesses the memory.
func (a *Attachment) OtherProcess() bool {
	_, remote := a.device.(*remoteImporter)
	return remote
}

// PeerToPeer reports whether the importer can deal with memory that has no pages.
func (a *Attachment) PeerToPeer() bool { return a.importer != nil && a.importer.AllowPeer2Peer }

// Revocable reports whether the memory can be taken away from the importer, also if it has
// pinned it.
func (a *Attachment) Revocable() bool {
	return a.importer != nil && a.importer.InvalidateMappings != nil
}

// Pinned reports whether the importer holds the memory in place. The caller has locked the
// reservation.
func (a *Attachment) Pinned() bool {
	a.buffer.resv.mustHold("Pinned")
	return a.pins > 0
}

// StillWritten reports to the exporter, from InvalidateMappings, that another process may be about
// to write to the place that the buffer leaves ([Table.Place]): the rest of one message, which it
// repeats at the new place. The exporter does not wait for it, but copies the bytes until two
// copies are the same: a message is moved up to some byte, and never with a hole in it.
func (a *Attachment) StillWritten() { a.buffer.written.Store(true) }

// Pin holds the memory in place until Unpin. The importer has locked the reservation.
//
// Errors: the exporter's; EINVAL for a static importer, whose mappings pin by themselves, and
// after Detach.
func (a *Attachment) Pin() error {
	const op = "dma_buf_pin"
	a.buffer.resv.mustHold("Pin")
	switch {
	case a.importer == nil:
		return ib.Errorf(op, syscall.EINVAL, "a static importer pins by mapping")
	case a.detached:
		return ib.Errorf(op, syscall.EINVAL, "the attachment is detached")
	}
	return a.pin()
}

func (a *Attachment) pin() error {
	if pin := a.buffer.cfg.Ops.Pin; pin != nil {
		if err := pin(a); err != nil {
			return named("dma_buf_pin", err)
		}
	}
	a.pins++
	return nil
}

// Unpin ends a Pin. The importer has locked the reservation.
func (a *Attachment) Unpin() {
	a.buffer.resv.mustHold("Unpin")
	if a.importer == nil || a.pins == 0 {
		panic("dmabuf: Unpin without Pin")
	}
	if checking.Load() && a.pins == 1 && a.mapped > 0 && !a.Revocable() {
		panic("dmabuf: Unpin of memory that is mapped by an importer that cannot be told of moves")
	}
	a.unpin()
}

func (a *Attachment) unpin() {
	a.pins--
	if unpin := a.buffer.cfg.Ops.Unpin; unpin != nil {
		unpin(a)
	}
}

// Map returns where the bytes are. The importer has locked the reservation. For a static
// importer, Map pins the memory and waits for its Kernel fences; a dynamic importer waits for
// them before its first access.
//
// Errors: the exporter's, ENODEV if the memory is revoked; EINVAL for a direction that there is
// not, after Detach, if a dynamic importer without InvalidateMappings has not pinned the
// memory, or if the exporter has mapped too few bytes; ENOMEM if it has returned no table; EBUSY
// if the cached mapping has another direction; ETIMEDOUT if the context ends before the fences
// are signalled.
func (a *Attachment) Map(ctx context.Context, dir Direction) (*Table, error) {
	const op = "dma_buf_map_attachment"
	b := a.buffer
	b.resv.mustHold("Map")
	switch {
	case a.detached:
		return nil, ib.Errorf(op, syscall.EINVAL, "the attachment is detached")
	case !dir.valid():
		return nil, ib.Errorf(op, syscall.EINVAL, "%v", dir)
	case a.Dynamic() && !a.Revocable() && a.pins == 0:
		return nil, ib.Errorf(op, syscall.EINVAL, "an importer that cannot be told of moves maps what it has pinned")
	}
	if a.cached != nil && a.cachedTo != dir && a.cachedTo != Bidirectional {
		return nil, ib.Errorf(op, syscall.EBUSY, "the cached mapping is %v, not %v", a.cachedTo, dir)
	}
	if !a.Dynamic() {
		if err := a.pin(); err != nil {
			return nil, err
		}
	}
	t, err := a.cached, error(nil)
	if t == nil {
		t, err = a.mapNew(op, dir)
	}
	if err == nil && !a.Dynamic() {
		if err = b.resv.Wait(ctx, Kernel); err != nil {
			if a.cached == nil {
				b.cfg.Ops.Unmap(a, t, dir)
			}
			err = ib.Errorf(op, syscall.ETIMEDOUT, "the buffer's fences: %v", err)
		}
	}
	if err != nil {
		if !a.Dynamic() {
			a.unpin()
		}
		return nil, named(op, err)
	}
	a.mapped++
	if b.cfg.Ops.CacheMapping && a.cached == nil {
		a.cached, a.cachedTo = t, dir
	}
	return t, nil
}

// mapNew has the exporter map the memory, and looks at what it returns.
func (a *Attachment) mapNew(op string, dir Direction) (*Table, error) {
	o, size := &a.buffer.cfg.Ops, a.buffer.cfg.Size
	t, err := o.Map(a, dir)
	switch {
	case err != nil:
		return nil, err
	case t == nil:
		return nil, ib.Errorf(op, syscall.ENOMEM, "the exporter has returned no table")
	case t.Len() < size:
		o.Unmap(a, t, dir)
		return nil, ib.Errorf(op, syscall.EINVAL, "the exporter has mapped %d of %d bytes", t.Len(), size)
	}
	return t, nil
}

// Unmap ends a mapping that Map has returned, with the same direction. The importer has locked
// the reservation, and accesses the bytes no more.
func (a *Attachment) Unmap(t *Table, dir Direction) {
	b := a.buffer
	b.resv.mustHold("Unmap")
	if a.mapped == 0 {
		panic("dmabuf: Unmap without Map")
	}
	a.mapped--
	if a.cached != t {
		b.cfg.Ops.Unmap(a, t, dir)
	}
	if !a.Dynamic() {
		a.unpin()
	}
}

// named makes an *ib.OpError of an error: an exporter may return a bare errno.
func named(op string, err error) error {
	var e *ib.OpError
	if errors.As(err, &e) {
		return err
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		errno = syscall.EIO
	}
	return ib.Errorf(op, errno, "the exporter: %v", err)
}
