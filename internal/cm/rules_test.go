package cm

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"
)

// One test for each rule of the connection. In all of them a is the active side, b the passive one.

func TestParametersReachThePeer(t *testing.T) {
	p := newPair(t)
	a := p.request()
	p.deliver(p.a, p.b)
	e := p.b.got(EventRequest)
	q := e.Request
	if e.Listener != listener || q.Path.FlowLabel != 0x584ba || q.Path.AckTimeout != 17 || q.Path.LifeTime != 16 || q.GUID != guidA {
		t.Errorf("request %+v", q)
	}
	want := Params{QPN: qpnA, PSN: a.PSN(), ResponderResources: 3, InitiatorDepth: 4, RetryCount: 7, RNRRetry: 6}
	checkParams(t, &q.Params, &want, "from a", ReqPrivateIP)
	b := e.Conn
	must(t, b.Accept(p.now, paramsB()))
	p.deliver(p.b, p.a)
	e = p.a.got(EventReply)
	want = Params{QPN: qpnB, PSN: b.PSN(), ResponderResources: 5, InitiatorDepth: 6, RNRRetry: 2, AckDelay: 15}
	checkParams(t, &e.Params, &want, "from b", RepPrivate)
	equal(t, "timeout of a", a.AckTimeout(), 17)
	equal(t, "timeout of b", b.AckTimeout(), 17)
	equal(t, "ids", [4]uint32{a.LocalID(), a.RemoteID(), b.LocalID(), b.RemoteID()},
		[4]uint32{b.RemoteID(), b.LocalID(), a.RemoteID(), a.LocalID()})
	equal(t, "QPNs", [4]uint32{a.LocalQPN(), a.RemoteQPN(), b.LocalQPN(), b.RemoteQPN()}, [4]uint32{qpnA, qpnB, qpnB, qpnA})
}

func checkParams(t *testing.T, got, want *Params, private string, room int) {
	t.Helper()
	if !bytes.Equal(got.Private, append([]byte(private), make([]byte, room-len(private))...)) {
		t.Errorf("private data %q", got.Private)
	}
	g, w := *got, *want
	g.Private, w.Private = nil, nil
	if g.QPN != w.QPN || g.PSN != w.PSN || g.ResponderResources != w.ResponderResources || g.InitiatorDepth != w.InitiatorDepth ||
		g.RetryCount != w.RetryCount || g.RNRRetry != w.RNRRetry || g.AckDelay != w.AckDelay || g.SRQ != w.SRQ || g.FlowControl != w.FlowControl {
		t.Errorf("parameters %+v, want %+v", g, w)
	}
}

func TestBothSidesEndEmpty(t *testing.T) {
	p := newPair(t)
	a, b := p.disconnected()
	p.pass(512*time.Millisecond - 1)
	p.states(a, TimeWait, b, TimeWait)
	p.pass(1)
	p.a.got(EventTimewaitExit)
	p.b.got(EventTimewaitExit)
	p.states(a, Idle, b, Idle)
	p.a.empty()
	p.b.empty()
	a.Close(p.now)
	a.Close(p.now)
	p.a.sent()
}

func TestREQRepeated(t *testing.T) {
	p := newPair(t)
	a := p.request()
	first := p.a.sent(AttrREQ)[0]
	for range 15 {
		p.pass(4608*time.Millisecond - 1)
		p.a.sent()
		p.pass(1)
		if m := p.a.sent(AttrREQ)[0]; m != first {
			t.Fatal("another REQ")
		}
	}
	p.pass(4608*time.Millisecond - 1)
	p.a.got()
	p.pass(1)
	equal(t, "conn", p.a.got(EventUnreachable).Conn, a)
	p.a.sent()
	p.a.empty()
}

func TestREPRepeatedAsREQSays(t *testing.T) {
	p := newPair(t)
	_, err := p.a.Connect(p.now, service, RC, p.path(), p.header(), paramsA(), 3)
	must(t, err)
	p.deliver(p.a, p.b)
	must(t, p.b.got(EventRequest).Conn.Accept(p.now, paramsB()))
	p.b.sent(AttrREP)
	p.pass(3*4096*time.Millisecond + 4095*time.Millisecond)
	p.b.sent(AttrREP, AttrREP, AttrREP)
	p.b.got()
	p.pass(time.Millisecond)
	p.b.got(EventUnreachable)
	p.b.empty()
}

