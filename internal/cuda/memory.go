package cuda

import (
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Memory is a range of a GPU's memory, as the backing of a region.
type Memory struct {
	card   *card
	addr   uint64 // of the first byte; in this process
	n      uint64
	pieces []piece // what it lies in, by address; none if it is another process's
	of     *imported

	gone   atomic.Bool // it was freed, or will be in a moment
	shared atomic.Pointer[passport]

	mu     sync.Mutex // guards region
	region *mem.Region
}

// piece is an allocation, or memory that is mapped at an address: what the driver gives a number.
type piece struct {
	start, end uint64
	id         uint64
	legacyIPC  bool
	posix      bool // it can be exported as a descriptor
}

// maxPieces is how many pieces a range may lie in: each access looks at those that it touches.
const maxPieces = 1 << 16

// Device reports whether there is memory of a GPU at an address, which the CPU does not address.
// Managed memory is not: the CPU reaches that by itself.
func (d *Driver) Device(addr uint64) bool {
	era := d.host.known.now()
	p, ok := d.ask(addr)
	if ok && p.memoryType == typeHost && !p.managed && p.start <= addr && addr < p.start+p.size {
		d.host.note(extent{p.start, p.start + p.size}, era)
	}
	return ok && p.isDevice()
}

func (d *Driver) ask(addr uint64) (p pointer, ok bool) {
	d.asks.do(func() {
		var r Result
		p, r = d.lookup(addr)
		ok = r == success
	})
	return p, ok
}

func (p *pointer) isDevice() bool { return p.memoryType == typeDevice && !p.managed }

// Find returns memory of a GPU by its address. ctx is the context to use for memory that belongs
// to none; 0: the primary context of its GPU, if the program uses that.
//
// Errors: EFAULT if not all of it is memory of one GPU; EINVAL if it has no bytes, or no context.
func (d *Driver) Find(op string, addr, n uint64, ctx uintptr) (*Memory, error) {
	if n == 0 || addr+n < addr {
		return nil, ib.Errorf(op, syscall.EINVAL, "%d bytes at %#x", n, addr)
	}
	m := &Memory{addr: addr, n: n}
	first, ok := d.ask(addr)
	if !ok || !first.isDevice() {
		return nil, notOneGPU(op, m, addr)
	}
	if first.ctx != 0 {
		ctx = first.ctx
	}
	var err error
	if ctx == 0 {
		if ctx, err = d.primaryOf(op, first.device); err != nil {
			return nil, err
		}
	}
	if err := d.walkIn(op, ctx, m, &first); err != nil {
		return nil, err
	}
	c, err := d.cardOf(op, ctx, first.device)
	if err != nil {
		return nil, err
	}
	m.card = c
	d.asks.in(c.ctx, func() Result { // a program's copies are then over when they return, as peers expect
		for _, p := range m.pieces {
			d.syncMemops(p.start) // memory that cannot have it is copied as it always was
		}
		return success
	})
	if !d.enter(m) {
		d.putCard(c)
		return nil, ib.Errorf(op, syscall.EFAULT, "the context of %#x is being destroyed", addr)
	}
	return m, nil
}

// enter notes memory, for Leave to find, and reports whether its context is not being destroyed.
func (d *Driver) enter(m *Memory) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m.card.dead {
		return false
	}
	m.card.memories[m] = true
	return true
}

// walkIn is walk, in a context.
func (d *Driver) walkIn(op string, ctx uintptr, m *Memory, first *pointer) (err error) {
	r := d.asks.in(ctx, func() Result {
		err = d.walk(op, m, first)
		return success
	})
	if r != success {
		return d.check(op, fnCtxSetCurrent, r)
	}
	return err
}

