package device

// Memory regions, from registration to deregistration:
//
//  1. RegMR and RegMRAddr take the memory; makeBacking chooses the kind of backing for it,
//     and register makes the region.
//  2. Rereg changes the region in place.
//  3. Close deregisters it.

import (
	"errors"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// MR is a memory region. It is small, because there may be a million of them.
type MR struct {
	region *mem.Region

	// What the getters return. They need no lock; the fields change while mu is held.
	keyAccess    atomic.Uint64 // the key above the access rights
	addr, length atomic.Uint64

	mu      sync.Mutex // guards what follows; held also while the region changes, or its backing is looked at
	pd      *PD
	iova    uint64 // where requests find it, if the program has chosen that
	ownIOVA bool   // the program has
	dmah    *DMAH  // the hint that it was registered with; nil: none
	closed  bool
}

// memory is what is to be registered: a slice or, if that is nil, a range by address.
type memory struct {
	buf    []byte
	addr   uintptr
	length uint64
	iova   *uint64 // its address in requests; nil: where it lies

	everything bool // the whole address space
	dm         bool // device memory

	backing mem.Backing // if not nil, the memory, made elsewhere
	alloc   uint64      // if not 0, bytes that the library allocates
}

// RegMR registers a slice.
func (p *PD) RegMR(buf []byte, access ib.Access) (provider.MR, error) {
	return p.register(memoryOf(buf), access)
}

// RegMRAddr registers memory outside the Go heap, whose owner keeps it mapped.
func (p *PD) RegMRAddr(addr uintptr, length uint64, iova uint64, access ib.Access) (provider.MR, error) {
	return p.register(memoryAt(addr, length, iova), access)
}

// RegImplicitMR registers the whole address space.
func (p *PD) RegImplicitMR(access ib.Access) (provider.MR, error) {
	return p.register(memory{everything: true}, access)
}

// AllocNullMR makes a region of memory that is not there, for local use: see
// mem.Null.
func (p *PD) AllocNullMR() (provider.MR, error) {
	return p.registerWith(memoryAt(0, 0, 0), ib.AccessLocalWrite, func() (mem.Backing, error) { return mem.NewNull(), nil })
}

func memoryOf(buf []byte) memory {
	if buf == nil {
		buf = []byte{} // no bytes, rather than address 0
	}
	return memory{buf: buf}
}

// memoryLocked returns what the region was made of.
func (m *MR) memoryLocked() memory {
	b := m.region.Backing()
	to := memory{everything: b.Kind() == mem.KindImplicit, dm: b.Kind() == mem.KindDevice}
	if s, ok := b.(interface{ Source() ([]byte, uintptr) }); ok {
		to.buf, to.addr = s.Source()
		to.length = b.Len()
	}
	if m.ownIOVA {
		iova := m.iova
		to.iova = &iova
	}
	return to
}

// useLocked records where requests find the memory that the region is made of.
func (m *MR) useLocked(from *memory) {
	if m.ownIOVA = from.iova != nil; m.ownIOVA {
		m.iova = *from.iova
	}
	r := m.region
	m.keyAccess.Store(uint64(r.Key())<<32 | uint64(r.Access()))
	m.addr.Store(r.IOVA())
	m.length.Store(r.Length())
}

func memoryAt(addr uintptr, length, iova uint64) memory {
	return memory{addr: addr, length: length, iova: &iova}
}

// makeBacking makes the backing of a region with such rights. Here, and nowhere else, the kind
// of memory is chosen.
func (d *Device) makeBacking(op string, m memory, access ib.Access) (mem.Backing, error) {
	var b mem.Backing
	var err error
	switch onDemand := access&ib.AccessOnDemand != 0; {
	case m.dm:
		return nil, ib.Errorf(op, syscall.EINVAL, "device memory is not on demand")
	case m.everything && !onDemand:
		return nil, ib.Errorf(op, syscall.EINVAL, "the whole address space can only be registered on demand")
	case m.everything:
		b, err = mem.NewImplicit(access, d.table.Paging())
	case onDemand && m.buf != nil:
		b, err = mem.NewOnDemandBytes(m.buf, access, d.table.Paging())
	case onDemand:
		b, err = mem.NewOnDemand(m.addr, m.length, access, d.table.Paging())
	case m.buf != nil:
		b, err = mem.NewPinnedBytes(m.buf, access, d.cfg.Lock)
	default:
		b, err = mem.NewPinned(m.addr, m.length, access, d.cfg.Lock, nil)
	}
	if err != nil {
		return nil, named(op, err)
	}
	return b, nil
}

// named gives an error the name of the verb that it is returned from.
func named(op string, err error) error {
	var e *ib.OpError
	if !errors.As(err, &e) || e.Op == op {
		return err
	}
	other := *e
	other.Op = op
	return &other
}

// iovaOf returns where requests find the memory of a backing.
func (m *memory) iovaOf(b mem.Backing) uint64 {
	if m.iova != nil {
		return *m.iova
	}
	if h, ok := b.(interface{ Addr() uintptr }); ok {
		return uint64(h.Addr())
	}
	return 0
}

func (p *PD) register(m memory, access ib.Access) (provider.MR, error) {
	return p.registerWith(m, access, func() (mem.Backing, error) { return p.dev.makeBacking("reg_mr", m, access) })
}

// RegBacking registers memory of a kind that is made elsewhere, at an address for requests.
// If it fails the backing is closed.
func (p *PD) RegBacking(b mem.Backing, iova uint64, access ib.Access) (provider.MR, error) {
	opened := false
	mr, err := p.registerWith(memoryAt(0, 0, iova), access, func() (mem.Backing, error) { opened = true; return b, nil })
	if err != nil && !opened {
		_ = b.Close() // the first error says more
	}
	return mr, err
}

func (p *PD) registerWith(m memory, access ib.Access, open func() (mem.Backing, error)) (provider.MR, error) {
	d := p.dev
	if err := p.use("reg_mr", &d.counts.mrs, d.limits.MRs); err != nil {
		return nil, err
	}
	b, err := open()
	if err != nil {
		p.unuse(&d.counts.mrs)
		return nil, err
	}
	region, err := d.table.Register(mem.RegionConfig{PD: p.id, Access: access, IOVA: m.iovaOf(b), Length: b.Len(), Backing: b})
	if err != nil {
		_ = b.Close() // the first error says more
		p.unuse(&d.counts.mrs)
		return nil, err
	}
	r := &MR{region: region, pd: p}
	r.useLocked(&m) // no other goroutine has it yet
	return r, nil
}

func (m *MR) LKey() uint32      { return uint32(m.keyAccess.Load() >> 32) }
func (m *MR) RKey() uint32      { return m.LKey() }
func (m *MR) Addr() uint64      { return m.addr.Load() }
func (m *MR) Length() uint64    { return m.length.Load() }
func (m *MR) Access() ib.Access { return ib.Access(uint32(m.keyAccess.Load())) }

// Locked reports whether the pages are locked, and if not, why.
func (m *MR) Locked() (bool, string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b, ok := m.region.Backing().(interface {
		Locked() bool
		LockNote() string
	})
	if !ok {
		return false, "not pinned"
	}
	return b.Locked(), b.LockNote()
}

// PinsDMABuf reports whether the device holds dma-bufs that it registers in place.
func (p *PD) PinsDMABuf() bool { return p.dev.cfg.PinDMABuf }

// PinsDMABuf reports whether the device holds dma-bufs that it registers in place.
func (m *MR) PinsDMABuf() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pd.PinsDMABuf()
}

