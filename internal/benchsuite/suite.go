package main

// How a group of measurements runs:
//
//  1. setup makes its contenders: queue pairs, peer processes, iperf3.
//  2. In each round every contender measures once, one after the other.
//  3. summarize makes rows of the values: medians, ratios, verdicts.
//  4. What setup made is closed, last first.

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"time"
)

// settings are what the flags set, and what tests shorten.
type settings struct {
	rounds   int
	duration time.Duration // of one measurement
	idle     time.Duration // how long an idle device is watched

	idleQPs   int           // connected and idle, for memory
	atOnce    int           // connections that are made at once
	floodTime time.Duration // of a flood of forged requests
	activeQPs int           // sharing a link, compared with one; and connected and idle, for CPU time

	region    int // bytes of a large on-demand region
	regions   int // on-demand regions of one process, compared with fewRegions
	populated int // on-demand regions that are closed with all pages present
	importers int // regions of one dma-buf, which are told of a move

	profiles string         // where CPU profiles go; empty: none
	only     *regexp.Regexp // names of groups to run; nil: all
}

func defaults() settings {
	return settings{rounds: 5, duration: 500 * time.Millisecond, idle: 3 * time.Second, idleQPs: 10_000, atOnce: 1_000, floodTime: 15 * time.Second, activeQPs: 1_000,
		region: 1 << 30, regions: 1_000_000, populated: 10_000, importers: 1_000}
}

// goal is what a ratio, or without one a median, should be.
type goal struct {
	Op    string  `json:"op"` // "≥", "≤" or "<"
	Value float64 `json:"value"`
}

func (g *goal) met(v float64) bool {
	switch g.Op {
	case "≥":
		return v >= g.Value
	case "≤":
		return v <= g.Value
	case "<":
		return v < g.Value
	}
	panic("unknown goal " + g.Op)
}

// row describes one figure of a contender.
type row struct {
	name    string
	unit    string
	against string // the row that it is divided by; empty: none
	goal    *goal  // of the ratio, or without one of the median; nil: only reported
}

// contender measures one or several figures at a time, by run or by rates.
type contender struct {
	rows   []row
	once   bool   // measured in the first round only: it does not vary
	notRun string // why it cannot be measured here; empty: it can
	run    func(d time.Duration) ([]float64, error)
	rates  func(d time.Duration) ([]rate, error) // instead of run, if bytes are moved all the time
	side   *side                                 // whose troubles are reported; nil: none are
}

// rate is how fast bytes were moved, and at what cost.
type rate struct {
	value float64 // in the row's unit
	cpu   float64 // CPU seconds of all processes that took part, user and kernel, for each GB
}

// rateOf returns the rate, in GB/s, at which some GB were moved.
func rateOf(gb float64, took, cpu time.Duration) rate {
	return rate{gb / took.Seconds(), cpu.Seconds() / gb}
}

// measured is what was measured of one row, a value for each round.
type measured struct {
	values []float64
	cpu    []float64 // see rate; empty if the row has none
}

// group is contenders that are measured one after the other in each round.
type group struct {
	name, title string
	setup       func(b *bench) ([]contender, error)
}

// bench runs groups. While a group runs, bench has what the group made.
type bench struct {
	settings
	report  *report
	closers []func() error
	note    string // what a reader must know about the group's goals; empty: nothing
	label   string // of the contender that measures, for profiles
}

// later registers something to be closed when the group is done.
func (b *bench) later(f func() error) { b.closers = append(b.closers, f) }

func (b *bench) closeAll() error {
	var errs []error
	for _, f := range slices.Backward(b.closers) {
		errs = append(errs, f())
	}
	b.closers = nil
	return errors.Join(errs...)
}

// run measures a group and adds it to the report.
func (b *bench) run(g *group) {
	b.note = ""
	cs, err := g.setup(b)
	r := groupResult{Name: g.name, Title: g.title, Note: b.note}
	if err == nil {
		err = b.measure(g, cs, &r)
	}
	if err = errors.Join(err, b.closeAll()); err != nil {
		r.Error = err.Error()
	}
	// What the group left behind should not be collected while the next measures.
	runtime.GC()
	b.report.add(r)
}

