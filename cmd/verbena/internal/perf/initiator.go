package perf

import (
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/hist"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

// answerLimit is how long the peer may take for an answer: it may have to
// allocate and register gigabytes first.
const answerLimit = 30 * time.Second

// Phases of the data in the buffers: what the warm-up left must not be taken
// for the result of the measurement.
const (
	phaseWarmUp = iota
	phaseMeasure
)

// corrupt, if a test sets it, damages the data before the measurement.
var corrupt func(r *rig)

// Initiate measures p, which Complete has completed, against the target at the
// other end of the side channel. It calls notify, if not nil, with each stage.
func Initiate(dev *verbs.Device, side *SideChannel, p Params, notify func(stage string)) (*Result, error) {
	if notify == nil {
		notify = func(string) {}
	}
	res, err := initiate(dev, side, p, notify)
	if err != nil {
		side.giveUp(err)
		return nil, err
	}
	return res, nil
}

func initiate(dev *verbs.Device, side *SideChannel, p Params, notify func(string)) (res *Result, err error) {
	notify("connecting")
	r, err := newRig(dev, side, p)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	r.fillTx(phaseWarmUp)
	peer, mtu, err := r.meetTarget(dev)
	if err != nil {
		return nil, err
	}

	m := &initiator{rig: r}
	notify("warming up")
	if _, err := m.run(p.warmUp()); err != nil {
		return nil, err
	}
	if err := side.send(message{Kind: kindStart, Sent: r.sent()}); err != nil {
		return nil, err
	}
	if _, err := side.receive(answerLimit, kindStarted); err != nil {
		return nil, err
	}
	for _, f := range r.flows {
		f.base = f.posted
	}
	r.begin()
	m.hist.Reset()

	if corrupt != nil {
		corrupt(r)
	}
	notify("measuring")
	cpu := sys.CPUSeconds()
	span, err := m.run(limit{iters: uint64(p.Iters), duration: p.Duration})
	if err != nil {
		return nil, err
	}
	cpu = sys.CPUSeconds() - cpu

	if err := side.send(message{Kind: kindStop, Sent: r.sent()}); err != nil {
		return nil, err
	}
	answer, err := side.receive(answerLimit, kindReport)
	if err != nil {
		return nil, err
	}
	if answer.Report == nil {
		return nil, errors.New("side channel: a report without content")
	}
	if p.Check {
		notify("checking")
		if answer.Report.Check != "" {
			return nil, fmt.Errorf("check failed at the target: %s", answer.Report.Check)
		}
		if err := r.checkInitiator(); err != nil {
			return nil, fmt.Errorf("check failed at the initiator: %w", err)
		}
	}
	res = newResult(p, span, &m.hist)
	res.MTU = mtu
	res.Initiator, res.Target = dev.Addr().String(), peer.Device
	res.CPUSeconds = CPUSeconds{Initiator: cpu, Target: answer.Report.CPUSeconds}
	if p.Link == string(verbs.LinkLoop) {
		res.CPUSeconds.Target = 0 // the same process: it is in the initiator's
	}
	return res, side.send(message{Kind: kindResult, Result: res})
}

// meetTarget connects the two sides and returns what the target offered, and
// the MTU that both use.
func (r *rig) meetTarget(dev *verbs.Device) (*offer, int, error) {
	mine, err := r.offer(dev)
	if err != nil {
		return nil, 0, err
	}
	if err := r.side.send(message{Kind: kindHello, Magic: magic, Version: Version, Params: &r.p}); err != nil {
		return nil, 0, err
	}
	answer, err := r.side.receive(answerLimit, kindOffer)
	if err != nil {
		return nil, 0, err
	}
	if answer.Offer == nil {
		return nil, 0, errors.New("side channel: an offer without content")
	}
	if r.p.MTU > 0 {
		if most := min(mine.MTU, answer.Offer.MTU); r.p.MTU > most {
			return nil, 0, fmt.Errorf("mtu %d: the path carries %d (active MTU here %d, at the peer %d)",
				r.p.MTU, most, mine.MTU, answer.Offer.MTU)
		}
		mine.MTU = r.p.MTU
	}
	mine.MTU = min(mine.MTU, answer.Offer.MTU)
	if err := r.connect(answer.Offer, mine.MTU); err != nil {
		return nil, 0, err
	}
	if err := r.side.send(message{Kind: kindAccept, Offer: mine}); err != nil {
		return nil, 0, err
	}
	_, err = r.side.receive(answerLimit, kindReady)
	return answer.Offer, mine.MTU, err
}

// limit is when a run ends: after iters messages or, if iters is 0, after duration.
type limit struct {
	iters    uint64
	duration time.Duration
}

// span is what a run did.
type span struct {
	messages uint64 // messages that the initiator sent
	elapsed  time.Duration
}

// warmUp returns the limit of the warm-up: a tenth of the measurement, within bounds.
func (p *Params) warmUp() limit {
	if p.Iters > 0 {
		n := min(max(p.Iters/10, 1), 10_000)
		// Only the very last batch may be shorter: the ring of requests is
		// posted from multiples of a batch on.
		return limit{iters: uint64((n + p.Batch - 1) &^ (p.Batch - 1))}
	}
	return limit{duration: min(max(p.Duration/10, 20*time.Millisecond), 250*time.Millisecond)}
}

// initiator runs the measuring loops.
type initiator struct {
	*rig
	hist hist.Histogram
	seq  byte // ping-pong in memory: the last byte of the current message
}

// run measures until the limit.
func (m *initiator) run(l limit) (span, error) {
	m.idle.reset()
	switch {
	case !m.p.Lat:
		return m.bandwidth(l)
	case m.p.Poll == PollMemory:
		return m.pingPongMemory(l)
	case m.op.receives:
		return m.pingPongCQ(l)
	default:
		return m.completion(l)
	}
}
