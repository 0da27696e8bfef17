package perf

import (
	"fmt"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/word"
)

// fillTx writes the data of a phase into the tx buffers.
func (r *rig) fillTx(phase int) {
	for _, t := range r.threads {
		for q := range t.flows {
			for s := range r.p.slots() {
				fill(t.slot(t.tx, q, s), seedOf(phase, t.first+q, s))
			}
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
	for _, t := range r.threads {
		clear(t.rx.bytes)
	}
}

// sent returns how many messages each queue pair has sent so far.
func (r *rig) sent() []uint64 {
	var n []uint64
	for _, t := range r.threads {
		for _, f := range t.flows {
			n = append(n, f.posted)
		}
	}
	return n
}

// checkInitiator compares what came back to the initiator.
func (r *rig) checkInitiator() error {
	for _, t := range r.threads {
		if err := t.checkInitiator(); err != nil {
			return err
		}
	}
	return nil
}

func (t *thread) checkInitiator() error {
	switch {
	case t.p.Op == OpAtomic:
		// Each queue pair has one counter, from 0 on: the last result is the
		// number of additions before it.
		for i, f := range t.flows {
			got := word.Load(t.slot(t.rx, i, 0))
			if f.posted > 0 && got != f.posted-1 {
				return fmt.Errorf("queue pair %d: the last atomic returned %d, not %d", t.first+i, got, f.posted-1)
			}
		}
		return nil
	case t.p.pingPong():
		return t.checkPingPong()
	case t.op.returns:
		for i, f := range t.flows {
			if err := t.checkSlots(i, f.base, f.posted); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkTarget compares what arrived at the target, where each queue pair of the
// initiator has sent so many messages.
func (r *rig) checkTarget(sent []uint64) error {
	for _, t := range r.threads {
		if err := t.checkTarget(sent[t.first:][:len(t.flows)]); err != nil {
			return err
		}
	}
	return nil
}

func (t *thread) checkTarget(sent []uint64) error {
	switch {
	case t.p.Op == OpAtomic:
		for i := range t.flows {
			got := word.Load(t.slot(t.rx, i, 0))
			if got != sent[i] {
				return fmt.Errorf("queue pair %d: the counter is %d after %d additions of 1", t.first+i, got, sent[i])
			}
		}
		return nil
	case t.p.pingPong():
		return t.checkPingPong()
	case !t.op.returns:
		for i, f := range t.flows {
			if err := t.checkSlots(i, f.base, sent[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkSlots compares the slots in rx that the messages of one of the thread's queue pairs
// with the numbers from to to-1 went to.
func (t *thread) checkSlots(qp int, from, to uint64) error {
	slots := uint64(t.p.slots())
	if to < from {
		return fmt.Errorf("queue pair %d: %d messages in all, %d of them in the warm-up", t.first+qp, to, from)
	}
	for i := range min(to-from, slots) {
		s := int((from + i) % slots)
		if err := verify(t.slot(t.rx, qp, s), seedOf(phaseMeasure, t.first+qp, s)); err != nil {
			return fmt.Errorf("queue pair %d, slot %d: %w", t.first+qp, s, err)
		}
	}
	return nil
}

// checkPingPong compares the one message in rx, but for its last byte: that is
// the sequence number if memory is watched.
func (t *thread) checkPingPong() error {
	b := t.slot(t.rx, 0, 0)
	if t.p.Poll == PollMemory {
		b = b[:len(b)-1]
	}
	return verify(b, seedOf(phaseWarmUp, 0, 0))
}
