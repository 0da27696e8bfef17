package mem

// A guard is a word that two processes share, the owner of memory and one who accesses it
// from outside: a bit that says that it must not any more, one that says that it must not
// for a moment, and how many accesses are under way.
//
// The user counts itself first and then looks at the bit, the owner sets the bit and then
// looks at the count: one of them sees the other. So after Shut and Await nobody accesses
// the memory, and nobody will.
//
// For a moment in which the memory moves the owner only suspends the guard, and does not
// wait: a user that was inside finds that out when it has copied (Still), and does it
// again when the guard is resumed. Each suspension has another number, so that none is
// missed.
//
// The owner believes nothing that it reads here. A user that dies inside leaves its count
// behind, and one that is broken may write anything; so Await also ends when the user has,
// and a wrong count holds the owner up as long as the user lives, no longer. (A user that
// lives and does not keep to this can do no more than it could without: the kernel lets
// only those have the memory who may debug the owner.)
//
// Behind the word stand random bytes, which the owner has at an address of its own: who
// reads them there, in what it takes for the owner's memory, knows that it is.
//
// The unsafe code makes atomic variables of the first bytes of a mapping. That is sound:
// a page is aligned, its file is sealed, so that it cannot become shorter under those who
// have mapped it, and the mapping stays until Close.

import (
	"crypto/rand"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/verbena-rdma/verbena/internal/sys"
)

const (
	guardBytes     = 4096
	guardShut      = 1 << 63
	guardSuspended = 1 << 62
	guardCount     = guardSuspended - 1
	guardLook      = 50 * time.Microsecond
	suspensionsAt  = 8

	proofAt, proofBytes = 64, 16
)

// Guard is one end of a guard.
type Guard struct{ b []byte }

// NewGuard makes a guard, for the owner, and a descriptor for the user. That is the
// caller's.
func NewGuard() (*Guard, int, error) {
	fd, err := sys.NewMemfd("verbena-guard", guardBytes)
	if err != nil {
		return nil, -1, err
	}
	g, err := OpenGuard(fd)
	if err != nil {
		_ = sys.CloseFD(fd) // the first error says more
		return nil, -1, err
	}
	_, _ = rand.Read(g.Proof()) // it never fails
	return g, fd, nil
}

// OpenGuard is the user's end. The descriptor stays the caller's.
func OpenGuard(fd int) (*Guard, error) {
	b, err := sys.MapMemfd(fd, guardBytes)
	if err != nil {
		return nil, err
	}
	return &Guard{b}, nil
}

// Proof are the random bytes.
func (g *Guard) Proof() []byte { return g.b[proofAt:][:proofBytes] }

func (g *Guard) word() *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&g.b[0])) }

// suspensions counts how often the owner has suspended the guard.
func (g *Guard) suspensions() *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&g.b[suspensionsAt]))
}

// Enter begins an access, if there may be one: then Leave ends it, and before that Still
// reports whether it counts, by the number that is returned. Otherwise the fault says
// whether there may be one later.
func (g *Guard) Enter() (since uint64, kind FaultKind) {
	since = g.suspensions().Load() // before: a suspension from here on makes Still false
	w := g.word().Load()
	if w&^guardCount == 0 { // who hammers does not move the count
		if w = g.word().Add(1); w&^guardCount == 0 {
			return since, FaultNone
		}
		g.Leave()
	}
	if w&guardShut != 0 {
		return 0, FaultDead
	}
	return 0, FaultPending
}

// Still reports whether the guard was open all the time since Enter.
func (g *Guard) Still(since uint64) bool {
	return g.word().Load()&guardSuspended == 0 && g.suspensions().Load() == since
}

// Leave ends an access.
func (g *Guard) Leave() { g.word().Add(^uint64(0)) }

// Busy reports whether accesses are under way.
func (g *Guard) Busy() bool { return g.word().Load()&guardCount != 0 }

// Shut lets nobody begin an access any more.
func (g *Guard) Shut() { g.word().Or(guardShut) }

// Suspend lets nobody begin an access until Resume, and makes those that are under way
// count for nothing. Shut does so for ever, and Await waits for them besides.
func (g *Guard) Suspend() {
	g.suspensions().Add(1)
	g.word().Or(guardSuspended)
}

// Resume ends Suspend.
func (g *Guard) Resume() { g.word().And(^uint64(guardSuspended)) }

// Suspended reports whether the owner has suspended the guard.
func (g *Guard) Suspended() bool { return g.word().Load()&guardSuspended != 0 }

// Await waits for the accesses that are under way, or until gone says that the user has
// ended.
func (g *Guard) Await(gone func() bool) {
	for i := 0; g.word().Load()&guardCount != 0; i++ {
		if i < spinsBeforeSleep {
			runtime.Gosched()
			continue
		}
		if gone() {
			return
		}
		time.Sleep(guardLook)
	}
}

// Close gives the guard up. Nobody uses it any more.
func (g *Guard) Close() error { return sys.Unmap(g.b) }
