package direct

// Memory of others, as a disk imports it. The life of a mapping:
//
//  1. hold maps the buffer, if it is not mapped, and shows it to the controller (mapLocked). A fence in the reservation
//     stands for the command.
//  2. leave signals the fence.
//  3. invalidate is called when the exporter moves the buffer, or takes it away. The mapping is stale then: no further
//     command gets it. The exporter waits for the fences of those under way.
//  4. The last command of a stale mapping gives it up (dropLocked), or invalidate does if there is none.

import (
	"context"
	"fmt"
	"io"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/pages"
	"github.com/verbena-rdma/verbena/p2p"
)

var errClosed = ib.Errorf("nvme_direct", syscall.ESHUTDOWN, "the memory or the disk is closed")

// Region is memory of a device, as a *gpu.Buffer is: its dma-buf, with a reference for the caller, where in it the memory
// begins, and how long it is.
type Region interface {
	Region() (buf *dmabuf.Buffer, off, n, addr uint64, err error)
}

// AttachConfig is how memory is used. The zero value is memory that may move, whose owner is no PCI device.
type AttachConfig struct {
	// Owner is where the device is that has the memory; nil: it is none of the topology, as for system memory, and the
	// topology is not asked.
	Owner *p2p.Address

	// Pin holds the memory in place until Close.
	Pin bool
}

// Memory is memory of others that a disk reads and writes.
type Memory struct {
	disk   *Disk
	off, n uint64
	path   p2p.Path
	reason string

	copier interface { // what a fallback uses; nil: the disk reaches the memory itself
		io.ReaderAt
		io.WriterAt
	}
	attachment *dmabuf.Attachment // nil: copier is used

	running sync.WaitGroup // transfers; Add is called with mu held, and not after closed is set
	closing chan struct{}  // closed when closed is set
	once    sync.Once      // of Close

	mu     sync.Mutex // guards closed
	closed bool

	// What follows is guarded by the reservation lock.
	current *mapping // nil: nothing is mapped
	lost    bool     // an exporter has taken a mapping away, so the next one is a fault
	pinned  bool
	revoked bool // what was pinned is gone
}

// mapping is a place of the buffer, as the controller sees it.
type mapping struct {
	table  *dmabuf.Table
	window pages.Range
	base   uint64 // the address of the buffer's first byte on the bus
	device bool   // it lies in memory of a device

	// What follows is guarded by the reservation lock.
	users int  // commands under way
	stale bool // the exporter has taken it away
}

// held is a mapping that a command uses.
type held struct {
	*mapping
	fence *dmabuf.Fence
}

// AttachRegion is Attach for memory that knows its dma-buf, as a *gpu.Buffer does. Config.Fallback needs its methods
// ReadAt and WriteAt.
func (d *Disk) AttachRegion(r Region, cfg AttachConfig) (*Memory, error) {
	if r == nil {
		return nil, ib.Errorf("nvme_direct_attach", syscall.EINVAL, "no memory")
	}
	buf, off, n, _, err := r.Region()
	if err != nil {
		return nil, err
	}
	defer buf.Put()
	return d.attach(buf, off, n, cfg, r)
}

// Attach makes the disk an importer of n bytes of a dma-buf, from off on. The caller's reference stays the caller's.
//
// Errors: EREMOTEIO if the disk does not reach memory of the owner, with the reason, unless it may fall back and the
// memory can be copied; EINVAL for a range outside the buffer; ESHUTDOWN after Close; the exporter's, which are those of
// pinning and mapping; ETIMEDOUT if it does not answer.
func (d *Disk) Attach(buf *dmabuf.Buffer, off, n uint64, cfg AttachConfig) (*Memory, error) {
	if buf == nil {
		return nil, ib.Errorf("nvme_direct_attach", syscall.EINVAL, "no buffer")
	}
	return d.attach(buf, off, n, cfg, nil)
}

