package cm

import (
	"net/netip"
	"testing"
	"time"
)

// resolve makes a send a SIDR_REQ. Nothing is delivered.
func (p *pair) resolve() *Conn {
	p.t.Helper()
	n, err := p.a.Resolve(p.now, udpPort, p.path(), p.header(), []byte("who"), 15)
	must(p.t, err)
	return n
}

func TestSIDR(t *testing.T) {
	p := newPair(t)
	a := p.resolve()
	p.deliver(p.a, p.b)
	e := p.b.got(EventSIDRRequest)
	q := e.Request
	if !q.SIDR || q.Service != udpPort || q.Header == nil || q.Header.Src.Port() != 45260 || len(q.Params.Private) != SIDRReqPrivateIP ||
		string(q.Params.Private[:4]) != "who\x00" || q.PKey != 0xffff || e.Listener != listener {
		t.Errorf("%+v", q)
	}
	must(t, e.Conn.AnswerSIDR(p.now, &SIDRReply{QPN: qpnB, QKey: 0x01234567, Info: []byte{9}, Private: []byte("me")}))
	equal(t, "again", e.Conn.AnswerSIDR(p.now, &SIDRReply{}), ErrState)
	p.b.empty()
	p.run()
	r := p.a.got(EventSIDRReply)
	if s := r.SIDR; r.Conn != a || s.Status != SIDRValid || s.QPN != qpnB || s.QKey != 0x01234567 || len(s.Info) != 1 || s.Info[0] != 9 ||
		len(s.Private) != SIDRRepPrivate || string(s.Private[:3]) != "me\x00" {
		t.Errorf("%+v", s)
	}
	equal(t, "QPN", a.RemoteQPN(), qpnB)
	p.a.empty()
}

func TestSIDRRejected(t *testing.T) {
	p := newPair(t)
	p.resolve()
	p.deliver(p.a, p.b)
	must(t, p.b.got(EventSIDRRequest).Conn.Reject(p.now, RejectConsumer, nil, []byte("no")))
	p.run()
	s := p.a.got(EventSIDRReply).SIDR
	equal(t, "status", s.Status, SIDRRejected)
	equal(t, "private", string(s.Private[:2]), "no")
	p.b.listen = func(*Request) Verdict { return Verdict{Reject: SIDRUnsupported} }
	p.resolve()
	p.run()
	equal(t, "status", p.a.got(EventSIDRReply).SIDR.Status, SIDRUnsupported)
	p.b.listen = func(*Request) Verdict { return Verdict{} }
	p.resolve()
	p.run()
	p.a.got()
	p.b.empty()
}

func TestSIDRDuplicate(t *testing.T) {
	p := newPair(t)
	p.resolve()
	m := p.a.sent(AttrSIDRREQ)[0]
	for range 3 {
		p.b.Receive(p.now, m.From, m.To, m.MAD[:])
	}
	b := p.b.got(EventSIDRRequest).Conn
	p.b.Receive(p.now, m.From, m.To, m.MAD[:])
	p.b.got()
	p.b.Receive(p.now, netip.MustParseAddr("10.0.0.3"), m.To, m.MAD[:]) // another host with the same id
	p.b.got(EventSIDRRequest).Conn.Close(p.now)
	must(t, b.AnswerSIDR(p.now, &SIDRReply{QPN: 1}))
	p.b.Receive(p.now, m.From, m.To, m.MAD[:]) // a new request
	p.b.got(EventSIDRRequest).Conn.Close(p.now)
	p.b.sent(AttrSIDRREP, AttrSIDRREP, AttrSIDRREP)
	p.b.empty()
}

func TestSIDRRepeatedThenUnreachable(t *testing.T) {
	p := newPair(t)
	_, err := p.a.Resolve(p.now, udpPort, p.path(), nil, nil, 2)
	must(t, err)
	p.pass(3*4096*time.Millisecond - 1)
	p.a.sent(AttrSIDRREQ, AttrSIDRREQ, AttrSIDRREQ)
	p.a.got()
	p.pass(1)
	p.a.got(EventUnreachable)
	p.a.empty()
}

func TestIPHeader(t *testing.T) {
	v6 := netip.MustParseAddr("fd00::1")
	for _, r := range []struct {
		name    string
		service uint64
		hdr     *IPHeader
		found   bool
	}{
		{"IPv4", service, &IPHeader{Src: netip.MustParseAddrPort("10.1.2.3:7"), Dst: netip.MustParseAddr("10.1.2.4")}, true},
		{"IPv6", service, &IPHeader{Src: netip.AddrPortFrom(v6, 9), Dst: netip.MustParseAddr("fd00::2")}, true},
		{"IB over IP", 0x013f0007, &IPHeader{Src: netip.AddrPortFrom(v6, 9), Dst: v6}, true},
		{"AF_IB", 0x013f0007, nil, false},
		{"another service", 0x1000000001061c06, nil, false},
		{"another service", 0x01070001, nil, false},
	} {
		var private [ReqPrivate]byte
		must(t, putPrivate(private[:], r.hdr, []byte{0, 0x77}))
		if r.name == "IPv4" && private[4+11] != 0 {
			t.Error("IPv4 address is mapped")
		}
		h, rest := parseIPHeader(r.service, private[:])
		if (h != nil) != r.found || rest[1] != 0x77 {
			t.Errorf("%s: %+v, then %x", r.name, h, rest)
			continue
		}
		if !r.found {
			equal(t, "room", len(rest), ReqPrivate)
			continue
		}
		equal(t, "room", len(rest), ReqPrivateIP)
		equal(t, "source", h.Src, r.hdr.Src)
		equal(t, "destination", h.Dst, r.hdr.Dst)
		if h.IPVersion != 4 && h.IPVersion != 6 || h.Version != 0 {
			t.Errorf("%s: %+v", r.name, h)
		}
	}
	for _, bad := range []*IPHeader{{}, {Src: netip.AddrPortFrom(v6, 9), Dst: netip.MustParseAddr("10.1.2.4")}} {
		equal(t, "error", putPrivate(make([]byte, ReqPrivate), bad, nil), ErrParam)
	}
}
