package mem

// Re-registration: a region becomes another one, with new memory, rights or
// domain, and keeps its place in the table. The stages:
//
//  1. Everything is checked. Until here nothing has changed.
//  2. New sections are kept out, and the open ones waited for: what is under way
//     ends on the old memory, and what comes later finds the key useless.
//  3. The region changes, with its key, and is opened again.
//  4. The old backing, if there is another, is closed.
//
// The key changes, so that no message is ever half in the old memory and half in
// the new; a region that stays on its memory keeps the key if KeepKey is set.

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// peerMemory is a Backing that may be peer memory: another device's, reached through
// its driver. Such memory takes neither windows nor re-registration, as with hardware.
type peerMemory interface{ PeerMemory() bool }

func isPeerMemory(b Backing) bool {
	p, ok := b.(peerMemory)
	return ok && p.PeerMemory()
}

// Rereg changes the region to cfg, on the same backing or on another; the old one is
// then closed. The error is an *ib.ReregError, which has what the region is now. Unless
// that is the new one, cfg's backing, if it is another, is still the caller's.
func (r *Region) Rereg(cfg RegionConfig) error {
	r.mu.Lock()
	movable := r.movable
	old, err := r.changeLocked(&cfg)
	r.mu.Unlock()
	if movable {
		r.awaitPeers()
	}
	if err != nil || old == nil {
		return err
	}
	// Without the lock: giving memory back may take long, and no access uses it.
	if err := closeBacking(old); err != nil {
		return &ib.ReregError{State: ib.ReregNewValid, Err: err}
	}
	return nil
}

// changeLocked changes the region, and returns the backing that is to be closed.
func (r *Region) changeLocked(cfg *RegionConfig) (old Backing, err error) {
	const op = "rereg_mr"
	// Memory that was revoked can be replaced.
	shut := r.state.Load() & shutToLooks
	if shut != 0 && (shut != stateRevoked || cfg.Backing == r.backing) {
		return nil, &ib.ReregError{State: ib.ReregUnusable, Err: ib.Errorf(op, syscall.EINVAL, "the region is closed, or was invalidated or revoked")}
	}
	if isPeerMemory(r.backing) || isPeerMemory(cfg.Backing) {
		return nil, oldValid(ib.Errorf(op, syscall.EOPNOTSUPP, "peer memory cannot be registered again"))
	}
	if b, ok := r.backing.(interface{ Borrowed() bool }); ok && b.Borrowed() {
		return nil, oldValid(ib.Errorf(op, syscall.EOPNOTSUPP, "memory of another process is registered again by its owner alone"))
	}
	if err := cfg.check(op); err != nil {
		return nil, oldValid(err)
	}
	if err := r.takeLocked(op); err != nil {
		return nil, oldValid(err)
	}
	r.killLocked(statePaused)
	if cfg.Backing != r.backing {
		old = r.backing
	}
	r.pd, r.access, r.iova, r.length = cfg.PD, cfg.Access, cfg.IOVA, cfg.Length
	r.stand(cfg.Backing)
	r.invalidatable = cfg.Invalidatable || cfg.Access&ib.AccessRemoteInvalidate != 0
	r.told.Store(false)
	if old != nil || !cfg.KeepKey {
		r.key.Store(r.after(r.Key()))
	}
	r.giveLocked()
	r.state.And(^uint64(statePaused | stateRevoked))
	return old, nil
}

func oldValid(err error) error { return &ib.ReregError{State: ib.ReregOldValid, Err: err} }
