package dmabuf

import (
	"bytes"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
)

// checking is set by CheckLocks.
var checking atomic.Bool

// CheckLocks switches the checks of the lock rules on or off. While they are on, a breach of
// the rules in the package's documentation is a panic that names the call. The checks cost
// microseconds for each call, so they are for tests. No reservation may be locked when they
// are switched.
func CheckLocks(on bool) { checking.Store(on) }

// holder is which goroutine holds a reservation's lock; 0 if none does, or nobody checks.
type holder struct{ id atomic.Uint64 }

func (h *holder) wants() {
	if checking.Load() && h.id.Load() == goroutine() {
		panic("dmabuf: the reservation is locked by this goroutine already")
	}
}

func (h *holder) got() {
	if checking.Load() {
		h.id.Store(goroutine())
	}
}

func (h *holder) left() {
	if !checking.Load() {
		return
	}
	if h.id.Load() != goroutine() {
		panic("dmabuf: Unlock of a reservation that another goroutine has locked")
	}
	h.id.Store(0)
}

// loan makes another goroutine count as the holder of a lock while its holder waits for it.
type loan struct {
	h      *holder // nil: the lock is not held, or nobody checks
	holder uint64

	mu      sync.Mutex // guards revoked, and keeps take and giveBack apart from revoke
	revoked bool
}

// lend returns a loan of the lock, if the calling goroutine holds it.
func (r *Reservation) lend() *loan {
	l := new(loan)
	if checking.Load() {
		if l.holder = goroutine(); r.check.id.Load() == l.holder {
			l.h = &r.check
		}
	}
	return l
}

// take makes the calling goroutine count as the holder.
func (l *loan) take() { l.pass(goroutine) }

// giveBack ends take.
func (l *loan) giveBack() { l.pass(func() uint64 { return l.holder }) }

func (l *loan) pass(to func() uint64) {
	if l.h == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.revoked {
		l.h.id.Store(to())
	}
}

// revoke ends the loan: the holder waits no more.
func (l *loan) revoke() {
	if l.h == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.revoked = true
	l.h.id.Store(l.holder)
}

// mustHold panics if locks are checked and this goroutine does not hold the lock.
func (r *Reservation) mustHold(call string) {
	if checking.Load() && r.check.id.Load() != goroutine() {
		panic("dmabuf: " + call + " without the reservation lock")
	}
}

// mustNotHold panics if locks are checked and this goroutine holds the lock.
func (r *Reservation) mustNotHold(call string) {
	if checking.Load() && r.check.id.Load() == goroutine() {
		panic("dmabuf: " + call + " with the reservation lock held")
	}
}

// goroutine returns the number of the calling goroutine, which the runtime shows in its stack
// only.
func goroutine() uint64 {
	var buf [64]byte
	text := bytes.TrimPrefix(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	if i := bytes.IndexByte(text, ' '); i > 0 {
		text = text[:i]
	}
	id, _ := strconv.ParseUint(string(text), 10, 64) // 0 for a form that it does not know: then all checks fail loudly
	return id
}
