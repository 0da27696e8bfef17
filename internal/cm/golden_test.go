package cm

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"os"
	"testing"

	"github.com/gopacket/gopacket/pcapgo"

	"github.com/verbena-rdma/verbena/ib"
)

// goldenMAD is a MAD that Linux has sent.
type goldenMAD struct {
	from, to netip.Addr
	mad      [Size]byte
}

// recorded returns the MADs of a recording, in ../wire/testdata.
func recorded(t testing.TB, file string) (all []goldenMAD) {
	t.Helper()
	f, err := os.Open("../wire/testdata/" + file)
	must(t, err)
	defer f.Close()
	r, err := pcapgo.NewReader(f)
	must(t, err)
	for {
		b, _, err := r.ReadPacketData()
		if errors.Is(err, io.EOF) {
			return all
		}
		must(t, err)
		const ip, v4, v6, udp, bth, deth, icrc = 14, 20, 40, 8, 12, 8, 4
		var m goldenMAD
		headers := ip + v4 + udp
		if be.Uint16(b[12:]) == 0x86dd {
			headers = ip + v6 + udp
			m.from, m.to = netip.AddrFrom16([16]byte(b[ip+8:])), netip.AddrFrom16([16]byte(b[ip+24:]))
		} else {
			m.from, m.to = netip.AddrFrom4([4]byte(b[ip+12:])), netip.AddrFrom4([4]byte(b[ip+16:]))
		}
		if len(b) != headers+bth+deth+Size+icrc || b[headers] != 0x64 || uint24(b[headers+5:]) != 1 {
			continue // no MAD
		}
		m.mad = [Size]byte(b[headers+bth+deth:])
		all = append(all, m)
	}
}

// golden returns the MADs of a recorded rping: see ../wire/testdata/golden/README.md.
func golden(t testing.TB) map[Attr]goldenMAD {
	t.Helper()
	all := map[Attr]goldenMAD{}
	for _, m := range recorded(t, "golden/rping.pcap") {
		attr, _, _, ok := Classify(m.mad[:])
		if !ok {
			t.Fatalf("%x is no message of the connection manager", m.mad)
		}
		all[attr] = m
	}
	for _, attr := range []Attr{AttrREQ, AttrREP, AttrRTU, AttrDREQ, AttrDREP} {
		if _, ok := all[attr]; !ok {
			t.Fatalf("no message %#x in the recording", attr)
		}
	}
	return all
}

// reencode parses the data of a message and returns the message made of it.
func reencode(mad []byte) (again [Size]byte, ok bool) {
	h, d, ok := parseHeader(mad)
	if !ok {
		return again, false
	}
	to := h.put(&again)
	switch h.attr {
	case AttrREQ:
		var m req
		m.parse(d)
		m.put(to)
	case AttrREP:
		var m rep
		m.parse(d)
		m.put(to)
	case AttrRTU, AttrDREP:
		parseIDs(d).put(to)
	case AttrMRA:
		var m mra
		m.parse(d)
		m.put(to)
	case AttrREJ:
		var m rej
		m.parse(d)
		m.put(to)
	case AttrDREQ:
		var m dreq
		m.parse(d)
		m.put(to)
	case AttrSIDRREQ:
		var m sidrReq
		m.parse(d)
		m.put(to)
	case AttrSIDRREP:
		var m sidrRep
		m.parse(d)
		m.put(to)
	default:
		return again, false
	}
	return again, true
}

// TestGoldenCodec: what parse has read, put writes, byte for byte.
func TestGoldenCodec(t *testing.T) {
	for attr, m := range golden(t) {
		again, ok := reencode(m.mad[:])
		if !ok || again != m.mad {
			t.Errorf("%#x:\nrecorded %x\nwritten  %x", attr, m.mad, again)
		}
	}
}

// TestKernelCodec: the same for what Linux has sent to us: every kind of message, by IPv4 and IPv6.
func TestKernelCodec(t *testing.T) {
	seen := map[Attr][2]int{} // by IPv4 and by IPv6
	for _, m := range recorded(t, "kernel/cm.pcap") {
		attr, _, _, ok := Classify(m.mad[:])
		again, known := reencode(m.mad[:])
		if !ok || !known || again != m.mad {
			t.Errorf("%#x:\nrecorded %x\nwritten  %x", attr, m.mad, again)
		}
		n := seen[attr]
		if m.from.Is4() {
			n[0]++
		} else {
			n[1]++
		}
		seen[attr] = n
		switch attr {
		case AttrREJ:
			var r rej
			if r.parse(data(&Send{MAD: m.mad})); r.reason != RejectInvalidServiceID {
				t.Errorf("REJ for reason %d, want that nobody listens", r.reason)
			}
		case AttrREQ:
			var q req
			q.parse(data(&Send{MAD: m.mad}))
			if h, _ := parseIPHeader(q.service, q.private[:]); h == nil || h.Src.Addr() != m.from || h.Dst != m.to {
				t.Errorf("a REQ from %v to %v has the header %+v", m.from, m.to, h)
			}
		}
	}
	for _, attr := range []Attr{AttrREQ, AttrMRA, AttrREJ, AttrREP, AttrRTU, AttrDREQ, AttrDREP, AttrSIDRREQ, AttrSIDRREP} {
		if n := seen[attr]; n[0] == 0 || n[1] == 0 {
			t.Errorf("%#x: %d by IPv4 and %d by IPv6", attr, n[0], n[1])
		}
	}
}

