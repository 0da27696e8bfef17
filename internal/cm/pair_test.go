package cm

// Two cores whose programs connect, reject, disconnect and close at random, over a network that loses,
// repeats, delays and so reorders MADs, under virtual time. Everything is drawn from a seed that is in
// the name of the test:
//
//	go test ./internal/cm -run 'TestPair/seed=7$'
//
// At the end both programs agree on what became of each connection, and the cores have forgotten all.

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// deed is something that happens at a time: a MAD arrives, or a program acts.
type deed struct {
	at    Time
	order int
	do    func()
}

type deeds []deed

func (d deeds) Len() int { return len(d) }
func (d deeds) Less(i, j int) bool {
	return d[i].at < d[j].at || d[i].at == d[j].at && d[i].order < d[j].order
}
func (d deeds) Swap(i, j int) { d[i], d[j] = d[j], d[i] }
func (d *deeds) Push(x any)   { *d = append(*d, x.(deed)) }
func (d *deeds) Pop() any {
	last := (*d)[len(*d)-1]
	*d = (*d)[:len(*d)-1]
	return last
}

// network is two cores, their programs, and what is under way.
type network struct {
	*pair
	rng   *rand.Rand
	loss  float64
	deeds deeds
	n     int
	qpn   uint32
	ends  []*life
}

// life is what a program knows of one Conn, and has done.
type life struct {
	*Conn
	side                        *side
	peerQPN, peerPSN            uint32
	accepted, rejected, closed  bool
	established, disconnecting  bool
	disconnected, timedOut      bool
	wasRejected, wasUnreachable bool
	exited                      bool
	reason                      Reason
}

func (w *network) later(d time.Duration, do func()) {
	w.n++
	heap.Push(&w.deeds, deed{w.now + d, w.n, do})
}

// upTo returns a random duration.
func (w *network) upTo(d time.Duration) time.Duration { return time.Duration(w.rng.Int64N(int64(d))) }

// maxDelay is how long a MAD may be under way: less than the time wait.
const maxDelay = 250 * time.Millisecond

// collect puts what the cores have sent on the way, and gives the programs their events.
func (w *network) collect() {
	for _, s := range []*side{w.a, w.b} {
		s.check(w.t)
		s.pump()
		for _, m := range s.out {
			to := w.a
			if m.To == w.b.addr {
				to = w.b
			}
			for copies := 1 + w.rng.IntN(4)/3; copies > 0; copies-- {
				if w.rng.Float64() >= w.loss {
					w.later(w.upTo(maxDelay), func() { to.Receive(w.now, m.From, m.To, m.MAD[:]) })
				}
			}
		}
		events := s.events
		s.out, s.events = nil, nil
		for _, e := range events {
			w.handle(s, &e)
		}
	}
}

// run lets time go from one deed or timer to the next, until there is none.
func (w *network) run() {
	for range 200_000 {
		w.collect()
		next, some := Time(0), false
		if len(w.deeds) > 0 {
			next, some = w.deeds[0].at, true
		}
		for _, s := range []*side{w.a, w.b} {
			if t, ok := s.Deadline(); ok && (!some || t < next) {
				next, some = t, true
			}
		}
		if !some {
			return
		}
		w.now = max(w.now, next)
		if len(w.deeds) > 0 && w.deeds[0].at <= w.now {
			heap.Pop(&w.deeds).(deed).do()
		}
		w.a.Tick(w.now)
		w.b.Tick(w.now)
	}
	w.t.Fatal("no end")
}

func (w *network) newLife(s *side, n *Conn) *life {
	l := &life{Conn: n, side: s}
	n.Data = l
	w.ends = append(w.ends, l)
	return l
}

func (w *network) params() *Params {
	w.qpn++
	return &Params{QPN: w.qpn, RetryCount: 7}
}

// connect is a program that wants a connection.
func (w *network) connect(from, to *side) {
	n, err := from.Connect(w.now, service, RC, &Path{Local: from.addr, Remote: to.addr, HopLimit: 64, MTU: 3, LifeTime: 16}, nil, w.params(), 15)
	must(w.t, err)
	l := w.newLife(from, n)
	if w.rng.IntN(10) == 0 { // it loses patience
		w.later(w.upTo(20*time.Second), func() { w.close(l) })
	}
}

func (w *network) close(l *life) {
	l.closed = true
	l.Close(w.now)
}

