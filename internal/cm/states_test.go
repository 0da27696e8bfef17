package cm

import (
	"fmt"
	"testing"
	"time"
)

// The state machine as a table: which state follows when a message comes. Where a row has no entry, the
// message has no effect. "REJ 4" and "REJ 10" are for the whole connection; "REJ of REQ" and so on are
// consumer defined.
var transitions = map[State]map[string]State{
	Idle:        {},
	ReqSent:     {"MRA of REQ": MRAReqRcvd, "REJ of REQ": Idle, "REJ 10 of REQ": TimeWait, "REP": RepRcvd},
	MRAReqRcvd:  {"REJ of REQ": Idle, "REJ 10 of REQ": TimeWait, "REP": RepRcvd},
	RepRcvd:     {"REJ of REP": TimeWait, "REJ": TimeWait, "REJ 4": TimeWait, "REJ 10": TimeWait},
	MRARepSent:  {"REJ of REP": TimeWait, "REJ": TimeWait, "REJ 4": TimeWait, "REJ 10": TimeWait},
	ReqRcvd:     {"REJ of REP": Idle, "REJ": Idle, "REJ 4": Idle, "REJ 10": Idle},
	MRAReqSent:  {"REJ of REP": Idle, "REJ": Idle, "REJ 4": Idle, "REJ 10": TimeWait},
	RepSent:     {"MRA of REP": MRARepRcvd, "REJ of REP": Idle, "REJ": Idle, "REJ 4": Idle, "REJ 10": TimeWait, "RTU": Established, "DREQ": DreqRcvd},
	MRARepRcvd:  {"REJ of REP": Idle, "REJ": Idle, "REJ 4": Idle, "REJ 10": TimeWait, "RTU": Established, "DREQ": DreqRcvd},
	Established: {"REJ of REP": TimeWait, "REJ": TimeWait, "REJ 4": TimeWait, "REJ 10": TimeWait, "DREQ": DreqRcvd, "REQ with its QPN": DreqSent},
	DreqSent:    {"REJ of REP": TimeWait, "REJ": TimeWait, "REJ 4": TimeWait, "REJ 10": TimeWait, "DREQ": DreqRcvd, "DREP": TimeWait},
	DreqRcvd:    {"DREP": TimeWait},
	TimeWait:    {},
	SIDRReqSent: {"SIDR_REP": Idle},
	SIDRReqRcvd: {},
}

// calls is which state follows a call of the program; a call that is not in a row returns an error.
var calls = map[State]map[string]State{
	Idle:        {},
	ReqSent:     {"Reject": Idle},
	MRAReqRcvd:  {"Reject": Idle},
	RepRcvd:     {"Reject": Idle, "Establish": Established},
	MRARepSent:  {"Reject": Idle, "Establish": Established},
	ReqRcvd:     {"Reject": Idle, "Accept": RepSent},
	MRAReqSent:  {"Reject": Idle, "Accept": RepSent},
	RepSent:     {"Reject": TimeWait, "Confirm": Established},
	MRARepRcvd:  {"Reject": TimeWait, "Confirm": Established},
	Established: {"Disconnect": DreqSent},
	DreqSent:    {},
	DreqRcvd:    {"Disconnect": TimeWait},
	TimeWait:    {},
	SIDRReqSent: {},
	SIDRReqRcvd: {"Reject": Idle, "AnswerSIDR": Idle},
}

// place is a Conn in a state, at one side of a pair.
type place struct {
	name  string
	reach func(p *pair) (s *side, n *Conn)
}

