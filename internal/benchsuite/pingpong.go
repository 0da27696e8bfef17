package main

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// A ping-pong waits for answers, not for completions of its own requests: only every
// signalEvery-th request asks for one. The send queue has room for several times as many.
const (
	signalEvery  = 16
	pingPongWRs  = 4 * signalEvery
	maxSamples   = 1 << 20
	oneWayParts  = 2 // a round trip has two ways
	pingPongSize = 8
)

// pinger posts the same request again and again.
type pinger struct {
	s   *side
	wrs []verbs.SendWR
	n   uint64
}

func newPinger(s *side, op verbs.Opcode) *pinger { return &pinger{s: s, wrs: s.list(op, 0, 1)} }

func (p *pinger) post() error {
	p.wrs[0].Flags = 0
	if p.n++; p.n%signalEvery == 0 {
		p.wrs[0].Flags = verbs.SendSignaled
	}
	_, err := p.s.qps[0].PostSend(p.wrs)
	return err
}

// postWord posts a request whose message is a number. The message is inline, so
// the next one may be written at once.
func (p *pinger) postWord(v uint64) error {
	binary.NativeEndian.PutUint64(p.s.tx.bytes, v)
	return p.post()
}

// pingWrite writes numbers into the far side's memory and polls until they come
// back in its own. It keeps half of each round trip.
func pingWrite(p *pinger, d time.Duration, keep *sampler) error {
	return timeEach(oneWayParts, d, keep, func() error {
		want := p.n + 1
		if err := p.postWord(want); err != nil {
			return err
		}
		var wait spinner
		for {
			if _, err := p.s.poll(); err != nil || loadWord(p.s.rx.bytes) == want {
				return err
			}
			if err := wait.idle(); err != nil {
				return err
			}
		}
	})
}

// pongWrite writes each number that appears in its memory back. last is the number that
// is there before the first ping.
func (s *side) pongWrite(last uint64, stop *atomic.Bool) error {
	p := newPinger(s, verbs.OpRDMAWrite)
	var wait spinner
	for !stop.Load() {
		if _, err := s.poll(); err != nil {
			return err
		}
		v := loadWord(s.rx.bytes)
		if v == last {
			wait.pause()
			continue
		}
		last = v
		wait.reset()
		if err := p.postWord(v); err != nil {
			return err
		}
	}
	return nil
}

// pingMemory is pingWrite as ib_write_lat does it, and verbena perf with --poll memory:
// post, wait for the completion, then watch the memory and poll nothing.
func pingMemory(p *pinger, d time.Duration, keep *sampler) error {
	return timeEach(oneWayParts, d, keep, func() error {
		want := p.n + 1
		if err := p.writeWord(want); err != nil {
			return err
		}
		var wait spinner
		for loadWord(p.s.rx.bytes) != want {
			if !wait.seldom() {
				continue
			}
			if err := wait.idle(); err != nil {
				return err
			}
		}
		return nil
	})
}

// pongMemory is the other side of pingMemory.
func (s *side) pongMemory(last uint64, stop *atomic.Bool) error {
	p := newPinger(s, verbs.OpRDMAWrite)
	var wait spinner
	for !stop.Load() {
		v := loadWord(s.rx.bytes)
		if v == last {
			if wait.seldom() {
				wait.pause()
			}
			continue
		}
		last = v
		wait.reset()
		if err := p.writeWord(v); err != nil {
			return err
		}
	}
	return nil
}

// writeWord writes a number and waits until that has completed.
func (p *pinger) writeWord(v uint64) error {
	p.n++
	binary.NativeEndian.PutUint64(p.s.tx.bytes, v)
	p.wrs[0].Flags = verbs.SendSignaled
	if _, err := p.s.qps[0].PostSend(p.wrs); err != nil {
		return err
	}
	var wait spinner
	for {
		if wcs, err := p.s.poll(); err != nil || len(wcs) > 0 {
			return err
		}
		if err := wait.idle(); err != nil {
			return err
		}
	}
}

// pingSend sends messages and polls until the answer has completed a receive.
func pingSend(p *pinger, d time.Duration, keep *sampler) error {
	return timeEach(oneWayParts, d, keep, func() error {
		if err := p.post(); err != nil {
			return err
		}
		var wait spinner
		for {
			if got, err := p.s.takeMessage(); err != nil || got {
				return err
			}
			if err := wait.idle(); err != nil {
				return err
			}
		}
	})
}

// pongSend answers each message with one.
func (s *side) pongSend(stop *atomic.Bool) error {
	p := newPinger(s, verbs.OpSend)
	var wait spinner
	for !stop.Load() {
		got, err := s.takeMessage()
		if err != nil {
			return err
		}
		if !got {
			wait.pause()
			continue
		}
		wait.reset()
		if err := p.post(); err != nil {
			return err
		}
	}
	return nil
}

// takeMessage polls once, and reports whether a message has come. If so, it posts a
// receive for the next.
func (s *side) takeMessage() (bool, error) {
	wcs, err := s.poll()
	if err != nil {
		return false, err
	}
	got := false
	for i := range wcs {
		if wcs[i].Op == verbs.WCRecv {
			if got {
				return false, fmt.Errorf("two messages at a time in a ping-pong")
			}
			got = true
			if _, err := s.qps[0].PostRecv(s.recv); err != nil {
				return false, err
			}
		}
	}
	return got, nil
}

// once returns a function that posts one request and waits until it is done on
// both sides, which are in this process. It allocates nothing.
func (r *rig) once(op verbs.Opcode) func() error {
	wrs := r.near.list(op, 0, 1)
	return func() error {
		if _, err := r.near.qps[0].PostSend(wrs); err != nil {
			return err
		}
		sent, received := false, op != verbs.OpSend
		var wait spinner
		for {
			if !sent {
				wcs, err := r.near.poll()
				if err != nil {
					return err
				}
				sent = len(wcs) > 0
			}
			if sent && received {
				return nil
			}
			// Over a link with packets the far side must be polled too.
			got, err := r.far.takeMessage()
			if err != nil {
				return err
			}
			if received = received || got; sent && received {
				return nil
			}
			if err := wait.idle(); err != nil {
				return err
			}
		}
	}
}

// timeOnce keeps how long each call takes.
func timeOnce(once func() error, d time.Duration, keep *sampler) error {
	return timeEach(1, d, keep, once)
}

// timeEach keeps how long each call takes, divided by its parts.
func timeEach(parts, d time.Duration, keep *sampler, call func() error) error {
	start := time.Now()
	last := time.Duration(0)
	for {
		if err := call(); err != nil {
			return err
		}
		now := time.Since(start)
		if !keep.add((now-last)/parts) || now >= d {
			return nil
		}
		last = now
	}
}