func TestDREQRepeatedThenTimedOut(t *testing.T) {
	p := newPair(t)
	a, _ := p.connected()
	must(t, a.Disconnect(p.now))
	p.a.sent(AttrDREQ)
	p.pass(16*4608*time.Millisecond - 1)
	equal(t, "DREQs", len(p.a.sent(AttrDREQ, AttrDREQ, AttrDREQ, AttrDREQ, AttrDREQ, AttrDREQ, AttrDREQ, AttrDREQ,
		AttrDREQ, AttrDREQ, AttrDREQ, AttrDREQ, AttrDREQ, AttrDREQ, AttrDREQ)), 15)
	p.pass(1)
	equal(t, "timed out", p.a.got(EventDisconnected).TimedOut, true)
	equal(t, "state", a.State(), TimeWait)
	p.pass(512 * time.Millisecond)
	p.a.got(EventTimewaitExit)
	p.a.empty()
}

func TestDuplicateREQ(t *testing.T) {
	p := newPair(t)
	a := p.request()
	p.a.pump()
	m := p.a.out[0]
	again := func() { p.b.Receive(p.now, m.From, m.To, m.MAD[:]) }
	again()
	again() // the program has not seen the first: ignored
	equal(t, "requests", len(p.b.conns), 1)
	b := p.b.got(EventRequest).Conn
	p.b.sent()
	again()
	reply := p.b.sent(AttrMRA)[0]
	var r mra
	r.parse(data(&reply))
	equal(t, "MRA", r, mra{ids: ids{b.LocalID(), a.LocalID()}, of: ofREQ, timeout: 24})
	must(t, b.Accept(p.now, paramsB()))
	p.b.sent(AttrREP)
	again()
	p.b.sent()
	p.b.got()
	must(t, b.Reject(p.now, RejectConsumer, nil, nil))
	p.b.sent(AttrREJ)
	equal(t, "state", b.State(), TimeWait)
	again()
	rej := rejOf(&p.b.sent(AttrREJ)[0])
	if rej.ids != (ids{0, a.LocalID()}) || rej.of != ofREQ || rej.reason != RejectStaleConn {
		t.Errorf("in time wait: %+v", rej)
	}
	b.Close(p.now)
	again()
	p.b.sent(AttrREJ)
	p.pass(512 * time.Millisecond)
	p.b.empty()
	again()
	p.b.got(EventRequest)
}

func TestMRAGivesTime(t *testing.T) {
	p := newPair(t)
	a, b := p.asked()
	p.pass(4608 * time.Millisecond)
	p.deliver(p.a, p.b) // the duplicate
	p.deliver(p.b, p.a) // MRA
	equal(t, "state", a.State(), MRAReqRcvd)
	p.pass(65536*time.Millisecond + 511*time.Millisecond)
	p.a.sent()
	p.pass(time.Millisecond)
	p.deliver(p.a, p.b)
	p.deliver(p.b, p.a) // a second MRA
	equal(t, "deadline", a.deadline, p.now+66048*time.Millisecond)
	must(t, b.Accept(p.now, paramsB()))
	p.deliver(p.b, p.a)
	p.a.got(EventReply) // the program of a takes its time
	p.pass(4096 * time.Millisecond)
	p.deliver(p.b, p.a)
	p.deliver(p.a, p.b)
	p.states(a, MRARepSent, b, MRARepRcvd)
	equal(t, "deadline", b.deadline, p.now+66048*time.Millisecond)
	must(t, a.Establish(p.now))
	p.deliver(p.a, p.b)
	p.b.got(EventEstablished)
	if _, ok := p.b.Deadline(); ok {
		t.Error("a timer runs")
	}
}

func TestDuplicateREPRepeatsRTU(t *testing.T) {
	p := newPair(t)
	a, b := p.replied()
	must(t, a.Establish(p.now))
	rtu := p.a.sent(AttrRTU)[0] // lost
	p.pass(4096 * time.Millisecond)
	p.deliver(p.b, p.a)
	again := p.a.sent(AttrRTU)[0]
	equal(t, "RTU", again.MAD, rtu.MAD)
	p.b.Receive(p.now, again.From, again.To, again.MAD[:])
	p.b.got(EventEstablished)
	p.b.Receive(p.now, again.From, again.To, again.MAD[:])
	p.b.got()
	p.states(a, Established, b, Established)
}

