package tour

import (
	"errors"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/perf"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/units"
	"github.com/verbena-rdma/verbena/verbs"
)

// sizes are the messages that are measured.
var sizes = []int{8, 4 << 10, 64 << 10, 1 << 20}

// Each figure is measured for so long: long enough for two digits, short enough
// for a tour.
const (
	latencyTime   = 150 * time.Millisecond
	bandwidthTime = 200 * time.Millisecond
)

// measure prints a small table of what the two devices can do here. It fails
// only if the tour is cancelled.
func (t *tour) measure() error {
	t.out.Printf("\n%s\n", t.out.Paint(term.Bold, "how fast it is here, both sides in this process"))
	rows := [][]string{{"", "loop", "loop", "udp", "udp"}, {"message", "µs", "GB/s", "µs", "GB/s"}}
	for _, size := range sizes {
		rows = append(rows, []string{units.FormatSize(size)})
	}
	for _, link := range links {
		l, err := newLab(t.ctx, verbs.Config{Link: link.mode})
		if err != nil {
			t.at += len(sizes)
			t.fail("", "open two devices", err)
			continue
		}
		for i, size := range sizes {
			t.at++
			t.out.Progress("[%d/%d] measuring %s over %s …", t.at, t.total, units.FormatSize(size), link.mode)
			row := &rows[i+2]
			lat, err := l.run(perf.Params{Op: perf.OpSend, Lat: true, Size: size, Duration: latencyTime, Check: true})
			if err != nil {
				t.fail("", "latency of "+units.FormatSize(size), err)
				*row = append(*row, "-")
			} else {
				*row = append(*row, units.FormatFigure(lat.Lat.P50))
			}
			bw, err := l.run(perf.Params{Op: perf.OpWrite, Size: size, Duration: bandwidthTime, Check: true})
			if err != nil {
				t.fail("", "bandwidth of "+units.FormatSize(size), err)
				*row = append(*row, "-")
			} else {
				*row = append(*row, units.FormatFigure(bw.GBytesPerS))
			}
			if err := t.ctx.Err(); err != nil {
				return errors.Join(err, l.close())
			}
		}
		if err := l.close(); err != nil {
			t.fail("", "close the devices", err)
		}
	}
	for _, line := range term.Table(rows) {
		t.out.Printf("      %s\n", line)
	}
	t.out.Printf("      µs: half a round trip of SENDs, median. GB/s: WRITEs, 64 outstanding; 10^9 bytes.\n")
	t.out.Printf("      More, and between two processes or hosts: verbena perf --help\n")
	return nil
}

// run measures from the lab's first device to its second.
func (l *lab) run(p perf.Params) (*perf.Result, error) {
	if err := p.Complete(); err != nil {
		return nil, err
	}
	return perf.Local(l.ctx, l.a.dev, l.b.dev, p, nil)
}