// measure runs the rounds. A contender that fails is left out from then on; the
// others go on.
func (b *bench) measure(g *group, cs []contender, r *groupResult) error {
	var errs []error
	failed := make([]bool, len(cs))
	all := make(map[string]measured)
	for round := range b.rounds {
		for i := range cs {
			c := &cs[i]
			if c.notRun != "" || failed[i] || c.once && round > 0 {
				continue
			}
			b.label = g.name + "-" + c.rows[0].name
			b.report.progress(fmt.Sprintf("%s: round %d of %d, %s", g.name, round+1, b.rounds, c.rows[0].name))
			got, err := b.measureOne(c, r)
			if err != nil {
				failed[i] = true
				errs = append(errs, fmt.Errorf("%s: %w", c.rows[0].name, err))
				continue
			}
			for k, v := range got {
				m := all[c.rows[k].name]
				m.values = append(m.values, v.value)
				if c.rates != nil {
					m.cpu = append(m.cpu, v.cpu)
				}
				all[c.rows[k].name] = m
			}
		}
	}
	r.Rows = summarize(cs, all)
	return errors.Join(errs...)
}

// measureOne lets a contender measure once, and records the troubles on the network
// meanwhile.
func (b *bench) measureOne(c *contender, r *groupResult) ([]rate, error) {
	watchdog := time.AfterFunc(hangLimit+10*b.duration, hang)
	defer watchdog.Stop()
	if c.side == nil {
		return b.profiled(c)
	}
	before := c.side.troubles()
	got, err := b.profiled(c)
	for name, n := range c.side.troubles() {
		if n -= before[name]; n > 0 {
			r.trouble(c.rows[0].name, name, n)
		}
	}
	return got, err
}

// profiled lets a contender measure, under the profiler if asked for. Each round
// overwrites the profile of the one before.
func (b *bench) profiled(c *contender) ([]rate, error) {
	path := b.profilePath("")
	if path == "" {
		return c.measure(b.duration)
	}
	stop, err := startProfile(path)
	if err != nil {
		return nil, err
	}
	got, err := c.measure(b.duration)
	return got, errors.Join(err, stop())
}

// measure measures by run or by rates. The figures of run have no CPU time.
func (c *contender) measure(d time.Duration) ([]rate, error) {
	if c.rates != nil {
		return c.rates(d)
	}
	values, err := c.run(d)
	var figures []rate
	for _, v := range values {
		figures = append(figures, rate{value: v})
	}
	return figures, err
}

// hangLimit is how much longer than planned a measurement may take. A loop that
// waits gives up long before; this is for a call that never returns.
const hangLimit = 2 * time.Minute

// hang ends a suite that makes no progress any more, and prints where it hangs.
func hang() {
	_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 2)
	fmt.Fprintln(os.Stderr, "benchsuite: a measurement hangs; above is where")
	os.Exit(1)
}

var notInName = regexp.MustCompile(`[^a-z0-9]+`)

// profilePath returns where the profile of the current contender goes, or of
// its peer with a suffix; empty if there is to be none.
func (b *bench) profilePath(suffix string) string {
	if b.profiles == "" {
		return ""
	}
	name := strings.Trim(notInName.ReplaceAllString(strings.ToLower(b.label), "-"), "-")
	return filepath.Join(b.profiles, name+suffix+".pprof")
}

func startProfile(path string) (stop func() error, err error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return f.Close()
	}, nil
}

// summarize makes the rows of what was measured, in the order of the contenders.
func summarize(cs []contender, all map[string]measured) []rowResult {
	var rows []rowResult
	for i := range cs {
		for _, spec := range cs[i].rows {
			rows = append(rows, summarizeRow(&spec, cs[i].notRun, all))
		}
	}
	return rows
}

func summarizeRow(spec *row, notRun string, all map[string]measured) rowResult {
	v, cpu := all[spec.name].values, all[spec.name].cpu
	r := rowResult{Name: spec.name, Unit: spec.unit, Values: v, CPUValues: cpu, Against: spec.against, Goal: spec.goal, NotRun: notRun}
	if len(v) == 0 {
		return r
	}
	r.Median, r.Min, r.Max = median(v), slices.Min(v), slices.Max(v)
	if len(cpu) > 0 {
		m := median(cpu)
		r.CPU = &m
	}
	judged := r.Median
	if spec.against != "" {
		rs := ratios(v, all[spec.against].values)
		if len(rs) == 0 {
			r.NotRun = "nothing to compare with"
			return r
		}
		judged = median(rs)
		r.Ratio = &judged
	}
	if spec.goal != nil {
		r.Verdict = verdictBelow
		if spec.goal.met(judged) {
			r.Verdict = verdictOK
		}
	}
	return r
}
