package tour

import (
	"context"
	"errors"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/perf"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/units"
	"github.com/verbena-rdma/verbena/verbs"
)

// sizes are the lengths of the messages that are measured.
var sizes = []int{8, 4 << 10, 64 << 10, 1 << 20}

// How long each figure is measured: long enough for two digits, short enough for a tour.
const (
	latencyTime   = 150 * time.Millisecond
	bandwidthTime = 200 * time.Millisecond
)

// figures are what is measured of each size.
var figures = []struct {
	name   string
	params perf.Params
	value  func(*perf.Result) float64
}{
	{"latency", perf.Params{Op: perf.OpSend, Lat: true, Duration: latencyTime, Check: true},
		func(r *perf.Result) float64 { return r.Lat.P50 }},
	{"bandwidth", perf.Params{Op: perf.OpWrite, Duration: bandwidthTime, Check: true},
		func(r *perf.Result) float64 { return r.GBytesPerS }},
}

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
			t.fail("", "open two devices", err)
		}
		for i, size := range sizes {
			t.at++
			t.out.Progress("[%d/%d] measuring %s over %s …", t.at, t.total, units.FormatSize(size), link.mode)
			cells, err := t.cells(l, size)
			if err != nil {
				t.out.Clear()
				return errors.Join(err, l.close())
			}
			rows[i+2] = append(rows[i+2], cells...)
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

// cells measures the figures of one size; if l is nil it returns "-" for each. It fails
// only if the tour is cancelled.
func (t *tour) cells(l *lab, size int) ([]string, error) {
	var cells []string
	for _, f := range figures {
		if l == nil {
			cells = append(cells, "-")
			continue
		}
		p := f.params
		p.Size = size
		res, err := l.run(p)
		switch cause := context.Cause(t.ctx); {
		case cause != nil:
			return nil, cause
		case err != nil:
			t.fail("", f.name+", "+units.FormatSize(size), err)
			cells = append(cells, "-")
		default:
			cells = append(cells, units.FormatFigure(f.value(res)))
		}
	}
	return cells, nil
}

// run measures from the lab's first device to its second.
func (l *lab) run(p perf.Params) (*perf.Result, error) {
	if err := p.Complete(); err != nil {
		return nil, err
	}
	return perf.Local(l.ctx, l.a.dev, l.b.dev, p, nil)
}
