package mem

// Memory of another process, its owner, which has registered it and shares the
// registration (ibv_import_mr). It is not mapped here and cannot be; the kernel copies,
// for those whom it lets debug the owner. The way of an access:
//
//  1. Enter the guard: from when the owner has deregistered on, nobody can; while the
//     owner has suspended the memory, not yet.
//  2. Read or write the owner's memory, by a descriptor of it.
//  3. Leave the guard. If the owner has suspended the memory meanwhile, it is to be done
//     again.
//
// The kernel may have to fetch the owner's pages first, and the owner may move them for as
// long as it likes: so it is an Engine, and a goroutine for each stream waits. Nobody changes
// such memory in one step.
//
// The descriptor leads to the memory of that process alone: if it is gone, or something
// is not mapped there, an access fails.

import (
	"errors"
	"io"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Imported is a Backing of memory of another process.
type Imported struct {
	ImportedConfig

	ended atomic.Bool // the owner has ended while the memory was suspended
}

// ImportedConfig says where the memory is. The Foreign closes all of it.
type ImportedConfig struct {
	Memory       int // a descriptor of the owner's memory: sys.OpenMemory
	Addr, Length uint64
	Guard        *Guard
	Link         ImportedLink
}

// ImportedLink is the connection with the owner: closing it tells the owner that nobody is
// there any more.
type ImportedLink interface {
	io.Closer
	// HungUp reports whether the owner has ended, or let go of it.
	HungUp() bool
}

// NewImported makes a backing. The caller has seen that Addr+Length does not wrap.
func NewImported(cfg ImportedConfig) *Imported { return &Imported{ImportedConfig: cfg} }

// Kind returns KindImported.
func (f *Imported) Kind() Kind { return KindImported }

// Len returns the number of bytes.
func (f *Imported) Len() uint64 { return f.Length }

// NeverFaults tells that what Run offers cannot be gone.
func (f *Imported) NeverFaults() bool { return true }

// Borrowed tells that it is not registered again, which is its owner's to do.
func (f *Imported) Borrowed() bool { return true }

// Run is never called.
func (f *Imported) Run(uint64, uint64, ib.Access) ([]byte, FaultKind) { return nil, FaultAccess }

// Owner is the memory itself: nobody copies within another process.
func (f *Imported) Owner() any { return f }

// Begin has an operation done by the goroutine of its stream.
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

// store writes bytes. If they end a message, what lies in their last word goes after the
// rest: the owner may be looking at it.
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

// insist moves bytes, again and again while the owner moves the memory, unless nobody wants
// them any more.
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
		return FaultStale // nobody will resume it
	}
	if kind != FaultNone {
		return kind
	}
	ok := call(f.Memory, b, f.Addr+off)
	still := f.Guard.Still(since)
	f.Guard.Leave()
	switch {
	case !still:
		return FaultPending // the owner has moved the memory meanwhile: it is to be done again
	case !ok:
		return FaultStale
	}
	return FaultNone
}

// await waits for a moment, while the owner moves the memory.
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

// Close lets go of everything, the link last.
func (f *Imported) Close() error {
	return errors.Join(sys.CloseFD(f.Memory), f.Guard.Close(), f.Link.Close())
}
