package cuda

// Memory of other processes on the same GPU. A process that sends from its memory names it, and
// the receiving process opens it, once for each allocation: then its card copies from there, and
// no byte passes through the host. Memory of cuMemAlloc is opened by its IPC handle, memory that
// was made by cuMemCreate by a descriptor, if it was made so that it can be exported. Other memory
// is not shared: its bytes go through the host.

import (
	"encoding/binary"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
)

const opShare = "share_gpu_memory"

// openerName is what the memory is known by between processes.
const openerName = "cuda"

// How an allocation is opened.
const (
	byIPC = iota + 1
	byDescriptor
)

// passport is what another process needs to open memory.
type passport struct {
	way    uint8
	gpu    [16]byte
	off, n uint64    // where in the allocation
	size   uint64    // of the allocation
	handle IPCHandle // byIPC
	fd     int       // byDescriptor; not sent as a number
}

const passportBytes = 1 + 16 + 3*8 + 64

func (p *passport) pack() []byte {
	b := append([]byte{p.way}, p.gpu[:]...)
	for _, v := range []uint64{p.off, p.n, p.size} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return append(b, p.handle[:]...)
}

// unpack reads what another process says, which may be nonsense.
func unpack(b []byte) (p passport, ok bool) {
	if len(b) != passportBytes {
		return p, false
	}
	p.way = b[0]
	copy(p.gpu[:], b[1:])
	for i, v := range []*uint64{&p.off, &p.n, &p.size} {
		*v = binary.LittleEndian.Uint64(b[17+8*i:])
	}
	copy(p.handle[:], b[41:])
	return p, (p.way == byIPC || p.way == byDescriptor) && p.n > 0 && p.off <= p.size && p.n <= p.size-p.off
}

func (p *passport) close() {
	if p.way == byDescriptor {
		_ = sys.CloseFD(p.fd) // it was open: it cannot fail
	}
}

// Share tells other processes how to open the memory.
func (m *Memory) Share() (opener string, what []byte, fd int, err error) {
	p := m.shared.Load()
	if p == nil {
		if p, err = m.export(); err != nil {
			return "", nil, -1, err
		}
		m.shared.Store(p) // PassShared calls one at a time
	}
	fd = -1
	if p.way == byDescriptor {
		if fd, err = sys.DupFD(p.fd); err != nil {
			return "", nil, -1, err
		}
	}
	return openerName, p.pack(), fd, nil
}

// export has the driver make what others need.
func (m *Memory) export() (*passport, error) {
	d := m.card.drv
	if !d.room {
		return nil, ib.Errorf(opShare, syscall.EOPNOTSUPP, "copies within the GPU may have to wait for kernels: CUDA_DEVICE_MAX_CONNECTIONS is less than %d", roomFor)
	}
	if m.of != nil || len(m.pieces) != 1 {
		return nil, ib.Errorf(opShare, syscall.EOPNOTSUPP, "the memory lies in %d allocations", len(m.pieces))
	}
	at := m.pieces[0]
	p := &passport{gpu: m.card.uuid, off: m.addr - at.start, n: m.n, size: at.end - at.start, fd: -1}
	f := fnIpcGetMemHandle
	m.card.opened.Lock() // the context does not go meanwhile
	defer m.card.opened.Unlock()
	if m.card.left {
		return nil, ib.Errorf(opShare, syscall.ENODEV, "the context is gone")
	}
	r := d.asks.in(m.card.ctx, func() (r Result) {
		if at.legacyIPC {
			p.way = byIPC
			p.handle, r = d.ipcOf(at.start)
			return r
		}
		if !at.posix {
			return notSupported
		}
		p.way = byDescriptor
		f = fnExportToShareableHandle
		fd, r := d.descriptorOf(at.start)
		p.fd = int(fd)
		return r
	})
	return p, d.check(opShare, f, r)
}

// importKey is by what an allocation of another process is known that is open.
type importKey struct {
	handle IPCHandle
	alone  *imported // of one that is opened by a descriptor: each time anew
}

// imported is an allocation of another process that is open.
type imported struct {
	card *card
	key  importKey
	addr uint64
	size uint64
	way  uint8
	uses int // guarded by the card's opened lock
}

// openShared opens memory of another process on one of the GPUs that this one uses.
func (d *Driver) openShared(what []byte, fd int) (mem.Engine, error) {
	defer func() {
		if fd >= 0 {
			_ = sys.CloseFD(fd) // it was open: it cannot fail
		}
	}()
	p, ok := unpack(what)
	if !ok || (p.way == byDescriptor) != (fd >= 0) {
		return nil, ib.Errorf(opShare, syscall.EINVAL, "what was said of the memory is nonsense")
	}
	c := d.cardOn(p.gpu)
	if c == nil {
		var err error
		if c, err = d.newCardOn(p.gpu); err != nil {
			return nil, err
		}
	}
	i, err := c.open(&p, fd)
	if err != nil {
		d.putCard(c)
		return nil, err
	}
	return &Memory{card: c, addr: i.addr + p.off, n: p.n, of: i}, nil
}