// DMADevice returns the device, for an exporter that sees the domain as the importer of its
// dma-buf: package p2p finds by it where in the machine the importer is.
func (p *PD) DMADevice() any { return p.dev }

// DMADevice returns the device.
func (m *MR) DMADevice() any {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pd.DMADevice()
}

// DMABufCounts returns the device's counters of dma-bufs.
func (p *PD) DMABufCounts() *mem.DMABufCounts { return &p.dev.dmabufs }

// DMABufCounts returns the device's counters of dma-bufs.
func (m *MR) DMABufCounts() *mem.DMABufCounts {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pd.DMABufCounts()
}

// ReregBacking is Rereg to memory of a kind that is made elsewhere, at an address for requests.
// If it fails with the old region valid, or none, the backing is closed.
func (m *MR) ReregBacking(b mem.Backing, iova uint64, c provider.MRChange) error {
	err := m.rereg(c, &memory{iova: &iova, backing: b})
	var failed *ib.ReregError
	if errors.As(err, &failed) && failed.State != ib.ReregNewValid {
		_ = b.Close() // the first error says more
	}
	return err
}

// Rereg changes the region.
func (m *MR) Rereg(c provider.MRChange) error { return m.rereg(c, nil) }

// rereg changes the region, to memory that was made elsewhere if made is not nil. Everything
// that may fail comes before the region itself changes, so that a failure leaves it as it was; only to close its former backing may fail after it
// has changed.
func (m *MR) rereg(c provider.MRChange, made *memory) error {
	const op = "rereg_mr"
	m.mu.Lock()
	defer m.mu.Unlock()
	had := m.region.Backing()
	if m.closed {
		return &ib.ReregError{State: ib.ReregUnusable, Err: ib.Errorf(op, syscall.EINVAL, "the region is closed")}
	}
	oldValid := func(err error) error { return &ib.ReregError{State: ib.ReregOldValid, Err: err} }
	if b, ok := had.(interface{ CanRereg() error }); ok {
		if err := b.CanRereg(); err != nil {
			return oldValid(named(op, err))
		}
	}
	pd := m.pd
	if c.PD != nil {
		var ok bool
		if pd, ok = c.PD.(*PD); !ok || pd.dev != m.pd.dev {
			return oldValid(ib.Errorf(op, syscall.EINVAL, "the protection domain belongs to another device"))
		}
	}
	access := m.Access()
	if c.Access != nil {
		access = *c.Access
	}
	to := m.memoryLocked()
	switch {
	case made != nil:
		to = *made
	case c.Buf != nil:
		to = memoryOf(c.Buf)
	case c.Alloc != 0:
		to = memory{alloc: c.Alloc}
	case c.Range != nil:
		to = memoryAt(c.Range.Addr, c.Range.Length, c.Range.IOVA)
	}
	if to.dm && access&ib.AccessZeroBased == 0 {
		return oldValid(errZeroBased(op))
	}
	backing, err := m.backingFor(op, had, &c, to, access)
	if err != nil {
		return oldValid(err)
	}
	giveUp := func() {
		if backing != had && made == nil {
			_ = backing.Close() // the first error says more
		}
	}
	if err := pd.ref(op); err != nil {
		giveUp()
		return oldValid(err)
	}
	err = m.region.Rereg(mem.RegionConfig{PD: pd.id, Access: access, IOVA: to.iovaOf(backing), Length: backing.Len(), Backing: backing, KeepKey: c.KeepKeys})
	var failed *ib.ReregError
	if errors.As(err, &failed) && failed.State != ib.ReregNewValid {
		giveUp()
		pd.unref()
		return err
	}
	m.pd.unref()
	m.pd = pd
	m.useLocked(&to)
	if backing != had {
		pd.dev.shares.forget(m) // other memory is not what was shared
	}
	return err
}