func places() map[State][]place {
	a := func(f func(*pair) (a, b *Conn)) place {
		return place{"a", func(p *pair) (*side, *Conn) { n, _ := f(p); return p.a, n }}
	}
	b := func(f func(*pair) (a, b *Conn)) place {
		return place{"b", func(p *pair) (*side, *Conn) { _, n := f(p); return p.b, n }}
	}
	waited := func(f func(*pair) (a, b *Conn)) func(*pair) (a, b *Conn) {
		return func(p *pair) (*Conn, *Conn) {
			a, b := f(p)
			p.pass(4608 * time.Millisecond)
			p.run()
			return a, b
		}
	}
	ended := func(side int) func(p *pair) (a, b *Conn) {
		return func(p *pair) (*Conn, *Conn) {
			a, b := p.connected()
			must(p.t, []*Conn{a, b}[side].Disconnect(p.now))
			p.run()
			return a, b
		}
	}
	gone := func(p *pair) (*Conn, *Conn) {
		a, b := p.disconnected()
		p.pass(time.Second)
		p.run()
		return a, b
	}
	first := func(p *pair) (*Conn, *Conn) { return p.request(), nil }
	return map[State][]place{
		Idle:       {a(gone), b(gone)},
		ReqSent:    {a(first)},
		MRAReqRcvd: {a(waited((*pair).asked))},
		RepRcvd: {{"a", func(p *pair) (*side, *Conn) {
			a, b := p.asked()
			must(p.t, b.Accept(p.now, paramsB()))
			m := p.b.sent(AttrREP)[0]
			p.a.Receive(p.now, m.From, m.To, m.MAD[:])
			return p.a, a
		}}},
		MRARepSent: {a((*pair).replied)},
		ReqRcvd: {{"b", func(p *pair) (*side, *Conn) {
			p.request()
			m := p.a.sent(AttrREQ)[0]
			p.b.Receive(p.now, m.From, m.To, m.MAD[:])
			return p.b, p.b.head.Conn
		}}},
		MRAReqSent:  {b((*pair).asked)},
		RepSent:     {b((*pair).replied)},
		MRARepRcvd:  {b(waited((*pair).replied))},
		Established: {a((*pair).connected), b((*pair).connected)},
		DreqSent:    {a(ended(0)), b(ended(1))},
		DreqRcvd:    {a(ended(1)), b(ended(0))},
		TimeWait:    {a((*pair).disconnected), b((*pair).disconnected)},
		SIDRReqSent: {{"a", func(p *pair) (*side, *Conn) { n := p.resolve(); return p.a, n }}},
		SIDRReqRcvd: {{"b", func(p *pair) (*side, *Conn) {
			p.resolve()
			p.deliver(p.a, p.b)
			return p.b, p.b.events[0].Conn
		}}},
	}
}

// toConn returns the messages of the peer of a Conn, right in every respect.
func toConn(n *Conn) map[string][]byte {
	peer := n.remoteID
	if peer == 0 {
		peer = 777
	}
	guid := n.guid
	if guid == 0 {
		guid = 888
	}
	i := ids{local: peer, remote: n.localID}
	reject := func(of subject, reason Reason) []byte {
		r := rej{ids: i, of: of, reason: reason, ariLen: 8}
		be.PutUint64(r.ari[:], guid)
		return message(AttrREJ, r.put)
	}
	q := req{localID: peer, guid: guid, qpn: n.remoteQPN, service: service, mtu: 3, localGID: n.path.Remote.As16(), remoteGID: n.path.Local.As16()}
	stale := q
	stale.localID++
	return map[string][]byte{
		"REQ":              message(AttrREQ, q.put),
		"REQ with its QPN": message(AttrREQ, stale.put),
		"MRA of REQ":       message(AttrMRA, (&mra{ids: i, of: ofREQ, timeout: 20}).put),
		"MRA of REP":       message(AttrMRA, (&mra{ids: i, of: ofREP, timeout: 20}).put),
		"MRA of LAP":       message(AttrMRA, (&mra{ids: i, of: ofOther, timeout: 20}).put),
		"REJ of REQ":       reject(ofREQ, RejectConsumer),
		"REJ 10 of REQ":    reject(ofREQ, RejectStaleConn),
		"REJ of REP":       reject(ofREP, RejectConsumer),
		"REJ":              reject(ofOther, RejectConsumer),
		"REJ 10":           reject(ofOther, RejectStaleConn),
		"REJ 4":            reject(ofOther, RejectTimeout),
		"REP":              message(AttrREP, (&rep{localID: peer, remoteID: n.localID, qpn: qpnB, guid: guid}).put),
		"RTU":              message(AttrRTU, i.put),
		"DREQ":             message(AttrDREQ, (&dreq{ids: i, qpn: n.localQPN}).put),
		"DREP":             message(AttrDREP, i.put),
		"SIDR_REQ":         message(AttrSIDRREQ, (&sidrReq{id: peer, service: service}).put),
		"SIDR_REP":         message(AttrSIDRREP, (&sidrRep{id: n.localID}).put),
		"LAP":              message(AttrLAP, i.put),
		"APR":              message(AttrAPR, i.put),
	}
}