// walk finds the pieces of a range. first is what the driver knows about its first byte. A context is current.
func (d *Driver) walk(op string, m *Memory, first *pointer) error {
	end := m.addr + m.n
	for at := m.addr; at < end; {
		p, r := d.lookup(at)
		if r != success {
			return d.check(op, fnPointerGetAttributes, r)
		}
		if p.isDevice() && !p.legacyIPC {
			if p.start, p.size, r = d.mapping(at); r != success {
				return d.check(op, fnMemGetAddressRange, r)
			}
		}
		next := p.start + p.size
		if !p.isDevice() || p.device != first.device || p.ctx != first.ctx || p.start > at || next <= at || p.id == 0 {
			return notOneGPU(op, m, at)
		}
		if len(m.pieces) == maxPieces {
			return ib.Errorf(op, syscall.ENOMEM, "%d bytes at %#x lie in more than %d pieces", m.n, m.addr, maxPieces)
		}
		m.pieces = append(m.pieces, piece{start: p.start, end: next, id: p.id, legacyIPC: p.legacyIPC, posix: p.handleTypes&handlePosix != 0})
		at = next
	}
	return nil
}

// notOneGPU is the error of a range of which the byte at an address is not memory of the GPU that the others are of.
func notOneGPU(op string, m *Memory, at uint64) error {
	return ib.Errorf(op, syscall.EFAULT, "%d bytes at %#x: not all of them are memory of one GPU, %#x is not", m.n, m.addr, at)
}

// primaryOf returns the primary context of a device, if the program uses it.
func (d *Driver) primaryOf(op string, device int32) (ctx uintptr, err error) {
	d.asks.do(func() {
		if !d.primaryActive(device) {
			err = ib.Errorf(op, syscall.EINVAL, "the memory belongs to no context, and GPU %d has no primary one in use", device)
			return
		}
		var r Result
		if ctx, r = d.retainPrimary(device); r != success {
			err = d.check(op, fnPrimaryCtxRetain, r)
			return
		}
		d.releasePrimary(device) // the card retains it
	})
	return ctx, err
}

// Bind notes the region that stands on the memory: see mem.Movable.
func (m *Memory) Bind(r *mem.Region) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.region = r
}

// Kind returns KindGPU.
func (m *Memory) Kind() mem.Kind { return mem.KindGPU }

// Len returns the number of bytes.
func (m *Memory) Len() uint64 { return m.n }

// Addr returns the address of the first byte, on the GPU.
func (m *Memory) Addr() uint64 { return m.addr }

// NeverFaults returns true: the CPU never touches the bytes.
func (m *Memory) NeverFaults() bool { return true }

// Run is never called, since Memory is a mem.Engine.
func (m *Memory) Run(uint64, uint64, ib.Access) ([]byte, mem.FaultKind) {
	return nil, mem.FaultAccess
}

// Owner returns the card: it copies between all memory of its context.
func (m *Memory) Owner() any { return m.card }

// Begin hands an operation to the worker of its stream.
func (m *Memory) Begin(op *mem.Op) {
	o := m.card.orderOf(op.Stream)
	o.worker.begin(job{Op: op, memory: m, order: o})
}

// check reports whether what an operation needs is still there. The worker calls it.
func (m *Memory) check(op *mem.Op) mem.FaultKind {
	n := lengthOf(op)
	if kind := m.current(op.Off, n); kind != mem.FaultNone {
		return kind
	}
	if op.Kind == mem.OpCopy {
		return op.From.(*Memory).current(op.FromOff, n)
	}
	if op.InPlace {
		if locked, answered := m.card.drv.holdsLocked(op.Bytes); answered && !locked {
			return mem.FaultStale
		}
	}
	return mem.FaultNone
}

// Close gives the memory back.
func (m *Memory) Close() error {
	if m.of != nil {
		m.of.close()
		return nil
	}
	d := m.card.drv
	d.mu.Lock()
	delete(m.card.memories, m)
	d.mu.Unlock()
	if p := m.shared.Load(); p != nil {
		p.close()
	}
	d.putCard(m.card)
	return nil
}
