package mem

// Imported memory: another process, its owner, has registered it and shares the
// registration (ibv_import_mr). This process cannot map it; the kernel copies to and from
// it, for a process that may debug the owner. An access
//
//  1. enters the guard, which fails for good once the owner has deregistered the memory,
//     and for a while when the owner has suspended it;
//  2. reads or writes the owner's memory, by a descriptor of it;
//  3. leaves the guard, and begins again if the owner has suspended the memory meanwhile.
//
// The kernel may have to fetch the owner's pages first, and a suspension lasts as long as
// the owner likes. So Imported is an Engine, with a goroutine for each stream that may
// wait. It has no atomics: the kernel only copies.
//
// The descriptor stands for the address space of that one process, also when its number is
// another process's by now: if the owner has ended, or nothing is mapped at an address, the
// access fails.

import (
	"errors"
	"io"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Imported is a Backing of imported memory.
type Imported struct {
	ImportedConfig

	ended atomic.Bool // the owner has hung up while the memory was suspended
}

// ImportedConfig is where the memory is, and how it is reached. Imported.Close closes
// Memory, Guard and Link.
type ImportedConfig struct {
	Memory       int // a descriptor of the owner's memory: sys.OpenMemory
	Addr, Length uint64
	Guard        *Guard
	Link         ImportedLink
}

// ImportedLink is the connection with the owner, which takes its closing for the end of all
// accesses from this process.
type ImportedLink interface {
	io.Closer
	// HungUp reports whether the owner has ended, or closed its end.
	HungUp() bool
}

// NewImported makes a backing. The caller has checked that Addr+Length does not wrap.
func NewImported(cfg ImportedConfig) *Imported { return &Imported{ImportedConfig: cfg} }

// Kind returns KindImported.
func (f *Imported) Kind() Kind { return KindImported }

// Len returns the number of bytes.
func (f *Imported) Len() uint64 { return f.Length }

// NeverFaults returns true: the CPU never touches the bytes.
func (f *Imported) NeverFaults() bool { return true }

// Borrowed returns true: only the owner registers the memory again.
func (f *Imported) Borrowed() bool { return true }

// Run is never called, since Imported is an Engine.
func (f *Imported) Run(uint64, uint64, ib.Access) ([]byte, FaultKind) { return nil, FaultAccess }

// Owner returns f itself: a copy between two imported memories is a load and a store, also
// if they are of one process.
func (f *Imported) Owner() any { return f }

// Begin hands an operation to the goroutine of its stream.
func (f *Imported) Begin(op *Op) { inOrder(f, op, f.do) }

// do does an operation.
func (f *Imported) do(op *Op) FaultKind {
	switch op.Kind {
	case OpLoad:
		return f.insist(op, sys.ReadMemory, op.Off, op.Bytes)
	case OpStore:
		return f.store(op, op.Off, op.Bytes, op.Last)
	case OpCopy:
		return f.copy(op)
	}
	return FaultAccess // an atomic
}

// store writes bytes. If they end a message, those in their last word are written after the
// rest: the owner process may be spinning on that word.
func (f *Imported) store(op *Op, off uint64, b []byte, last bool) FaultKind {
	if last {
		end := int((f.Addr+off+uint64(len(b))-1)%wordSize) + 1
		if head := len(b) - end; head > 0 {
			if kind := f.insist(op, sys.WriteMemory, off, b[:head]); kind != FaultNone {
				return kind
			}
			off, b = off+uint64(head), b[head:]
		}
	}
	return f.insist(op, sys.WriteMemory, off, b)
}

// copy copies within the memory.
func (f *Imported) copy(op *Op) FaultKind {
	b := staging.get(int(min(op.N, Quantum)))
	defer staging.put(b)
	for done := uint64(0); done < op.N; {
		k := min(op.N-done, uint64(len(b)))
		if kind := f.insist(op, sys.ReadMemory, op.FromOff+done, b[:k]); kind != FaultNone {
			return kind
		}
		if kind := f.store(op, op.Off+done, b[:k], op.Last && done+k == op.N); kind != FaultNone {
			return kind
		}
		done += k
	}
	return FaultNone
}

// insist moves bytes, again for as long as the owner's suspensions come between. It gives up
// when the region is being taken away for good (Op.Unwanted).
func (f *Imported) insist(op *Op, call func(fd int, b []byte, addr uint64) bool, off uint64, b []byte) FaultKind {
	for {
		kind := f.move(call, off, b)
		if kind != FaultPending {
			return kind
		}
		if op.Unwanted() {
			return FaultDead
		}
		f.await()
	}
}

func (f *Imported) move(call func(fd int, b []byte, addr uint64) bool, off uint64, b []byte) FaultKind {
	since, kind := f.Guard.Enter()
	if kind == FaultPending && f.ended.Load() {
		return FaultStale // the owner will not resume it
	}
	if kind != FaultNone {
		return kind
	}
	ok := call(f.Memory, b, f.Addr+off)
	still := f.Guard.Still(since)
	f.Guard.Leave()
	switch {
	case !still:
		return FaultPending // the owner has suspended the memory meanwhile, and may have moved it
	case !ok:
		return FaultStale
	}
	return FaultNone
}

// await sleeps for a moment if the memory is suspended, and notes if the owner has hung up.
func (f *Imported) await() {
	if !f.Guard.Suspended() {
		return
	}
	if f.Link.HungUp() {
		f.ended.Store(true)
		return
	}
	time.Sleep(guardLook)
}

// Close closes the descriptor and the guard, and then the link, by which the owner learns
// of it.
func (f *Imported) Close() error {
	return errors.Join(sys.CloseFD(f.Memory), f.Guard.Close(), f.Link.Close())
}
