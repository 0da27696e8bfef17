package perf

import (
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/word"
	"github.com/verbena-rdma/verbena/verbs"
)

// Serve is the target of one measurement, which the initiator at the other end of the
// side channel describes. It returns the initiator's result.
func Serve(dev *verbs.Device, side *SideChannel) (*Result, error) {
	res, err := serve(dev, side)
	if err != nil {
		side.giveUp(err)
		return nil, err
	}
	return res, nil
}

func serve(dev *verbs.Device, side *SideChannel) (res *Result, err error) {
	p, err := side.receiveHello()
	if err != nil {
		return nil, err
	}
	r, err := newRig(dev, side, p)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	r.fillTx(phaseWarmUp)
	if err := r.meetInitiator(dev); err != nil {
		return nil, err
	}

	receivers := make([]*target, len(r.threads))
	for i, t := range r.threads {
		receivers[i] = &target{thread: t}
	}
	over := false // the measurement is over: only the result is to come
	var cpu float64
	for {
		if !over {
			if err := r.each(func(i int) error { return receivers[i].run() }); err != nil {
				return nil, err
			}
		}
		m, err := side.receive(0, kindStart, kindStop, kindResult)
		if err != nil {
			return nil, err
		}
		if m.Kind == kindResult {
			if err := m.Result.fits(&p); err != nil {
				return nil, err
			}
			return m.Result, nil
		}
		if len(m.Sent) != p.QPs {
			return nil, fmt.Errorf("side channel: %d counts for %d queue pairs", len(m.Sent), p.QPs)
		}
		// After a start or a stop nothing is under way any more. All that has arrived
		// is received before the buffers change or are compared.
		for _, t := range receivers {
			if err := t.drain(m.Sent[t.first:][:len(t.flows)]); err != nil {
				return nil, err
			}
		}
		answer := message{Kind: kindStarted}
		if m.Kind == kindStop {
			answer = message{Kind: kindReport, Report: &report{CPUSeconds: sys.CPUSeconds() - cpu}}
			if p.Check {
				if err := r.checkTarget(m.Sent); err != nil {
					answer.Report.Check = err.Error()
				}
			}
			over = true
		} else {
			for _, t := range r.threads {
				for i, f := range t.flows {
					f.base = m.Sent[t.first+i]
				}
			}
			r.begin()
			cpu = sys.CPUSeconds()
		}
		if err := side.send(answer); err != nil {
			return nil, err
		}
	}
}

// receiveHello waits for the initiator's parameters and checks them as if they came from
// the command line: any host may have sent them.
func (s *SideChannel) receiveHello() (Params, error) {
	m, err := s.receive(answerLimit, kindHello)
	switch {
	case err != nil:
		return Params{}, err
	case m.Magic != magic:
		return Params{}, errors.New("side channel: not a peer of verbena perf")
	case m.Version != Version:
		return Params{}, fmt.Errorf("side channel: the initiator speaks version %d, this is version %d; use the same verbena on both sides", m.Version, Version)
	case m.Params == nil:
		return Params{}, errors.New("side channel: a hello without content")
	}
	p := *m.Params
	return p, p.Complete()
}

// meetInitiator connects the two sides.
func (r *rig) meetInitiator(dev *verbs.Device) error {
	mine, err := r.offer(dev)
	if err != nil {
		return err
	}
	if err := r.side.send(message{Kind: kindOffer, Offer: mine}); err != nil {
		return err
	}
	answer, err := r.side.receive(answerLimit, kindAccept)
	if err != nil {
		return err
	}
	if answer.Offer == nil || mtuOf(answer.Offer.MTU) == 0 {
		return errors.New("side channel: the initiator accepts without a valid MTU")
	}
	if err := r.connect(answer.Offer, answer.Offer.MTU); err != nil {
		return err
	}
	return r.side.send(message{Kind: kindReady})
}

// target runs the loops of a thread of the passive side. Each ends when a message comes on
// the side channel.
type target struct {
	*thread
	seq byte // ping-pong in memory: the number of the last message
}

func (t *target) run() error {
	t.idle.reset()
	switch {
	case t.p.pingPong() && t.p.Poll == PollMemory:
		return t.echoMemory()
	case t.p.pingPong():
		return t.echoCQ()
	case t.op.receives:
		return t.consume()
	case t.p.BusyTarget || t.p.Lat:
		return t.attend()
	default:
		return nil // one-sided: the device does everything
	}
}

// consume takes receives off and posts them again.
func (t *target) consume() error {
	for {
		n, err := t.consumeOnce()
		if err != nil {
			return err
		}
		if n > 0 {
			t.idle.reset()
			continue
		}
		if t.pending() {
			return nil
		}
		t.idle.since = time.Time{} // the initiator may take its time
		if err := t.idle.wait(pollTurns); err != nil {
			return err
		}
	}
}

// consumeOnce polls once, and posts as many receives as were used.
func (t *target) consumeOnce() (int, error) {
	wcs, err := t.poll()
	if err != nil {
		return 0, err
	}
	for i := 0; i < len(wcs); {
		f, k := t.flows[wcs[i].ID], i
		for i < len(wcs) && wcs[i].ID == wcs[k].ID {
			i++
		}
		f.received += uint64(i - k)
		if err := f.postRecvs(i - k); err != nil {
			return 0, err
		}
	}
	return len(wcs), nil
}

// drain polls until everything that the initiator has sent to this thread is received.
func (t *target) drain(sent []uint64) error {
	if !t.op.receives || t.p.pingPong() {
		return nil
	}
	t.idle.reset()
	for i := 0; i < len(sent); {
		f := t.flows[i]
		if f.received > sent[i] {
			return fmt.Errorf("queue pair %d: received %d messages of %d", t.first+i, f.received, sent[i])
		}
		if f.received == sent[i] {
			i++
			continue
		}
		n, err := t.consumeOnce()
		if err != nil {
			return err
		}
		if n > 0 {
			t.idle.reset()
		} else if err := t.idle.wait(pollTurns); err != nil {
			return fmt.Errorf("queue pair %d: received %d messages of %d: %w", t.first+i, f.received, sent[i], err)
		}
	}
	return nil
}

// attend polls though nothing completes here, so that the device makes progress in this
// goroutine, without delay.
func (t *target) attend() error {
	for !t.pending() {
		if _, err := t.poll(); err != nil {
			return err
		}
		t.idle.since = time.Time{}
		if err := t.idle.wait(pollTurns); err != nil {
			return err
		}
	}
	return nil
}

// echoCQ answers every message with one.
func (t *target) echoCQ() error {
	f := t.flows[0]
	for {
		before := f.received
		if err := t.awaitReceive(f, true); err != nil {
			return err
		}
		if f.received == before {
			return nil
		}
		if err := f.postPingPong(); err != nil {
			return err
		}
	}
}

// echoMemory answers every message that appears in the buffer with one.
func (t *target) echoMemory() error {
	f := t.flows[0]
	for {
		for word.LoadByte(t.rx.bytes, t.p.Size-1) != t.seq+1 {
			if t.pending() {
				return nil
			}
			t.idle.since = time.Time{}
			if err := t.idle.wait(watchTurns); err != nil {
				return err
			}
		}
		t.seq++
		if err := t.writeNumbered(f, t.seq); err != nil {
			return err
		}
	}
}
