package device

// On-demand paging as a device offers it: what it can do, the region that is the
// whole address space, advice about memory that is going to be used.
//
// The stages of advice: Advise checks every element. Then it prefetches, if the caller wants
// to wait (flush); if not, the advisor's goroutine does.

import (
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// ODPCaps returns what on-demand paging the device supports.
func (d *Device) ODPCaps() ib.ODPCaps {
	const reliable = ib.ODPSend | ib.ODPRecv | ib.ODPWrite | ib.ODPRead | ib.ODPAtomic | ib.ODPSRQRecv | ib.ODPFlush | ib.ODPAtomicWrite
	means := mem.PagingMeans()
	return ib.ODPCaps{
		Supported: true, Implicit: true,
		RC: reliable, XRC: reliable,
		UC:       ib.ODPSend | ib.ODPRecv | ib.ODPWrite,
		UD:       ib.ODPSend | ib.ODPRecv | ib.ODPSRQRecv,
		Notifier: means.Notifier, Scan: means.Scan, Mappings: means.Mappings, Fetch: means.Fetch,
	}
}

// PagingStats returns the device's counters of on-demand paging.
func (d *Device) PagingStats() ib.PagingStats { return d.table.Paging().Stats() }

// PagingStats returns the region's counters of on-demand paging; all are zero if
// it is not on demand.
func (m *MR) PagingStats() ib.PagingStats {
	is, ok := m.region.Snapshot()
	if !ok { // it is closed, or a call is closing or changing it, which may have to wait for storage
		if !m.mu.TryLock() {
			return ib.PagingStats{}
		}
		is.Backing = m.region.Backing()
		m.mu.Unlock()
	}
	if b, ok := is.Backing.(interface{ Stats() ib.PagingStats }); ok {
		return b.Stats()
	}
	return ib.PagingStats{}
}

// advisor does prefetches that no caller waits for.
type advisor struct {
	mu      sync.Mutex // guards what follows
	list    []mem.Prefetch
	parts   int // of them all
	running bool

	worker sync.WaitGroup // ends when the list is empty; close waits
}

// maxAdvice is how many parts of prefetches wait at most: a call that gives more advice
// prefetches itself.
const maxAdvice = 1024

// Advise prefetches memory that is going to be used. The errors are those of
// ibv_advise_mr(3).
func (p *PD) Advise(advice ib.Advice, flush bool, sgl []ib.SGE) error {
	const op = "advise_mr"
	if advice > ib.AdvisePrefetchNoFault {
		return ib.Errorf(op, syscall.EOPNOTSUPP, "advice %d", advice)
	}
	if len(sgl) == 0 {
		return ib.Errorf(op, syscall.EINVAL, "an empty list")
	}
	p.dev.mu.Lock()
	closed := p.closed
	p.dev.mu.Unlock()
	if closed {
		return ib.Errorf(op, syscall.EINVAL, "the protection domain is closed")
	}
	f := mem.Prefetch{Parts: make([]mem.Part, len(sgl)),
		Write: advice == ib.AdvisePrefetchWrite, NoFault: advice == ib.AdvisePrefetchNoFault}
	for i := range sgl {
		var err error
		if f.Parts[i], err = p.partOf(&sgl[i], f.Write); err != nil {
			return err
		}
	}
	if !flush && p.dev.advisor.add(&f) {
		return nil
	}
	if i, kind := f.Do(flush); kind != mem.FaultNone && flush {
		return ib.Errorf(op, syscall.EFAULT, "%d bytes at %#x: %v", sgl[i].Length, sgl[i].Addr, kind)
	}
	return nil
}

// partOf checks an element of an advice.
func (p *PD) partOf(e *ib.SGE, write bool) (mem.Part, error) {
	const op = "advise_mr"
	refuse := func(errno syscall.Errno, format string, args ...any) (mem.Part, error) {
		return mem.Part{}, ib.Errorf(op, errno, format, args...)
	}
	var is mem.RegionConfig
	r := p.dev.table.Lookup(e.LKey)
	if r != nil {
		var ok bool
		if is, ok = r.Snapshot(); !ok {
			r = nil
		}
	}
	switch {
	case r == nil:
		return refuse(syscall.ENOENT, "no region has the key %#x", e.LKey)
	case is.PD != p.id:
		return refuse(syscall.EPERM, "the region %#x is of another protection domain", e.LKey)
	case is.Access&ib.AccessOnDemand == 0 && !mem.Prefetches(is.Backing):
		return refuse(syscall.EINVAL, "the region %#x is neither on demand nor of a dma-buf that may move", e.LKey)
	case write && is.Access&ib.AccessLocalWrite == 0:
		return refuse(syscall.EPERM, "the region %#x may not be written", e.LKey)
	}
	off, n := e.Addr-is.IOVA, uint64(e.Length)
	if off > is.Length || n > is.Length-off { // an address below the region is an off beyond it
		return refuse(syscall.EFAULT, "%d bytes at %#x are not inside the region", n, e.Addr)
	}
	return mem.Part{Region: r, Key: e.LKey, Off: off, N: n}, nil
}

// add leaves a prefetch to the worker, unless it has enough to do.
func (a *advisor) add(f *mem.Prefetch) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.parts > maxAdvice-min(len(f.Parts), maxAdvice) {
		return false
	}
	a.parts += len(f.Parts)
	a.list = append(a.list, *f)
	if !a.running {
		a.running = true
		a.worker.Add(1)
		go a.work()
	}
	return true
}

// work does prefetches while there are any.
func (a *advisor) work() {
	defer a.worker.Done()
	for {
		a.mu.Lock()
		list := a.list
		a.list, a.parts = nil, 0
		a.running = len(list) > 0
		a.mu.Unlock()
		if len(list) == 0 {
			return
		}
		for i := range list {
			list[i].Do(false) // a hint: a failure is not reported
		}
	}
}

// close waits for the worker. All regions are closed, so it has nothing to do.
func (a *advisor) close() { a.worker.Wait() }
