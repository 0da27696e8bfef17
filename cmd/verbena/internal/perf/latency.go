package perf

import (
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/word"
	"github.com/verbena-rdma/verbena/verbs"
)

// A ping-pong by completion queue waits for the answer, and completions of its own
// requests cost time: so only every signalEvery-th request asks for one. The send queue
// has room for several times as many.
const (
	signalEvery  = 16
	latSendQueue = 64
)

// Nothing in these loops allocates.

// pingPongCQ sends a message, waits for the completion of the receive of the
// answer, and counts half of the time.
func (m *initiator) pingPongCQ(l limit) (span, error) {
	f := m.flows[0]
	start := time.Now()
	last := start
	for n := uint64(0); ; {
		if err := f.postPingPong(); err != nil {
			return span{}, err
		}
		if err := m.awaitReceive(f, false); err != nil {
			return span{}, err
		}
		now := time.Now()
		m.hist.Record(now.Sub(last) / 2)
		last = now
		n++
		if l.reached(n, now.Sub(start)) {
			return span{messages: n, elapsed: now.Sub(start)}, nil
		}
	}
}

// postPingPong posts the queue pair's one request once more.
func (f *flow) postPingPong() error {
	f.sends[0].Flags = 0
	if f.posted%signalEvery == signalEvery-1 {
		f.sends[0].Flags = verbs.SendSignaled
	}
	if _, err := f.qp.PostSend(f.sends); err != nil {
		return err
	}
	f.posted++
	return nil
}

// awaitReceive polls until a message has arrived and posts a receive for the next one. If
// stoppable is set, it also returns, without a message, when the side channel has one.
func (t *thread) awaitReceive(f *flow, stoppable bool) error {
	for got := false; !got; {
		wcs, err := t.poll()
		if err != nil {
			return err
		}
		for i := range wcs {
			if op := wcs[i].Op; op == verbs.WCRecv || op == verbs.WCRecvRDMAWithImm {
				got = true
				f.received++
			}
		}
		if got {
			t.idle.reset()
			break
		}
		if stoppable {
			t.idle.since = time.Time{} // the peer may take its time
			if t.pending() {
				return nil
			}
		}
		if err := t.idle.wait(pollTurns); err != nil {
			return err
		}
	}
	return f.postRecvs(1)
}

// pingPongMemory writes a message into the target's buffer, whose last byte is the
// message's number, and watches the last byte of its own buffer for the answer. It
// counts half of the time. The order is that of ib_write_lat: post, wait for the
// completion (before that the tx buffer must not change), watch.
func (m *initiator) pingPongMemory(l limit) (span, error) {
	f := m.flows[0]
	start := time.Now()
	last := start
	for n := uint64(0); ; {
		m.seq++
		if err := m.writeNumbered(f, m.seq); err != nil {
			return span{}, err
		}
		if err := m.watch(m.seq); err != nil {
			return span{}, err
		}
		now := time.Now()
		m.hist.Record(now.Sub(last) / 2)
		last = now
		n++
		if l.reached(n, now.Sub(start)) {
			return span{messages: n, elapsed: now.Sub(start)}, nil
		}
	}
}

// writeNumbered writes a message with the number seq and waits until the write
// has completed.
func (t *thread) writeNumbered(f *flow, seq byte) error {
	t.tx.bytes[t.p.Size-1] = seq
	if _, err := f.qp.PostSend(f.sends); err != nil {
		return err
	}
	f.posted++
	return t.awaitCompletion()
}

// watch waits until the message with the number seq is in memory. It polls no completion
// queue: the device receives the message without that.
func (t *thread) watch(seq byte) error {
	for word.LoadByte(t.rx.bytes, t.p.Size-1) != seq {
		if err := t.idle.wait(watchTurns); err != nil {
			return err
		}
	}
	t.idle.reset()
	return nil
}

// awaitCompletion polls until the one request under way has completed.
func (t *thread) awaitCompletion() error {
	for {
		wcs, err := t.poll()
		if err != nil {
			return err
		}
		if len(wcs) > 0 {
			t.idle.reset()
			return nil
		}
		if err := t.idle.wait(pollTurns); err != nil {
			return err
		}
	}
}

// completion measures operations that the target does not answer with a message
// of its own: from posting to completion, which is a full round trip.
func (m *initiator) completion(l limit) (span, error) {
	f := m.flows[0]
	start := time.Now()
	last := start
	for n := uint64(0); ; {
		if _, err := f.qp.PostSend(f.sends); err != nil {
			return span{}, err
		}
		f.posted++
		if err := m.awaitCompletion(); err != nil {
			return span{}, err
		}
		now := time.Now()
		m.hist.Record(now.Sub(last))
		last = now
		n++
		if l.reached(n, now.Sub(start)) {
			return span{messages: n, elapsed: now.Sub(start)}, nil
		}
	}
}

// reached reports whether a run is over.
func (l limit) reached(n uint64, elapsed time.Duration) bool {
	if l.iters > 0 {
		return n >= uint64(l.iters)
	}
	return elapsed >= l.duration
}
