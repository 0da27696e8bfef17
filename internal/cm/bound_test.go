package cm

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"
)

// forged returns REQs of a peer that does not exist, each with another id, QPN and GUID.
func forged(t testing.TB, p *pair) func() []byte {
	p.request()
	m := p.a.sent(AttrREQ)[0]
	var r req
	r.parse(data(&m))
	rng := rand.New(rand.NewPCG(7, 7))
	return func() []byte {
		r.localID, r.guid, r.qpn = rng.Uint32()|1, rng.Uint64(), rng.Uint32()&mask24
		return message(AttrREQ, r.put)
	}
}

// TestFloodOfREQsIsBounded: the newest request is always there, and the others are evicted at random,
// with an event if the program knows them.
func TestFloodOfREQsIsBounded(t *testing.T) {
	const limit = 50
	p := newPair(t)
	p.b = newSide(t, "10.0.0.2", guidB, 2, func(c *Config) { c.MaxPending = limit })
	next := forged(t, p)
	check := func() {
		t.Helper()
		equal(t, "pending", len(p.b.pending.conns), limit)
		equal(t, "conns", len(p.b.conns), limit)
		equal(t, "ids", len(p.b.byID), limit)
		equal(t, "QPNs", len(p.b.byQPN), limit)
		equal(t, "timers", len(p.b.timers), 0)
		if _, ok := p.b.NextMAD(); ok {
			t.Fatal("a forged REQ is answered")
		}
	}
	from := netip.MustParseAddr("10.0.0.1")
	for range 2000 { // nobody takes the events
		p.b.Receive(p.now, from, p.b.addr, next())
	}
	check()
	var seen []*Conn
	for e, ok := p.b.NextEvent(); ok; e, ok = p.b.NextEvent() {
		equal(t, "event", e.Type, EventRequest)
		seen = append(seen, e.Conn)
	}
	equal(t, "events", len(seen), limit)
	for range 20 * limit { // all that the program knows are evicted sooner or later
		p.b.Receive(p.now, from, p.b.addr, next())
	}
	check()
	dropped := 0
	for e, ok := p.b.NextEvent(); ok; e, ok = p.b.NextEvent() {
		if e.Type == EventDropped {
			dropped++
			equal(t, "state", e.Conn.State(), Idle)
			equal(t, "accept", e.Conn.Accept(p.now, paramsB()), ErrState)
			e.Conn.Close(p.now)
		} else {
			e.Conn.Close(p.now)
		}
	}
	equal(t, "dropped", dropped, limit)
	for _, n := range seen {
		n.Close(p.now)
	}
	p.b.pump()
	p.b.out = nil
	p.b.empty()
}

// TestFloodOfWithdrawnREQs: REQ and REJ of forged peers leave nothing.
func TestFloodOfWithdrawnREQs(t *testing.T) {
	p := newPair(t)
	next := forged(t, p)
	for range 100 {
		m := next()
		var r req
		r.parse(m[headerLen:])
		p.b.Receive(p.now, p.a.addr, p.b.addr, m)
		no := rej{ids: ids{local: r.localID}, of: ofOther, reason: RejectTimeout, ariLen: 8}
		be.PutUint64(no.ari[:], r.guid)
		p.b.Receive(p.now, p.a.addr, p.b.addr, message(AttrREJ, no.put))
		equal(t, "conns", len(p.b.conns), 0)
		if p.b.head != nil {
			t.Fatal("an event is left")
		}
	}
	p.b.empty()
}

// TestTimeWaitIsBounded: the program closes many connections at once.
func TestTimeWaitIsBounded(t *testing.T) {
	const limit = 20
	p := newPair(t)
	p.b = newSide(t, "10.0.0.2", guidB, 2, func(c *Config) { c.MaxTimeWait = limit })
	for i := range uint32(3 * limit) {
		params := paramsA()
		params.QPN = 100 + i
		a, err := p.a.Connect(p.now, service, RC, p.path(), p.header(), params, 15)
		must(t, err)
		p.deliver(p.a, p.b)
		b := p.b.got(EventRequest).Conn
		params = paramsB()
		params.QPN = 100 + i
		must(t, b.Accept(p.now, params))
		p.deliver(p.b, p.a)
		p.a.got(EventReply)
		must(t, a.Establish(p.now))
		p.deliver(p.a, p.b)
		p.b.got(EventEstablished)
		b.Close(p.now)
		p.run()
		p.a.got(EventDisconnected)
		a.Close(p.now)
	}
	equal(t, "waiting", len(p.b.waiting.conns), limit)
	equal(t, "ids", len(p.b.byID), limit)
	p.run()
	p.pass(512 * time.Millisecond)
	p.a.empty()
	p.b.empty()
}

