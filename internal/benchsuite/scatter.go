package main

// Inline receive ("scatter to CQE"), which is on by default: what it costs, or saves, on
// each link.

import (
	"errors"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// inlineReceive compares queue pairs with inline receive and without it: for SENDs, which
// wait beside a completion, and for the results of READs and atomics.
func (b *bench) inlineReceive(make func(spec) (*rig, error), link verbs.LinkMode) ([]contender, error) {
	sp := eight(link, verbs.RC)
	with, err := make(sp)
	if err != nil {
		return nil, err
	}
	sp.NoScatter = true
	without, err := make(sp)
	if err != nil {
		return nil, err
	}
	if with.peer != nil {
		if err := b.apart(with.peer, without.peer); err != nil {
			return nil, err
		}
	}
	var cs []contender
	for _, op := range []verbs.Opcode{verbs.OpSend, verbs.OpRDMARead, verbs.OpAtomicFetchAdd} {
		name := op.String() + ", without"
		cs = append(cs, without.short(name, op, ""), with.short(op.String()+", with", op, name))
	}
	return cs, nil
}

// short is a contender for one short operation at a time. Between processes a SEND is
// answered, and half of the round trip counts.
func (r *rig) short(name string, op verbs.Opcode, against string) contender {
	switch {
	case r.peer == nil:
		f := r.once(op)
		return r.served(name, modePassive, against, nil, func(d time.Duration, keep *sampler) error { return timeOnce(f, d, keep) })
	case op == verbs.OpSend:
		p := newPinger(r.near, op)
		return r.served(name, modePongSend, against, nil, func(d time.Duration, keep *sampler) error { return pingSend(p, d, keep) })
	}
	wrs := r.near.list(op, 0, 1)
	f := func() error { return r.near.postAndWait(wrs) }
	return r.served(name, modePoll, against, nil, func(d time.Duration, keep *sampler) error { return timeOnce(f, d, keep) })
}

// served is a contender that keeps durations while the far side serves.
func (r *rig) served(name string, m mode, against string, g *goal, run func(time.Duration, *sampler) error) contender {
	c := r.b.quantiles(name, "µs", 1e3, against, g, func(d time.Duration, keep *sampler) error {
		if err := r.serve(m, false); err != nil {
			return err
		}
		err := run(d, keep)
		_, stopErr := r.finish()
		return errors.Join(err, stopErr)
	})
	c.side = r.near
	return c
}
