package main

// Our flows and TCP cubic through the box, alone and beside each other.

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/figure"
	"github.com/verbena-rdma/verbena/verbs"
)

// crossing is a box and what is sent through it.
type crossing struct {
	name string
	link link
}

var crossings = []crossing{
	{"500 Mb/s, 2 × 1 ms", link{rate: 500e6, delay: time.Millisecond, buffer: 500 << 10, ecn: 64 << 10}},
	{"100 Mb/s, 2 × 10 ms", link{rate: 100e6, delay: 10 * time.Millisecond, buffer: 250 << 10, ecn: 64 << 10}},
}

// scene is which flows there are at a time.
type scene struct {
	name   string
	writes int  // queue pairs that WRITE
	tcp    int  // connections
	ecn    bool // of TCP
}

var scenes = []scene{
	{"WRITE", 1, 0, false},
	{"cubic", 0, 1, false},
	{"cubic, ECN", 0, 1, true},
	{"2 WRITE", 2, 0, false},
	{"WRITE + cubic", 1, 1, false},
	{"WRITE + cubic, ECN", 1, 1, true},
}

// ecnCapable is the codepoint by which packets may be marked.
const ecnCapable = 2

func throughBox(s *settings) (*table, error) {
	t := &table{columns: []string{"box", "flows", "WRITE Mb/s", "TCP Mb/s", "of the link", "least of largest flow", "queue, mean ms", "p99 ms", "marks", "drops", "sent again", "timeouts"}}
	for i := range crossings {
		if err := crossings[i].measure(s, t); err != nil {
			return t, fmt.Errorf("%s: %w", crossings[i].name, err)
		}
	}
	t.notes = append(t.notes, "Goodput. The queue is that towards the receiver, as packets find it. Marks and drops are those of both directions.")
	return t, nil
}

// crossed is what was seen in one measurement.
type crossed struct {
	write, tcp      float64 // Mb/s of payload
	least           float64 // the smallest flow's share of the largest's
	mean, p99       float64 // ms
	marks, drops    float64
	again, timeouts float64
}

func (c *crossing) measure(s *settings, t *table) (err error) {
	x, err := newBox(s.frame, c.link)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.close()) }()
	got := make([][]crossed, len(scenes))
	for range s.rounds {
		for i := range scenes {
			r, err := scenes[i].play(s, x)
			if err != nil {
				return fmt.Errorf("%s: %w", scenes[i].name, err)
			}
			got[i] = append(got[i], r)
			fmt.Fprintf(os.Stderr, "%s, %-18s WRITE %.0f Mb/s, TCP %.0f Mb/s, queue %.2f ms\n", c.name, scenes[i].name, r.write, r.tcp, r.mean)
		}
	}
	for i, rs := range got {
		of := func(f func(*crossed) float64) string {
			var all []float64
			for k := range rs {
				all = append(all, f(&rs[k]))
			}
			return figure.Number(median(all))
		}
		t.rows = append(t.rows, []string{c.name, scenes[i].name,
			of(func(r *crossed) float64 { return r.write }), of(func(r *crossed) float64 { return r.tcp }),
			of(func(r *crossed) float64 { return (r.write + r.tcp) * 1e6 / c.link.rate }), of(func(r *crossed) float64 { return r.least }),
			of(func(r *crossed) float64 { return r.mean }), of(func(r *crossed) float64 { return r.p99 }),
			of(func(r *crossed) float64 { return r.marks }), of(func(r *crossed) float64 { return r.drops }),
			of(func(r *crossed) float64 { return r.again }), of(func(r *crossed) float64 { return r.timeouts })})
	}
	if n, err := x.undelivered(); err != nil || n > 0 {
		t.notes = append(t.notes, fmt.Sprintf("%s: %d packets did not reach the box, which had no processor (%v).", c.name, n, err))
	}
	return nil
}

// play measures one scene, with processes of its own, so that nobody remembers the scene before.
func (sc *scene) play(s *settings, x *box) (c crossed, err error) {
	if err := x.ecn(sc.ecn); err != nil {
		return c, err
	}
	var rigs []*rig
	defer func() {
		for _, r := range rigs {
			err = errors.Join(err, r.stop())
		}
	}()
	add := func(qps int) (*rig, error) {
		r, err := newRig(x.path, spec{QPs: qps, Size: s.size, Depth: s.depth, Traffic: ecnCapable})
		if err == nil {
			rigs = append(rigs, r)
		}
		return r, err
	}
	var ours, theirs *rig
	if sc.writes > 0 {
		if ours, err = add(sc.writes); err != nil {
			return c, err
		}
	}
	if sc.tcp > 0 {
		if theirs, err = add(0); err != nil {
			return c, err
		}
	}
	x.reset()
	d := s.crossing
	var a, b figures
	var errs [2]error
	var wg sync.WaitGroup
	if ours != nil {
		wg.Go(func() { a, errs[0] = ours.verbs(verbs.OpRDMAWrite, d) })
	}
	if theirs != nil {
		wg.Go(func() { b, errs[1] = theirs.tcp(sc.tcp, d) })
	}
	// The box counts what happens while all flows are there.
	time.Sleep(d * 9 / 10)
	there, back := x.seen(0), x.seen(1)
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return c, err
	}
	const megabits = mib * 8 / 1e6
	c = crossed{
		write: a.mibs * megabits, tcp: b.mibs * megabits, least: leastOfLargest(append(a.shares, b.shares...)),
		mean: there.mean().Seconds() * 1e3, p99: there.quantile(0.99).Seconds() * 1e3,
		marks: float64(there.marked + back.marked), drops: float64(there.dropped + back.dropped),
		again: a.counters["retransmitted_packets"] + b.counters["tcp_retransmitted"], timeouts: a.counters["local_ack_timeouts"],
	}
	return c, nil
}
