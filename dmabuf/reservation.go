package dmabuf

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// Usage is the class of a fence in a reservation. Who asks for a class gets those before it,
// too.
type Usage uint8

const (
	// Kernel fences stand for the movement of the memory itself. Everybody waits for them.
	Kernel Usage = iota
	// Write fences stand for accesses that write: readers wait for them.
	Write
	// Read fences stand for accesses that read: writers wait for them.
	Read
	// Bookkeep fences stand for anything else that uses the memory. Only an exporter that
	// moves or frees the memory waits for them.
	Bookkeep
	numUsages
)

var usageNames = [numUsages]string{"KERNEL", "WRITE", "READ", "BOOKKEEP"}

// String names the class as the kernel does.
func (u Usage) String() string {
	if u < numUsages {
		return usageNames[u]
	}
	return fmt.Sprintf("Usage(%d)", uint8(u))
}

// UsageFor returns the class of fences that an access waits for: a reader for writers, a
// writer for all.
func UsageFor(write bool) Usage {
	if write {
		return Read
	}
	return Write
}

// Reservation is the lock of a buffer, or of several that an exporter keeps together, and the
// fences of those that use it. Make one with NewReservation.
type Reservation struct {
	lock  chan struct{} // has room for the one who holds the lock
	check holder

	mu     sync.Mutex // guards what follows
	fences []reserved
	at     map[*Fence]int // where in fences each one is
	prune  int            // Add removes signalled fences when there are so many
}

// reserved is a fence and its class.
type reserved struct {
	fence *Fence
	usage Usage
}

// NewReservation returns a reservation that is not locked and has no fences.
func NewReservation() *Reservation { return &Reservation{lock: make(chan struct{}, 1)} }

// Lock locks the reservation.
func (r *Reservation) Lock() {
	r.check.wants()
	r.lock <- struct{}{}
	r.check.got()
}

// LockContext locks the reservation, or returns the context's error if that ends first.
func (r *Reservation) LockContext(ctx context.Context) error {
	r.check.wants()
	select {
	case r.lock <- struct{}{}:
	default:
		select {
		case r.lock <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	r.check.got()
	return nil
}

// TryLock locks the reservation if nobody has. It reports whether it did.
func (r *Reservation) TryLock() bool {
	select {
	case r.lock <- struct{}{}:
		r.check.got()
		return true
	default:
		return false
	}
}

// Unlock unlocks the reservation.
func (r *Reservation) Unlock() {
	r.check.left()
	select {
	case <-r.lock:
	default:
		panic("dmabuf: Unlock of a reservation that is not locked")
	}
}

// Add adds a fence. The caller has locked the reservation. A fence that is there already gets
// the lower of both classes: it may be raised, and is never degraded.
func (r *Reservation) Add(f *Fence, usage Usage) {
	r.mustHold("Reservation.Add")
	if f == nil || usage >= numUsages {
		panic(fmt.Sprintf("dmabuf: Reservation.Add of the fence %p as %v", f, usage))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if i, ok := r.at[f]; ok {
		r.fences[i].usage = min(r.fences[i].usage, usage)
		return
	}
	if len(r.fences) >= r.prune {
		r.pruneLocked()
		r.prune = max(2*len(r.fences), minPrune)
	}
	if r.at == nil {
		r.at = make(map[*Fence]int)
	}
	r.at[f] = len(r.fences)
	r.fences = append(r.fences, reserved{f, usage})
}

// minPrune is how many fences a reservation keeps before Add looks whether they are signalled.
const minPrune = 16

// pruneLocked removes the fences that are signalled.
func (r *Reservation) pruneLocked() {
	r.fences = slices.DeleteFunc(r.fences, func(e reserved) bool { return e.fence.Signaled() })
	clear(r.at)
	for i, e := range r.fences {
		r.at[e.fence] = i
	}
}

// Fences returns the pending fences of a class and those before it.
func (r *Reservation) Fences(usage Usage) (pending []*Fence) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pruneLocked()
	for _, e := range r.fences {
		if e.usage <= usage {
			pending = append(pending, e.fence)
		}
	}
	return pending
}

// Signaled reports whether no fence of a class, or of one before it, is pending.
func (r *Reservation) Signaled(usage Usage) bool { return len(r.Fences(usage)) == 0 }

// Wait waits for the fences of a class and those before it that are there now. It returns an
// error only if the context ends before they are signalled: that the work of a fence failed is
// the business of the one who added it.
func (r *Reservation) Wait(ctx context.Context, usage Usage) error {
	for _, f := range r.Fences(usage) {
		select {
		case <-f.Done():
		case <-ctx.Done():
			if !f.Signaled() {
				return ctx.Err()
			}
		}
	}
	return nil
}

// ExportFence returns a descriptor of the pending fences of a class and those before it. It is a
// descriptor as [Fence.FD] returns one, readable once all of them are signalled, and at once if
// there are none. Fences that are added later are not in it.
func (r *Reservation) ExportFence(usage Usage) (int, error) {
	pending := r.Fences(usage)
	if len(pending) == 1 {
		return pending[0].FD()
	}
	merged, give := merge(pending)
	fd, err := merged.newFD(give)
	if err != nil {
		give()
	}
	return fd, err
}

// ImportFence adds the fence of a descriptor ([FenceFromFD]) to a class. It takes the lock.
func (r *Reservation) ImportFence(ctx context.Context, fd int, usage Usage) error {
	const op = "dma_buf_import_sync_file"
	r.mustNotHold("Reservation.ImportFence")
	if usage >= numUsages {
		return ib.Errorf(op, syscall.EINVAL, "%v", usage)
	}
	f, err := FenceFromFD(fd)
	if err != nil {
		return err
	}
	if f.Signaled() {
		return nil
	}
	if err := r.LockContext(ctx); err != nil {
		return ib.Errorf(op, syscall.ETIMEDOUT, "the buffer's reservation lock: %v", err)
	}
	defer r.Unlock()
	r.Add(f, usage)
	return nil
}
