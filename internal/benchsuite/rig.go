package main

import (
	"errors"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
)

// rig is two connected sides. The near one measures; the far one is in this process, or
// in a peer process.
type rig struct {
	b    *bench
	near *side
	far  *side // in this process; nil if peer is set
	peer *peer

	cpu    time.Duration // of this process, when the far side began to serve
	verify bool          // the far side must have received everything
}

// newRig makes a rig with both sides in this process. The group closes it.
func (b *bench) newRig(sp spec) (*rig, error) {
	r := &rig{b: b}
	var err error
	if r.near, err = newSide(sp); err != nil {
		return nil, err
	}
	b.later(r.near.close)
	if r.far, err = newSide(sp); err != nil {
		return nil, err
	}
	b.later(r.far.close)
	return r, errors.Join(r.near.connect(r.far.offer()), r.far.connect(r.near.offer()))
}

// newPeerRig makes a rig with the far side in a peer process. The group closes it.
func (b *bench) newPeerRig(sp spec) (*rig, error) { return b.newPeerRigAt(sp, "") }

// newPeerRigAt is newPeerRig with the far side's device at an address.
func (b *bench) newPeerRigAt(sp spec, addr string) (*rig, error) {
	r := &rig{b: b}
	var err error
	if r.near, err = newSide(sp); err != nil {
		return nil, err
	}
	b.later(r.near.close)
	if r.peer, err = b.newPeer(); err != nil {
		return nil, err
	}
	sp.Addr = addr
	made, err := r.peer.call(request{Op: opMake, Spec: &sp})
	if err != nil {
		return nil, err
	}
	if err := r.near.connect(*made.Offer); err != nil {
		return nil, err
	}
	own := r.near.offer()
	_, err = r.peer.call(request{Op: opConnect, Offer: &own})
	return r, err
}

// serve makes the far side serve in a mode, until finish. With verify, finish fails unless
// the far side has received what the near side's buffer holds.
func (r *rig) serve(m mode, verify bool) (err error) {
	r.verify = verify
	if r.peer != nil {
		_, err = r.peer.call(request{Op: opServe, Mode: m, Verify: verify, Profile: r.b.profilePath("-peer")})
	} else if verify {
		err = r.far.forget()
	}
	r.cpu = sys.CPUTime()
	return err
}

// finish ends serving and returns the CPU time that both sides have used.
func (r *rig) finish() (time.Duration, error) {
	cpu := sys.CPUTime() - r.cpu
	if r.peer != nil {
		done, err := r.peer.call(request{Op: opStop})
		return cpu + time.Duration(done.CPU), err
	}
	if r.verify {
		return cpu, r.far.arrived()
	}
	return cpu, nil
}

// apart keeps this process and peers on different processors until the group is done, if
// there are two: two loops that spin on one processor would measure the scheduler.
func (b *bench) apart(peers ...*peer) error {
	cpus, err := sys.CPUs()
	if err != nil || len(cpus) < 2 {
		return err
	}
	b.later(func() error { return sys.Pin(cpus...) })
	for _, p := range peers {
		if _, err := p.call(request{Op: opPin, CPU: cpus[1]}); err != nil {
			return err
		}
	}
	return sys.Pin(cpus[0])
}
