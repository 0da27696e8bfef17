package cm

import (
	"testing"
	"time"
)

// BenchmarkConnectClose is a whole connection through two cores: REQ, REP, RTU, DREQ, DREP, time wait.
func BenchmarkConnectClose(b *testing.B) {
	p := newPair(b)
	deliver := func(from, to *side) *Conn {
		for m, ok := from.NextMAD(); ok; m, ok = from.NextMAD() {
			to.Receive(p.now, m.From, m.To, m.MAD[:])
		}
		e, ok := to.NextEvent()
		if !ok {
			b.Fatal("no event")
		}
		return e.Conn
	}
	path, hdr, pa, pb := p.path(), p.header(), paramsA(), paramsB()
	b.ReportAllocs()
	for b.Loop() {
		x, err := p.a.Connect(p.now, service, RC, path, hdr, pa, 15)
		must(b, err)
		y := deliver(p.a, p.b)
		must(b, y.Accept(p.now, pb))
		deliver(p.b, p.a)
		must(b, x.Establish(p.now))
		deliver(p.a, p.b)
		must(b, x.Disconnect(p.now))
		deliver(p.a, p.b)
		must(b, y.Disconnect(p.now))
		deliver(p.b, p.a)
		x.Close(p.now)
		y.Close(p.now)
		p.now += time.Second
		p.a.Tick(p.now)
		p.b.Tick(p.now)
	}
	p.a.empty()
	p.b.empty()
}

// BenchmarkFlood is a REQ of a peer that does not exist, when as many as may be are pending already.
func BenchmarkFlood(b *testing.B) {
	p := newPair(b)
	next := forged(b, p)
	b.ReportAllocs()
	for b.Loop() {
		p.b.Receive(p.now, p.a.addr, p.b.addr, next())
		if _, ok := p.b.NextMAD(); ok {
			b.Fatal("answered")
		}
	}
	equal(b, "pending", len(p.b.pending.conns), min(b.N, 1024))
}