func (d *Disk) attach(buf *dmabuf.Buffer, off, n uint64, cfg AttachConfig, of any) (*Memory, error) {
	const op = "nvme_direct_attach"
	if size := buf.Size(); n == 0 || off > size || n > size-off {
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes at %d of a buffer of %d", n, off, size)
	}
	m := &Memory{disk: d, off: off, n: n, path: p2p.PathBus, closing: make(chan struct{})}
	if refusal := m.judge(cfg.Owner); refusal != nil {
		copier, ok := of.(interface {
			io.ReaderAt
			io.WriterAt
		})
		if !d.cfg.Fallback || !ok {
			return nil, refusal
		}
		m.copier = copier
	} else if err := m.attach(buf, cfg.Pin); err != nil {
		return nil, err
	}
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		_ = m.Close() // it has no error
		return nil, errClosed
	}
	d.memories[m] = struct{}{}
	d.mu.Unlock()
	return m, nil
}

// judge asks the topology how the disk reaches memory of a device. It returns why not.
func (m *Memory) judge(owner *p2p.Address) error {
	t := m.disk.cfg.Topology
	if t == nil || owner == nil {
		return nil
	}
	v := t.Verdict(*owner, m.disk.cfg.At)
	m.reason = v.Reason
	switch v.Map {
	case p2p.BusAddress:
	case p2p.ThroughHostBridge:
		m.path = p2p.PathHostBridge
	default:
		m.path = p2p.PathSystem
		return ib.Errorf("nvme_direct_attach", syscall.EREMOTEIO, "%v does not reach memory of %v: %s", m.disk.cfg.At, *owner, v.Reason)
	}
	return nil
}

// attach attaches to the buffer, and maps it once: so what is wrong with it is found now.
func (m *Memory) attach(buf *dmabuf.Buffer, pin bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	a, err := buf.DynamicAttach(m.disk, dmabuf.Importer{AllowPeer2Peer: true, InvalidateMappings: m.invalidate})
	if err != nil {
		return err
	}
	m.attachment = a
	if err = m.lock(context.Background(), ctx); err == nil {
		if pin {
			err = a.Pin()
			m.pinned = err == nil
		}
		if err == nil {
			err = m.mapLocked(context.Background(), ctx)
		}
		if err != nil {
			m.unpinLocked()
		}
		buf.Reservation().Unlock()
	}
	if err != nil {
		a.Detach()
	}
	return err
}

// Path returns how the disk reaches the memory while it lies in its device: PathSystem means that data is copied. Reason
// returns what has decided, if the topology was asked.
func (m *Memory) Path() p2p.Path { return m.path }

// Reason is explained at Path.
func (m *Memory) Reason() string { return m.reason }

// Len returns the number of bytes.
func (m *Memory) Len() uint64 { return m.n }

// enter begins a transfer, which ends with running.Done.
func (m *Memory) enter() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return errClosed
	}
	m.running.Add(1)
	return nil
}

// ending reports whether the memory is about to be closed.
func (m *Memory) ending() bool {
	select {
	case <-m.closing:
		return true
	default:
		return false
	}
}

// Close ends the transfers of the memory, which waits for the commands under way, and gives it up. Closing again does
// nothing.
func (m *Memory) Close() error {
	m.once.Do(func() {
		m.mu.Lock()
		m.closed = true
		close(m.closing)
		m.mu.Unlock()
		m.running.Wait()
		if m.attachment != nil {
			resv := m.attachment.Buffer().Reservation()
			resv.Lock()
			if c := m.current; c != nil {
				m.current = nil
				m.dropLocked(c)
			}
			m.unpinLocked()
			resv.Unlock()
			m.attachment.Detach()
		}
		m.disk.mu.Lock()
		delete(m.disk.memories, m)
		m.disk.mu.Unlock()
	})
	return nil
}

// lock locks the reservation. limited is ctx with a limit of its own.
func (m *Memory) lock(ctx, limited context.Context) error {
	if err := m.attachment.Buffer().Reservation().LockContext(limited); err != nil {
		return late(ctx, "the buffer's reservation lock")
	}
	return nil
}

// late returns why a wait has ended: the caller's context, or ETIMEDOUT.
func late(ctx context.Context, what string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("nvme_direct: %s: %w", what, err)
	}
	return ib.Errorf("nvme_direct", syscall.ETIMEDOUT, "%s", what)
}