func TestConfirmEstablishesWithoutRTU(t *testing.T) {
	p := newPair(t)
	a, b := p.replied()
	must(t, b.Confirm(p.now))
	p.b.got(EventEstablished)
	equal(t, "again", b.Confirm(p.now), ErrConnected)
	equal(t, "of a", a.Confirm(p.now), ErrState)
	must(t, a.Establish(p.now))
	p.deliver(p.a, p.b)
	p.b.got()
	p.pass(time.Hour)
	p.b.sent()
}

func TestREQOfKnownQPNIsStale(t *testing.T) {
	p := newPair(t)
	_, b := p.connected()
	p.request() // a has forgotten the connection, and uses the same QPN
	p.deliver(p.a, p.b)
	out := p.b.sent(AttrREJ, AttrDREQ)
	equal(t, "reason", rejOf(&out[0]).reason, RejectStaleConn)
	equal(t, "state", b.State(), DreqSent)
	p.b.got()
	p.a.Receive(p.now, out[0].From, out[0].To, out[0].MAD[:])
	e := p.a.got(EventRejected)
	equal(t, "reason", e.Reason, RejectStaleConn)
	equal(t, "state", e.Conn.State(), TimeWait)
	p.pass(512 * time.Millisecond)
	p.a.got() // no connection was there to exit from
	equal(t, "state", e.Conn.State(), Idle)
}

func TestREPOfKnownQPNIsStale(t *testing.T) {
	p := newPair(t)
	old, _ := p.connected()
	params := paramsA()
	params.QPN++
	a, err := p.a.Connect(p.now, service, RC, p.path(), p.header(), params, 15)
	must(t, err)
	p.deliver(p.a, p.b)
	b := p.b.got(EventRequest).Conn
	must(t, b.Accept(p.now, paramsB()))
	p.deliver(p.b, p.a)
	out := p.a.sent(AttrREJ, AttrDREQ)
	r := rejOf(&out[0])
	if r.reason != RejectStaleConn || r.of != ofREP || r.ids != (ids{a.LocalID(), b.LocalID()}) {
		t.Errorf("%+v", r)
	}
	equal(t, "old one", old.State(), DreqSent)
	p.b.Receive(p.now, out[0].From, out[0].To, out[0].MAD[:])
	equal(t, "reason", p.b.got(EventRejected).Reason, RejectStaleConn)
	equal(t, "new one", b.State(), TimeWait)
}

func TestRejectReachesThePeer(t *testing.T) {
	p := newPair(t)
	a, b := p.asked()
	must(t, b.Reject(p.now, RejectConsumer, []byte{1, 2}, []byte("no")))
	m := p.b.sent(AttrREJ)[0]
	equal(t, "ids", rejOf(&m).ids, ids{b.LocalID(), a.LocalID()})
	p.a.Receive(p.now, m.From, m.To, m.MAD[:])
	e := p.a.got(EventRejected)
	if e.Reason != RejectConsumer || !bytes.Equal(e.ARI, []byte{1, 2}) || len(e.Private) != RejPrivate || string(e.Private[:3]) != "no\x00" {
		t.Errorf("%+v", e)
	}
	p.a.empty()
	p.b.empty()

	a, b = p.replied()
	must(t, a.Reject(p.now, RejectConsumer, nil, nil))
	p.deliver(p.a, p.b)
	equal(t, "reason", p.b.got(EventRejected).Reason, RejectConsumer)
	p.states(a, Idle, b, Idle)
	p.a.empty()
	p.b.empty()
}

