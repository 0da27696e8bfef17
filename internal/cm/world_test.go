package cm

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
)

// side is a core with what it has sent and reported.
type side struct {
	*Core
	t      testing.TB
	addr   netip.Addr
	listen func(*Request) Verdict
	out    []Send
	events []Event
}

// pair is two cores, a virtual time, and MADs that a test delivers or not.
type pair struct {
	t    testing.TB
	now  Time
	a, b *side // b listens
}

const (
	guidA    = 0x0a00_0000_0000_000a
	guidB    = 0x0b00_0000_0000_000b
	service  = 0x01061c06
	udpPort  = 0x01110007
	qpnA     = 0x11
	qpnB     = 0x22
	listener = "listener"
)

func newSide(t testing.TB, addr string, guid uint64, seed uint64, change func(*Config)) *side {
	s := &side{t: t, addr: netip.MustParseAddr(addr)}
	r := rand.New(rand.NewPCG(seed, guid))
	s.listen = func(*Request) Verdict { return Verdict{Listener: listener} }
	cfg := Config{
		GUID: guid, Rand: r.Uint64, AckDelay: 15, NewID: func() uint32 { return r.Uint32() | 1 },
		Listener: func(q *Request) Verdict { return s.listen(q) },
	}
	if change != nil {
		change(&cfg)
	}
	s.Core = New(cfg)
	return s
}

func newPair(t testing.TB) *pair {
	return &pair{t: t, now: time.Hour, a: newSide(t, "10.0.0.1", guidA, 1, nil), b: newSide(t, "10.0.0.2", guidB, 2, nil)}
}

// pump takes what the core has.
func (s *side) pump() {
	for m, ok := s.NextMAD(); ok; m, ok = s.NextMAD() {
		s.out = append(s.out, m)
	}
	for e, ok := s.NextEvent(); ok; e, ok = s.NextEvent() {
		s.events = append(s.events, e)
	}
}

// run delivers everything until nothing is under way.
func (p *pair) run() {
	p.t.Helper()
	for range 100 {
		p.a.pump()
		p.b.pump()
		if len(p.a.out)+len(p.b.out) == 0 {
			return
		}
		p.deliver(p.a, p.b)
		p.deliver(p.b, p.a)
	}
	p.t.Fatal("the cores do not stop sending")
}

// deliver delivers what one side has sent.
func (p *pair) deliver(from, to *side) {
	from.pump()
	for _, m := range from.out {
		to.Receive(p.now, m.From, m.To, m.MAD[:])
	}
	from.out = nil
	to.pump()
}

// pass lets time pass: each timer ends at its time.
func (p *pair) pass(d time.Duration) {
	end := p.now + d
	for range 10000 {
		next := end
		for _, s := range []*side{p.a, p.b} {
			if t, ok := s.Deadline(); ok {
				next = min(next, t)
			}
		}
		p.now = max(p.now, next)
		p.a.Tick(p.now)
		p.b.Tick(p.now)
		if p.now == end {
			return
		}
	}
	p.t.Fatal("timers without end")
}

// sent demands which messages a side has sent, takes them off, and returns them.
func (s *side) sent(want ...Attr) []Send {
	s.t.Helper()
	s.pump()
	var got []Attr
	for _, m := range s.out {
		attr, _, _, _ := Classify(m.MAD[:])
		got = append(got, attr)
	}
	if !slices.Equal(got, want) {
		s.t.Fatalf("%v sent %#x, want %#x", s.addr, got, want)
	}
	out := s.out
	s.out = nil
	return out
}

// got demands which events a side has had, takes them off, and returns the last.
func (s *side) got(want ...EventType) Event {
	s.t.Helper()
	s.pump()
	var got []EventType
	for _, e := range s.events {
		got = append(got, e.Type)
	}
	if !slices.Equal(got, want) {
		s.t.Fatalf("%v has events %v, want %v", s.addr, got, want)
	}
	e := Event{}
	if len(s.events) > 0 {
		e = s.events[len(s.events)-1]
	}
	s.events = nil
	return e
}

// empty demands that the core has forgotten everything.
func (s *side) empty() {
	s.t.Helper()
	s.pump()
	if n := len(s.conns) + len(s.byID) + len(s.byQPN) + len(s.sidr) + len(s.timers) + len(s.pending.conns) + len(s.waiting.conns); n != 0 || s.head != nil || len(s.mads) != 0 {
		s.t.Fatalf("%v: left: conns %v byID %v byQPN %v sidr %v timers %d pending %d waiting %d event %v", s.addr, s.conns, s.byID, s.byQPN, s.sidr,
			len(s.timers), len(s.pending.conns), len(s.waiting.conns), s.head)
	}
}

func (p *pair) path() *Path {
	return &Path{Local: p.a.addr, Remote: p.b.addr, HopLimit: 64, FlowLabel: 0x584ba, MTU: ib.MTU1024, LifeTime: 16}
}

func (p *pair) header() *IPHeader {
	return &IPHeader{Src: netip.AddrPortFrom(p.a.addr, 45260), Dst: p.b.addr}
}

func paramsA() *Params {
	return &Params{QPN: qpnA, ResponderResources: 3, InitiatorDepth: 4, RetryCount: 7, RNRRetry: 6, Private: []byte("from a")}
}

func paramsB() *Params {
	return &Params{QPN: qpnB, ResponderResources: 5, InitiatorDepth: 6, RNRRetry: 2, Private: []byte("from b")}
}

// request makes a send a REQ. Nothing is delivered.
func (p *pair) request() *Conn {
	p.t.Helper()
	n, err := p.a.Connect(p.now, service, RC, p.path(), p.header(), paramsA(), 15)
	must(p.t, err)
	return n
}

// asked brings b so far that its program has a REQ of a.
func (p *pair) asked() (a, b *Conn) {
	p.t.Helper()
	a = p.request()
	p.deliver(p.a, p.b)
	return a, p.b.got(EventRequest).Conn
}

// replied brings a so far that its program has the REP.
func (p *pair) replied() (a, b *Conn) {
	p.t.Helper()
	a, b = p.asked()
	must(p.t, b.Accept(p.now, paramsB()))
	p.deliver(p.b, p.a)
	p.a.got(EventReply)
	return a, b
}

// connected makes a connection.
func (p *pair) connected() (a, b *Conn) {
	p.t.Helper()
	a, b = p.replied()
	must(p.t, a.Establish(p.now))
	p.deliver(p.a, p.b)
	p.b.got(EventEstablished)
	p.states(a, Established, b, Established)
	return a, b
}

// disconnected makes a connection that a has ended; both are in time wait.
func (p *pair) disconnected() (a, b *Conn) {
	p.t.Helper()
	a, b = p.connected()
	must(p.t, a.Disconnect(p.now))
	p.deliver(p.a, p.b)
	p.b.got(EventDisconnected)
	must(p.t, b.Disconnect(p.now))
	p.deliver(p.b, p.a)
	p.a.got(EventDisconnected)
	p.states(a, TimeWait, b, TimeWait)
	return a, b
}

func (p *pair) states(a *Conn, wantA State, b *Conn, wantB State) {
	p.t.Helper()
	if a.State() != wantA || b.State() != wantB {
		p.t.Fatalf("a: %v, b: %v; want %v, %v", a.State(), b.State(), wantA, wantB)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: %v, want %v", what, got, want)
	}
}

// data returns the data of a MAD.
func data(m *Send) []byte { return m.MAD[headerLen:] }

func rejOf(m *Send) (r rej) {
	r.parse(data(m))
	return r
}