// hold keeps the buffer where it is, for one command, until leave.
func (m *Memory) hold(ctx context.Context, write bool) (held, error) {
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := m.lock(ctx, limited); err != nil {
		return held{}, err
	}
	resv := m.attachment.Buffer().Reservation()
	defer resv.Unlock()
	if m.current == nil {
		if err := m.mapLocked(ctx, limited); err != nil {
			return held{}, err
		}
	}
	usage := dmabuf.Write
	if write { // to the disk: the memory is read
		usage = dmabuf.Read
	}
	h := held{m.current, dmabuf.NewFence()}
	h.users++
	resv.Add(h.fence, usage)
	return h, nil
}

// leave ends a hold.
func (m *Memory) leave(h held) {
	h.fence.Signal(nil) // first: the exporter may hold the lock and wait for it
	resv := m.attachment.Buffer().Reservation()
	resv.Lock()
	defer resv.Unlock()
	if h.users--; h.users == 0 && h.stale {
		m.dropLocked(h.mapping)
	}
}

// mapLocked maps the buffer and shows it to the controller. The reservation is locked.
func (m *Memory) mapLocked(ctx, limited context.Context) error {
	if m.revoked {
		return ib.Errorf("nvme_direct", syscall.ENODEV, "the exporter has taken the memory away")
	}
	t, err := m.attachment.Map(limited, dmabuf.Bidirectional)
	if err != nil {
		return err
	}
	if m.attachment.Buffer().Reservation().Wait(limited, dmabuf.Kernel) != nil {
		m.attachment.Unmap(t, dmabuf.Bidirectional)
		return late(ctx, "the buffer's fences")
	}
	c := &mapping{table: t, device: t.IsDevice()}
	if err := m.disk.show(c); err != nil {
		m.attachment.Unmap(t, dmabuf.Bidirectional)
		return err
	}
	m.disk.mappings.Add(1)
	if m.lost {
		m.lost = false
		m.disk.faults.Add(1)
	}
	m.current = c
	return nil
}

// invalidate is called by the exporter, with the reservation locked.
func (m *Memory) invalidate(*dmabuf.Attachment) {
	if m.pinned {
		m.revoked = true // for who has pinned memory it means that the memory is gone
	}
	if c := m.current; c != nil {
		m.current, m.lost = nil, true
		m.disk.invalidations.Add(1)
		c.stale = true
		if c.users == 0 {
			m.dropLocked(c)
		}
	}
	if m.revoked {
		m.unpinLocked()
	}
}

// dropLocked gives a mapping up, which no command uses. The reservation is locked.
func (m *Memory) dropLocked(c *mapping) {
	m.disk.hide(c)
	m.attachment.Unmap(c.table, dmabuf.Bidirectional)
}

// unpinLocked ends the pin, if there is one. The reservation is locked.
func (m *Memory) unpinLocked() {
	if m.pinned {
		m.pinned = false
		m.attachment.Unpin()
	}
}

// show gives the segments of a mapping one range of addresses on the bus.
//
// Errors: EOPNOTSUPP for segments that are not whole pages; ENOMEM if there are no addresses left; those of the bus.
func (d *Disk) show(c *mapping) error {
	const op = "nvme_direct_map"
	segments := c.table.Segments()
	for i, s := range segments {
		if len(s)%pages.Size != 0 && i < len(segments)-1 {
			return ib.Errorf(op, syscall.EOPNOTSUPP, "a segment of %d bytes: the controller's addresses are of whole pages", len(s))
		}
	}
	d.mu.Lock()
	got, ok := d.window.Alloc(c.table.Len())
	d.mu.Unlock()
	if !ok {
		return ib.Errorf(op, syscall.ENOMEM, "no addresses on the bus for %d bytes", c.table.Len())
	}
	c.window, c.base = got, d.cfg.Window+got.Off
	at := c.base
	for i, s := range segments {
		if err := d.cfg.Bus.Add(at, s); err != nil {
			d.hideSome(c, i)
			return err
		}
		at += uint64(len(s))
	}
	return nil
}

// hide takes a mapping off the bus.
func (d *Disk) hide(c *mapping) { d.hideSome(c, len(c.table.Segments())) }

// hideSome takes the first segments of a mapping off the bus.
func (d *Disk) hideSome(c *mapping, first int) {
	at := c.base
	for _, s := range c.table.Segments()[:first] {
		_ = d.cfg.Bus.Remove(at) // it was added
		at += uint64(len(s))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.window.Free(c.window)
}
