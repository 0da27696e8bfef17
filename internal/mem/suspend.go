package mem

// Memory that is taken away: for a moment, because it moves (Suspend, Resume), or for
// good, because its owner wants it back (Revoke). Both are about a leaf, a region that
// stands on memory and not on other regions; windows and indirect keys that lead to it
// stay as they are, and accesses through them end as accesses by its own key do.
//
//   - While a region is suspended, accesses to its bytes end in FaultPending, and
//     Fault.Await waits until it is resumed, revoked or closed. Its rights and bounds
//     can be looked at, windows bound to it and keys made of it.
//   - Accesses to a region that is revoked end in FaultRevoked until it is closed. It keeps
//     its key, and windows and indirect keys that stand on it keep it from being closed.
//
// When Suspend or Revoke returns, no access of this process is under way. Suspend does not
// wait for other processes that copy to or from the memory themselves: they look at the
// guard again after the copy, and repeat it if the memory was suspended meanwhile. So the
// caller of Suspend moves the bytes to other pages.

import (
	"runtime"
	"sync"
	"time"
)

// suspension is what a region needs once it is suspended, or a goroutine waits for its sections.
type suspension struct {
	by       int           // calls of Suspend without a Resume; guarded by the region's lock
	left     chan struct{} // closed when no section is open any more; nil: lastLeaves has given out none; guarded by waiters
	reopened chan struct{} // closed when it is suspended no more, or gone; nil: Reopened has given out none; guarded by waiters
}

// waiters guards the channels by which goroutines wait for regions, and Region.suspend. The
// region's own lock does not: its holder may wait for another process, for long.
var waiters sync.Mutex

// suspensionLocked returns the region's suspension, and makes it if there is none. The caller
// holds waiters.
func (r *Region) suspensionLocked() *suspension {
	if r.suspend == nil {
		r.suspend = new(suspension)
	}
	return r.suspend
}

// Suspend keeps accesses out and waits for those under way. It nests: as many calls of
// Resume end it. It returns false, and has done nothing, if the region is closed, invalidated
// or revoked, or is no leaf.
func (r *Region) Suspend() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.window != nil || r.mkey != nil || r.state.Load()&(shutToLooks) != 0 {
		return false
	}
	waiters.Lock()
	s := r.suspensionLocked()
	waiters.Unlock()
	if s.by++; s.by == 1 {
		r.killLocked(stateSuspended)
	}
	return true
}

// Resume ends a Suspend that has returned true. The region may have been closed since.
func (r *Region) Resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	waiters.Lock()
	s := r.suspensionLocked()
	waiters.Unlock()
	if s.by == 0 {
		panic("mem: Resume of a region that is not suspended")
	}
	if s.by--; s.by > 0 {
		return
	}
	r.state.And(^uint64(stateSuspended))
	if r.table.resumed != nil {
		r.table.resumed(r)
	}
	r.wakeWaiters()
}

// Revoke ends all access to the region's memory: when it returns no access is under way, of
// this process or another, and none will begin. The key stays allocated until Close. Revoking
// again, or a region that is closed, does nothing. Revoke returns false if the region is no
// leaf.
func (r *Region) Revoke() bool {
	r.mu.Lock()
	ok, movable := r.revokeLocked(), r.movable
	r.mu.Unlock()
	if movable {
		r.awaitPeers()
	}
	return ok
}

// RevokeOn is Revoke for a region that stands on b. If it stands on something else by now it
// does nothing: then no access to b is under way, and none will begin. It does not wait for
// other processes if b is Movable: the owner of the memory gives its pages up.
func (r *Region) RevokeOn(b Backing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.backing == b {
		r.revokeLocked()
	}
}

func (r *Region) revokeLocked() bool {
	if r.window != nil || r.mkey != nil {
		return false
	}
	if r.state.Load()&(stateDead|stateRevoked) == 0 {
		r.killLocked(stateRevoked)
	}
	return true
}

// awaitPeers waits until no other process accesses the memory by itself that the region was
// closed, changed or revoked on. The caller holds no lock: such a process may be stopped.
func (r *Region) awaitPeers() {
	if left := r.table.peersLeft; left != nil {
		left(r)
	}
}

// PeersLeave waits until no other process accesses the memory by itself, after Suspend or
// RevokeOn, but no longer than limit. It reports false if one may still do so.
func (r *Region) PeersLeave(limit time.Duration) bool {
	inside := r.table.peersInside
	if inside == nil || !inside(r) {
		return true
	}
	for start := time.Now(); time.Since(start) < limit; {
		for range spinsBeforeSleep {
			runtime.Gosched()
			if !inside(r) {
				return true
			}
		}
		time.Sleep(limit / 64)
	}
	return !inside(r)
}

// Reopened returns a channel that is closed when the region is suspended no more, or is
// gone; nil if it is not suspended.
func (r *Region) Reopened() <-chan struct{} {
	waiters.Lock()
	defer waiters.Unlock()
	// Resume, and what ends the region, changes the state first and then calls wakeWaiters.
	if s := r.state.Load(); s&stateSuspended == 0 || s&shutToLooks != 0 {
		return nil
	}
	s := r.suspensionLocked()
	if s.reopened == nil {
		s.reopened = make(chan struct{})
	}
	return s.reopened
}

// awaitReopened waits until the region is suspended no more, or is gone.
func (r *Region) awaitReopened() {
	if c := r.Reopened(); c != nil {
		<-c
	}
}

// wakeWaiters closes the channel that Reopened has given out.
func (r *Region) wakeWaiters() {
	waiters.Lock()
	defer waiters.Unlock()
	if s := r.suspend; s != nil && s.reopened != nil {
		close(s.reopened)
		s.reopened = nil
	}
}
