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
// What is read is a copy, in staging bytes. What is to be written is written to such bytes
// first, and Store brings them to the owner. The copy loop calls it (copy.go,
// far.go); nobody else writes to memory that it is not told to be near (gather.go, IsHost,
// Whole), and nobody changes it in one step (atomic.go).
//
// The descriptor leads to the memory of that process alone: if it is gone, or something
// is not mapped there, an access fails. An access waits for the owner's pages if they have
// to be fetched, as one to pinned memory that is not locked does.

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Foreign is a Backing of memory of another process.
type Foreign struct {
	ForeignConfig

	ended  atomic.Bool  // the owner has ended while the memory was suspended
	mu     sync.RWMutex // held for reading while Await looks at the guard
	closed bool         // guarded by mu
}

// ForeignConfig says where the memory is. The Foreign closes all of it.
type ForeignConfig struct {
	Memory       int // a descriptor of the owner's memory: sys.OpenMemory
	Addr, Length uint64
	Guard        *Guard
	Link         ForeignLink
}

// ForeignLink is the connection with the owner: closing it tells the owner that nobody is
// there any more.
type ForeignLink interface {
	io.Closer
	// HungUp reports whether the owner has ended, or let go of it.
	HungUp() bool
}

// NewForeign makes a backing. The caller has seen that Addr+Length does not wrap.
func NewForeign(cfg ForeignConfig) *Foreign { return &Foreign{ForeignConfig: cfg} }

// Kind returns KindForeign.
func (f *Foreign) Kind() Kind { return KindForeign }

// Len returns the number of bytes.
func (f *Foreign) Len() uint64 { return f.Length }

// Solid tells that what Run offers cannot be gone.
func (f *Foreign) Solid() bool { return true }

// PeerMemory tells that it takes no windows, and is not registered again, which is its
// owner's to do.
func (f *Foreign) PeerMemory() bool { return true }

// Run returns a copy of bytes, or if they are to be written a place for them.
func (f *Foreign) Run(off, n uint64, acc ib.Access) ([]byte, FaultKind) {
	if off >= f.Length || n > f.Length-off {
		return nil, FaultBounds
	}
	b := staging.get(int(min(n, Quantum)))
	if acc&writing != 0 {
		return b, FaultNone
	}
	if kind := f.move(sys.ReadMemory, off, b); kind != FaultNone {
		staging.put(b)
		return nil, kind
	}
	return b, FaultNone
}

// Done takes back bytes that Run has returned.
func (f *Foreign) Done(b []byte) { staging.put(b) }

// Store writes bytes. If they end a message, what lies in their last word goes after the
// rest: the owner may be looking at it.
func (f *Foreign) Store(off uint64, b []byte, last bool) FaultKind {
	if last {
		end := int((f.Addr+off+uint64(len(b))-1)%wordSize) + 1
		if head := len(b) - end; head > 0 {
			if kind := f.move(sys.WriteMemory, off, b[:head]); kind != FaultNone {
				return kind
			}
			off, b = off+uint64(head), b[head:]
		}
	}
	return f.move(sys.WriteMemory, off, b)
}

func (f *Foreign) move(call func(fd int, b []byte, addr uint64) bool, off uint64, b []byte) FaultKind {
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

// Gone is never called: what Run offers cannot be gone.
func (f *Foreign) Gone(uint64, uint64, ib.Access) FaultKind { return FaultStale }

// Await waits for an owner that moves the memory.
func (f *Foreign) Await(uint64, uint64, ib.Access) FaultKind {
	for range guardWait / guardLook {
		f.mu.RLock()
		waits := !f.closed && f.Guard.Suspended()
		if waits && f.Link.HungUp() {
			f.ended.Store(true)
			waits = false
		}
		f.mu.RUnlock()
		if !waits {
			return FaultNone
		}
		time.Sleep(guardLook)
	}
	return FaultPending
}

// Close lets go of everything, the link last.
func (f *Foreign) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	return errors.Join(sys.CloseFD(f.Memory), f.Guard.Close(), f.Link.Close())
}
