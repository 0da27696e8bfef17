package netsim

import (
	"regexp"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
)

func run(t *testing.T, c Case) *Result {
	t.Helper()
	r, err := c.Run()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestGoals runs some of the cases; make netsim runs them all.
func TestGoals(t *testing.T) {
	some := regexp.MustCompile(`^(near (droptail|ECN) [14]×(WRITE|READ)|[15] % (WRITE|SEND|READ))$`)
	ran := 0
	for _, g := range Groups(1) {
		for _, c := range g.Cases {
			if !some.MatchString(c.Name) {
				continue
			}
			ran++
			t.Run(c.Name, func(t *testing.T) {
				t.Parallel()
				r := run(t, c)
				if !r.Ok() {
					t.Errorf("%.2f of the link, the goal is %g; Jain's index %.3f, the goal is %g; seed %d", r.Rate, c.Goals.Rate, r.Jain, c.Goals.Jain, c.Seed)
				}
			})
		}
	}
	if ran != 14 {
		t.Errorf("%d cases", ran)
	}
}

// TestMarks: where packets are marked, none is dropped, and the queue is at most half of cubic's.
func TestMarks(t *testing.T) {
	l := with(Near, func(l *Link) { l.Mark = marked["near"] })
	c := Case{Name: "ours", Seed: 3, Link: l, Ours: 4, Op: ib.OpRDMAWrite, Size: 64 << 10, Warm: 100 * time.Millisecond, Time: 200 * time.Millisecond}
	r := run(t, c)
	drop := c
	drop.Link = Near
	d := run(t, drop)
	if r.Dropped > 0 || r.Again > 0 || r.Marked == 0 {
		t.Errorf("%d dropped, %d sent again, %d marked", r.Dropped, r.Again, r.Marked)
	}
	// As Linux has it, unless told otherwise: it may not be marked.
	tcp := run(t, Case{Name: "cubic", Seed: 3, Link: l, Cubic: 4, Warm: c.Warm, Time: c.Time})
	if r.MeanWait > tcp.MeanWait/2 {
		t.Errorf("packets wait %v, cubic's %v", r.MeanWait, tcp.MeanWait)
	}
	if r.MeanWait > d.MeanWait/2 {
		t.Errorf("packets wait %v where they are marked, %v where they are dropped", r.MeanWait, d.MeanWait)
	}
}

// TestClean: on a path that one queue pair does not fill, nothing is sent twice, from the first packet
// on.
func TestClean(t *testing.T) {
	for _, p := range []struct {
		name string
		link Link
		size int
		warm Time
	}{{"near", Near, 64 << 10, 10 * time.Millisecond}, {"far", Far, 256 << 10, time.Second}} {
		l := with(p.link, func(l *Link) { l.Buffer = 64 << 20 })
		for _, o := range ops {
			r := run(t, Case{Name: o.name, Seed: 1, Link: l, Ours: 1, Op: o.op, Size: p.size, Warm: p.warm, Time: 5 * p.warm})
			if r.Again+r.Timeouts+r.Probes > 0 || r.Dropped > 0 || r.Rate < 0.9 {
				t.Errorf("%s, %s: %d packets sent again, %d timeouts, %d probes, %d dropped, %.2f of the link", p.name, o.name, r.Again, r.Timeouts, r.Probes, r.Dropped, r.Rate)
			}
		}
	}
}

// TestRepeatable: a case runs the same way each time, and another seed another way.
func TestRepeatable(t *testing.T) {
	c := Case{Name: "lossy", Seed: 5, Link: with(Near, func(l *Link) { l.Loss = 0.02 }), Ours: 2, Op: ib.OpRDMAWrite, Size: 64 << 10, Warm: 10 * time.Millisecond, Time: 20 * time.Millisecond}
	a, b := run(t, c), run(t, c)
	c.Seed = 6
	other := run(t, c)
	if a.Rate != b.Rate || a.Lost != b.Lost {
		t.Errorf("twice the same: %g and %g of the link, %d and %d lost", a.Rate, b.Rate, a.Lost, b.Lost)
	}
	if a.Lost == other.Lost && a.Rate == other.Rate {
		t.Error("another seed gives the same")
	}
}

// TestCubic holds the model to what is known of TCP: it fills a link with a buffer, and on a lossy
// one gets about as much as the square root of the loss allows (Mathis).
func TestCubic(t *testing.T) {
	l := with(Near, func(l *Link) { l.Rate = 1e9 })
	if r := run(t, Case{Name: "clean", Seed: 1, Link: l, Cubic: 1, Warm: 500 * time.Millisecond, Time: time.Second}); r.Rate < 0.9 {
		t.Errorf("alone it gets %.2f of the link", r.Rate)
	}
	l = with(Far, func(l *Link) { l.Loss = 0.01 })
	r := run(t, Case{Name: "lossy", Seed: 1, Link: l, Cubic: 1, Warm: 2 * time.Second, Time: 10 * time.Second})
	perTrip := r.Beside[0] * l.RTT.Seconds() / mtu
	if perTrip < 4 || perTrip > 40 { // Mathis: 12 segments
		t.Errorf("at 1 %% it sends %.1f segments in a round trip", perTrip)
	}
	two := run(t, Case{Name: "two", Seed: 1, Link: Near, Cubic: 4, Warm: 200 * time.Millisecond, Time: time.Second})
	if two.Jain < 0.8 {
		t.Errorf("four connections share with an index of %.2f", two.Jain)
	}
}

func TestJain(t *testing.T) {
	for _, c := range []struct {
		rates []float64
		want  float64
	}{{[]float64{1, 1, 1}, 1}, {[]float64{1, 0, 0, 0}, 0.25}, {nil, 0}, {[]float64{0}, 0}} {
		if got := Jain(c.rates); got != c.want {
			t.Errorf("%v: %g, not %g", c.rates, got, c.want)
		}
	}
}
