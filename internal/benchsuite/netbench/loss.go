package main

// WRITE, SEND and READ on a path that loses packets in both directions, beside TCP on the same path. In each round
// every loss is tried with every contender.

import (
	"errors"
	"fmt"
	"os"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/figure"
	"github.com/verbena-rdma/verbena/verbs"
)

// losses are of a thousand packets.
var losses = []struct {
	perMille int
	goal     float64 // of our own rate without loss; 0: none
}{{0, 0}, {1, 0.9}, {10, 0.5}, {50, 0.1}}

// tcp stands for TCP where there is a verb.
const tcp verbs.Opcode = 0xff

// contenders of one path: the verbs, and TCP, which is the last.
var contenders = []struct {
	name string
	verb verbs.Opcode
}{{"WRITE", verbs.OpRDMAWrite}, {"SEND", verbs.OpSend}, {"READ", verbs.OpRDMARead}, {"TCP cubic", tcp}}

func lossy(s *settings, seg segmentation) (_ *table, err error) {
	p, err := newPath(s.frame, seg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	r, err := newRig(p, spec{QPs: 1, Size: s.size, Depth: s.depth, Poll: s.poll})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()

	got := make([][][]figures, len(losses)) // by loss, contender and round
	for i := range got {
		got[i] = make([][]figures, len(contenders))
	}
	for range s.rounds {
		for i, l := range losses {
			for k, c := range contenders {
				if err := p.lose(l.perMille); err != nil {
					return nil, err
				}
				var f figures
				if c.verb == tcp {
					f, err = r.tcp(1, s.duration)
				} else {
					f, err = r.verbs(c.verb, s.duration)
				}
				if err != nil {
					return nil, fmt.Errorf("%s at %g %%: %w", c.name, float64(l.perMille)/10, err)
				}
				seen, dropped, err := p.lost()
				if err != nil {
					return nil, err
				}
				f.counters["dropped"], f.counters["seen"] = float64(dropped), float64(seen)
				got[i][k] = append(got[i][k], f)
				fmt.Fprintf(os.Stderr, "%4g %% %-9s %8.1f MiB/s, %.0f of %.0f packets dropped\n", float64(l.perMille)/10, c.name, f.mibs, f.counters["dropped"], f.counters["seen"])
			}
		}
	}

	t := &table{columns: []string{"loss", "", "MiB/s", "min", "max", "of lossless", "goal", "", "of TCP", "goal", "", "packets lost", "sent again", "timeouts", "probes", "buffer drops", "CPU s/GB"}}
	curves := make([]curve, len(contenders))
	for i, l := range losses {
		for k, c := range contenders {
			fs := got[i][k]
			count := func(name string) string {
				return figure.Number(medianOf(fs, func(f *figures) float64 { return f.counters[name] }))
			}
			lossless, ofTCP := ratio(fs, got[0][k]), ratio(fs, got[i][len(contenders)-1])
			row := []string{fmt.Sprintf("%g %%", float64(l.perMille)/10), c.name, figure.Number(medianOf(fs, rateOf)), figure.Number(least(fs)), figure.Number(most(fs))}
			if c.verb == tcp {
				row = append(row, figure.Number(lossless), "", "", "", "", "", count("dropped"), count("tcp_retransmitted"), "", "", "")
			} else {
				// Without loss there is another goal: nothing is sent twice, in any round.
				judged := []string{figure.Number(lossless), "", "", figure.Number(ofTCP), "", ""}
				if l.goal != 0 {
					judged = []string{figure.Number(lossless), fmt.Sprintf("≥ %g", l.goal), verdictOf(lossless >= l.goal), figure.Number(ofTCP), "≥ 1", verdictOf(ofTCP >= 1)}
				}
				again := count("retransmitted_packets")
				if l.perMille == 0 {
					most := 0.0
					for i := range fs {
						most = max(most, fs[i].counters["retransmitted_packets"])
					}
					again = figure.Number(most) + " " + verdictOf(most == 0)
				}
				row = append(append(row, judged...), count("dropped"), again, count("local_ack_timeouts"), count("ack_probes"), count("udp_rcvbuf_errors"))
			}
			curves[k].name = c.name
			curves[k].rates = append(curves[k].rates, medianOf(fs, rateOf))
			t.rows = append(t.rows, append(row, figure.Number(medianOf(fs, func(f *figures) float64 { return f.cpu }))))
		}
	}
	t.panel = &panel{map[segmentation]string{single: "single packets are lost", segmented: "segmented sends are lost"}[seg], curves}
	return t, nil
}
