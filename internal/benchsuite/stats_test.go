package main

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		in   []float64
		want float64
	}{
		{[]float64{7}, 7},
		{[]float64{3, 1}, 2},
		{[]float64{9, 1, 5}, 5},
		{[]float64{1, 100, 2, 3}, 2.5},
		{[]float64{-1, -1, 4, -1, 4}, -1},
	} {
		in := slices.Clone(c.in)
		if got := median(in); got != c.want {
			t.Errorf("median of %v is %v, not %v", c.in, got, c.want)
		}
		if !slices.Equal(in, c.in) {
			t.Errorf("median changed %v to %v", c.in, in)
		}
	}
	if !math.IsNaN(median(nil)) {
		t.Error("the median of nothing is a number")
	}
}

// A round in which the whole machine was slow must not move a ratio.
func TestRatiosGoByRound(t *testing.T) {
	got := ratios([]float64{8, 4, 9}, []float64{10, 5, 10})
	if want := []float64{0.8, 0.8, 0.9}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := ratios([]float64{1, 2}, []float64{0, 4, 7}); !slices.Equal(got, []float64{0.5}) {
		t.Errorf("a division by nothing: %v", got)
	}
}

func TestSampler(t *testing.T) {
	const seed = 1
	t.Logf("seed %d", seed)
	s := newSampler(100)
	for i, v := range rand.New(rand.NewPCG(seed, 0)).Perm(100) {
		if more := s.add(time.Duration(v + 1)); more != (i < 99) {
			t.Fatalf("value %d of 100: room for more: %v", i+1, more)
		}
	}
	got := s.quantiles(0, 0.5, 0.99, 1)
	if want := []float64{1, 50, 99, 100}; !slices.Equal(got, want) {
		t.Errorf("quantiles of 1 to 100: %v, want %v", got, want)
	}
	s.reset()
	if q := s.quantiles(0.5); !math.IsNaN(q[0]) {
		t.Errorf("the median of nothing is %v", q[0])
	}
	s.add(7)
	if q := s.quantiles(0.5, 0.99); q[0] != 7 || q[1] != 7 {
		t.Errorf("quantiles of one value: %v", q)
	}
}

func TestGoal(t *testing.T) {
	for _, c := range []struct {
		g    goal
		v    float64
		want bool
	}{
		{goal{"≥", 0.8}, 0.8, true}, {goal{"≥", 0.8}, 0.79, false},
		{goal{"≤", 1.1}, 1.1, true}, {goal{"≤", 1.1}, 1.11, false},
		{goal{"<", 1000}, 999, true}, {goal{"<", 1000}, 1000, false},
		{goal{"≥", 0.8}, math.NaN(), false}, {goal{"<", 1}, math.NaN(), false},
	} {
		if c.g.met(c.v) != c.want {
			t.Errorf("%v %s %v: want %v", c.v, c.g.Op, c.g.Value, c.want)
		}
	}
}

func TestSummarize(t *testing.T) {
	values := map[string]measured{"ours": {values: []float64{2, 5, 3}, cpu: []float64{0.3, 0.1, 0.2}},
		"theirs": {values: []float64{4, 5, 4}}, "alone": {values: []float64{9, 11, 10}}}
	cs := []contender{
		{rows: []row{{name: "theirs", unit: "GB/s"}}},
		{rows: []row{
			{name: "ours", unit: "GB/s", against: "theirs", goal: &goal{"≥", 0.7}},
			{name: "alone", unit: "ns", goal: &goal{"<", 10}},
		}},
		{rows: []row{{name: "missing"}}, notRun: "not installed"},
		{rows: []row{{name: "alone", against: "missing"}}},
	}
	rows := summarize(cs, values)
	if len(rows) != 5 {
		t.Fatalf("%d rows", len(rows))
	}
	if r := rows[0]; r.Median != 4 || r.Min != 4 || r.Max != 5 || r.Ratio != nil || r.Verdict != "" || r.CPU != nil {
		t.Errorf("only reported: %+v", r)
	}
	if r := rows[1]; r.Ratio == nil || *r.Ratio != 0.75 || r.Verdict != verdictOK || r.CPU == nil || *r.CPU != 0.2 {
		t.Errorf("a ratio: %+v", r)
	}
	if r := rows[2]; r.Median != 10 || r.Verdict != verdictBelow {
		t.Errorf("a median that misses: %+v", r)
	}
	if r := rows[3]; r.NotRun != "not installed" || len(r.Values) != 0 {
		t.Errorf("not run: %+v", r)
	}
	if r := rows[4]; r.NotRun == "" || r.Ratio != nil || r.Median != 10 {
		t.Errorf("nothing to compare with: %+v", r)
	}
}

func TestExitCode(t *testing.T) {
	for _, c := range []struct {
		r          report
		strict, ci bool
		want       int
	}{
		{report{}, true, true, 0},
		{report{Below: 1}, false, false, 0},
		{report{Below: 1}, false, true, 0},
		{report{Below: 1}, true, false, 1},
		{report{NotRun: 1}, false, false, 0},
		{report{NotRun: 1}, true, false, 0},
		{report{NotRun: 1}, false, true, 1},
		{report{Failed: 1}, false, false, 1},
	} {
		if got := exitCode(&c.r, c.strict, c.ci); got != c.want {
			t.Errorf("below %d, not run %d, failed %d, strict %v, CI %v: exit %d, want %d",
				c.r.Below, c.r.NotRun, c.r.Failed, c.strict, c.ci, got, c.want)
		}
	}
}

func TestPerftestReport(t *testing.T) {
	heading := " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n"
	for _, c := range []struct {
		report string
		want   float64
		fails  error
	}{
		{"---\n" + heading + " 65536      5000             0.00            1036.43\t\t   0.016583\n---\n", 0.016583, nil},
		{heading + " 65536 5000 0.00 0.00 0.000000\n", 0, errNoClock},
		{heading + " 8 5000 1.69 45.1 -nan\n", 0, errNoClock},
	} {
		got, err := fifth(c.report)
		if got != c.want || !errors.Is(err, c.fails) {
			t.Errorf("%q: %v, %v", c.report, got, err)
		}
	}
	for _, report := range []string{"", heading, "Couldn't connect\n"} {
		if got, err := fifth(report); err == nil || errors.Is(err, errNoClock) {
			t.Errorf("%q: %v, %v", report, got, err)
		}
	}
}

// gaps finds the longest time between completions around each move, and nothing else.
func TestGaps(t *testing.T) {
	start := time.Now()
	var g gaps
	g.last = start
	for i, c := range []struct {
		at    int // milliseconds
		phase uint64
		want  int // the longest gap; 0: no move has ended
	}{
		{50, 0, 0},             // no move, however long it takes
		{51, 1, 0}, {60, 1, 0}, // one has begun, and the peer goes on for a while
		{65, 2, 9},              // the longest was before its end
		{95, 2, 0}, {100, 4, 5}, // begun and ended between two completions
		{101, 5, 0}, {121, 7, 20}, // ended, and the next has begun
		{124, 8, 20}, // which has begun in the same gap
		{125, 8, 0},
	} {
		got, ok := g.completed(start.Add(time.Duration(c.at)*time.Millisecond), c.phase)
		if ok != (c.want > 0) || ok && got != time.Duration(c.want)*time.Millisecond {
			t.Errorf("completion %d: %v, %v, want %d ms", i, got, ok, c.want)
		}
	}
}
