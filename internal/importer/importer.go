// Package importer makes memory regions of dma-bufs: it is the part of an RDMA device that
// attaches to a buffer and maps it.
//
//  1. Import attaches to the buffer and maps it, pinned if that is asked for.
//  2. Run offers the bytes for as long as the mapping is good.
//  3. invalidate is called when the exporter moves the buffer: it keeps accesses out of the
//     region, waits for those under way, and unmaps. For pinned memory that is the end of the
//     region's memory, which is revoked.
//  4. The next access finds no mapping, and ends in a fault that is brief: Await maps the buffer
//     again, after the exporter is done and the Kernel fences are signalled. If the exporter
//     refuses, the access ends with an error.
//  5. Close unmaps and detaches.
//
// share.go has peers that access the memory by themselves.
//
// The exporter holds the reservation lock over a move, and invalidate waits for accesses under
// it. So no access waits for that lock inside a read section, and none of the region's locks is
// held while it is waited for.
package importer

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Patience is how long an exporter may take to answer, and the Kernel fences to be signalled,
// before an access or a call fails.
var Patience = 10 * time.Second

// Refusal is how long accesses fail, without asking the exporter, after one could not have the
// buffer mapped. The access that waited fails when it is tried again. A peer may try it again as
// late as an RNR timer says, which is 655 ms at most (IBA 9.7.5.2.8).
var Refusal = time.Second

// Config is what of a buffer becomes a region.
type Config struct {
	Offset, Length uint64
	// Pinned: the buffer is held in place. It can still be revoked.
	Pinned bool
	Device any // the importer's device, for the exporter to look at
	// Counts are the device's counters; nil: there are none.
	Counts *mem.DMABufCounts
	// Peer: the exporter is a PeerDirect client (peer.go).
	Peer bool
}

// Backing is a mem.Backing of a dma-buf.
type Backing struct {
	cfg        Config
	attachment *dmabuf.Attachment

	// table is what is mapped; nil: nothing is. It changes with the reservation locked. It
	// becomes nil only while accesses are kept out of the region.
	table   atomic.Pointer[dmabuf.Table]
	revoked atomic.Bool
	refused atomic.Int64 // when the Refusal ends, in nanoseconds since started; 0: there is none
	told    atomic.Bool  // a failure of Await was logged, and the buffer not mapped since

	faults, faultPages, local, remote, invalidations, invalidationPages, failures atomic.Uint64
	prefetches, prefetchPages                                                     atomic.Uint64

	mu     sync.Mutex // guards region, and what table becomes while there is none
	region *mem.Region

	shareMu sync.Mutex    // guards shared
	shared  *placeSegment // of the place that is mapped; nil: no peer has asked for it

	closed bool // guarded by the reservation lock
	pinned bool // Pin has succeeded, and Unpin was not called; guarded by the reservation lock
}

// Import makes a backing of a part of a buffer.
//
// Errors: EINVAL if the part is empty or not inside the buffer, or the buffer is released; the
// exporter's; ETIMEDOUT if the exporter does not answer.
func Import(b *dmabuf.Buffer, cfg Config) (*Backing, error) {
	const op = "reg_dmabuf_mr"
	if size := b.Size(); cfg.Length == 0 || cfg.Offset > size || cfg.Length > size-cfg.Offset {
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes at %d are not inside a buffer of %d", cfg.Length, cfg.Offset, size)
	}
	if !b.Get() {
		return nil, ib.Errorf(op, syscall.EINVAL, "the buffer is released")
	}
	if cfg.Counts == nil {
		cfg.Counts = new(mem.DMABufCounts)
	}
	i := &Backing{cfg: cfg}
	err := inTime(op, func(ctx context.Context) error {
		defer b.Put() // the attachment has a reference of its own
		return i.attach(ctx, op, b)
	}, func() { i.leave() })
	if err != nil {
		return nil, err
	}
	return i, nil
}

// inTime runs do, which the exporter may keep from ending. If do takes longer than Patience,
// inTime returns ETIMEDOUT; then undo is called if do ends well after all.
func inTime(op string, do func(context.Context) error, undo func()) error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	result := make(chan error, 1)
	var decided atomic.Bool
	go func() {
		defer cancel()
		err := do(ctx)
		if decided.CompareAndSwap(false, true) {
			result <- err
		} else if err == nil {
			undo()
		}
	}()
	select {
	case err := <-result:
		return err
	case <-ctx.Done(): // do has taken too long, or has just ended
		if decided.CompareAndSwap(false, true) {
			return ib.Errorf(op, syscall.ETIMEDOUT, "the exporter does not answer")
		}
		return <-result
	}
}