func TestREJOfAnotherMessageHasNoEffect(t *testing.T) {
	p := newPair(t)
	a, b := p.connected()
	for _, r := range []rej{
		{ids: ids{0, a.LocalID()}, of: ofREQ, reason: RejectConsumer},                // the REQ is answered
		{ids: ids{b.LocalID() + 1, a.LocalID()}, of: ofREP, reason: RejectConsumer},  // of another Conn
		{ids: ids{b.LocalID(), a.LocalID()}, of: ofOther, reason: RejectTimeout},     // ARI is not b's GUID
		{ids: ids{b.LocalID(), a.LocalID() + 1}, of: ofOther, reason: RejectTimeout}, // nobody's
	} {
		p.a.Receive(p.now, p.b.addr, p.a.addr, message(AttrREJ, r.put))
		p.a.got()
		equal(t, "state", a.State(), Established)
	}
	r := rej{ids: b.ids(), of: ofOther, reason: RejectConsumer}
	p.a.Receive(p.now, p.b.addr, p.a.addr, message(AttrREJ, r.put))
	p.a.got(EventRejected)
	equal(t, "state", a.State(), TimeWait)
}

// message returns a MAD.
func message(attr Attr, put func([]byte)) []byte {
	var m [Size]byte
	put(header{tid: 1, attr: attr}.put(&m))
	return m[:]
}

// lastDREQ returns the DREQ for a connection of a process that has died.
func lastDREQ(id, peer, qpn uint32, tid uint64) [Size]byte {
	m, _ := LastWords(&Last{State: Established, ID: id, Peer: peer, RemoteQPN: qpn}, tid)
	return m
}

func TestDREQ(t *testing.T) {
	t.Run("unknown is answered", func(t *testing.T) {
		p := newPair(t)
		mad := lastDREQ(1, 2, 3, 4)
		p.b.Receive(p.now, p.a.addr, p.b.addr, mad[:])
		m := p.b.sent(AttrDREP)[0]
		h, d, _ := parseHeader(m.MAD[:])
		equal(t, "ids", parseIDs(d), ids{2, 1})
		equal(t, "transaction", h.tid, 4)
		equal(t, "to", m.To, p.a.addr)
	})
	t.Run("wrong QPN is ignored", func(t *testing.T) {
		p := newPair(t)
		a, b := p.connected()
		mad := lastDREQ(b.LocalID(), a.LocalID(), qpnA+1, 4)
		p.a.Receive(p.now, p.b.addr, p.a.addr, mad[:])
		p.a.sent()
		p.a.got()
		equal(t, "state", a.State(), Established)
	})
	t.Run("of a sibling", func(t *testing.T) {
		p := newPair(t)
		a, b := p.connected()
		mad := lastDREQ(b.LocalID(), a.LocalID(), b.RemoteQPN(), 4)
		p.a.Receive(p.now, p.b.addr, p.a.addr, mad[:])
		p.a.got(EventDisconnected)
	})
	t.Run("repeated until the program disconnects", func(t *testing.T) {
		p := newPair(t)
		a, b := p.connected()
		must(t, a.Disconnect(p.now))
		p.deliver(p.a, p.b)
		p.b.got(EventDisconnected)
		p.pass(4608 * time.Millisecond)
		p.deliver(p.a, p.b)
		p.b.sent()
		p.b.got()
		must(t, b.Disconnect(p.now))
		p.b.sent(AttrDREP) // lost
		p.states(a, DreqSent, b, TimeWait)
		m := *a.msg
		p.b.Receive(p.now, m.From, m.To, m.MAD[:]) // in time wait
		p.deliver(p.b, p.a)
		p.a.got(EventDisconnected)
		equal(t, "state", a.State(), TimeWait)
	})
	t.Run("crossing", func(t *testing.T) {
		p := newPair(t)
		a, b := p.connected()
		must(t, a.Disconnect(p.now))
		must(t, b.Disconnect(p.now))
		p.run()
		p.a.got(EventDisconnected)
		p.b.got(EventDisconnected)
		p.states(a, DreqRcvd, b, DreqRcvd)
		must(t, a.Disconnect(p.now))
		p.run()
		p.b.got()
		p.states(a, TimeWait, b, TimeWait)
		equal(t, "again", a.Disconnect(p.now), ErrState)
		p.pass(time.Second)
		p.a.got(EventTimewaitExit)
		p.b.got(EventTimewaitExit)
		p.a.empty()
		p.b.empty()
	})
	t.Run("before the RTU", func(t *testing.T) {
		p := newPair(t)
		a, b := p.replied()
		must(t, a.Establish(p.now))
		p.a.sent(AttrRTU) // lost
		must(t, a.Disconnect(p.now))
		p.deliver(p.a, p.b)
		p.b.got(EventDisconnected)
		equal(t, "state", b.State(), DreqRcvd)
	})
}

