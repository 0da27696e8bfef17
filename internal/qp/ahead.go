package qp

// Requests that come before others that are missing. If the peer is of this library, the responder
// keeps them, tells the peer which are missing (report), and executes them when those have come.
// Another peer gets the NAK that the specification asks for, and sends them again.
//
// Also here: what a queue pair tells a peer of congestion (congestion notification packets, IBA
// annex A17.9.3).

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// How much is kept.
const (
	maxAheadBytes = 16 << 20    // for one queue pair
	maxAheadAll   = 64 << 20    // for all queue pairs of the process
	maxAheadPSNs  = wire.MaxGap // behind the expected request
	maxPairs      = 64          // in a report: it fits the smallest MTU
)

var aheadAll atomic.Int64 // bytes of requests that all queue pairs keep

// aheads are requests that came too early, in order, none twice.
type aheads struct {
	trains []*train.Train
	bytes  int
}

// keepAhead keeps a request that came too early, and reports whether it is kept.
func (q *QP) keepAhead(t *train.Train) bool {
	r := &q.resp
	end := t.PSN.Add(q.takes(t))
	if t.N < 1 || t.Len < (t.N-1)*q.mtu || t.Len > t.N*q.mtu || t.N > 1 && t.MTU != q.mtu {
		return false // it is refused when its turn comes
	}
	if !q.ours || t.Payload.Table != nil || t.Lease != nil || r.notReady || t.PSN.Sub(r.epsn)+q.takes(t) > maxAheadPSNs ||
		r.ahead.bytes+t.Len > maxAheadBytes || aheadAll.Load() > maxAheadAll {
		return false
	}
	a := &r.ahead
	i := len(a.trains)
	for i > 0 && t.PSN.Less(a.trains[i-1].PSN) {
		i--
	}
	if i > 0 {
		before := a.trains[i-1]
		switch over := before.PSN.Add(q.takes(before)).Sub(t.PSN); {
		case over >= end.Sub(t.PSN):
			return true // it is kept already
		case over > 0 && q.takes(t) != t.N:
			return false
		case over > 0:
			t.TrimFront(over)
		}
	}
	var overlaps *train.Train
	j := i
	for j < len(a.trains) && !end.Less(a.trains[j].PSN.Add(q.takes(a.trains[j]))) {
		j++ // the new one has all of it
	}
	if j < len(a.trains) && a.trains[j].PSN.Less(end) { // and the front of this one
		overlaps = a.trains[j]
		if q.takes(overlaps) != overlaps.N {
			return false
		}
	}
	c, f := t.Keep()
	if !f.OK() {
		return false
	}
	if overlaps != nil {
		overlaps.TrimFront(end.Sub(overlaps.PSN))
	}
	for _, x := range a.trains[i:j] {
		a.count(x, -1)
		x.Free()
	}
	a.trains = slices.Replace(a.trains, i, j, c)
	a.count(c, 1)
	return true
}

// count adds the bytes of a train, or with sign -1 takes them away.
func (a *aheads) count(t *train.Train, sign int) {
	n := sign * (t.Holds() + heldCost)
	a.bytes += n
	aheadAll.Add(int64(n))
}

// dropAhead forgets what is kept.
func (r *responder) dropAhead() {
	for _, t := range r.ahead.trains {
		r.ahead.count(t, -1)
		t.Free()
	}
	r.ahead = aheads{}
}

// takeAhead executes requests that are kept, as far as those before them have come.
func (q *QP) takeAhead() {
	r := &q.resp
	a := &r.ahead
	for len(a.trains) > 0 && !r.epsn.Less(a.trains[0].PSN) { // none is left if the queue pair has failed
		t := a.trains[0]
		a.trains[0] = nil
		if a.trains = a.trains[1:]; len(a.trains) == 0 {
			a.trains = nil
		}
		a.count(t, -1)
		over := r.epsn.Sub(t.PSN)
		if over < q.takes(t) && (over == 0 || q.takes(t) == t.N) {
			if over > 0 {
				t.TrimFront(over)
			}
			q.receiveRequest(t) // its payload is here: it has no fault of its own
		}
		t.Free()
	}
}

