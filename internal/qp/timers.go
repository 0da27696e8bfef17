package qp

// Time on the requester's side. The acknowledgement timeout is the one that the
// queue pair was given, T = 4.096 µs × 2^timeout (IBA 9.7.6.1.3), and the
// request fails when RetryCnt+1 times T has passed without progress. Within that
// time packets are sent again earlier, when an answer takes much longer than recent
// round trips: T is often 67 ms, a round trip 10 µs.

import (
	"time"

	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// minRTO is the shortest time after which an answer counts as overdue: with less than a
// scheduler's slice, the requester would send twice what a busy peer has not yet read.
const minRTO = 16 * time.Millisecond

// maxPatience bounds the retransmission timeout after progress, as a multiple of the one
// that was measured. Where much is lost, a long time passes between measurements, and
// each loss doubles the timeout.
const maxPatience = 4

// holdTime is how long a queue pair whose timeout is 0 keeps the credits of packets that
// the peer does not answer.
const holdTime = 100 * time.Millisecond

type timers struct {
	timeout      Time // T; 0: never
	noEarlyProbe bool // no answer counts as overdue, and nothing is probed, before T
	started      Time // when the current wait began, 0: no wait
	progAt       Time // the last progress
	rto          Time
	srtt         Time
	sampleAt     Time // when sample was sent, 0: none
	sample       wire.PSN

	tries     int // retries since the last progress
	rnrTries  int
	lostAt    wire.PSN
	lostValid bool
}

func (r *timers) stop() { r.started, r.sampleAt = 0, 0 }

// sent notes that a request has left.
func (r *requester) sent(t *train.Train, now Time) {
	if r.started == 0 {
		r.started, r.progAt = now, now
	}
	if t.AckReq && r.sampleAt == 0 && !t.Bounce {
		r.sampleAt, r.sample = now, t.PSN.Add(t.N-1)
	}
}

// measure takes the round trip of the sample, which has come, and returns it.
func (r *requester) measure(now Time) Time {
	rtt := now - r.sampleAt
	if r.srtt == 0 {
		r.srtt = rtt
	}
	r.srtt += (rtt - r.srtt) / 8
	r.sampleAt = 0
	r.rto = max(minRTO, 8*r.srtt)
	return rtt
}

// progress notes that everything before una is acknowledged. It returns the round trip of the
// sample, if that is among it, else 0.
func (r *requester) progress(una wire.PSN, now Time) (rtt Time) {
	if r.sampleAt != 0 && r.sample.Less(una) {
		rtt = r.measure(now)
	}
	// Without a sample it is open which copy was answered: the timeout that losses have
	// made longer stays, within bounds.
	r.rto = min(r.rto, maxPatience*max(minRTO, 8*r.srtt))
	r.tries, r.rnrTries, r.lostValid = 0, 0, false
	r.progAt, r.started = now, now
	r.probes, r.probeAt = 0, 0
	if una == r.max {
		r.started = 0
	}
	return rtt
}

// restart begins a new wait after going back.
func (r *requester) restart(now Time) {
	r.started, r.sampleAt = now, 0
}

// deadline returns when something is due, 0 for never. least is the shortest time that the peer has for
// an answer, if it is longer than usual.
func (r *requester) deadline(least Time) Time {
	switch {
	case r.fetching:
		return 0
	case r.congestion.waits():
		return r.congestion.deadline()
	case r.started == 0 || r.una == r.nxt || r.waits() && r.next == r.nxt:
		return 0
	case r.unasked() && !r.noEarlyProbe: // with noEarlyProbe, Tick probes after T
		return r.started + probeAfter
	case r.timeout == 0: // it waits for ever, but gives back credits that others need
		if r.heldCredits == 0 {
			return 0
		}
		return r.started + holdTime
	}
	if r.noEarlyProbe {
		return r.started + r.timeout
	}
	return r.started + min(r.timeout, max(r.rto, minRTO, least))
}

// expired notes a timeout: the next wait is longer. It reports whether another T has
// passed without progress, which uses up one of the retries.
func (r *requester) expired(now Time) bool {
	r.rto = min(r.timeout, 2*max(r.rto, minRTO))
	if now-r.progAt < r.timeout*Time(r.tries+1) {
		return false
	}
	r.tries++
	return true
}

// rnrWait reports whether the requester is still waiting after an RNR NAK.
func (r *requester) rnrWait(now Time) bool {
	if !r.congestion.waits() {
		return false
	}
	if now < r.congestion.deadline() {
		return true
	}
	r.congestion.askAgain()
	r.restart(now)
	r.progAt = now
	return false
}