// TestCloseTellsThePeer has for each state what Close sends.
func TestCloseTellsThePeer(t *testing.T) {
	type row struct {
		name   string
		state  State
		reach  func(*pair) *Conn
		sends  []Attr
		reason Reason
	}
	a := func(f func(*pair) (a, b *Conn)) func(*pair) *Conn {
		return func(p *pair) *Conn { n, _ := f(p); return n }
	}
	b := func(f func(*pair) (a, b *Conn)) func(*pair) *Conn {
		return func(p *pair) *Conn { _, n := f(p); return n }
	}
	dreqRcvd := func(p *pair) *Conn {
		a, b := p.connected()
		must(t, a.Disconnect(p.now))
		p.deliver(p.a, p.b)
		p.b.got(EventDisconnected)
		return b
	}
	for _, r := range []row{
		{"REQ sent", ReqSent, (*pair).request, []Attr{AttrREQ, AttrREJ}, RejectTimeout},
		{"MRA of REQ received", MRAReqRcvd, func(p *pair) *Conn {
			a, _ := p.asked()
			p.pass(4608 * time.Millisecond)
			p.run()
			return a
		}, []Attr{AttrREJ}, RejectTimeout},
		{"REQ received", MRAReqSent, b((*pair).asked), []Attr{AttrREJ}, RejectConsumer},
		{"REP received", MRARepSent, a((*pair).replied), []Attr{AttrREJ}, RejectConsumer},
		{"REP sent", RepSent, b((*pair).replied), []Attr{AttrREJ}, RejectConsumer},
		{"established a", Established, a((*pair).connected), []Attr{AttrDREQ}, 0},
		{"established b", Established, b((*pair).connected), []Attr{AttrDREQ}, 0},
		{"DREQ sent", DreqSent, func(p *pair) *Conn {
			a, _ := p.connected()
			must(t, a.Disconnect(p.now))
			return a
		}, []Attr{AttrDREQ}, 0},
		{"DREQ received", DreqRcvd, dreqRcvd, []Attr{AttrDREP}, 0},
		{"time wait a", TimeWait, a((*pair).disconnected), nil, 0},
		{"time wait b", TimeWait, b((*pair).disconnected), nil, 0},
		{"SIDR_REQ sent", SIDRReqSent, (*pair).resolve, []Attr{AttrSIDRREQ}, 0},
		{"SIDR_REQ received", SIDRReqRcvd, func(p *pair) *Conn {
			p.resolve()
			p.deliver(p.a, p.b)
			return p.b.got(EventSIDRRequest).Conn
		}, []Attr{AttrSIDRREP}, 0},
	} {
		t.Run(r.name, func(t *testing.T) {
			p := newPair(t)
			n := r.reach(p)
			equal(t, "state", n.State(), r.state)
			s := p.a
			if n.core == p.b.Core {
				s = p.b
			}
			n.Close(p.now)
			equal(t, "state", n.State(), Idle)
			out := s.sent(r.sends...)
			if r.reason != 0 {
				rej := rejOf(&out[len(out)-1])
				equal(t, "reason", rej.reason, r.reason)
				if r.reason == RejectTimeout && (rej.ariLen != 8 || be.Uint64(rej.ari[:]) != guidA) {
					t.Errorf("%+v", rej)
				}
			}
			for _, m := range out {
				other := p.a
				if s == p.a {
					other = p.b
				}
				other.Receive(p.now, m.From, m.To, m.MAD[:])
			}
			p.pass(200 * time.Second)
			s.got()
			s.empty()
		})
	}
}

func TestCloseBeforeTheProgramSawTheRequest(t *testing.T) {
	p := newPair(t)
	a := p.request()
	p.a.pump()
	m := p.a.out[0]
	p.b.Receive(p.now, m.From, m.To, m.MAD[:])
	p.a.out = nil
	a.Close(p.now)
	m = p.a.sent(AttrREJ)[0]
	p.b.Receive(p.now, m.From, m.To, m.MAD[:])
	p.b.got()
	p.b.empty()
}

