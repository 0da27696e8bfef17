package mem

// Device memory: memory that belongs to the device and has no address in the
// program. Its life:
//
//  1. Alloc takes a range of the process's pool, a memory file that is mapped when
//     the first buffer is wanted; pages come when they are touched. A buffer that
//     is to be shown to other devices has a file of its own instead, which shows them
//     nothing else.
//  2. The program reaches it by ReadAt and WriteAt, or at its address if it is of the
//     coherent class; Backing makes what a region stands on, any number of times.
//  3. Free gives it back, unless regions are left, and clears it: a buffer is zero
//     when it is handed out.
//
// How much of it all processes together may have is not decided here: each has a
// pool as large as the whole.

import (
	"math"
	"os"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// DevicePool is the device memory of one process.
type DevicePool struct {
	mu    sync.Mutex // guards what follows
	arena arena
	fd    int
	mem   []byte // nil: nothing was wanted yet
	own   *Own   // all of it; there is one if mem is there
}

// NewDevicePool makes a pool of size bytes, which it does not take yet.
func NewDevicePool(size uint64) *DevicePool {
	p := &DevicePool{fd: -1}
	p.arena.init(min(size, math.MaxInt))
	return p
}

// DeviceMem is a buffer of device memory.
type DeviceMem struct {
	pool     *DevicePool
	place    *extent // nil: it has a file of its own
	file     int     // that file
	b        []byte
	coherent bool

	host sync.RWMutex // read: the host accesses it; guards freed
	mu   sync.Mutex   // guards regions
	// regions counts those that stand on it; taken: it is being freed
	regions int
	freed   bool
}

// DeviceMemConfig is what buffer is wanted.
type DeviceMemConfig struct {
	Length   uint64
	LogAlign uint // its place in the pool is a multiple of 1<<LogAlign
	Coherent bool // the program may access it at its address
	Export   bool // it may be shown to other devices
}

// Alloc takes a buffer, all zero. It fails with ENOMEM if there is no room.
func (p *DevicePool) Alloc(cfg DeviceMemConfig) (*DeviceMem, error) {
	const op = "alloc_dm"
	switch {
	case cfg.Length == 0:
		return nil, ib.Errorf(op, syscall.EINVAL, "no bytes")
	case cfg.LogAlign > 62:
		return nil, ib.Errorf(op, syscall.EINVAL, "an alignment of 2^%d", cfg.LogAlign)
	}
	noRoom := ib.Errorf(op, syscall.ENOMEM, "no %d bytes with an alignment of 2^%d are free in the pool", cfg.Length, cfg.LogAlign)
	p.mu.Lock()
	defer p.mu.Unlock()
	if cfg.Length > p.arena.size || uint64(1)<<cfg.LogAlign > p.arena.size {
		return nil, noRoom
	}
	m := &DeviceMem{pool: p, file: -1, coherent: cfg.Coherent}
	if cfg.Export {
		if err := m.open(cfg.Length); err != nil {
			return nil, err
		}
		return m, nil
	}
	if err := p.mapLocked(); err != nil {
		return nil, err
	}
	e := p.arena.alloc(cfg.Length, 1<<cfg.LogAlign)
	if e == nil {
		return nil, noRoom
	}
	m.place, m.b = e, p.mem[e.off:][:e.n:e.n]
	return m, nil
}

// open gives the buffer a file of its own, of whole pages.
func (m *DeviceMem) open(length uint64) error {
	size := int((length + pageSize - 1) &^ (pageSize - 1))
	var b []byte
	var err error
	if m.file, b, err = newDeviceFile(size); err != nil {
		return err
	}
	m.b = b[:length]
	return nil
}

// mapLocked makes the pool's memory, once.
func (p *DevicePool) mapLocked() (err error) {
	if p.mem == nil {
		if p.fd, p.mem, err = newDeviceFile(int(p.arena.size)); err == nil {
			p.own = addOwn(p.mem)
		}
	}
	return err
}

func newDeviceFile(size int) (fd int, b []byte, err error) {
	if fd, err = sys.NewMemfd("verbena-device-memory", size); err == nil {
		if b, err = sys.MapMemfd(fd, size); err == nil {
			sys.PreferHugePages(b)
			return fd, b, nil
		}
		_ = sys.CloseFD(fd) // the first error says more
	}
	return -1, nil, ib.Errorf("alloc_dm", syscall.ENOMEM, "%v", err)
}

// Close gives the pool's memory back. All buffers are freed.
func (p *DevicePool) Close() error {
	p.mu.Lock()
	own := p.own
	p.own = nil
	p.mu.Unlock()
	if own == nil {
		return nil
	}
	own.close()
	p.mu.Lock()
	defer p.mu.Unlock()
	err := sys.Unmap(p.mem)
	if e := sys.CloseFD(p.fd); err == nil {
		err = e
	}
	p.mem, p.fd = nil, -1
	return err
}

// Len returns the number of bytes.
func (m *DeviceMem) Len() uint64 { return uint64(len(m.b)) }

// Regions returns how many regions stand on it.
func (m *DeviceMem) Regions() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return max(0, m.regions)
}

// Coherent reports whether the program may access the buffer at its address.
func (m *DeviceMem) Coherent() bool { return m.coherent }

// WriteAt copies from the program to the buffer, and ReadAt the other way round.
// Nothing is copied if not all of it lies in the buffer: EFAULT. The last word is
// stored last, as the device does it.
func (m *DeviceMem) WriteAt(b []byte, off int64) (int, error) {
	return m.access("memcpy_to_dm", b, off, func(at []byte) bool { return moveGuarded(at, b, true) == 0 })
}