// TestEveryStateEveryMessage: whatever comes, the state that follows is the one of the table, and after
// Close nothing is left.
func TestEveryStateEveryMessage(t *testing.T) {
	eachPlace(t, func(t *testing.T, at place, state State) {
		_, n := at.reach(newPair(t))
		for name := range toConn(n) {
			p := newPair(t)
			s, n := at.reach(p)
			equal(t, "state", n.State(), state)
			mad := toConn(n)[name]
			s.Receive(p.now, n.path.Remote, n.path.Local, mad)
			want, ok := transitions[state][name]
			if !ok {
				want = state
			}
			equal(t, name, n.State(), want)
			s.check(t)
			s.Receive(p.now, n.path.Remote, n.path.Local, mad) // and the duplicate
			s.check(t)
			leaveEmpty(p, s, n)
		}
	})
}

// TestEveryStateEveryCall is the same for the program's calls.
func TestEveryStateEveryCall(t *testing.T) {
	eachPlace(t, func(t *testing.T, at place, state State) {
		for name, call := range map[string]func(*Conn, Time) error{
			"Accept":     func(n *Conn, now Time) error { return n.Accept(now, paramsB()) },
			"Establish":  (*Conn).Establish,
			"Reject":     func(n *Conn, now Time) error { return n.Reject(now, RejectConsumer, nil, nil) },
			"Disconnect": (*Conn).Disconnect,
			"Confirm":    (*Conn).Confirm,
			"AnswerSIDR": func(n *Conn, now Time) error { return n.AnswerSIDR(now, &SIDRReply{}) },
		} {
			p := newPair(t)
			s, n := at.reach(p)
			err := call(n, p.now)
			want, ok := calls[state][name]
			if ok != (err == nil) {
				t.Fatalf("%s: %v", name, err)
			}
			if !ok {
				want = state
			}
			equal(t, name, n.State(), want)
			s.check(t)
			leaveEmpty(p, s, n)
		}
	})
}

func eachPlace(t *testing.T, f func(*testing.T, place, State)) {
	all := places()
	for state := range numStates {
		if len(all[state]) == 0 {
			t.Fatalf("no way to state %v", state)
		}
		for _, at := range all[state] {
			t.Run(fmt.Sprintf("%v %s", state, at.name), func(t *testing.T) { f(t, at, state) })
		}
	}
}

// leaveEmpty closes the Conn, and those that messages have made, and demands that nothing is left.
func leaveEmpty(p *pair, s *side, n *Conn) {
	p.t.Helper()
	s.pump()
	n.Close(p.now)
	for _, e := range s.events {
		e.Conn.Close(p.now)
	}
	s.check(p.t)
	p.pass(4 * time.Hour)
	for _, c := range s.conns {
		p.t.Fatalf("left: %+v", c)
	}
	s.empty()
}

// TestLastWordsAreThoseOfClose: what another process says for a dead one is what the program's Close would
// have said.
func TestLastWordsAreThoseOfClose(t *testing.T) {
	eachPlace(t, func(t *testing.T, at place, state State) {
		p := newPair(t)
		s, n := at.reach(p)
		equal(t, "state", n.State(), state)
		l, ok := n.Last()
		words, said := LastWords(&l, 7)
		for _, silent := range []State{Idle, TimeWait, SIDRReqSent} {
			if state == silent {
				equal(t, "has last words", ok || said, false)
				return
			}
		}
		equal(t, "has last words", ok && said, true)
		for _, ok := s.NextMAD(); ok; _, ok = s.NextMAD() {
		}
		s.out = nil
		if state == DreqSent { // Close leaves it at the DREQ that is repeated
			equal(t, "last words", Attr(be.Uint16(words[16:])), AttrDREQ)
			return
		}
		n.Close(p.now)
		m, ok := s.NextMAD()
		equal(t, "Close sends", ok, true)
		a, b := m.MAD, words
		const tid = 8
		copy(a[tid:], make([]byte, 8))
		copy(b[tid:], make([]byte, 8))
		equal(t, "last words", b, a)
		equal(t, "to", m.To, n.Path().Remote)
	})
}
