package cuda

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// notForGPUs are rights that regions of GPU memory cannot have: it is not paged, and nobody knows
// whether it persists.
const notForGPUs = ib.AccessOnDemand | ib.AccessFlushPersistent

// Register registers memory of a GPU by its address; iova is the address in requests. ctx is as
// for Find.
//
// Errors: EINVAL for rights that such regions cannot have; those of Find.
func (d *Driver) Register(pd provider.PD, addr, n, iova uint64, access ib.Access, ctx uintptr) (provider.MR, error) {
	const op = "reg_mr"
	p, ok := pd.(interface {
		RegBacking(b mem.Backing, iova uint64, access ib.Access) (provider.MR, error)
	})
	if !ok {
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "the device has no memory of GPUs")
	}
	m, err := d.open(op, addr, n, access, ctx)
	if err != nil {
		return nil, err
	}
	return p.RegBacking(m, iova, access)
}

// Rereg registers a region anew, with memory of a GPU. The error is an *ib.ReregError. c has what
// else changes.
func (d *Driver) Rereg(mr provider.MR, addr, n, iova uint64, c provider.MRChange, ctx uintptr) error {
	const op = "rereg_mr"
	r, ok := mr.(interface {
		ReregBacking(b mem.Backing, iova uint64, c provider.MRChange) error
	})
	if !ok {
		return &ib.ReregError{State: ib.ReregOldValid, Err: ib.Errorf(op, syscall.EOPNOTSUPP, "the device has no memory of GPUs")}
	}
	access := mr.Access()
	if c.Access != nil {
		access = *c.Access
	}
	m, err := d.open(op, addr, n, access, ctx)
	if err != nil {
		return &ib.ReregError{State: ib.ReregOldValid, Err: err}
	}
	return r.ReregBacking(m, iova, c)
}

// open checks what is asked for, and finds the memory.
func (d *Driver) open(op string, addr, n uint64, access ib.Access, ctx uintptr) (*Memory, error) {
	if err := canHave(op, access); err != nil {
		return nil, err
	}
	if access&(ib.AccessRemoteWrite|ib.AccessRemoteAtomic) != 0 && access&ib.AccessLocalWrite == 0 {
		return nil, ib.Errorf(op, syscall.EINVAL, "remote write and remote atomic access need local write access")
	}
	return d.Find(op, addr, n, ctx)
}

// Adapt refuses rights that regions of GPU memory cannot have.
func (m *Memory) Adapt(access ib.Access) error { return canHave("rereg_mr", access) }

func canHave(op string, access ib.Access) error {
	if access&notForGPUs != 0 {
		return ib.Errorf(op, syscall.EINVAL, "access bits %#x are not for memory of a GPU", uint32(access&notForGPUs))
	}
	return nil
}

// Gone is what a program is about to free.
type Gone uint32

const (
	GoneAllocation Gone = iota + 1 // the allocation that begins at addr
	GoneRange                      // what is mapped at addr
	GoneContext                    // addr is the context
	GoneDevice                     // addr is the number of the GPU whose primary context is reset
	GoneHost                       // page-locked memory of the host
	GoneRelease                    // addr is the number of a GPU whose primary context has one user less; a card is one itself
)

// Leave makes the device leave memory that the program is about to free: when it returns, no
// access is under way, and none will begin. The regions are revoked.
func (d *Driver) Leave(what Gone, addr, n uint64) {
	switch what {
	case GoneHost:
		d.leaveHost(addr)
		return
	case GoneRelease:
		return
	}
	if what == GoneContext || what == GoneDevice {
		d.host.known.clear()
	}
	going := d.dying(what, addr)
	d.revoke(func(m *Memory) bool { return m.card.dead || m.touches(what, addr, n) })
	for _, c := range going {
		if <-c.ready; c.err == nil {
			c.leave()
		}
		d.putCard(c)
	}
}

// dying returns the cards whose context is about to go. The caller gives them back.
func (d *Driver) dying(what Gone, addr uint64) (going []*card) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for ctx, c := range d.cards {
		if !c.dead && (what == GoneContext && ctx == uintptr(addr) || what == GoneDevice && c.primary && uint64(c.device) == addr) {
			c.dead = true
			c.users++
			going = append(going, c)
		}
	}
	return going
}

// revoke makes the device leave some of the memory.
func (d *Driver) revoke(which func(m *Memory) bool) {
	d.mu.Lock()
	var gone []*Memory
	for _, c := range d.cards {
		for m := range c.memories {
			if which(m) {
				gone = append(gone, m)
			}
		}
	}
	d.mu.Unlock()
	for _, m := range gone {
		m.revoke()
	}
}

// touches reports whether the memory lies in what is about to go.
func (m *Memory) touches(what Gone, addr, n uint64) bool {
	for _, p := range m.pieces {
		if what == GoneAllocation && p.start == addr || what == GoneRange && p.start < addr+n && addr < p.end {
			return true
		}
	}
	return false
}

// revoke ends all accesses to the memory, and has other processes close it.
func (m *Memory) revoke() {
	m.mu.Lock()
	r := m.region
	m.mu.Unlock()
	if r != nil {
		r.RevokeOn(m) // first: accesses then end as those to any memory that was revoked
		mem.Unshare(m)
	}
	m.gone.Store(true)
}

// leaveHost makes the cards leave page-locked memory of the host that is about to go. From then on
// it is treated as any other memory of the program's.
func (d *Driver) leaveHost(addr uint64) {
	p, ok := d.ask(addr)
	if !ok || p.memoryType != typeHost {
		return
	}
	e := extent{p.start, p.start + p.size}
	if p.size == 0 {
		e = extent{addr, addr + 1}
	}
	d.host.leave(e)
	d.mu.Lock()
	var cards []*card
	for _, c := range d.cards {
		c.users++
		cards = append(cards, c)
	}
	d.mu.Unlock()
	for _, c := range cards {
		if <-c.ready; c.err == nil {
			c.settle(false)
		}
		d.putCard(c)
	}
}
