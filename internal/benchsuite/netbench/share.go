package main

// Flows side by side: queue pairs of one process, and processes on one address; on a path that loses nothing, also
// while other processes want the processors, and on one that loses.

import (
	"errors"
	"fmt"
	"os"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/figure"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	sharers   = 4
	shareGoal = 0.4 / 0.6 // the smallest share of the largest
)

// setting is what is around the flows.
type setting struct {
	name     string
	busy     bool
	perMille int // lost
}

var settingsOfSharing = []setting{{"", false, 0}, {", busy", true, 0}, {", 0.1 % lost", false, 1}}

// flows are some that are side by side.
type flows struct {
	name string
	rigs []*rig
	verb verbs.Opcode
}

func sharing(s *settings) (_ *table, err error) {
	p, err := newPath(s.frame, single)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	var rigs []*rig
	defer func() {
		for _, r := range rigs {
			err = errors.Join(err, r.stop())
		}
	}()
	for i := range 1 + sharers { // one with all queue pairs, and one for each process
		sp := spec{QPs: 1, Size: s.size, Depth: s.depth, Poll: s.poll}
		if i == 0 {
			sp.QPs = sharers
		}
		r, err := newRig(p, sp)
		if err != nil {
			return nil, err
		}
		rigs = append(rigs, r)
	}
	var all []flows
	for _, c := range contenders {
		all = append(all, flows{c.name, rigs[:1], c.verb})
	}
	all = append(all, flows{"WRITE, a process each", rigs[1:], verbs.OpRDMAWrite})

	t := &table{columns: []string{fmt.Sprintf("%d side by side", sharers), "MiB/s together", "least of largest", "worst round", "goal", "", "sent again", "timeouts", "CPU s/GB"}}
	for _, around := range settingsOfSharing {
		got, err := shareRounds(s, p, around, all)
		if err != nil {
			return t, err
		}
		for k, f := range all {
			t.rows = append(t.rows, shareRow(&f, around, got[k]))
		}
	}
	return t, nil
}

func shareRounds(s *settings, p *path, around setting, all []flows) (_ [][]figures, err error) {
	if err := p.lose(around.perMille); err != nil {
		return nil, err
	}
	if around.busy {
		load, err := startLoad(s.busy)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, load.Stop()) }()
	}
	got := make([][]figures, len(all))
	for range s.rounds {
		for k := range all {
			f, err := all[k].measure(s)
			if err != nil {
				return nil, fmt.Errorf("%s%s: %w", all[k].name, around.name, err)
			}
			got[k] = append(got[k], f)
			fmt.Fprintf(os.Stderr, "%s%s %.0f MiB/s\n", all[k].name, around.name, f.shares)
		}
	}
	return got, nil
}

// measure lets all flows run at a time.
func (f *flows) measure(s *settings) (figures, error) {
	if f.verb == tcp {
		return f.rigs[0].tcp(sharers, s.duration)
	}
	all, err := together(f.rigs, f.verb, s.duration)
	sum := figures{counters: map[string]float64{}}
	for i := range all {
		sum.mibs += all[i].mibs
		sum.shares = append(sum.shares, all[i].shares...)
		sum.cpu += all[i].cpu / float64(len(all))
		for name, n := range all[i].counters {
			sum.counters[name] += n
		}
	}
	return sum, err
}

func shareRow(f *flows, around setting, got []figures) []string {
	fair, worst := medianOf(got, fairness), 1.0
	for i := range got {
		worst = min(worst, fairness(&got[i]))
	}
	count := func(name string) string {
		return figure.Number(medianOf(got, func(f *figures) float64 { return f.counters[name] }))
	}
	row := []string{f.name + around.name, figure.Number(medianOf(got, rateOf)), figure.Number(fair), figure.Number(worst)}
	if f.verb == tcp {
		row = append(row, "", "", count("tcp_retransmitted"), "")
	} else {
		row = append(row, fmt.Sprintf("≥ %.2f", shareGoal), verdictOf(fair >= shareGoal), count("retransmitted_packets"), count("local_ack_timeouts"))
	}
	return append(row, figure.Number(medianOf(got, func(f *figures) float64 { return f.cpu })))
}

// fairness returns the smallest flow's share of the largest's.
func fairness(f *figures) float64 { return leastOfLargest(f.shares) }