// TestGoldenExchange: a core in the place of either side of the recorded rping sends what Linux sent,
// byte for byte; transaction ids and communication ids are given.
func TestGoldenExchange(t *testing.T) {
	all := golden(t)
	var q req
	q.parse(data(&Send{MAD: all[AttrREQ].mad}))
	var r rep
	r.parse(data(&Send{MAD: all[AttrREP].mad}))
	var tids []uint64
	for _, attr := range []Attr{AttrREQ, AttrDREQ} {
		m := all[attr].mad
		h, _, _ := parseHeader(m[:])
		tids = append(tids, h.tid)
	}
	takeTID := func() uint64 {
		tid := tids[0]
		tids = tids[1:]
		return tid
	}
	p := &pair{}
	p.a = newSide(t, all[AttrREQ].from.String(), q.guid, 1, func(c *Config) { c.NewID = func() uint32 { return q.localID }; c.Rand = takeTID })
	p.b = newSide(t, all[AttrREQ].to.String(), r.guid, 1, func(c *Config) { c.NewID = func() uint32 { return r.localID } })
	same := func(m Send, attr Attr) {
		t.Helper()
		if m.MAD != all[attr].mad {
			t.Errorf("%#x:\nLinux %x\nwe    %x", attr, all[attr].mad, m.MAD)
		}
		if m.From != all[attr].from || m.To != all[attr].to {
			t.Errorf("%#x: from %v to %v, Linux from %v to %v", attr, m.From, m.To, all[attr].from, all[attr].to)
		}
	}
	send := func(to *side, attr Attr) {
		m := all[attr]
		to.Receive(0, m.from, m.to, m.mad[:])
	}

	path := &Path{Local: p.a.addr, Remote: p.b.addr, TClass: q.tclass, HopLimit: q.hopLimit, FlowLabel: (45260*31 + 7174) & 0xfffff, MTU: ib.MTU(q.mtu), LifeTime: 16}
	hdr := &IPHeader{Src: netip.AddrPortFrom(p.a.addr, be.Uint16(q.private[2:])), Dst: p.b.addr}
	a, err := p.a.Connect(0, service, RC, path, hdr, &Params{QPN: q.qpn, PSN: q.psn, ResponderResources: q.responderResources,
		InitiatorDepth: q.initiatorDepth, RetryCount: q.retryCount, RNRRetry: q.rnrRetry, FlowControl: q.flowControl, SRQ: q.srq,
		Private: bytes.TrimRight(q.private[ipHeaderLen:], "\x00")}, 15)
	must(t, err)
	same(p.a.sent(AttrREQ)[0], AttrREQ)
	send(p.b, AttrREQ)
	e := p.b.got(EventRequest)
	if q := e.Request; q.Path.Local != p.b.addr || q.Path.Remote != p.a.addr || *q.Header != (IPHeader{Src: hdr.Src, Dst: hdr.Dst, IPVersion: 4}) ||
		len(q.Params.Private) != ReqPrivateIP || q.Service != service || q.Transport != RC || q.PKey != 0xffff {
		t.Errorf("request %+v", q)
	}
	must(t, e.Conn.Accept(0, &Params{QPN: r.qpn, PSN: r.psn, ResponderResources: r.responderResources, InitiatorDepth: r.initiatorDepth,
		RNRRetry: r.rnrRetry, FlowControl: r.flowControl, SRQ: r.srq, Private: bytes.TrimRight(r.private[:], "\x00")}))
	same(p.b.sent(AttrREP)[0], AttrREP)
	send(p.a, AttrREP)
	p.a.got(EventReply)
	must(t, a.Establish(0))
	same(p.a.sent(AttrRTU)[0], AttrRTU)
	send(p.b, AttrRTU)
	p.b.got(EventEstablished)
	first, second, end := p.a, p.b, a
	if all[AttrDREQ].from == p.b.addr {
		first, second, end = p.b, p.a, e.Conn
		p.b.cfg.Rand = takeTID
	}
	must(t, end.Disconnect(0))
	same(first.sent(AttrDREQ)[0], AttrDREQ)
	send(second, AttrDREQ)
	other := second.got(EventDisconnected).Conn
	must(t, other.Disconnect(0))
	same(second.sent(AttrDREP)[0], AttrDREP)
	send(first, AttrDREP)
	first.got(EventDisconnected)
}