// attach attaches to the buffer and maps it. After an error nothing is attached.
func (i *Backing) attach(ctx context.Context, op string, b *dmabuf.Buffer) error {
	a, err := b.DynamicAttach(i.cfg.Device, dmabuf.Importer{AllowPeer2Peer: true, InvalidateMappings: i.invalidate})
	if err != nil {
		return err
	}
	i.attachment = a
	if err := i.lock(ctx, op); err != nil {
		a.Detach()
		return err
	}
	if i.cfg.Pinned {
		if err = a.Pin(); err == nil {
			i.pinned = true
			i.cfg.Counts.Pins.Add(1)
		}
	}
	if err == nil {
		err = i.mapLocked(ctx, op, func() { i.cfg.Counts.Mappings.Add(1) })
	}
	if err != nil && i.pinned {
		i.pinned = false
		a.Unpin()
	}
	b.Reservation().Unlock()
	if err != nil {
		a.Detach()
	}
	return err
}

func (i *Backing) lock(ctx context.Context, op string) error {
	if err := i.attachment.Buffer().Reservation().LockContext(ctx); err != nil {
		return ib.Errorf(op, syscall.ETIMEDOUT, "the buffer's reservation lock: %v", err)
	}
	return nil
}

// mapLocked maps the buffer, and waits for its Kernel fences: with the reservation locked, as in
// the kernel. counts counts the mapping, before an access can find it: when a request has
// completed, what it has caused is counted.
func (i *Backing) mapLocked(ctx context.Context, op string, counts func()) error {
	t, err := i.attachment.Map(ctx, dmabuf.Bidirectional)
	if err != nil {
		return err
	}
	if err := i.attachment.Buffer().Reservation().Wait(ctx, dmabuf.Kernel); err != nil {
		i.attachment.Unmap(t, dmabuf.Bidirectional)
		return ib.Errorf(op, syscall.ETIMEDOUT, "the buffer's fences: %v", err)
	}
	i.refused.Store(0)
	i.told.Store(false)
	counts()
	i.table.Store(t)
	return nil
}

// Bind notes the region that stands on the backing: see mem.Movable.
func (i *Backing) Bind(r *mem.Region) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.region = r
}

// Kind returns mem.KindDMABuf, or mem.KindPeer.
func (i *Backing) Kind() mem.Kind {
	if i.cfg.Peer {
		return mem.KindPeer
	}
	return mem.KindDMABuf
}

// Len returns the number of bytes.
func (i *Backing) Len() uint64 { return i.cfg.Length }

// Buffer returns the buffer, and where in it the region begins.
func (i *Backing) Buffer() (b *dmabuf.Buffer, off uint64) {
	return i.attachment.Buffer(), i.cfg.Offset
}

// Pins reports whether the region holds the buffer in place.
func (i *Backing) Pins() bool { return i.cfg.Pinned }

// Adapt refuses rights that regions of dma-bufs cannot have.
func (i *Backing) Adapt(access ib.Access) error {
	if access&^allowed != 0 {
		return ib.Errorf("rereg_mr", syscall.EINVAL, "access bits %#x are not for dma-bufs", uint32(access&^allowed))
	}
	return nil
}

// Run returns bytes that are mapped.
func (i *Backing) Run(off, n uint64, _ ib.Access) ([]byte, mem.FaultKind) {
	if off >= i.cfg.Length || n > i.cfg.Length-off {
		return nil, mem.FaultBounds
	}
	if t := i.table.Load(); t != nil {
		return t.At(i.cfg.Offset+off, n), mem.FaultNone
	}
	if i.revoked.Load() {
		return nil, mem.FaultRevoked
	}
	if until := i.refused.Load(); until != 0 && now() < until {
		return nil, mem.FaultStorage
	}
	return nil, mem.FaultBrief
}

// Gone returns FaultStale: the exporter has offered bytes that are not there.
func (i *Backing) Gone(uint64, uint64, ib.Access) mem.FaultKind { return mem.FaultStale }

// started is what times are counted from.
var started = time.Now()

func now() int64 { return int64(time.Since(started)) }

// Owner implements mem.Owned: who waits for a buffer waits for its reservation.
func (i *Backing) Owner() any { return i.attachment.Buffer().Reservation() }

// Await maps the buffer again. If that fails, the accesses of the next moment fail, too (Refusal):
// the one that waited may ask for its bytes several times before it ends.
func (i *Backing) Await(_, _ uint64, acc ib.Access) mem.FaultKind {
	return i.bringIn(func() { i.count(acc) })
}

// Prefetch maps the buffer again before an access needs it.
func (i *Backing) Prefetch() mem.FaultKind {
	kind := i.bringIn(func() {
		i.cfg.Counts.Mappings.Add(1)
		i.prefetchPages.Add(i.pages())
	})
	if kind == mem.FaultNone {
		i.prefetches.Add(1)
	}
	return kind
}

