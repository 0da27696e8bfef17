package mem

import (
	"errors"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// FLUSH (IBA annex A19), in two steps:
//
//  1. Flush checks the request and makes what was written before it visible to
//     all processors and devices. It never waits.
//  2. Persist, where the peer has asked for that, brings it to storage. That may take
//     long: the caller holds no lock, and no read section is open.

// FlushRange is what a peer asks to be flushed.
type FlushRange struct {
	Key   uint32
	Addr  uint64
	Len   uint64
	Whole bool      // all of the region: Addr and Len mean nothing
	Acc   ib.Access // what is asked for, as the rights that it needs
}

// durable is a Backing that can bring its bytes to storage, if Durable returns true.
// Persist may block, and is called outside any read section: perhaps after
// Close, when it must do no harm. It touches no bytes.
type durable interface {
	Durable() bool
	Persist(off, n uint64) error
}

func isDurable(b Backing) bool {
	d, ok := b.(durable)
	return ok && d.Durable()
}

// Flush checks a FLUSH: key, state, domain, rights, bounds. Unlike a READ or
// WRITE of nothing, a FLUSH of nothing must name a good key.
//
// It makes everything that was copied before visible to all. Nothing more than
// a memory barrier is needed for that, since copies are made by the CPU, whose
// caches are coherent with each other and with devices; hardware has to push
// its writes out of the I/O complex. The barrier is the read section itself,
// which begins and ends with an atomic read-modify-write.
func (t *Table) Flush(f FlushRange, who Actor) Fault {
	r, _, _, fault := t.openFlush(&f, who)
	if fault.OK() {
		r.exit()
	}
	return fault
}

// Persist brings the bytes to storage. It may block. Rights and bounds are
// checked again; a region that is closed from then on does not wait for it.
func (t *Table) Persist(f FlushRange, who Actor) Fault {
	r, off, n, fault := t.openFlush(&f, who)
	if !fault.OK() {
		return fault
	}
	d, ok := r.backing.(durable)
	fault = r.fault(FaultAccess, off, n, f.Acc) // here, where it is certain what the region is
	r.exit()
	if !ok {
		return fault // Register refuses such regions
	}
	if n == 0 {
		return Fault{}
	}
	switch err := d.Persist(off, n); {
	case err == nil:
		return Fault{}
	case errors.Is(err, syscall.ENOMEM):
		fault.Kind = FaultStale // not mapped any more
	default:
		fault.Kind = FaultStorage
	}
	return r.report(fault)
}

// openFlush opens a section on the region, and returns where in it the range lies.
func (t *Table) openFlush(f *FlushRange, who Actor) (r *Region, off, n uint64, fault Fault) {
	addr, n := f.Addr, f.Len
	if f.Whole {
		if r = t.Lookup(f.Key); r != nil {
			now, _ := r.Snapshot()
			addr, n = now.IOVA, now.Length // if it becomes another region now, its key does not fit any more
		}
	}
	if r = t.Lookup(f.Key); r == nil {
		return nil, 0, 0, Fault{Kind: FaultKey, Key: f.Key, Extent: Extent{addr, n}}
	}
	off, leaf, kind := r.open(f.Key, addr, n, f.Acc, who, shutToBytes)
	if kind != FaultNone {
		return nil, 0, 0, shutFault(leaf, kind, f.Key, addr, n)
	}
	return r, off, n, Fault{}
}