// ReadAt is explained at WriteAt.
func (m *DeviceMem) ReadAt(b []byte, off int64) (int, error) {
	return m.access("memcpy_from_dm", b, off, func(at []byte) bool { return moveGuarded(b, at, false) == 0 })
}

func (m *DeviceMem) access(op string, b []byte, off int64, move func(at []byte) bool) (int, error) {
	m.host.RLock()
	defer m.host.RUnlock()
	switch size := uint64(len(m.b)); {
	case m.freed:
		return 0, errFreed(op)
	case off < 0:
		return 0, ib.Errorf(op, syscall.EINVAL, "a negative offset")
	case uint64(off) > size || uint64(len(b)) > size-uint64(off):
		return 0, ib.Errorf(op, syscall.EFAULT, "%d bytes at %d are not inside a buffer of %d", len(b), off, size)
	case len(b) == 0:
		return 0, nil
	case !move(m.b[off:][:len(b)]):
		return 0, ib.Errorf(op, syscall.EFAULT, "the program's own memory is not there")
	}
	return len(b), nil
}

func errFreed(op string) error {
	return ib.Errorf(op, syscall.EINVAL, "the device memory is freed")
}

// Bytes returns the buffer itself, if it is coherent. It must not be used after
// Free.
func (m *DeviceMem) Bytes() ([]byte, error) {
	m.host.RLock()
	defer m.host.RUnlock()
	if m.freed {
		return nil, errFreed("map_dm")
	}
	if !m.coherent {
		return nil, ib.Errorf("map_dm", syscall.EOPNOTSUPP, "only coherent device memory can be accessed directly")
	}
	return m.b, nil
}

// Export returns a file that shows the buffer, from an offset on.
func (m *DeviceMem) Export() (f *os.File, off int64, err error) {
	const op = "export_dm"
	m.host.RLock()
	defer m.host.RUnlock()
	if m.freed {
		return nil, 0, errFreed(op)
	}
	if m.place != nil {
		return nil, 0, ib.Errorf(op, syscall.EOPNOTSUPP, "the device memory was not allocated to be exported")
	}
	if f, err = sys.DupFile(m.file, "verbena-device-memory"); err != nil {
		return nil, 0, ib.Errorf(op, syscall.EMFILE, "%v", err)
	}
	return f, 0, nil
}

// Lend returns the buffer itself. It cannot be freed until giveBack is called.
func (m *DeviceMem) Lend() (b []byte, giveBack func(), err error) {
	d, err := m.Backing(0, m.Len())
	if err != nil {
		return nil, nil, err
	}
	return d.(*deviceBacking).b, func() { _ = d.Close() }, nil
}

// Backing makes what a region on a part of the buffer stands on. The buffer cannot
// be freed until it is closed. The part may be empty, as adapters have it.
func (m *DeviceMem) Backing(off, n uint64) (Backing, error) {
	const op = "reg_dm_mr"
	if size := uint64(len(m.b)); off > size || n > size-off {
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes at %d are not inside a buffer of %d", n, off, size)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.regions == taken {
		return nil, errFreed(op)
	}
	m.regions++
	return &deviceBacking{m, m.b[off:][:n:n]}, nil
}

// Free gives the buffer back. It fails with EBUSY while regions stand on it.
// Freeing again does nothing.
func (m *DeviceMem) Free() error {
	m.mu.Lock()
	regions := m.regions
	if regions == 0 {
		m.regions = taken
	}
	m.mu.Unlock()
	if regions > 0 {
		return ib.Errorf("free_dm", syscall.EBUSY, "%d regions are registered on the device memory", regions)
	}
	if regions == taken {
		return nil
	}
	m.host.Lock()
	m.freed = true
	m.host.Unlock()
	if m.place == nil {
		err := sys.Unmap(m.b[:cap(m.b)])
		if e := sys.CloseFD(m.file); err == nil {
			err = e
		}
		return err
	}
	p := m.pool
	p.mu.Lock()
	own := p.own
	p.mu.Unlock()
	p.clear(own, m.place.off, m.b)
	p.mu.Lock()
	p.arena.release(m.place)
	p.mu.Unlock()
	return nil
}

// punchFrom is from which length on whole pages are given back to the system.
const punchFrom = 64 << 10

// clear makes a range zero again.
func (p *DevicePool) clear(own *Own, off uint64, b []byte) {
	if len(b) >= punchFrom {
		start := (off + pageSize - 1) &^ (pageSize - 1)
		end := (off + uint64(len(b))) &^ (pageSize - 1)
		if own.unlessPinned(func() bool { return sys.PunchHole(p.fd, int64(start), int64(end-start)) == nil }) {
			clear(b[:start-off])
			clear(b[end-off:])
			return
		}
	}
	clear(b)
}

// deviceBacking is a part of a buffer that a region stands on.
type deviceBacking struct {
	m *DeviceMem
	b []byte
}

// Kind returns KindDevice.
func (d *deviceBacking) Kind() Kind { return KindDevice }

// Len returns the number of bytes.
func (d *deviceBacking) Len() uint64 { return uint64(len(d.b)) }

// NeverFaults reports whether accesses can never fault: the program has the address of a
// coherent buffer, and could unmap it.
func (d *deviceBacking) NeverFaults() bool { return !d.m.coherent }

// Run returns all of the bytes at off.
func (d *deviceBacking) Run(off, n uint64, _ ib.Access) ([]byte, FaultKind) {
	if size := uint64(len(d.b)); off >= size || n > size-off {
		return nil, FaultBounds
	}
	return d.b[off:][:n], FaultNone
}

// Close lets the buffer be freed.
func (d *deviceBacking) Close() error {
	d.m.mu.Lock()
	d.m.regions--
	d.m.mu.Unlock()
	d.b = nil // a Memo may keep the region longer than its memory is there
	return nil
}
