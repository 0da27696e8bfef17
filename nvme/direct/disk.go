package direct

// A transfer's way: Do checks it, waits for its fence, and moves one piece after the other (move). A piece is what one
// command moves: inPlace has the buffer mapped and held (memory.go) and the disk move it; bounce has the disk move
// it to system memory, or from there, and the memory's owner copy it.

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/pages"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/p2p"
)

// patience is how long an exporter may take to answer, and its Kernel fences to be signalled.
const patience = 10 * time.Second

// windowSize is how many addresses of the bus a disk has for memory of others.
const windowSize = 1 << 46

// defaultWindow is where they begin. Memory of the host and BARs lie below.
const defaultWindow = 1 << 52

// Config describes a disk.
type Config struct {
	Storage *driver.Storage // the disk; needed. Its owner closes it, after the Disk
	Bus     driver.Bus      // shows memory to the disk's controller; needed
	DMA     driver.DMA      // system memory that the controller reaches; needed for Fallback

	// Topology is the machine, and At where in it the controller is. nil: the controller reaches all memory.
	Topology *p2p.Topology
	At       p2p.Address

	// Places is told where the disk is, so that exporters know: see p2p.Places. nil: they do not ask, or are told by others.
	Places *p2p.Places

	// Fallback: data of memory that the disk does not reach goes through system memory. Otherwise Attach fails.
	Fallback bool

	// Window is the first of 2^46 addresses of the bus for memory of others; 0: 2^52. Nothing else lies there.
	Window uint64
}

// Disk is a disk that reads and writes memory of other devices. Its methods may be called by several goroutines.
type Disk struct {
	cfg   Config
	block uint64

	transfers, bus, hostBridge, system, copied atomic.Uint64 // see Stats
	mappings, faults, invalidations            atomic.Uint64

	mu       sync.Mutex // guards what follows
	window   pages.Pool
	spare    []driver.Memory // system memory of fallbacks, each of one piece
	memories map[*Memory]struct{}
	closed   bool
}

// Stats is what a disk has moved, in bytes of commands that have succeeded, and how often memory was out of its place.
type Stats struct {
	Transfers uint64 // that have ended well

	Bus        uint64 // to or from a device's memory, by its address on the bus
	HostBridge uint64 // to or from a device's memory, through the host bridge
	System     uint64 // to or from a buffer of a device that lay in system memory
	Copied     uint64 // through system memory of the disk's own, and copied there: Config.Fallback

	Mappings      uint64 // of buffers
	Faults        uint64 // of them, those of a command that found the buffer moved
	Invalidations uint64 // mappings that exporters have taken away
}

// Stats returns what the disk has moved.
func (d *Disk) Stats() Stats {
	return Stats{Transfers: d.transfers.Load(), Bus: d.bus.Load(), HostBridge: d.hostBridge.Load(), System: d.system.Load(),
		Copied: d.copied.Load(), Mappings: d.mappings.Load(), Faults: d.faults.Load(), Invalidations: d.invalidations.Load()}
}