func TestNoIDLeft(t *testing.T) {
	p := newPair(t)
	p.b = newSide(t, "10.0.0.2", guidB, 2, func(c *Config) { c.NewID = func() uint32 { return 5 } })
	next := forged(t, p)
	p.b.Receive(p.now, p.a.addr, p.b.addr, next())
	p.b.Receive(p.now, p.a.addr, p.b.addr, next())
	p.b.got(EventRequest)
	p.b.sent()
	if _, err := p.b.Connect(p.now, service, RC, p.path(), nil, paramsB(), 1); err != ErrNoID {
		t.Error(err)
	}
	if _, err := p.b.Resolve(p.now, service, p.path(), nil, nil, 1); err != ErrNoID {
		t.Error(err)
	}
}

func TestClassify(t *testing.T) {
	p := newPair(t)
	a, b := p.disconnected()
	r := rej{ids: b.ids(), of: ofREP, reason: RejectConsumer}
	for attr, put := range map[Attr]func([]byte){
		AttrREP: (&rep{localID: b.LocalID(), remoteID: a.LocalID()}).put, AttrREJ: r.put, AttrRTU: b.ids().put,
		AttrDREQ: (&dreq{ids: b.ids()}).put, AttrDREP: b.ids().put, AttrMRA: (&mra{ids: b.ids()}).put,
		AttrSIDRREP: (&sidrRep{id: a.LocalID()}).put,
	} {
		got, id, _, ok := Classify(message(attr, put))
		if !ok || got != attr || id != a.LocalID() {
			t.Errorf("%#x: %#x for %#x, %v", attr, got, id, ok)
		}
	}
	for attr, put := range map[Attr]func([]byte){
		AttrREQ: (&req{localID: 3, service: service}).put, AttrSIDRREQ: (&sidrReq{id: 3, service: service}).put,
	} {
		got, id, s, ok := Classify(message(attr, put))
		if !ok || got != attr || id != 0 || s != service {
			t.Errorf("%#x: %#x for %#x, %#x, %v", attr, got, id, s, ok)
		}
	}
	for _, bad := range [][]byte{nil, make([]byte, Size), message(AttrLAP, b.ids().put), message(AttrREQ, b.ids().put)[:255]} {
		if _, _, _, ok := Classify(bad); ok {
			t.Errorf("%x is taken", bad)
		}
	}
}

func TestRejectNoListener(t *testing.T) {
	p := newPair(t)
	p.request()
	m := p.a.sent(AttrREQ)[0]
	for given, want := range map[Reason]Reason{0: RejectInvalidServiceID, RejectConsumer: RejectConsumer} {
		s, ok := RejectNoListener(m.From, m.To, m.MAD[:], given)
		if !ok || s.From != m.To || s.To != m.From || !bytes.Equal(s.MAD[8:16], m.MAD[8:16]) {
			t.Fatalf("%+v", s)
		}
		equal(t, "reason", rejOf(&s).reason, want)
	}
	s, _ := RejectNoListener(m.From, m.To, m.MAD[:], 0)
	p.a.Receive(p.now, s.From, s.To, s.MAD[:])
	equal(t, "reason", p.a.got(EventRejected).Reason, RejectInvalidServiceID)
	for given, want := range map[Reason]uint8{0: SIDRUnsupported, SIDRRejected: SIDRRejected} {
		p.resolve()
		m = p.a.sent(AttrSIDRREQ)[0]
		s, ok := RejectNoListener(m.From, m.To, m.MAD[:], given)
		equal(t, "ok", ok, true)
		p.a.Receive(p.now, s.From, s.To, s.MAD[:])
		equal(t, "status", p.a.got(EventSIDRReply).SIDR.Status, want)
	}
	for _, bad := range [][]byte{nil, message(AttrREP, (&rep{}).put)} {
		if _, ok := RejectNoListener(m.From, m.To, bad, 0); ok {
			t.Errorf("%x is answered", bad)
		}
	}
}