// handle is what the programs do when something happens.
func (w *network) handle(s *side, e *Event) {
	if e.Type == EventRequest {
		w.answer(w.newLife(s, e.Conn), e)
		return
	}
	l := e.Conn.Data.(*life)
	if l.closed {
		w.t.Fatalf("%v after Close", e.Type)
	}
	switch e.Type {
	case EventReply:
		l.peerQPN, l.peerPSN = e.Params.QPN, e.Params.PSN
		w.later(w.upTo(6*time.Second), func() {
			if w.rng.IntN(8) == 0 {
				l.rejected = l.Reject(w.now, RejectConsumer, nil, nil) == nil
				w.close(l)
			} else if l.Establish(w.now) == nil {
				w.live(l)
			}
		})
	case EventEstablished:
		w.live(l)
	case EventRejected:
		l.wasRejected, l.reason = true, e.Reason
		w.close(l)
	case EventUnreachable:
		l.wasUnreachable = true
		w.close(l)
	case EventDisconnected:
		l.disconnected, l.timedOut = true, e.TimedOut
		w.later(w.upTo(6*time.Second), func() {
			_ = l.Disconnect(w.now) // if it has not been done
			if w.rng.IntN(2) == 0 {
				w.close(l)
			}
		})
	case EventTimewaitExit:
		if !l.disconnected || l.exited {
			w.t.Fatalf("time wait exit of %+v", l)
		}
		l.exited = true
	default:
		w.t.Fatalf("event %v", e.Type)
	}
}

// answer accepts or rejects a request.
func (w *network) answer(l *life, e *Event) {
	l.peerQPN, l.peerPSN = e.Params.QPN, e.Params.PSN
	w.later(w.upTo(6*time.Second), func() {
		if w.rng.IntN(6) == 0 {
			l.rejected = l.Reject(w.now, RejectConsumer, nil, nil) == nil
			w.close(l)
		} else {
			l.accepted = l.Accept(w.now, w.params()) == nil
		}
	})
}

// live is an established connection; each side may end it.
func (w *network) live(l *life) {
	if l.established {
		w.t.Fatal("established twice")
	}
	l.established = true
	switch w.rng.IntN(3) {
	case 0:
		w.later(w.upTo(5*time.Second), func() { l.disconnecting = l.Disconnect(w.now) == nil })
	case 1:
		w.later(w.upTo(5*time.Second), func() { w.close(l) })
	}
}

func TestPair(t *testing.T) {
	seeds := 90
	if testing.Short() {
		seeds = 30
	}
	established := 0
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			w := &network{pair: newPair(t), rng: rand.New(rand.NewPCG(uint64(seed), 20))}
			w.a = newSide(t, "10.0.0.1", guidA, uint64(seed), nil)
			w.b = newSide(t, "10.0.0.2", guidB, uint64(seed), nil)
			w.loss = []float64{0, 0.1, 0.3}[seed%3]
			for range 8 {
				w.later(w.upTo(10*time.Second), func() { w.connect(w.a, w.b) })
				w.later(w.upTo(10*time.Second), func() { w.connect(w.b, w.a) })
			}
			w.run()
			for _, l := range w.ends { // connections that nobody has ended, or whose last DREQ was lost
				w.close(l)
			}
			w.run()
			w.a.empty()
			w.b.empty()
			w.agree()
			for _, l := range w.ends {
				if l.established {
					established++
				}
			}
		})
	}
	if established < 10*seeds {
		t.Errorf("%d ends were ever established, of %d", established, 16*seeds)
	}
}

// agree holds both ends of each connection to each other.
func (w *network) agree() {
	byIDs := map[[2]uint32]*life{}
	for _, l := range w.ends {
		byIDs[[2]uint32{l.LocalID(), l.RemoteID()}] = l
	}
	for _, l := range w.ends {
		o := byIDs[[2]uint32{l.RemoteID(), l.LocalID()}]
		bad := func(what string) {
			w.t.Helper()
			w.t.Errorf("%s:\n%+v\n%+v", what, l, o)
		}
		if l.State() != Idle {
			bad("not over")
		}
		if l.established && o == nil {
			bad("established with nobody")
		}
		if o == nil {
			continue
		}
		switch {
		case l.passive && l.established && !o.established:
			bad("the passive side is established, the active one is not")
		case l.established && (l.peerQPN != o.LocalQPN() || l.peerPSN != o.PSN() || l.RemoteQPN() != o.LocalQPN()):
			bad("QPN or PSN differ")
		case !l.passive && l.established && !l.closedEarly() && !o.closedEarly() && !o.established && !o.disconnected:
			bad("the active side is established, the passive one heard nothing of it")
		case l.disconnecting && l.disconnected && !l.timedOut && !o.disconnected && !o.closed:
			bad("one side is disconnected, the other is not")
		case l.wasRejected && l.reason == RejectConsumer && !o.rejected && !o.closed:
			bad("rejected by nobody")
		case l.wasUnreachable && o.established && !o.closed:
			bad("one side gave up, the other is established")
		}
	}
}

// closedEarly reports whether the program closed its end before the end of the connection was agreed.
func (l *life) closedEarly() bool { return l.closed && !l.disconnected }
