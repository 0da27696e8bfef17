package cm

import (
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"
)

// besieged is a pair whose listener has a backlog, which forged requests have filled.
type besieged struct {
	*pair
	backlog *Backlog
	next    func() []byte
	from    netip.Addr
	taken   map[*Conn]bool // requests that the program could see
}

func newBesieged(t testing.TB, limit int) *besieged {
	p := newPair(t)
	b := &besieged{pair: p, backlog: &Backlog{Max: limit}, from: netip.MustParseAddr("10.0.0.9"), taken: map[*Conn]bool{}}
	p.b.listen = func(*Request) Verdict { return Verdict{Listener: listener, Backlog: b.backlog} }
	b.next = forged(t, p)
	b.flood(limit)
	return b
}

// flood delivers forged requests, and takes the events.
func (b *besieged) flood(n int) {
	b.t.Helper()
	for range n {
		b.receive(b.next())
	}
}

func (b *besieged) receive(mad []byte) {
	b.b.Receive(b.now, b.from, b.b.addr, mad)
	for e, ok := b.b.NextEvent(); ok; e, ok = b.b.NextEvent() {
		switch e.Type {
		case EventRequest:
			b.taken[e.Conn] = true
		case EventDropped:
			if !b.taken[e.Conn] {
				b.t.Fatal("a request is dropped that never came")
			}
			delete(b.taken, e.Conn)
		default:
			b.t.Fatalf("event %v", e.Type)
		}
	}
}

// of returns the request of a REQ, nil if it is not there.
func (b *besieged) of(mad []byte) *Conn {
	var r req
	r.parse(mad[headerLen:])
	return b.b.byID[remoteKey{r.guid, r.localID}]
}

// TestBacklogIsBounded: a flood takes no more room than the backlog has, nobody is answered, and every
// request is evicted sooner or later.
func TestBacklogIsBounded(t *testing.T) {
	const limit = 50
	b := newBesieged(t, limit)
	first := make(map[*Conn]bool)
	for n := range b.taken {
		first[n] = true
	}
	for range 40 {
		b.flood(limit)
		equal(t, "backlog", b.backlog.Len(), limit)
		equal(t, "conns", len(b.b.conns), limit)
		equal(t, "ids", len(b.b.byID), limit)
		equal(t, "QPNs", len(b.b.byQPN), limit)
		equal(t, "events", len(b.taken), limit)
		equal(t, "pending", len(b.b.pending.conns), 0)
		b.b.check(t)
	}
	if _, ok := b.b.NextMAD(); ok {
		t.Error("a forged REQ is answered")
	}
	for n := range b.taken {
		if first[n] {
			t.Error("the first requests are never evicted")
		}
		n.Close(b.now)
	}
	equal(t, "backlog", b.backlog.Len(), 0)
	b.b.pump()
	b.b.out = nil
	b.b.empty()
}

// TestRepeatedREQFindsRoom: a real request that was turned away is no duplicate when it comes again. It
// goes before all that come for the first time, however many follow.
func TestRepeatedREQFindsRoom(t *testing.T) {
	b := newBesieged(t, 50)
	real := b.next()
	b.receive(real)
	for n := 0; b.of(real) != nil; n++ {
		if n == 10_000 {
			t.Fatal("the request is never evicted")
		}
		b.flood(1)
	}
	for range 9 { // 4.6 s
		b.now += 512 * time.Millisecond
		b.flood(100)
	}
	b.receive(real)
	n := b.of(real)
	if n == nil || !n.Request().Again {
		t.Fatalf("the repeated request: %+v", n)
	}
	b.flood(10_000)
	if b.of(real) != n || n.State() != MRAReqSent {
		t.Fatalf("the repeated request is evicted: %v", n.State())
	}
	n.Seen()
	equal(t, "pending", len(b.b.pending.conns), 1)
	b.b.check(t)
	b.flood(10_000)
	must(t, n.Accept(b.now, paramsB()))
	b.b.sent(AttrREP)
}

// TestRepeatedREQsTakeTurns: of those that come again, one more takes the place of a random one, and of
// those that come first none stays.
func TestRepeatedREQsTakeTurns(t *testing.T) {
	const limit = 20
	b := newBesieged(t, limit)
	var all [][]byte
	for range 10 * limit {
		m := b.next()
		all = append(all, m)
		b.receive(m)
	}
	b.flood(50 * limit) // all of them are turned away
	b.now += 4608 * time.Millisecond
	for _, m := range all {
		if b.of(m) != nil {
			t.Fatal("a request outlasts the flood")
		}
		b.receive(m)
	}
	equal(t, "of those that come again", len(b.backlog.again.conns), limit)
	equal(t, "of those that come first", len(b.backlog.fresh.conns), 0)
	b.flood(1) // finds no room at all
	equal(t, "of those that come first", len(b.backlog.fresh.conns), 0)
	last := 0
	for _, m := range all[:len(all)-limit] {
		if b.of(m) != nil {
			last++
		}
	}
	if last == 0 || b.of(all[len(all)-1]) == nil {
		t.Errorf("%d of those that are not the last stay: the choice is not random", last)
	}
	b.b.check(t)
}

// TestTurnedAwayIsForgotten: after two generations nothing is left, and a memory takes no room without
// need. Few are taken for others.
func TestTurnedAwayIsForgotten(t *testing.T) {
	c := newPair(t).b.Core
	m := &c.turnedAway
	rng := rand.New(rand.NewPCG(3, 4))
	now := time.Hour
	hash := func(id uint32) uint64 { return m.hash(netip.MustParseAddr("10.0.0.1"), 7, id) }
	if m.has(now, hash(1)) || m.now != nil {
		t.Error("it is there before it came")
	}
	m.add(now, hash(1))
	for range 800_000 { // a flood of 100,000 a second
		m.add(now+1, rng.Uint64())
	}
	wrong := 0
	for range 100_000 {
		if m.has(now+2, rng.Uint64()) {
			wrong++
		}
	}
	if wrong > 200 {
		t.Errorf("%d of 100,000 are taken for others", wrong)
	}
	if !m.has(now+generation-1, hash(1)) || !m.has(now+2*generation-1, hash(1)) {
		t.Error("it is forgotten too early")
	}
	m.add(now+2*generation, hash(2))
	if m.has(now+2*generation, hash(1)) || !m.has(now+2*generation, hash(2)) {
		t.Error("generations do not follow each other")
	}
	if m.has(now+10*generation, hash(2)) || m.now != nil || m.old != nil {
		t.Error("it is not forgotten")
	}
}
