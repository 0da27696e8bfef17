package netsim

import (
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// Paths of the cases. The buffers hold what a round trip does, that of Near four times as much.
var (
	Far    = Link{Rate: 1e9, RTT: 20 * time.Millisecond, Buffer: 2_500_000}
	Near   = Link{Rate: 10e9, RTT: 100 * time.Microsecond, Buffer: 512 << 10}
	Fast   = Link{Rate: 100e9, RTT: 100 * time.Microsecond, Buffer: 1_250_000}
	marked = map[string]int{"far": 500_000, "near": 65_536, "fast": 300_000}
)

// Case is one simulation.
type Case struct {
	Name  string
	Seed  uint64
	Link  Link
	Ours  int  // queue pairs, each of a host of its own
	Cubic int  // connections of the model
	ECN   bool // and they ask for marks, which Linux does only if told (net.ipv4.tcp_ecn=1)
	Op    ib.Opcode
	Size  int
	Warm  Time // what is before is not measured
	Time  Time
	Goals Goals
	Queue bool // the queue is kept, for the plot
}

// Goals are what a result is held to; 0: nothing.
type Goals struct {
	Rate float64 // of the link
	Jain float64 // of ours
}

// Result is what a case has measured.
type Result struct {
	Case
	Rate     float64   // payload that has passed, of what the link can carry
	Rates    []float64 // bytes a second, of ours
	Beside   []float64 // of the connections
	Jain     float64
	MeanWait Time // in the buffer
	Dropped  int  // by the buffer
	Lost     int
	Marked   int
	Again    uint64 // packets that ours have sent again
	Timeouts uint64
	Probes   uint64
	Samples  []sample
}

// Ok reports whether the goals are met.
func (r *Result) Ok() bool { return r.Rate >= r.Goals.Rate && r.Jain >= r.Goals.Jain }

// Jain returns Jain's index of fairness: 1 if all are equal, 1/n if one has everything.
func Jain(rates []float64) float64 {
	sum, squares := 0.0, 0.0
	for _, r := range rates {
		sum += r
		squares += r * r
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / squares / float64(len(rates))
}

// Run runs a case.
func (c *Case) Run() (*Result, error) {
	s := newSim(c.Seed)
	there := &bottleneck{Link: c.Link, s: s}
	back := &bottleneck{Link: c.Link, s: s}
	forward, reverse := there, back
	if c.Op == ib.OpRDMARead { // data goes against the requests
		forward, reverse = back, there
	}
	var hosts, all []*host
	for i := range c.Ours {
		a, err := newHost(s, 2*i+1, forward.send)
		if err != nil {
			return nil, err
		}
		b, err := newHost(s, 2*i+2, reverse.send)
		if err != nil {
			return nil, err
		}
		if err := connect(a, b); err != nil {
			return nil, err
		}
		a.op, a.size = c.Op, c.Size
		hosts, all = append(hosts, a), append(all, a, b)
		s.at(epoch+Time(s.rng.Int64N(int64(c.Link.RTT)+1)), a.start)
	}
	var tcp []*cubic
	for range c.Cubic {
		t := newCubic(s, there.send, back.send, c.ECN)
		tcp = append(tcp, t)
		s.at(epoch+Time(s.rng.Int64N(int64(c.Link.RTT)+1)), t.start)
	}
	s.run(epoch + c.Warm)
	before := make([]int64, 0, len(hosts)+len(tcp))
	for _, h := range hosts {
		before = append(before, h.done)
	}
	for _, t := range tcp {
		before = append(before, t.done)
	}
	sent, waits := there.sent-there.dropped-there.lost, there.waits
	s.run(epoch + c.Warm + c.Time)
	r := &Result{Case: *c, Dropped: there.dropped, Lost: there.lost + back.lost, Marked: there.marked, Samples: there.queue}
	sum := 0.0
	for i, h := range hosts {
		if h.failed != nil {
			return nil, fmt.Errorf("%s: %w", c.Name, h.failed)
		}
		r.Rates = append(r.Rates, float64(h.done-before[i])/c.Time.Seconds())
		sum += r.Rates[i]
	}
	for i, t := range tcp {
		r.Beside = append(r.Beside, float64(t.done-before[len(hosts)+i])/c.Time.Seconds())
		sum += r.Beside[i]
	}
	for _, h := range all {
		r.Again += h.q.Counters[qp.CntRetransmits]
		r.Timeouts += h.q.Counters[qp.CntTimeouts]
		r.Probes += h.q.Counters[qp.CntProbes]
	}
	r.Rate = sum * 8 / c.Link.Rate * (mtu + overhead) / mtu
	r.Jain = Jain(r.Rates)
	if len(hosts) == 0 {
		r.Jain = Jain(r.Beside)
	}
	if n := there.sent - there.dropped - there.lost - sent; n > 0 {
		r.MeanWait = (there.waits - waits) / Time(n)
	}
	return r, nil
}

// with returns the link with another property.
func with(l Link, f func(*Link)) Link {
	f(&l)
	return l
}

var ops = []struct {
	op   ib.Opcode
	name string
}{{ib.OpRDMAWrite, "WRITE"}, {ib.OpSend, "SEND"}, {ib.OpRDMARead, "READ"}}

// Group is the cases of one table.
type Group struct {
	Name  string
	Cases []Case
}

// Groups returns all cases. seeds is with how many seeds each is run.
func Groups(seeds int) []Group {
	type path struct {
		name       string
		link       Link
		size       int
		warm, time Time
	}
	paths := []path{
		{"far", Far, 256 << 10, 4 * time.Second, 8 * time.Second},
		{"near", Near, 64 << 10, 100 * time.Millisecond, 400 * time.Millisecond},
		{"fast", Fast, 128 << 10, 50 * time.Millisecond, 50 * time.Millisecond},
	}
	var clean, losses, beside Group
	clean.Name, losses.Name, beside.Name = "clean", "loss", "cubic"
	for seed := range uint64(seeds) {
		add := func(g *Group, c Case) {
			c.Seed = seed + 1
			g.Cases = append(g.Cases, c)
		}
		for _, p := range paths {
			for _, ecn := range []bool{false, true} {
				l, name := p.link, p.name+" droptail"
				if ecn {
					l, name = with(l, func(l *Link) { l.Mark = marked[p.name] }), p.name+" ECN"
				}
				for _, n := range []int{1, 2, 4, 8, 16} {
					for _, o := range ops {
						if o.op == ib.OpSend && n > 1 {
							continue
						}
						add(&clean, Case{Name: fmt.Sprintf("%s %d×%s", name, n, o.name), Link: l, Ours: n, Op: o.op, Size: p.size,
							Warm: p.warm, Time: p.time, Goals: Goals{Rate: 0.9, Jain: 0.95}, Queue: n == 4})
					}
				}
				for _, n := range []int{1, 4} {
					add(&beside, Case{Name: fmt.Sprintf("%s %d×cubic", name, n), Link: l, Cubic: n, Warm: p.warm, Time: p.time, Queue: n == 4})
					if ecn {
						add(&beside, Case{Name: fmt.Sprintf("%s %d×cubic with ECN", name, n), Link: l, Cubic: n, ECN: true, Warm: p.warm, Time: p.time})
					}
				}
				add(&beside, Case{Name: name + " 2×WRITE beside 2×cubic", Link: l, Ours: 2, Cubic: 2, Op: ib.OpRDMAWrite, Size: p.size, Warm: p.warm, Time: p.time})
			}
		}
		near := paths[1]
		lossy := func(name string, goal float64, f func(*Link)) {
			for _, o := range ops {
				add(&losses, Case{Name: fmt.Sprintf("%s %s", name, o.name), Link: with(near.link, f), Ours: 1, Op: o.op, Size: near.size,
					Warm: near.warm, Time: near.time, Goals: Goals{Rate: goal}})
			}
			add(&losses, Case{Name: name + " cubic", Link: with(near.link, f), Cubic: 1, Warm: near.warm, Time: near.time})
		}
		lossy("0.1 %", 0.8, func(l *Link) { l.Loss = 0.001 })
		lossy("1 %", 0.6, func(l *Link) { l.Loss = 0.01 })
		lossy("5 %", 0.25, func(l *Link) { l.Loss = 0.05 })
		lossy("1 % in bursts of 8", 0.5, func(l *Link) { l.Loss, l.Burst = 0.01, 8 })
		lossy("1 % late", 0.5, func(l *Link) { l.Late = 0.01 })
	}
	return []Group{clean, losses, beside}
}
