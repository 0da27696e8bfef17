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

	posters := make([]*initiator, len(r.threads))
	for i, t := range r.threads {
		posters[i] = &initiator{thread: t}
	}
	notify("warming up")
	if _, err := r.measure(posters, p.warmUp()); err != nil {
		return nil, err
	}
	if err := side.send(message{Kind: kindStart, Sent: r.sent()}); err != nil {
		return nil, err
	}
	if _, err := side.receive(answerLimit, kindStarted); err != nil {
		return nil, err
	}
	for _, m := range posters {
		for _, f := range m.flows {
			f.base = f.posted
		}
		m.hist.Reset()
	}
	r.begin()

	if corrupt != nil {
		corrupt(r)
	}
	notify("measuring")
	cpu := sys.CPUSeconds()
	spans, err := r.measure(posters, limit{iters: p.Iters, duration: p.Duration})
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
	if answer.Report == nil || answer.Report.CPUSeconds < 0 {
		return nil, errors.New("side channel: a report without valid content")
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
	used := CPUSeconds{Initiator: cpu, Target: answer.Report.CPUSeconds}
	if p.Link == string(verbs.LinkLoop) {
		used.Target = 0 // the same process: it is in the initiator's
	}
	times := &posters[0].hist
	for _, m := range posters[1:] {
		times.Add(&m.hist)
	}
	res = newResult(p, spans, times, used)
	res.MTU = mtu
	res.Initiator, res.Target = dev.Addr().String(), peer.Device
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
	if err := r.fits(answer.Offer); err != nil {
		return nil, 0, err
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
	iters    int
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
		// Only the very last batch of a thread may be shorter: the ring of requests is
		// posted from multiples of a batch on. Threads have equal shares here.
		share := min(max(p.Iters/10/p.Threads, 1), 10_000)
		return limit{iters: p.Threads * ((share + p.Batch - 1) &^ (p.Batch - 1))}
	}
	return limit{duration: min(max(p.Duration/10, 20*time.Millisecond), 250*time.Millisecond)}
}

// measure runs the loops of all threads until the limit, of which each thread has its
// share, and returns what each did.
func (r *rig) measure(posters []*initiator, l limit) ([]span, error) {
	spans := make([]span, len(posters))
	start := time.Now()
	err := r.each(func(i int) (err error) {
		own := l
		own.iters, _ = r.p.share(l.iters, i)
		s, err := posters[i].run(start, own)
		spans[i] = s
		return err
	})
	return spans, err
}

// initiator runs the measuring loops of a thread.
type initiator struct {
	*thread
	hist hist.Histogram
	seq  byte // ping-pong in memory: the last byte of the current message
	_    pad
}

// run measures until the limit. A bandwidth counts from start on.
func (m *initiator) run(start time.Time, l limit) (span, error) {
	m.idle.reset()
	switch {
	case !m.p.Lat:
		return m.bandwidth(start, l)
	case m.p.Poll == PollMemory:
		return m.pingPongMemory(l)
	case m.op.receives:
		return m.pingPongCQ(l)
	default:
		return m.completion(l)
	}
}