// bringIn maps the buffer again, if it is not mapped. It calls count, with the reservation locked, if it
// has.
func (i *Backing) bringIn(count func()) mem.FaultKind {
	const op = "dma_buf_map_attachment"
	do := func(ctx context.Context) error {
		if err := i.lock(ctx, op); err != nil {
			return err
		}
		defer i.attachment.Buffer().Reservation().Unlock()
		if i.closed || i.revoked.Load() || i.table.Load() != nil {
			return nil // nothing to do, or another access has mapped it
		}
		return i.mapLocked(ctx, op, count)
	}
	var err error
	if i.prompt() {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		err = do(ctx)
		cancel()
	} else {
		err = inTime(op, do, func() {})
	}
	switch {
	case err == nil:
		return mem.FaultNone
	case errors.Is(err, syscall.ENODEV):
		i.end()
		return mem.FaultRevoked
	}
	i.failures.Add(1)
	if !i.told.Swap(true) { // peers may cause it as often as they like
		slog.Warn("verbena: a dma-buf that has moved cannot be mapped again", "buffer", i.attachment.Buffer().Name(), "error", err)
	}
	i.refused.Store(now() + int64(Refusal))
	if i.table.Load() != nil { // the exporter has answered after all, or another access was luckier
		i.refused.Store(0)
	}
	return mem.FaultStorage
}

// prompt reports whether the exporter's operations always return soon: those of dmabuf.Alloc do. Then
// no other goroutine is needed that may be left waiting for them, nor woken.
func (i *Backing) prompt() bool {
	b := i.attachment.Buffer()
	m, ok := b.Priv().(*dmabuf.Memory)
	return ok && m.Buffer() == b
}

// end notes that the memory is gone for good, after the exporter has said so to a mapping.
func (i *Backing) end() {
	i.revoked.Store(true)
	i.mu.Lock()
	r := i.region
	i.mu.Unlock()
	if r != nil {
		r.RevokeOn(i)
	}
}

// invalidate stops accesses and unmaps. The exporter has locked the reservation.
func (i *Backing) invalidate(a *dmabuf.Attachment) {
	if i.table.Load() == nil {
		return
	}
	i.mu.Lock()
	r := i.region
	if r == nil {
		// No access can be under way, and Bind waits.
		i.drop(a)
		i.mu.Unlock()
		return
	}
	i.mu.Unlock()
	if i.pinned {
		r.RevokeOn(i)
		i.drop(a)
		return
	}
	suspended := r.Suspend() // if not, the region is closed or revoked, and no access under way
	i.peersLeave(a, r)
	i.drop(a)
	if suspended {
		r.Resume()
	}
}

// drop gives up the mapping, and the pin. The reservation is locked, and no access under way.
func (i *Backing) drop(a *dmabuf.Attachment) {
	if t := i.table.Swap(nil); t != nil {
		i.unshare()
		a.Unmap(t, dmabuf.Bidirectional)
		i.invalidations.Add(1)
		i.cfg.Counts.Invalidations.Add(1)
		i.invalidationPages.Add(i.pages())
	}
	if i.pinned {
		i.revoked.Store(true)
		i.pinned = false
		a.Unpin()
	}
}

func (i *Backing) pages() uint64 {
	page := uint64(os.Getpagesize())
	return (i.cfg.Offset+i.cfg.Length-1)/page - i.cfg.Offset/page + 1
}

// count counts a mapping that an access has waited for.
func (i *Backing) count(acc ib.Access) {
	i.cfg.Counts.Mappings.Add(1)
	i.faults.Add(1)
	i.cfg.Counts.Faults.Add(1)
	i.faultPages.Add(i.pages())
	if acc&ib.AccessRemote != 0 {
		i.remote.Add(1)
	} else {
		i.local.Add(1)
	}
}

// Stats returns how often accesses found the buffer moved, and moves took mappings away.
func (i *Backing) Stats() ib.PagingStats {
	return ib.PagingStats{
		PageFaults: i.faults.Load(), PageFaultPages: i.faultPages.Load(),
		LocalFaults: i.local.Load(), RemoteFaults: i.remote.Load(),
		Invalidations: i.invalidations.Load(), InvalidationPages: i.invalidationPages.Load(),
		Prefetches: i.prefetches.Load(), PrefetchPages: i.prefetchPages.Load(),
		FailedResolutions: i.failures.Load(),
	}
}

// Present returns how many pages are mapped: all or none.
func (i *Backing) Present() uint64 {
	if i.table.Load() == nil {
		return 0
	}
	return i.pages()
}

// Close unmaps and detaches. It fails with ETIMEDOUT if the exporter does not answer; what is
// left is done when it does.
func (i *Backing) Close() error {
	return inTime("dereg_mr", func(context.Context) error { i.leave(); return nil }, func() {})
}

func (i *Backing) leave() {
	r := i.attachment.Buffer().Reservation()
	r.Lock()
	i.closed = true
	if t := i.table.Swap(nil); t != nil {
		i.unshare()
		i.attachment.Unmap(t, dmabuf.Bidirectional)
	}
	if i.pinned {
		i.pinned = false
		i.attachment.Unpin()
	}
	r.Unlock()
	i.attachment.Detach()
}
