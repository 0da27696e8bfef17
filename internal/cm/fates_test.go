package cm

// Every way in which a network can treat the first messages of a connection: each of them arrives, is
// lost, arrives twice, arrives late, or arrives at once and again when the connection has been up for some
// time. All combinations are tried, with programs that answer at once and programs that take longer than
// a message is waited for, and with data that arrives before the RTU. Whatever happens, both programs get
// the connection, neither hears of an end, and it ends once when one of them ends it.

import (
	"container/heap"
	"fmt"
	"os"
	"testing"
	"time"
)

// fate is what becomes of a message.
type fate int

const (
	arrives fate = iota
	isLost
	arrivesTwice
	arrivesLate  // behind what is sent soon after it
	arrivesAgain // at once, and when the connection has been up for a while
	numFates
)

var fateNames = [numFates]string{"arrives", "lost", "twice", "late", "again"}

// The pauses of a message that arrives late, and of one that arrives again: longer than any message is
// waited for.
const (
	lateBy  = 10 * time.Millisecond
	againBy = 9 * time.Second
)

// course is one run of a connection: what the programs do, and what becomes of the first messages.
type course struct {
	*network
	fates         []fate
	accepts       time.Duration // how long b's program takes to accept
	establishes   time.Duration // how long a's program takes to establish
	data          bool          // a's program sends data as soon as it has the connection
	a, b          *Conn
	got           [2][]EventType
	log           []string
	disconnecting bool
}

func (c *course) say(format string, args ...any) {
	c.log = append(c.log, fmt.Sprintf("%v ", c.now-time.Hour)+fmt.Sprintf(format, args...))
}

// step sends what the cores have, as the fates say, and gives the programs their events.
func (c *course) step() {
	for i, s := range []*side{c.network.a, c.network.b} {
		s.check(c.t)
		s.pump()
		for _, m := range s.out {
			c.send(s, &m)
		}
		events := s.events
		s.out, s.events = nil, nil
		for _, e := range events {
			c.got[i] = append(c.got[i], e.Type)
			c.say("%c has %v", 'a'+rune(i), e.Type)
			c.act(&e)
		}
	}
}

func (c *course) send(from *side, m *Send) {
	to, f := c.network.a, arrives
	if from == to {
		to = c.network.b
	}
	if len(c.fates) > 0 {
		f, c.fates = c.fates[0], c.fates[1:]
	}
	attr, _, _, _ := Classify(m.MAD[:])
	c.say("%v sends %#x, which %s", from.addr, attr, fateNames[f])
	deliver := func() { to.Receive(c.now, m.From, m.To, m.MAD[:]) }
	switch f {
	case isLost:
		return
	case arrivesTwice:
		c.later(time.Millisecond, deliver)
	case arrivesLate:
		c.later(lateBy, deliver)
		return
	case arrivesAgain:
		c.later(againBy, deliver)
	}
	c.later(time.Millisecond, deliver)
}

// act is what the programs do.
func (c *course) act(e *Event) {
	switch e.Type {
	case EventRequest:
		c.b = e.Conn
		c.later(c.accepts, func() { must(c.t, c.b.Accept(c.now, paramsB())) })
	case EventReply:
		c.later(c.establishes, func() {
			must(c.t, c.a.Establish(c.now))
			if c.data {
				c.later(2*time.Millisecond, func() { _ = c.b.Confirm(c.now) }) // fails if the RTU was faster
			}
		})
	case EventDisconnected:
		if e.Conn == c.b && !c.disconnecting {
			return
		}
		if e.Conn == c.b {
			must(c.t, c.b.Disconnect(c.now))
		}
	}
}

// settle lets time pass until nothing is under way.
func (c *course) settle() {
	for range 1000 {
		c.step()
		next, some := Time(0), len(c.deeds) > 0
		if some {
			next = c.deeds[0].at
		}
		for _, s := range []*side{c.network.a, c.network.b} {
			if t, ok := s.Deadline(); ok && (!some || t < next) {
				next, some = t, true
			}
		}
		if !some {
			return
		}
		c.now = max(c.now, next)
		for len(c.deeds) > 0 && c.deeds[0].at <= c.now {
			heap.Pop(&c.deeds).(deed).do()
		}
		c.network.a.Tick(c.now)
		c.network.b.Tick(c.now)
	}
	c.fail("no end")
}

func (c *course) fail(format string, args ...any) {
	c.t.Helper()
	for _, l := range c.log {
		c.t.Log(l)
	}
	c.t.Fatalf(format, args...)
}

// expect demands the events that a program has had, and forgets them.
func (c *course) expect(i int, want ...EventType) {
	c.t.Helper()
	if fmt.Sprint(c.got[i]) != fmt.Sprint(want) {
		c.fail("%c has had %v, want %v", 'a'+rune(i), c.got[i], want)
	}
	c.got[i] = nil
}

// run makes the connection and ends it. The fates are those of the first messages of either part.
func (c *course) run(up, down []fate) {
	c.fates = up
	c.a = c.request()
	c.settle()
	c.expect(0, EventReply)
	c.expect(1, EventRequest, EventEstablished)
	if c.a.State() != Established || c.b.State() != Established {
		c.fail("a: %v, b: %v", c.a.State(), c.b.State())
	}
	c.fates, c.disconnecting = down, true
	must(c.t, c.a.Disconnect(c.now))
	c.settle()
	c.expect(0, EventDisconnected, EventTimewaitExit)
	c.expect(1, EventDisconnected, EventTimewaitExit)
	c.network.a.empty()
	c.network.b.empty()
}

// fatesOf returns the fates of n messages that a number stands for.
func fatesOf(number, n int) (f []fate) {
	for range n {
		f = append(f, fate(number%int(numFates)))
		number /= int(numFates)
	}
	return f
}

func combinations(n int) int {
	all := 1
	for range n {
		all *= int(numFates)
	}
	return all
}

func TestFates(t *testing.T) {
	const slow = 5 * time.Second // longer than a REQ and a REP are waited for
	for _, who := range []struct {
		name                 string
		accepts, establishes time.Duration
		data                 bool
	}{
		{"quick", 0, 0, false},
		{"quick with data", 0, 0, true},
		{"slow to accept", slow, 0, false},
		{"slow to establish", 0, slow, false},
		{"slow to establish, with data", 0, slow, true},
		{"slow", slow, slow, false},
	} {
		t.Run(who.name, func(t *testing.T) {
			messages := 4
			if os.Getenv("VERBENA_FULL") != "" {
				messages = 6
			}
			run := func(up, down []fate) {
				c := &course{network: &network{pair: newPair(t)}, accepts: who.accepts, establishes: who.establishes, data: who.data}
				c.say("%v then %v", up, down)
				c.run(up, down)
			}
			for number := range combinations(messages) {
				run(fatesOf(number, messages), nil)
			}
			for number := range combinations(4) {
				run(nil, fatesOf(number, 4))
			}
		})
	}
}