// New makes a disk.
//
// Errors: EINVAL without storage or bus, for a fallback without DMA, or for a window whose addresses end too soon or do
// not begin at a page; those of p2p.Places.Set.
func New(cfg Config) (*Disk, error) {
	const op = "nvme_direct"
	if cfg.Window == 0 {
		cfg.Window = defaultWindow
	}
	switch {
	case cfg.Storage == nil || cfg.Bus == nil:
		return nil, ib.Errorf(op, syscall.EINVAL, "a disk and a bus are needed")
	case cfg.Fallback && cfg.DMA == nil:
		return nil, ib.Errorf(op, syscall.EINVAL, "a fallback needs system memory")
	case cfg.Window%pages.Size != 0 || cfg.Window > math.MaxUint64-windowSize:
		return nil, ib.Errorf(op, syscall.EINVAL, "a window at %#x", cfg.Window)
	}
	d := &Disk{cfg: cfg, block: uint64(cfg.Storage.BlockSize()), window: pages.New(windowSize), memories: map[*Memory]struct{}{}} //nolint:gosec // positive
	if cfg.Places != nil {
		if err := cfg.Places.Set(d, cfg.At); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// Close ends transfers, which waits for the commands under way, and gives all memory up. The storage stays. Closing again
// does nothing.
func (d *Disk) Close() error {
	d.mu.Lock()
	d.closed = true
	var all []*Memory
	for m := range d.memories {
		all = append(all, m)
	}
	spare := d.spare
	d.spare = nil
	d.mu.Unlock()
	for _, m := range all {
		_ = m.Close() // it has no error
	}
	for i := range spare {
		spare[i].Free()
	}
	return nil
}

// Transfer is data that moves between a disk and memory.
type Transfer struct {
	Memory *Memory
	Write  bool   // to the disk; otherwise from it
	At     uint64 // where in Memory; with what Attach was given in front of it, a multiple of 4
	Length uint64 // a multiple of the block size
	Offset int64  // where on the disk; a multiple of the block size

	// Wait is signalled when the transfer may begin; nil: at once. If it is signalled with an error, nothing is moved.
	Wait ib.Fence
	// Timeout is how long Wait may take; 0: ib.DefaultFenceTimeout.
	Timeout time.Duration
	// Done is signalled at the end, with the error that the transfer has; nil: nobody is told.
	Done ib.Fence
}

// Read moves n bytes from off on the disk to at in memory.
//
// Errors: those of Do.
func (d *Disk) Read(ctx context.Context, m *Memory, at, n uint64, off int64) error {
	return d.Do(ctx, Transfer{Memory: m, At: at, Length: n, Offset: off})
}

// Write moves n bytes from at in memory to off on the disk.
//
// Errors: those of Do.
func (d *Disk) Write(ctx context.Context, m *Memory, at, n uint64, off int64) error {
	return d.Do(ctx, Transfer{Memory: m, Write: true, At: at, Length: n, Offset: off})
}

// Do executes a transfer. Its fence Done is not signalled if there is something wrong with the transfer itself.
//
// Errors: EINVAL for memory of another disk, or a transfer that is empty, not aligned, or outside the memory or the disk;
// EROFS for a write to a disk that refuses writes; ENODEV if the exporter has taken the memory away; ESHUTDOWN if the
// memory or the disk is closed; EDEADLK for a fence that could never be signalled; ETIMEDOUT if the exporter does not
// answer, or Wait is not signalled in time; the error of Wait; those of commands; the context's.
func (d *Disk) Do(ctx context.Context, t Transfer) error {
	if err := d.queue(&t); err != nil {
		return err
	}
	if err := t.Memory.enter(); err != nil {
		return err
	}
	defer t.Memory.running.Done()
	return t.end(d.run(ctx, &t))
}

// Start executes a transfer beside the program. Its fence Done is signalled at the end: then the disk uses the memory no
// more. Memory.Close and Disk.Close wait for it, so what the signal calls must not call them.
//
// Errors: those of Do that are found before the transfer waits or moves anything; then Done is not signalled. EINVAL
// without Done.
func (d *Disk) Start(ctx context.Context, t Transfer) error {
	if t.Done == nil {
		return ib.Errorf("nvme_direct", syscall.EINVAL, "a transfer that is not waited for needs a fence")
	}
	if err := d.queue(&t); err != nil {
		return err
	}
	m := t.Memory
	if err := m.enter(); err != nil {
		return err
	}
	go func() {
		defer m.running.Done() // after the fence: when the memory is closed, that is signalled
		_ = t.end(d.run(ctx, &t))
	}()
	return nil
}

// end signals the fence of a transfer.
func (t *Transfer) end(err error) error {
	if t.Done != nil {
		t.Done.Signal(err)
	}
	return err
}

// queue checks a transfer, and notes its fences where waits are found that never end.
func (d *Disk) queue(t *Transfer) error {
	const op = "nvme_direct"
	m, size := t.Memory, uint64(d.cfg.Storage.Size()) //nolint:gosec // positive
	switch {
	case m == nil || m.disk != d:
		return ib.Errorf(op, syscall.EINVAL, "no memory, or memory of another disk")
	case t.Length == 0 || t.At > m.n || t.Length > m.n-t.At:
		return ib.Errorf(op, syscall.EINVAL, "%d bytes at %d of memory of %d", t.Length, t.At, m.n)
	case t.Offset < 0 || uint64(t.Offset) > size || t.Length > size-uint64(t.Offset):
		return ib.Errorf(op, syscall.EINVAL, "%d bytes at %d of a disk of %d", t.Length, t.Offset, size)
	case t.Length%d.block != 0 || uint64(t.Offset)%d.block != 0:
		return ib.Errorf(op, syscall.EINVAL, "%d bytes at %d are not blocks of %d", t.Length, t.Offset, d.block)
	case (m.off+t.At)%4 != 0:
		return ib.Errorf(op, syscall.EINVAL, "memory at %d: data begins at multiples of 4", m.off+t.At)
	case t.Write && d.cfg.Storage.ReadOnly():
		return ib.Errorf(op, syscall.EROFS, "the disk refuses writes")
	case t.Timeout < 0:
		return ib.Errorf(op, syscall.EINVAL, "a timeout of %v", t.Timeout)
	}
	if t.Timeout == 0 {
		t.Timeout = ib.DefaultFenceTimeout
	}
	if f, ok := t.Wait.(ib.QueuedFence); ok {
		if err := f.Queued(t, "a transfer of a disk", false, t.Timeout); err != nil {
			return err
		}
	}
	if f, ok := t.Done.(ib.QueuedFence); ok {
		return f.Queued(t, "a transfer of a disk", true, t.Timeout)
	}
	return nil
}

// run waits for the transfer's fence, and moves the data.
func (d *Disk) run(ctx context.Context, t *Transfer) error {
	if err := t.wait(ctx); err != nil {
		return err
	}
	piece := uint64(d.cfg.Storage.Piece()) //nolint:gosec // positive
	for done := uint64(0); done < t.Length; {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("nvme_direct: %w", err)
		}
		if t.Memory.ending() {
			return errClosed
		}
		n := min(piece, t.Length-done)
		if err := d.move(ctx, t, done, n); err != nil {
			return err
		}
		done += n
	}
	d.transfers.Add(1)
	return nil
}

// wait waits until the transfer may begin.
func (t *Transfer) wait(ctx context.Context) error {
	if t.Wait == nil {
		return nil
	}
	limit := time.NewTimer(t.Timeout)
	defer limit.Stop()
	select {
	case <-t.Wait.Done():
	case <-ctx.Done():
		return fmt.Errorf("nvme_direct: %w", ctx.Err())
	case <-t.Memory.closing:
		return errClosed
	case <-limit.C:
		return ib.Errorf("nvme_direct", syscall.ETIMEDOUT, "the fence is not signalled")
	}
	if f, ok := t.Wait.(interface{ Err() error }); ok && f.Err() != nil {
		return fmt.Errorf("nvme_direct: what the transfer waited for: %w", f.Err())
	}
	return nil
}

// move moves one piece, which begins done bytes behind the start.
func (d *Disk) move(ctx context.Context, t *Transfer, done, n uint64) error {
	at, off := t.At+done, t.Offset+int64(done) //nolint:gosec // inside the disk
	if t.Memory.copier != nil {
		return d.bounce(t.Memory, at, int(n), off, t.Write) //nolint:gosec // one piece
	}
	return d.inPlace(ctx, t.Memory, at, int(n), off, t.Write) //nolint:gosec // one piece
}

// inPlace has the disk move a piece where the buffer is.
func (d *Disk) inPlace(ctx context.Context, m *Memory, at uint64, n int, off int64, write bool) error {
	h, err := m.hold(ctx, write)
	if err != nil {
		return err
	}
	err = d.cfg.Storage.Move(h.base+m.off+at, n, off, write)
	m.leave(h)
	if err != nil {
		return err
	}
	counter := &d.system
	switch {
	case h.device && m.path == p2p.PathHostBridge:
		counter = &d.hostBridge
	case h.device:
		counter = &d.bus
	}
	counter.Add(uint64(n)) //nolint:gosec // positive
	return nil
}

// bounce has the disk move a piece through system memory, and the memory's owner copy it.
func (d *Disk) bounce(m *Memory, at uint64, n int, off int64, write bool) error {
	s, err := d.takeSpare()
	if err != nil {
		return err
	}
	defer d.putSpare(s)
	b := s.Bytes[:n]
	if write {
		if _, err := m.copier.ReadAt(b, int64(at)); err != nil { //nolint:gosec // inside the memory
			return err
		}
	}
	if err := d.cfg.Storage.Move(s.Addr, n, off, write); err != nil {
		return err
	}
	d.copied.Add(uint64(n)) //nolint:gosec // positive
	if !write {
		_, err = m.copier.WriteAt(b, int64(at)) //nolint:gosec // inside the memory
	}
	return err
}

func (d *Disk) takeSpare() (driver.Memory, error) {
	d.mu.Lock()
	if n := len(d.spare); n > 0 {
		m := d.spare[n-1]
		d.spare = d.spare[:n-1]
		d.mu.Unlock()
		return m, nil
	}
	d.mu.Unlock()
	return d.cfg.DMA.Alloc(d.cfg.Storage.Piece())
}

// putSpare keeps memory for the next fallback, or gives it back.
func (d *Disk) putSpare(m driver.Memory) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		m.Free()
		return
	}
	d.spare = append(d.spare, m)
}