// receiveEarly deals with a request that came before others.
func (q *QP) receiveEarly(t *train.Train) {
	r := &q.resp
	q.Counters.add(CntOutOfSequence, t.N)
	probe := t.Hints&wire.HintProbe != 0
	if !q.keepAhead(t) {
		switch {
		case !r.nakSent:
			q.nak(wire.NakPSNSequence, r.epsn)
		case probe && r.notReady:
			q.rnr() // the peer asks because the last one was lost
		case probe:
			q.nak(wire.NakPSNSequence, r.epsn)
		}
		return
	}
	r.probed = r.probed || probe
	if !r.ack.pending || r.ack.syndrome.IsAck() {
		r.ack.pending, r.ack.psn, r.ack.syndrome = true, r.epsn, wire.NakPSNSequence
	}
}

// report makes an acknowledgement, whose PSN is set, a report of what is missing.
func (q *QP) report(t *train.Train) {
	r := &q.resp
	come := r.epsn.Sub(t.PSN.Add(1))
	if come < 0 || come > wire.MaxGap {
		return
	}
	var b [4 * maxPairs]byte
	g := wire.Gaps(b[:0])
	at := r.epsn
	for _, x := range r.ahead.trains {
		if gap := x.PSN.Sub(at); gap > 0 {
			if len(g) == len(b)-4 || come > wire.MaxGap {
				break
			}
			g = g.Append(come, gap)
			come = 0
		}
		come += q.takes(x)
		at = x.PSN.Add(q.takes(x))
	}
	g = g.Append(min(come, wire.MaxGap), 0)
	t.Kind = wire.KindGaps
	t.SetInline(g)
	q.Counters.add(CntGapsSent, 1)
}

// notifyGap is how often, at most, a peer is told of congestion: as often as adapters do.
const notifyGap = 50 * time.Microsecond

// notices is what a queue pair is to tell its peer of congestion.
type notices struct {
	marked int  // packets that were marked, since the last notification
	due    bool // one is to be sent
	at     Time // when the last was
}

// sawMarks notes packets that met congestion on their way here. The peer is told. The requester
// decides itself how many answers are under way.
func (q *QP) sawMarks(t *train.Train, now Time) {
	q.Counters.add(CntMarked, t.Marked)
	if t.IsAnswer() {
		if c := q.controller(); c != nil {
			c.sawMarks(t.Marked)
		}
		if q.ours {
			return
		}
	}
	n := &q.notices
	n.marked = min(n.marked+t.Marked, 1<<16-1)
	if n.at == 0 || now-n.at >= notifyGap {
		n.due, n.at = true, now
	}
}

// pullNotice makes a congestion notification. Between queue pairs of this library it says how many
// packets were marked.
func (q *QP) pullNotice(t *train.Train) bool {
	n := &q.notices
	if !n.due {
		return false
	}
	t.Kind, t.DestQP, t.N, t.Start, t.End = wire.KindCNP, q.attr.DestQPN, 1, true, true
	var b [16]byte
	if q.ours {
		b[0], b[1] = byte(n.marked>>8), byte(n.marked)
	}
	t.SetInline(b[:])
	n.due, n.marked = false, 0
	q.Counters.add(CntNoticesSent, 1)
	return true
}

// receiveNotice takes a congestion notification.
func (q *QP) receiveNotice(t *train.Train) {
	if t.Len != 16 {
		return
	}
	q.Counters.add(CntNotices, 1)
	n := 1
	if q.ours {
		var b [16]byte
		raw := [1][]byte{b[:]}
		if f, _ := mem.Copy(&mem.List{Raw: raw[:]}, &t.Payload, 16, false); !f.OK() {
			return
		}
		n = max(1, int(b[0])<<8|int(b[1]))
	}
	if c := q.controller(); c != nil {
		c.sawMarks(n)
	}
}
