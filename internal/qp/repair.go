package qp

// Repair of what the network loses, between two queue pairs of this library (wire.HintOurs). What
// comes too early is kept: by the responder (ahead.go), which tells in reports what it has and
// lacks (wire.Gaps), and by the requester, which sees from each answer which ones before it are
// missing. Only what is missing is sent again:
//
//  1. receiveGaps, answerAhead: what has come, and what is missing: runs of packets between una
//     and nxt. All else is under way.
//  2. pullRepair sends lost runs again, before anything new. A run that was sent again is lost
//     again if something that was sent later has come, and it has not.
//  3. pullProbe asks, by the last packet, what has come, when nothing was heard for a few round
//     trips. The answer shows it.
//  4. loseAll: there was no answer for very long. Everything that is not known to have come is
//     sent again.
//
// With other peers, which can only go back to the first packet that is missing, there are no runs
// (lost, retry).

import (
	"slices"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// run is consecutive packets between una and nxt of which something is known.
type run struct {
	first, end wire.PSN
	state      runState
	sent       uint32       // repeated: number of the repair
	after      wire.PSN     // repeated: the new packet that was sent next
	kept       *train.Train // landed: an answer that takes effect in its turn; one packet
}

type runState uint8

const (
	underWay runState = iota // not in the list
	missing                  // lost, and to be sent again
	repeated                 // sent again
	arrived                  // requests that have come, behind others that have not
	landed                   // answers that have come, behind others that have not: the bytes are in place, or kept
)

// repairs is what a requester knows of packets under way.
type repairs struct {
	// executed is the end of the requests that the peer is known to have executed. una stays
	// behind it where answers are missing.
	executed wire.PSN

	runs    []run // in order
	spare   []run // storage for the next list
	settled int   // packets in runs that have arrived or landed
	missing int   // packets in runs that are missing
	sends   uint32

	making  int  // packets of the run that is being sent again; 0: what is being sent is new
	oldest  bool // and it is the first run, of which one packet needs no room
	tell    bool // a probe is to be sent
	probes  int  // sent since the last progress
	probeAt Time // when the last was sent
	probed  uint32
	probing bool // probed is valid: a probe is under way
}

// reorder is how many packets have to come behind one before it counts as lost: networks reorder
// a little.
const reorder = 3

// evidence is what shows that packets are lost.
type evidence struct {
	upTo  wire.PSN // new packets before this one have come
	sent  uint32   // and so have repairs before this one
	later bool     // sent is valid
}

// shows reports whether a repair is lost: it has not come, but something that was sent later has.
func (e *evidence) shows(x *run) bool {
	return x.after.Less(e.upTo) || e.later && int32(e.sent-x.sent) > 0
}

// rewrite lets f say what state packets from first up to end are in, run by run: also those that
// are under way.
func (r *requester) rewrite(first, end wire.PSN, f func(x *run)) {
	if first.Less(r.una) {
		first = r.una
	}
	if r.nxt.Less(end) {
		end = r.nxt
	}
	if !first.Less(end) {
		return
	}
	out, at := r.spare[:0], first
	add := func(x run) {
		if x.state == underWay || !x.first.Less(x.end) {
			return
		}
		if n := len(out); n > 0 && out[n-1].end == x.first && out[n-1].state == x.state && x.kept == nil && out[n-1].kept == nil &&
			(x.state != repeated || x.sent == out[n-1].sent) {
			out[n-1].end = x.end
			return
		}
		out = append(out, x)
	}
	change := func(x run) {
		if x.first.Less(x.end) {
			at = x.end
			f(&x)
			add(x)
		}
	}
	for _, x := range r.runs {
		if !first.Less(x.end) {
			out = append(out, x)
			continue
		}
		if x.first.Less(first) {
			before := x
			before.end, x.first = first, first
			add(before)
		}
		if at.Less(end) && at.Less(x.first) {
			change(run{first: at, end: earlier(x.first, end)})
		}
		if x.first.Less(end) {
			inside := x
			inside.end = earlier(x.end, end)
			x.first = inside.end
			change(inside)
		}
		add(x)
	}
	change(run{first: at, end: end})
	r.runs, r.spare = out, r.runs[:0]
	r.count()
}

// covered reports whether one run has all packets from first up to end, and what state it is in.
func (r *requester) covered(first, end wire.PSN) (x *run, ok bool) {
	i, _ := slices.BinarySearchFunc(r.runs, first, func(x run, psn wire.PSN) int {
		if psn.Less(x.end) {
			return 1
		}
		return -1
	})
	if i == len(r.runs) {
		return nil, false
	}
	x = &r.runs[i]
	return x, !first.Less(x.first) && !x.end.Less(end)
}

func earlier(a, b wire.PSN) wire.PSN {
	if a.Less(b) {
		return a
	}
	return b
}

func (r *requester) count() {
	r.settled, r.missing = 0, 0
	for i := range r.runs {
		switch x := &r.runs[i]; x.state {
		case arrived, landed:
			r.settled += x.end.Sub(x.first)
		case missing:
			r.missing += x.end.Sub(x.first)
		}
	}
}

// dropRuns forgets what is known of packets before una, and from psn on.
func (r *requester) dropRuns(psn wire.PSN) {
	if len(r.runs) == 0 {
		return
	}
	out := r.runs[:0]
	for _, x := range r.runs {
		if x.first.Less(r.una) {
			x.first = r.una
		}
		x.end = earlier(x.end, psn)
		if x.first.Less(x.end) {
			out = append(out, x)
		} else if x.kept != nil {
			x.kept.Free()
		}
	}
	clear(r.runs[len(out):])
	r.runs = out
	r.count()
}

// forgetRepairs forgets what is known of packets under way.
func (r *requester) forgetRepairs() {
	for i := range r.runs {
		if t := r.runs[i].kept; t != nil {
			t.Free()
		}
	}
	r.repairs = repairs{executed: r.una}
}

// selective reports whether only what is missing is sent again: the peer is a queue pair of this
// library, and no answer waits for an engine.
func (q *QP) selective() bool { return q.ours && !q.req.waits() }

// parts calls f for the packets from first up to end, piece by piece: those that each belong to
// one READ or atomic (rd), whose range is given whole, and those that do not.
func (r *requester) parts(first, end wire.PSN, f func(first, end wire.PSN, rd *rdRange)) {
	for i := range r.rd.n {
		e := r.rd.at(i)
		if !first.Less(end) || !e.first.Less(end) {
			break
		}
		if !first.Less(e.end()) {
			continue
		}
		if first.Less(e.first) {
			f(first, e.first, nil)
			first = e.first
		}
		f(first, earlier(e.end(), end), e)
		first = e.end()
	}
	if first.Less(end) {
		f(first, end, nil)
	}
}

// requestsCame notes requests that have come, and returns whether that is news. Answers to READs
// are still awaited.
func (q *QP) requestsCame(first, end wire.PSN, e *evidence) (news bool) {
	r := &q.req
	r.parts(first, end, func(first, end wire.PSN, rd *rdRange) {
		if x, ok := r.covered(first, end); ok && x.state == arrived {
			return
		}
		r.rewrite(first, end, func(x *run) {
			switch {
			case rd != nil:
				if x.state == missing { // the answer is on its way
					x.state = underWay
				}
				return
			case x.state == arrived:
				return
			case x.state == repeated && (!e.later || int32(x.sent-e.sent) > 0):
				e.sent, e.later = x.sent, true
			}
			x.state = arrived
			news = true
		})
	})
	return news
}

// requestsLost notes requests that are missing, and returns how many packets those are. Requests for
// answers do not count: the window is for the answers, which go the other way.
func (q *QP) requestsLost(first, end wire.PSN, e *evidence) (lost int) {
	r := &q.req
	r.parts(first, end, func(first, end wire.PSN, rd *rdRange) {
		if rd != nil { // one packet asks for all of it
			first, end = rd.first, rd.end()
		}
		if x, ok := r.covered(first, end); ok && (x.state == missing || x.state == repeated && !e.shows(x)) {
			return
		}
		r.rewrite(first, end, func(x *run) {
			if x.state == underWay || x.state == repeated && e.shows(x) {
				if rd == nil {
					lost += x.end.Sub(x.first)
				}
				x.state = missing
			}
		})
	})
	return lost
}

// answersLost notes answers before psn that are missing: later ones have come.
func (q *QP) answersLost(psn wire.PSN, e *evidence) (lost int) {
	r := &q.req
	r.parts(r.una, psn, func(first, end wire.PSN, rd *rdRange) {
		if rd == nil {
			return
		}
		r.rewrite(first, end, func(x *run) {
			if x.state == underWay || x.state == repeated && e.shows(x) {
				lost += x.end.Sub(x.first)
				x.state = missing
			}
		})
	})
	return lost
}

// sawLoss follows up on packets that were found to be missing.
func (q *QP) sawLoss(n int, now Time) {
	r := &q.req
	q.settle()
	if n == 0 {
		return
	}
	r.sampleAt = 0
	if c := q.controller(); c != nil {
		c.lost(n, now)
	} else {
		r.congestion.lost()
	}
}

// heard notes that something new has come, though una has not moved: the peer is there.
func (q *QP) heard(n int, now Time) {
	r := &q.req
	q.settle()
	r.probes, r.probeAt = 0, 0
	if r.started != 0 {
		r.started, r.progAt = now, now
	}
	r.tries, r.lostValid = 0, false
	q.control(0, n, now)
}

// receiveGaps takes a report of the peer's responder: an acknowledgement, and which requests have
// come behind it.
func (q *QP) receiveGaps(t *train.Train, now Time) {
	r := &q.req
	var b [4 * maxPairs]byte
	if !q.selective() || t.Len > len(b) || t.PSN.Less(r.una.Add(-1)) {
		q.Counters.add(CntGhostAcks, 1)
		return
	}
	raw := [1][]byte{b[:t.Len]}
	if f, _ := mem.Copy(&mem.List{Raw: raw[:]}, &t.Payload, uint64(t.Len), false); !f.OK() {
		return
	}
	g := wire.Gaps(b[:t.Len])
	if !g.Check() {
		q.Counters.add(CntGhostAcks, 1)
		return
	}
	q.Counters.add(CntGapsReceived, 1)
	e := q.evidenceOf(t)
	q.acknowledged(t.PSN.Add(1), &e, now)
	news, behind, at := false, 0, t.PSN.Add(1)
	for i := range g.Pairs() {
		come, gap := g.Pair(i)
		if come > 0 && q.requestsCame(at, at.Add(come), &e) {
			news = true
		}
		if i > 0 {
			behind += come
		}
		at = at.Add(come)
		if come > 0 && e.upTo.Less(at) {
			e.upTo = at
		}
		at = at.Add(gap)
	}
	all := !at.Less(r.nxt) // nothing is under way that could still show more
	lost := 0
	at = t.PSN.Add(1)
	for i := range g.Pairs() {
		come, gap := g.Pair(i)
		if i > 0 {
			behind -= come
		}
		at = at.Add(come)
		if gap > 0 && (behind >= reorder || all || e.later) {
			lost += q.requestsLost(at, at.Add(gap), &e)
		}
		at = at.Add(gap)
	}
	q.sampled(e.upTo, now)
	if news {
		q.heard(0, now)
	}
	q.sawLoss(lost, now)
}

// evidenceOf returns what an answer shows of itself: that a probe has come.
func (q *QP) evidenceOf(t *train.Train) evidence {
	r := &q.req
	e := evidence{upTo: r.una}
	if t.Hints&wire.HintProbe != 0 && r.probing {
		e.sent, e.later = r.probed, true
		r.probing = false
		if r.sampleAt != 0 {
			r.sampleAt = r.probeAt // it is the probe that is answered
		}
	}
	return e
}

// acknowledged is receiveAck for a peer that repairs: everything before psn has come.
func (q *QP) acknowledged(psn wire.PSN, e *evidence, now Time) {
	r := &q.req
	if e.upTo.Less(psn) {
		e.upTo = psn
	}
	if r.executed.Less(psn) {
		r.executed = psn
	}
	q.takeLanded(now)
	if !r.una.Less(psn) || q.state != ib.QPRTS && q.state != ib.QPSQD {
		return
	}
	q.requestsCame(r.una, psn, e)
	q.sawLoss(q.answersLost(psn, e), now) // they were sent before the acknowledgement
}

// sampled measures the round trip of the sample, if it has come.
func (q *QP) sampled(upTo wire.PSN, now Time) {
	r := &q.req
	if r.sampleAt != 0 && r.sample.Less(upTo) {
		q.control(r.measure(now), 0, now)
	}
}

// control tells the controller of a round trip, if rtt is not 0, and of packets that have arrived.
func (q *QP) control(rtt Time, acked int, now Time) {
	c := q.controller()
	if c == nil {
		return
	}
	if rtt > 0 {
		c.sample(rtt, now)
	}
	c.ackedPackets(acked, now)
	q.req.congestion.pipe = c.pipe() / max(q.mtu, 1)
}

// controller returns the controller of the path, nil if there is none.
func (q *QP) controller() *control {
	if q.path.Credits == nil {
		return nil
	}
	return q.path.Credits.pool.control
}

// answerAhead takes an answer that comes before others that are missing. Its bytes go to their
// place; the last packet of a request is kept until its turn, since the program may look at it.
func (q *QP) answerAhead(t *train.Train, now Time) mem.Fault {
	r := &q.req
	at, w := q.requestOf(t.PSN)
	if w == nil {
		q.Counters.add(CntGhostAcks, t.N)
		return mem.Fault{}
	}
	done := t.PSN.Sub(w.first)
	if vendor := q.checkAnswer(t, w, done); vendor != 0 || t.Lease != nil {
		return mem.Fault{} // it is asked for again, and fails in its turn
	}
	n := t.N // packets whose bytes go to their place
	last := done+t.N == int(w.n)
	if last {
		n--
	}
	if r.executed.Less(t.PSN) {
		r.executed = t.PSN // requests before it
	}
	end := t.PSN.Add(t.N)
	e := evidence{upTo: end}
	news := 0
	if n > 0 && !w.staged {
		size := n * q.mtu
		f, side := mem.Copy(q.localList(at, uint64(done)*uint64(q.mtu)), &t.Payload, uint64(size), false)
		if !f.OK() {
			if side == mem.Src {
				return f
			}
			n = 0 // it is asked for again, and fails or waits in its turn
		}
		r.rewrite(t.PSN, t.PSN.Add(n), func(x *run) { news += x.land() })
	}
	if last {
		news += q.keepAnswer(t)
	}
	if news > 0 {
		q.heard(news, now)
	}
	q.sampled(end, now)
	before := r.overtaken()
	if !end.Less(r.nxt) { // nothing is under way that could still show more
		before = end
	}
	q.sawLoss(q.answersLost(before, &e), now)
	return mem.Fault{}
}

// overtaken returns the packet before which answers count as lost: so many that have landed are
// behind it.
func (r *requester) overtaken() wire.PSN {
	need := reorder
	for i := len(r.runs) - 1; i >= 0; i-- {
		x := &r.runs[i]
		if x.state != landed {
			continue
		}
		if n := x.end.Sub(x.first); n < need {
			need -= n
			continue
		}
		return x.end.Add(-need)
	}
	return r.una
}

// land makes packets landed, and returns how many were not.
func (x *run) land() int {
	if x.state == landed {
		return 0
	}
	x.state = landed
	return x.end.Sub(x.first)
}

// keepAnswer keeps the last packet of a train until its turn, and returns 1 if that is new.
func (q *QP) keepAnswer(t *train.Train) (news int) {
	psn := t.PSN.Add(t.N - 1)
	q.req.rewrite(psn, psn.Add(1), func(x *run) {
		if x.state == landed {
			return
		}
		if t.N > 1 {
			t.TrimFront(t.N - 1)
		}
		if c, f := t.Keep(); f.OK() {
			x.state, x.kept = landed, c
			news = 1
		}
	})
	return news
}

// requestOf returns the request that a packet under way belongs to, and its number; nil if there
// is none.
func (q *QP) requestOf(psn wire.PSN) (uint32, *wqe) {
	for i := q.sq.head; i != q.sq.tail; i++ {
		w := q.sq.at(i)
		if !w.started {
			break
		}
		if psn.Less(w.end()) {
			if psn.Less(w.first) {
				break
			}
			return i, w
		}
	}
	return 0, nil
}

// takeLanded lets answers come into effect that have landed, as far as those before them have.
func (q *QP) takeLanded(now Time) {
	r := &q.req
	for q.selective() {
		if r.una.Less(r.executed) {
			q.advance(r.executed, now)
		}
		if len(r.runs) == 0 || r.runs[0].first != r.una || r.runs[0].state != landed || q.state != ib.QPRTS && q.state != ib.QPSQD {
			return
		}
		x := r.runs[0]
		w := q.sq.at(q.sq.head)
		if q.sq.head == q.sq.tail || !w.started || r.una.Less(w.first) || !r.una.Less(w.end()) {
			return
		}
		if x.kept == nil {
			r.una = x.end
			q.progressed(x.end.Sub(x.first), now)
			continue
		}
		r.runs[0].kept = nil
		if w.facts().atomic {
			setOrig(x.kept)
		}
		una := r.una
		q.land(x.kept, q.sq.head, x.first.Sub(w.first), now) // its bytes are here: it has no fault of its own
		x.kept.Free()
		if r.una == una {
			r.rewrite(x.first, x.end, func(x *run) { x.state = underWay }) // it is asked for again
			return
		}
	}
}

// pullRepair sends packets again that are missing, if there is room.
func (q *QP) pullRepair(t *train.Train, now Time) bool {
	r := &q.req
	if r.missing == 0 || r.fetching {
		return false // also while the peer is not ready for what comes behind
	}
	k := 0
	for r.runs[k].state != missing {
		k++
	}
	x := r.runs[k]
	i, w := q.requestOf(x.first)
	if w == nil {
		return false
	}
	n := earlier(x.end, w.end()).Sub(x.first)
	if w.facts().rd {
		n = earlier(x.end, r.rd.endOf(x.first)).Sub(x.first)
	}
	r.oldest = k == 0
	n = q.makeAgain(t, i, x.first, n, now)
	if n == 0 {
		return false
	}
	t.Hints |= wire.HintAlone
	if x.first == r.una {
		t.Hints |= wire.HintFirst
	}
	t.AckReq = true
	q.Counters.add(CntRetransmits, t.N)
	r.sends++
	r.rewrite(x.first, x.first.Add(n), func(y *run) { y.state, y.sent, y.after = repeated, r.sends, r.nxt })
	if r.started == 0 {
		r.started, r.progAt = now, now
	}
	return true
}

// makeAgain makes a train of up to n packets of request i, which were sent before, and returns how
// many packets, or PSNs of a READ, it has.
func (q *QP) makeAgain(t *train.Train, i uint32, first wire.PSN, n int, now Time) int {
	r := &q.req
	cur, nxt, unacked, ask, failing := r.cur, r.nxt, r.unacked, r.askNow, r.failing
	r.cur, r.nxt, r.making = i, first, n
	n = q.makeRequest(t, q.sq.at(i), now)
	r.making = 0
	if r.failing != failing || q.state != ib.QPRTS && q.state != ib.QPSQD { // it was loaded, which has failed
		t.Reset()
		q.rewind(r.nxt)
		return 0
	}
	r.cur, r.nxt, r.unacked, r.askNow = cur, nxt, unacked, ask
	if n == 0 {
		t.Reset()
		return 0
	}
	t.Again, t.Bounce = true, true
	return n
}

// How often, and how many times, probes ask what has come.
const (
	probeTrips  = 3                      // round trips without news until the first probe
	leastProbe  = 250 * time.Microsecond // and at least so long
	firstProbe  = 30 * time.Millisecond  // before a round trip was measured
	maxProbes   = 8
	otherProbes = 1 // to a peer that is not of this library
	blindProbes = 3 // before the first answer
	// firstRTO is the same before a round trip was measured.
	firstRTO = 64 * time.Millisecond
	// probedRTO is the shortest time without an answer after which all is sent again to a peer
	// that is being probed: it is more likely to be busy than to have lost everything.
	probedRTO = 128 * time.Millisecond
)

// canProbe reports whether the last packet can be sent again to ask what has come. Another peer would
// execute a READ again.
func (q *QP) canProbe() bool {
	r := &q.req
	return q.path.Selective && r.nxt == r.max && !r.waits() && (q.ours || r.rd.n == 0 || r.rd.at(r.rd.n-1).end() != r.nxt)
}

// leastRTO returns the shortest time that the peer has for an answer; 0: the usual one.
func (q *QP) leastRTO() Time {
	switch {
	case !q.path.Selective:
		return 0
	case q.ours && q.canProbe():
		return probedRTO
	case q.req.srtt == 0:
		return firstRTO
	}
	return 0
}

// probeDeadline returns when the next probe is due, 0 for never.
func (q *QP) probeDeadline() Time {
	r, most := &q.req, otherProbes
	switch {
	case q.ours:
		most = maxProbes
	case r.srtt == 0:
		most = blindProbes
	}
	if r.probes >= most || r.tell || !q.canProbe() {
		return 0
	}
	wait := firstProbe
	if r.srtt > 0 {
		wait = max(probeTrips*r.srtt, leastProbe)
	}
	return max(r.started, r.probeAt) + wait<<r.probes
}

// pullProbe sends the last packet again, to ask what has come.
func (q *QP) pullProbe(t *train.Train, now Time) bool {
	r := &q.req
	if !r.tell || r.fetching || r.rnrWait(now) {
		return false
	}
	r.tell = false
	if r.una == r.nxt || !q.canProbe() {
		return false
	}
	first, n := r.nxt.Add(-1), 1
	i, w := q.requestOf(first)
	if w == nil {
		return false
	}
	if w.facts().rd {
		if r.rd.n == 0 {
			return false
		}
		e := r.rd.at(r.rd.n - 1)
		first, n = e.first, int(e.n)
		if first.Less(r.una) { // the first answers have come
			first, n = r.una, e.end().Sub(r.una)
		}
	}
	r.oldest = true
	if q.makeAgain(t, i, first, n, now) == 0 {
		return false
	}
	t.Hints |= wire.HintProbe | wire.HintAlone
	t.AckReq = true
	r.sends++
	r.probed, r.probing = r.sends, true
	if r.sampleAt != 0 && !r.sample.Less(first) {
		r.sampleAt, r.probeAt = now, now // which copy is answered is not known
	}
	q.settle() // it was under way already
	q.Counters.add(CntProbes, 1)
	return true
}

// loseOldest has the oldest packet sent again, which shows the peer what has been answered: it
// waits for bytes of an answer that has come long ago.
func (q *QP) loseOldest() {
	r := &q.req
	r.parts(r.una, r.una.Add(1), func(first, end wire.PSN, rd *rdRange) {
		if rd != nil {
			end = rd.end()
		}
		r.rewrite(first, end, func(x *run) {
			if x.state == underWay || x.state == repeated {
				x.state = missing
			}
		})
	})
	q.settle()
}

// loseAll: no answer has come for so long that everything counts as lost but answers that have
// landed.
func (q *QP) loseAll(now Time) {
	r := &q.req
	r.rewrite(r.una, r.nxt, func(x *run) {
		if x.state != landed { // what has arrived, too: the peer may have had to forget it
			x.state = missing
		}
	})
	r.probes, r.probeAt, r.probing, r.tell = 0, now, false, false
	q.settle()
	if c := q.controller(); c != nil {
		c.timedOut(r.started, now)
	} else {
		r.congestion.lost()
	}
	r.askNow = true
	r.restart(now)
}