func TestREJ4IsFoundByGUID(t *testing.T) {
	p := newPair(t)
	a, b := p.asked()
	must(t, b.Accept(p.now, paramsB()))
	p.b.sent(AttrREP) // lost
	a.Close(p.now)
	p.deliver(p.a, p.b)
	equal(t, "reason", p.b.got(EventRejected).Reason, RejectTimeout)
	p.b.empty()
}

func TestForeignVendorOfREPIsAnError(t *testing.T) {
	p := newPair(t)
	a, b := p.asked()
	must(t, b.Accept(p.now, paramsB()))
	m := p.b.sent(AttrREP)[0]
	var r rep
	r.parse(data(&m))
	r.vendor = 0x15b3
	r.put(data(&m))
	p.a.Receive(p.now, m.From, m.To, m.MAD[:])
	equal(t, "reason", p.a.got(EventReplyError).Reason, RejectVendorOption)
	must(t, a.Reject(p.now, RejectVendorOption, nil, nil))
	p.deliver(p.a, p.b)
	p.b.got(EventRejected)
	p.a.empty()
}

func TestECE(t *testing.T) {
	p := newPair(t)
	offer, reply := ECE{Vendor: 0x15b3, Options: 9}, ECE{Vendor: 0x15b3, Options: 0xffffffff}
	q := paramsA()
	q.ECE = offer
	_, err := p.a.Connect(p.now, service, RC, p.path(), p.header(), q, 15)
	must(t, err)
	p.deliver(p.a, p.b)
	e := p.b.got(EventRequest)
	equal(t, "offer", e.Params.ECE, offer)
	q = paramsB()
	q.ECE = reply
	must(t, e.Conn.Accept(p.now, q))
	p.deliver(p.b, p.a)
	equal(t, "answer", p.a.got(EventReply).Params.ECE, reply)
}

func TestLAPIsIgnored(t *testing.T) {
	p := newPair(t)
	a, b := p.connected()
	for _, attr := range []Attr{AttrLAP, AttrAPR, 0, 0x1b, 1} {
		p.a.Receive(p.now, p.b.addr, p.a.addr, message(attr, b.ids().put))
	}
	p.a.sent()
	p.a.got()
	equal(t, "state", a.State(), Established)
}

func TestOtherMADsAreIgnored(t *testing.T) {
	p := newPair(t)
	p.request()
	m := p.a.sent(AttrREQ)[0]
	for i, v := range map[int]byte{0: 2, 1: 4, 2: 1, 3: 0x83} {
		bad := m.MAD
		bad[i] = v
		p.b.Receive(p.now, m.From, m.To, bad[:])
	}
	p.b.Receive(p.now, m.From, m.To, m.MAD[:255])
	p.b.Receive(p.now, m.From, m.To, append(m.MAD[:], 0))
	p.b.Receive(p.now, m.From, m.To, nil)
	p.b.got()
	p.b.empty()
}

func TestListenersVerdict(t *testing.T) {
	for _, reason := range []Reason{0, RejectInvalidServiceID, RejectConsumer, RejectInvalidGID} {
		p := newPair(t)
		p.b.listen = func(*Request) Verdict { return Verdict{Reject: reason} }
		a := p.request()
		p.deliver(p.a, p.b)
		p.b.got()
		p.b.empty()
		if reason == 0 {
			p.b.sent()
			equal(t, "state", a.State(), ReqSent)
			continue
		}
		p.deliver(p.b, p.a)
		e := p.a.got(EventRejected)
		equal(t, "reason", e.Reason, reason)
		if gid := p.b.addr.As16(); reason == RejectInvalidGID && !bytes.Equal(e.ARI, gid[:]) {
			t.Errorf("ARI %x", e.ARI)
		}
	}
}

func TestREQThatNobodyCanTake(t *testing.T) {
	for want, change := range map[Reason]func(*req){
		RejectInvalidMTU: func(r *req) { r.mtu = 0 },
		RejectInvalidGID: func(r *req) { r.localGID = netip.MustParseAddr("ff02::1").As16() },
	} {
		p := newPair(t)
		p.request()
		m := p.a.sent(AttrREQ)[0]
		var r req
		r.parse(data(&m))
		change(&r)
		r.put(data(&m))
		p.b.Receive(p.now, m.From, m.To, m.MAD[:])
		out := p.b.sent(AttrREJ)[0]
		equal(t, "reason", rejOf(&out).reason, want)
		equal(t, "to", out.To, p.a.addr)
		p.b.empty()
	}
}