// backingFor returns the backing of the changed region: its present one, if that will do.
func (m *MR) backingFor(op string, had mem.Backing, c *provider.MRChange, to memory, access ib.Access) (mem.Backing, error) {
	switch {
	case to.backing != nil:
		return to.backing, nil
	case to.alloc != 0 && access&ib.AccessOnDemand != 0:
		return nil, errAllocOnDemand(op)
	case to.alloc != 0:
		return m.pd.dev.allocate(op, to.alloc, access)
	}
	if c.Buf != nil || c.Range != nil || (m.Access()^access)&ib.AccessOnDemand != 0 {
		if _, ours := had.(*mem.Alloc); ours && c.Buf == nil && c.Range == nil {
			return nil, errAllocOnDemand(op)
		}
		return m.pd.dev.makeBacking(op, to, access)
	}
	if a, ok := had.(interface{ Adapt(ib.Access) error }); ok {
		if err := a.Adapt(access); err != nil {
			return nil, named(op, err)
		}
	}
	return had, nil
}

// ref and unref change how many objects the domain has, for one that moves.
func (p *PD) ref(op string) error {
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	if p.closed {
		return ib.Errorf(op, syscall.EINVAL, "the protection domain is closed")
	}
	p.refs++
	return nil
}

func (p *PD) unref() {
	p.dev.mu.Lock()
	p.refs--
	p.dev.mu.Unlock()
}

// Close deregisters: when it returns, the device touches the memory no more. It
// fails with EBUSY while windows are bound to the region.
func (m *MR) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	err := m.region.Close()
	if m.closed = m.region.Closed(); m.closed {
		m.pd.dev.shares.forget(m)
		if m.dmah != nil {
			m.dmah.use(-1)
		}
		m.pd.unuse(&m.pd.dev.counts.mrs)
	}
	return err
}
