package qp

// Answers to READs and atomics whose bytes an engine has to move (staged.go). The completer
// accepts them as they come, and they come into effect in this order, when their bytes are
// there. Until then una stays where it is, and acknowledgements that come meanwhile wait.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// landing is the answers of a requester that wait for engines, and what waits behind them.
type landing struct {
	answers []*Move        // oldest first
	next    wire.PSN       // of the answer expected behind them; valid if there are some
	nextAt  uint32         // the request that it belongs to
	acks    []*train.Train // acknowledgements and NAKs that came behind them
}

// waits reports whether there are answers that have not come into effect.
func (l *landing) waits() bool { return len(l.answers) > 0 }

// expected returns the PSN of the oldest packet whose answer has not come.
func (q *QP) expected() wire.PSN {
	if q.req.waits() {
		return q.req.next
	}
	return q.req.una
}

// reached goes on to the request that an answer with PSN psn belongs to, and returns its
// number. It reports false if answers are missing before it.
func (q *QP) reached(psn wire.PSN, now Time) (at uint32, ok bool) {
	r := &q.req
	if !r.waits() {
		q.advance(psn, now)
		return q.sq.head, r.una == psn
	}
	for r.next != psn && r.nextAt != q.sq.tail { // past requests that the answer acknowledges
		w := q.sq.at(r.nextAt)
		if !w.started || w.facts().rd || psn.Less(w.end()) {
			break
		}
		r.next, r.nextAt = w.end(), r.nextAt+1
	}
	return r.nextAt, r.next == psn
}

// landed notes an answer, to request at, that comes into effect when its move is over.
func (q *QP) landed(m *Move, at uint32, now Time) {
	r := &q.req
	r.answers = append(r.answers, m)
	r.arrived(m.psn) // the answer acknowledges all before it
	r.next, r.nextAt = m.psn.Add(m.n), at
	if w := q.sq.at(at); r.next == w.end() {
		r.nextAt++
	}
	r.tries, r.lostValid = 0, false
	if r.started != 0 {
		r.started, r.progAt = now, now
	}
}

// keepAck keeps an acknowledgement or a NAK until the answers before it have come into effect.
// A later one replaces an acknowledgement; nothing behind a NAK is kept.
func (l *landing) keepAck(t *train.Train) {
	c := new(train.Train)
	*c = *t
	c.SetNone()
	if n := len(l.acks); n > 0 && l.acks[n-1].AETH.Syndrome.IsAck() {
		if !c.PSN.Less(l.acks[n-1].PSN) {
			l.acks[n-1] = c
		}
		return
	}
	if len(l.acks) == 0 {
		l.acks = append(l.acks, c)
	}
}

// lastNak returns the NAK by which the peer has failed; nil if none is kept.
func (l *landing) lastNak() *train.Train {
	if n := len(l.acks); n > 0 && l.acks[n-1].AETH.Syndrome.IsNak() && l.acks[n-1].AETH.Syndrome != wire.NakPSNSequence {
		return l.acks[n-1]
	}
	return nil
}

// finishAnswers lets answers come into effect, in their order, as far as their moves are over.
// It returns one whose payload could not be read, for its sender, and why.
func (q *QP) finishAnswers(now Time) (*train.Train, mem.Fault) {
	r := &q.req
	for r.waits() && r.answers[0].over {
		m := r.answers[0]
		if q.state != ib.QPRTS && q.state != ib.QPSQD {
			r.landing = landing{}
			return nil, mem.Fault{}
		}
		if !m.fault.OK() {
			return q.answerFailed(m, now)
		}
		if r.answers = r.answers[1:]; len(r.answers) == 0 {
			r.answers = nil
		}
		q.advance(m.psn, now) // the answer acknowledges all before it
		if r.una != m.psn || q.sq.head == q.sq.tail || q.state == ib.QPErr {
			continue // a completion did not fit
		}
		r.una = r.una.Add(m.n)
		q.progressed(m.n, now)
		q.advance(r.una, now)
	}
	if r.waits() {
		return nil, mem.Fault{}
	}
	acks := r.acks
	r.landing = landing{}
	q.takeLanded(now)
	for _, t := range acks {
		if q.state == ib.QPRTS || q.state == ib.QPSQD {
			q.receiveAnswer(t, now)
		}
	}
	return nil, mem.Fault{}
}

// answerFailed ends a request whose answer could not be written to its memory. If the payload
// could not be read from the peer's memory, it returns the train, for the peer; or asks for
// the answer again, if the peer has ended the lease. If the peer has done that because it has
// failed, its NAK, which waits behind the answer, says how the request ends.
func (q *QP) answerFailed(m *Move, now Time) (*train.Train, mem.Fault) {
	r := &q.req
	q.moves.forgetKind(moveAnswer)
	nak := r.lastNak()
	r.landing = landing{}
	q.advance(m.psn, now)
	switch {
	case m.side == mem.Src && m.train.Leased():
		return m.train, m.fault
	case m.side == mem.Src && nak != nil:
		q.receiveAnswer(nak, now)
	case m.side == mem.Src:
		q.AnswerUnread(now)
	case q.state == ib.QPRTS || q.state == ib.QPSQD:
		q.fail(ib.WCLocProtErr, vendorFault(m.fault), now)
	}
	return nil, mem.Fault{}
}
