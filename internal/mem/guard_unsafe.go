package mem

// A guard is a word that two processes share: the owner of memory, and a user that accesses
// it from outside. It has a bit that ends accesses for good, a bit that ends them for a
// moment, and the count of accesses under way.
//
// The user counts its access first and then looks at the bits; the owner sets a bit and then
// looks at the count: one of them sees the other. So after Shut and Await no access of the
// user is under way, and none will begin.
//
// For a moment in which the memory moves the owner only suspends the guard, and does not
// wait: a user whose access was under way finds that out after its copy (Still), and copies
// again when the owner has resumed the guard. The owner counts suspensions, so that the user
// misses none.
//
// The owner trusts nothing that it reads here. A user that dies during an access leaves its
// count behind, and a broken one may write anything; so Await returns also when the user has
// ended: a wrong count delays the owner while the user lives, no longer. (A live user that
// ignores the guard gains nothing: the kernel lets it have the memory only if it may debug
// the owner.)
//
// Random bytes follow the word. The owner has mapped them at an address of its own: a user
// that reads the same bytes at that address, by its descriptor of the owner's memory, has
// the right process.
//
// The unsafe code makes atomic variables of the first bytes of a mapping. That is sound:
// a page is aligned, its file is sealed, so that it cannot become shorter under a process
// that has mapped it, and the mapping stays until Close.

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

// NewGuard makes a guard, for the owner, and a descriptor for the user. The caller closes the
// descriptor.
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

// OpenGuard makes the user's end of a guard. The descriptor stays the caller's.
func OpenGuard(fd int) (*Guard, error) {
	b, err := sys.MapMemfd(fd, guardBytes)
	if err != nil {
		return nil, err
	}
	return &Guard{b}, nil
}

// Proof returns the random bytes.
func (g *Guard) Proof() []byte { return g.b[proofAt:][:proofBytes] }

func (g *Guard) word() *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&g.b[0])) }

// suspensions counts how often the owner has suspended the guard.
func (g *Guard) suspensions() *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&g.b[suspensionsAt]))
}

// Enter begins an access, if the guard is open: after the copy Still reports, by the number
// that is returned, whether the copy is good, and then Leave ends the access. It returns
// FaultDead if the guard is shut, FaultPending if it is suspended.
func (g *Guard) Enter() (since uint64, kind FaultKind) {
	since = g.suspensions().Load() // before: a suspension from here on makes Still false
	w := g.word().Load()
	if w&^guardCount == 0 { // a user that tries again and again does not move the count
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

// Shut keeps the user from beginning an access, for good.
func (g *Guard) Shut() { g.word().Or(guardShut) }

// Suspend keeps the user from beginning an access until Resume, and makes Still false for
// those that are under way. It does not wait for them.
func (g *Guard) Suspend() {
	g.suspensions().Add(1)
	g.word().Or(guardSuspended)
}

// Resume ends Suspend.
func (g *Guard) Resume() { g.word().And(^uint64(guardSuspended)) }

// Suspended reports whether the owner has suspended the guard.
func (g *Guard) Suspended() bool { return g.word().Load()&guardSuspended != 0 }

// Await waits until no access is under way, or until gone reports that the user has ended.
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

// Close unmaps this end of the guard. The caller does not use it any more.
func (g *Guard) Close() error { return sys.Unmap(g.b) }