// cardOn returns a card of a GPU, nil if there is none. The caller gives it back.
func (d *Driver) cardOn(gpu [16]byte) *card {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.cards {
		select {
		case <-c.ready:
			if c.err == nil && !c.dead && c.uuid == gpu {
				c.users++
				return c
			}
		default:
		}
	}
	return nil
}

// newCardOn returns a card of a GPU of which no memory is registered here, if the program uses the GPU's primary
// context. The caller gives it back.
func (d *Driver) newCardOn(gpu [16]byte) (*card, error) {
	d.use() // until the card is one itself
	defer d.Close()
	device := int32(-1)
	d.asks.do(func() {
		n, r := d.deviceCount()
		for i := int32(0); r == success && i < n && device < 0; i++ {
			if dev, r := d.device(i); r == success && d.isOn(dev, gpu) {
				device = dev
			}
		}
	})
	if device < 0 {
		return nil, ib.Errorf(opShare, syscall.ENODEV, "the memory is on a GPU that is not used here")
	}
	ctx, err := d.primaryOf(opShare, device)
	if err != nil {
		return nil, err
	}
	return d.cardOf(opShare, ctx, device)
}

// isOn reports whether a device is a GPU whose primary context the program uses.
func (d *Driver) isOn(dev int32, gpu [16]byte) bool {
	id, r := d.uuid(dev)
	return r == success && id == gpu && d.primaryActive(dev)
}

// open opens an allocation, or finds that it is open.
func (c *card) open(p *passport, fd int) (*imported, error) {
	c.opened.Lock()
	defer c.opened.Unlock()
	if c.left {
		return nil, ib.Errorf(opShare, syscall.ENODEV, "the context is gone")
	}
	if i := c.imports[importKey{handle: p.handle}]; p.way == byIPC && i != nil {
		if i.size < p.size {
			return nil, ib.Errorf(opShare, syscall.EINVAL, "an allocation of %d bytes has %d", i.size, p.size)
		}
		i.uses++
		return i, nil
	}
	i := &imported{card: c, size: p.size, way: p.way, uses: 1}
	f := fnIpcOpenMemHandle
	r := c.drv.slow.in(c.ctx, func() (r Result) {
		if p.way == byDescriptor {
			f = fnMap
			i.addr, r = c.drv.mapDescriptor(fd, p.size, c.device)
			return r
		}
		if i.addr, r = c.drv.openIPC(&p.handle); r != success {
			return r
		}
		// Another process says how long it is: the driver knows.
		if at, r := c.drv.lookup(i.addr); r != success || at.start+at.size-i.addr < p.size {
			c.drv.closeIPC(i.addr)
			return invalidValue
		}
		return success
	})
	if err := c.drv.check(opShare, f, r); err != nil {
		return nil, err
	}
	i.key = importKey{handle: p.handle}
	if p.way == byDescriptor {
		i.key = importKey{alone: i}
	}
	c.imports[i.key] = i
	return i, nil
}

// mapDescriptor maps an allocation of n bytes at an address of its own.
func (d *Driver) mapDescriptor(fd int, n uint64, device int32) (addr uint64, r Result) {
	h, r := d.importFD(fd)
	if r != success {
		return 0, r
	}
	return d.mapAllocation(h, n, device)
}

// mapAllocation maps an allocation, and gives its handle back: what is mapped stays.
func (d *Driver) mapAllocation(h, n uint64, device int32) (addr uint64, r Result) {
	defer d.release(h)
	if addr, r = d.reserve(n); r != success {
		return 0, r
	}
	if r = d.mapAt(addr, n, h); r != success {
		d.unreserve(addr, n)
		return 0, r
	}
	if r = d.allow(addr, n, device); r != success {
		d.unmapAllocation(addr, n)
		return 0, r
	}
	return addr, success
}

func (d *Driver) unmapAllocation(addr, n uint64) Result {
	if r := d.unmap(addr, n); r != success {
		return r
	}
	return d.unreserve(addr, n)
}

// descriptorOf returns a descriptor of the allocation that is mapped at an address.
func (d *Driver) descriptorOf(addr uint64) (fd int32, r Result) {
	h, r := d.allocationOf(addr)
	if r != success {
		return -1, r
	}
	defer d.release(h)
	return d.exportFD(h)
}

// close ends a use. With the last one the allocation is closed; no copy is under way on it.
func (i *imported) close() {
	c := i.card
	c.opened.Lock()
	if i.uses--; i.uses == 0 {
		delete(c.imports, i.key)
	}
	if i.uses == 0 && !c.left {
		c.drv.slow.in(c.ctx, func() Result {
			if i.way == byIPC {
				return c.drv.closeIPC(i.addr)
			}
			return c.drv.unmapAllocation(i.addr, i.size)
		})
	}
	c.opened.Unlock()
	c.drv.putCard(c)
}

var _ mem.Sharing = (*Memory)(nil)
