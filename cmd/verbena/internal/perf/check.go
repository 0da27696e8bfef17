package perf

import (
	"fmt"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/word"
)

// fillTx writes the data of a phase into the tx buffer.
func (r *rig) fillTx(phase int) {
	for q := range r.p.QPs {
		for s := range r.p.slots() {
			fill(r.slot(r.tx, q, s), seedOf(phase, q, s))
		}
	}
}

// begin prepares the buffers for the measurement: other data in tx, zeros in rx, so that
// what the warm-up left is not taken for a result. Neither side has a message under way.
// Ping-pong and atomics keep their buffers: the check of a ping-pong is a byte that
// changes with every message, that of atomics is the count.
func (r *rig) begin() {
	if r.p.pingPong() || r.p.Op == OpAtomic {
		return
	}
	r.fillTx(phaseMeasure)
	clear(r.rx.bytes)
}

// sent returns how many messages each queue pair has sent so far.
func (r *rig) sent() []uint64 {
	n := make([]uint64, len(r.flows))
	for i, f := range r.flows {
		n[i] = f.posted
	}
	return n
}

// checkInitiator compares what came back to the initiator.
func (r *rig) checkInitiator() error {
	switch {
	case r.p.Op == OpAtomic:
		// Each queue pair has one counter, from 0 on: the last result is the
		// number of additions before it.
		for i, f := range r.flows {
			got := word.Load(r.slot(r.rx, i, 0))
			if f.posted > 0 && got != f.posted-1 {
				return fmt.Errorf("queue pair %d: the last atomic returned %d, not %d", i, got, f.posted-1)
			}
		}
		return nil
	case r.p.pingPong():
		return r.checkPingPong()
	case r.op.returns:
		for i, f := range r.flows {
			if err := r.checkSlots(i, f.base, f.posted); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkTarget compares what arrived at the target, where each queue pair of the
// initiator has sent so many messages.
func (r *rig) checkTarget(sent []uint64) error {
	switch {
	case r.p.Op == OpAtomic:
		for i := range r.flows {
			got := word.Load(r.slot(r.rx, i, 0))
			if got != sent[i] {
				return fmt.Errorf("queue pair %d: the counter is %d after %d additions of 1", i, got, sent[i])
			}
		}
		return nil
	case r.p.pingPong():
		return r.checkPingPong()
	case !r.op.returns:
		for i, f := range r.flows {
			if err := r.checkSlots(i, f.base, sent[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkSlots compares the slots in rx that a queue pair's messages with the
// numbers from to to-1 went to.
func (r *rig) checkSlots(qp int, from, to uint64) error {
	slots := uint64(r.p.slots())
	if to < from {
		return fmt.Errorf("queue pair %d: %d messages in all, %d of them in the warm-up", qp, to, from)
	}
	for i := range min(to-from, slots) {
		s := int((from + i) % slots)
		if err := verify(r.slot(r.rx, qp, s), seedOf(phaseMeasure, qp, s)); err != nil {
			return fmt.Errorf("queue pair %d, slot %d: %w", qp, s, err)
		}
	}
	return nil
}

// checkPingPong compares the one message in rx, but for its last byte: that is
// the sequence number if memory is watched.
func (r *rig) checkPingPong() error {
	b := r.slot(r.rx, 0, 0)
	if r.p.Poll == PollMemory {
		b = b[:len(b)-1]
	}
	return verify(b, seedOf(phaseWarmUp, 0, 0))
}