func TestAnswersGoToTheGIDsOfTheREQ(t *testing.T) {
	p := newPair(t)
	p.request()
	m := p.a.sent(AttrREQ)[0]
	p.b.Receive(p.now, netip.MustParseAddr("10.0.0.77"), netip.MustParseAddr("10.0.0.78"), m.MAD[:])
	must(t, p.b.got(EventRequest).Conn.Accept(p.now, paramsB()))
	out := p.b.sent(AttrREP)[0]
	equal(t, "from", out.From, p.b.addr)
	equal(t, "to", out.To, p.a.addr)
	equal(t, "flow label", out.FlowLabel, 0x584ba)
}

func TestCallsInTheWrongState(t *testing.T) {
	p := newPair(t)
	a, b := p.connected()
	for _, n := range []*Conn{a, b} {
		for _, err := range []error{n.Accept(p.now, paramsB()), n.Establish(p.now), n.Reject(p.now, 28, nil, nil), n.AnswerSIDR(p.now, &SIDRReply{})} {
			if !errors.Is(err, ErrState) {
				t.Error(err)
			}
		}
	}
	p.a.sent()
	p.b.sent()
	p.states(a, Established, b, Established)
}

func TestLengthsOfPrivateData(t *testing.T) {
	p := newPair(t)
	params := paramsA()
	for room, hdr := range map[int]*IPHeader{ReqPrivate: nil, ReqPrivateIP: p.header()} {
		params.Private = make([]byte, room+1)
		if _, err := p.a.Connect(p.now, service, RC, p.path(), hdr, params, 15); !errors.Is(err, ErrLength) {
			t.Error(err)
		}
	}
	for room, hdr := range map[int]*IPHeader{SIDRReqPrivate: nil, SIDRReqPrivateIP: p.header()} {
		if _, err := p.a.Resolve(p.now, udpPort, p.path(), hdr, make([]byte, room+1), 15); !errors.Is(err, ErrLength) {
			t.Error(err)
		}
	}
	p.a.empty()
	_, b := p.asked()
	for _, err := range []error{
		b.Accept(p.now, &Params{Private: make([]byte, RepPrivate+1)}),
		b.Reject(p.now, 28, nil, make([]byte, RejPrivate+1)),
		b.Reject(p.now, 28, make([]byte, RejARI+1), nil),
	} {
		if !errors.Is(err, ErrLength) {
			t.Error(err)
		}
	}
	p.b.sent()
	equal(t, "state", b.State(), MRAReqSent)
	must(t, b.Accept(p.now, &Params{QPN: 1, Private: make([]byte, RepPrivate)}))
}

func TestXRC(t *testing.T) {
	p := newPair(t)
	a, err := p.a.Connect(p.now, service, XRC, p.path(), p.header(), paramsA(), 15)
	must(t, err)
	p.deliver(p.a, p.b)
	e := p.b.got(EventRequest)
	equal(t, "transport", e.Request.Transport, XRC)
	equal(t, "responder resources", e.Params.ResponderResources, 0)
	must(t, e.Conn.Accept(p.now, paramsB()))
	m := p.b.sent(AttrREP)[0]
	var r rep
	r.parse(data(&m))
	if r.qpn != 0 || r.eecn != qpnB || !r.srq {
		t.Errorf("%+v", r)
	}
	p.a.Receive(p.now, m.From, m.To, m.MAD[:])
	equal(t, "QPN", p.a.got(EventReply).Params.QPN, qpnB)
	must(t, a.Establish(p.now))
	p.deliver(p.a, p.b)
	p.b.got(EventEstablished)
	e.Conn.Close(p.now)
	p.b.sent() // the target lives on
	equal(t, "QPN", a.RemoteQPN(), qpnB)
}

func TestAckTimeout(t *testing.T) {
	for _, r := range [][3]uint8{{15, 16, 17}, {0, 16, 17}, {16, 16, 18}, {17, 16, 18}, {18, 16, 19}, {20, 16, 20}, {31, 31, 31}, {0, 0, 2}} {
		equal(t, "ACK timeout", AckTimeout(r[0], r[1]), r[2])
	}
}
