package mem

// Memory that is taken away: for a moment, because it moves (Suspend, Resume), or for
// good, because its owner wants it back (Revoke). Both are about a leaf, a region that
// stands on memory and not on other regions; windows and indirect keys that lead to it
// stay as they are, and accesses through them meet what accesses by its own key do.
//
//   - While a region is suspended, accesses to its bytes end in FaultPending, and
//     Fault.Await waits until it is resumed, revoked or closed. Its rights and bounds
//     can be looked at, windows bound to it and keys made of it.
//   - A region that is revoked answers FaultRevoked until it is closed. It keeps its
//     key, and those who stand on it keep it from being closed.
//
// When Suspend or Revoke returns, nobody in this process touches the bytes. Suspend does
// not wait for other processes that copy to or from the memory by themselves: those look
// again after the copy and repeat it if the memory was taken meanwhile. Whoever moves the
// bytes therefore moves them to other pages.

import "sync"

// suspension is what a region has that was ever suspended.
type suspension struct {
	by       int           // how many have suspended it; guarded by the region's lock
	left     chan struct{} // closed when no section is open any more (lastLeaves); nil until somebody waits; guarded by waiters
	reopened chan struct{} // closed when it is suspended no more, or gone; nil until somebody waits; guarded by waiters
}

// waiters guards what those who wait for regions share with those who wake them: whoever
// shuts a region may hold the region's own lock for long, to wait for another process.
var waiters sync.Mutex

// suspensionLocked returns what the region has for it. The caller holds waiters.
func (r *Region) suspensionLocked() *suspension {
	if r.suspend == nil {
		r.suspend = new(suspension)
	}
	return r.suspend
}

// Suspend keeps accesses out and waits for those under way. It nests: as many calls of
// Resume end it. It reports whether it was done; a region that is closed, invalidated or
// revoked, or is no leaf, cannot be suspended.
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

// Resume ends a Suspend that was done. The region may have been closed since.
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

// Revoke ends all access to the region's memory: when it returns nobody touches it, in
// this process or another, and nobody will. The key stays allocated until Close. Revoking
// again, or a region that is closed, does nothing; a region that is no leaf cannot be
// revoked, and it reports false.
func (r *Region) Revoke() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.window != nil || r.mkey != nil {
		return false
	}
	if r.state.Load()&(stateDead|stateRevoked) == 0 {
		r.killLocked(stateRevoked)
	}
	return true
}

// Reopened returns a channel that is closed when the region is suspended no more, or is
// gone; nil if it is not suspended.
func (r *Region) Reopened() <-chan struct{} {
	waiters.Lock()
	defer waiters.Unlock()
	// Whoever opens the region again, or ends it, changes the state first.
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

// wakeWaiters ends the waiting of those who have a channel of Reopened.
func (r *Region) wakeWaiters() {
	waiters.Lock()
	defer waiters.Unlock()
	if s := r.suspend; s != nil && s.reopened != nil {
		close(s.reopened)
		s.reopened = nil
	}
}
