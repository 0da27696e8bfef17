package gpu

// The importer: other exporters' dma-bufs as memory of the GPU. It is dynamic: the buffer is mapped when an
// operation uses it. When the exporter moves the buffer while operations are under way, it finds their
// fences, and waits; the last of them gives the mapping up.

import (
	"context"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
)

// imported is another exporter's buffer.
type imported struct {
	attachment *dmabuf.Attachment
	buffer     *dmabuf.Buffer

	mu    sync.Mutex // guards users
	users int        // operations that use table

	// What follows is guarded by the reservation lock.
	table *dmabuf.Table   // nil: nothing is mapped
	stale []*dmabuf.Table // mappings that operations still used when the exporter took them away
	left  bool
}

// Import makes memory of the GPU of a dma-buf: of this process, of another one, or of the kernel. The
// Buffer keeps it alive; the caller's reference stays the caller's.
//
// Errors: the exporter's; [ErrClosed]; EINVAL if the dma-buf is released.
func (d *Device) Import(buf *dmabuf.Buffer) (*Buffer, error) {
	const op = "gpu_import"
	if err := d.begin(op, 1); err != nil {
		return nil, err
	}
	defer d.card.unuse()
	if buf == nil {
		return nil, ib.Errorf(op, syscall.EINVAL, "nil dma-buf")
	}
	if x, ok := buf.Priv().(*exporter); ok && x.card == d.card { // its own memory comes back
		if !x.get() {
			return nil, fail(op, ErrFreed, "object %d", x.id)
		}
		return d.newBuffer(op, x.object, x.off, min(x.n, x.size-x.off))
	}
	size := buf.Size()
	if size > maxVRAM {
		return nil, fail(op, ErrOutOfMemory, "%d bytes", size)
	}
	i := &imported{buffer: buf}
	var err error
	if i.attachment, err = buf.DynamicAttach(d, dmabuf.Importer{AllowPeer2Peer: true, InvalidateMappings: i.invalidate}); err != nil {
		return nil, err
	}
	o := &object{card: d.card, id: objectIDs.Add(1), size: size, span: roundUp(size, page), resv: buf.Reservation(), imported: i}
	o.refs.Store(1)
	if !d.card.enter(o) {
		i.attachment.Detach()
		return nil, fail(op, ErrOutOfMemory, "no addresses for %d bytes", size)
	}
	return d.newBuffer(op, o, 0, size)
}

// useLocked maps the buffer for an operation, which ends when the fence is signalled. The reservation
// is locked.
func (i *imported) useLocked(ctx context.Context, op string, write bool, f *dmabuf.Fence) (*dmabuf.Table, error) {
	if i.left {
		return nil, fail(op, ErrFreed, "imported memory")
	}
	if i.table == nil {
		t, err := i.attachment.Map(ctx, dmabuf.Bidirectional)
		if err != nil {
			return nil, err
		}
		i.table = t
	}
	if err := i.buffer.Reservation().Wait(ctx, dmabuf.Kernel); err != nil {
		return nil, ib.Errorf(op, syscall.ETIMEDOUT, "the buffer's fences: %v", err)
	}
	usage := dmabuf.Read
	if write {
		usage = dmabuf.Write
	}
	i.buffer.Reservation().Add(f, usage)
	i.mu.Lock()
	i.users++
	i.mu.Unlock()
	return i.table, nil
}

// settle is called when an operation has ended. The last one gives up what the exporter took away.
func (i *imported) settle() {
	i.mu.Lock()
	i.users--
	last := i.users == 0
	i.mu.Unlock()
	if !last {
		return
	}
	r := i.buffer.Reservation()
	r.Lock()
	defer r.Unlock()
	i.dropStaleLocked()
}

// invalidate is called by the exporter, with the reservation locked. Operations under way have fences
// there. It may be called again, when they are signalled.
func (i *imported) invalidate(*dmabuf.Attachment) {
	if i.table != nil {
		i.stale = append(i.stale, i.table)
		i.table = nil
	}
	i.dropStaleLocked()
}

// dropStaleLocked gives up what the exporter took away, unless an operation uses it. The reservation is
// locked.
func (i *imported) dropStaleLocked() {
	i.mu.Lock()
	busy := i.users > 0
	i.mu.Unlock()
	if busy {
		return
	}
	for _, t := range i.stale {
		i.attachment.Unmap(t, dmabuf.Bidirectional)
	}
	i.stale = nil
}

// leave gives the buffer up. No operation uses it.
func (i *imported) leave() {
	r := i.buffer.Reservation()
	r.Lock()
	i.left = true
	for _, t := range append(i.stale, i.table) {
		if t != nil {
			i.attachment.Unmap(t, dmabuf.Bidirectional)
		}
	}
	i.stale, i.table = nil, nil
	r.Unlock()
	i.attachment.Detach()
}
