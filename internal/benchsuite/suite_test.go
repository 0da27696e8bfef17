package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/child"
)

// parentArg makes the test binary a suite that holds a peer and waits.
const parentArg = "benchsuite-parent"

func TestMain(m *testing.M) {
	switch {
	case isPeer(os.Args):
		os.Exit(peerMain())
	case len(os.Args) == 2 && os.Args[1] == parentArg:
		p, err := new(bench).newPeer()
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(p.PID())
		select {}
	}
	goleak.VerifyTestMain(m)
}

func brief() settings {
	return settings{rounds: 2, duration: 10 * time.Millisecond, idle: 20 * time.Millisecond, idleQPs: 50, atOnce: 20, floodTime: 100 * time.Millisecond, activeQPs: 20,
		region: 8 << 20, regions: 3000, populated: 20, importers: 50}
}

// Every measurement runs, for a moment: whether a goal is reached says nothing
// here, whether there are figures does.
func TestEveryGroup(t *testing.T) {
	for i := range groups {
		g := &groups[i]
		t.Run(g.name, func(t *testing.T) {
			r := &report{}
			b := &bench{settings: brief(), report: r}
			b.run(g)
			got := r.Groups[0]
			if got.Error != "" {
				t.Fatal(got.Error)
			}
			if len(got.Rows) == 0 {
				t.Fatal("no rows")
			}
			if strings.HasPrefix(g.name, "threads-") != (got.Note != "") {
				t.Errorf("the note is %q", got.Note)
			}
			for _, row := range got.Rows {
				checkRow(t, &row)
			}
		})
	}
}

func checkRow(t *testing.T, r *rowResult) {
	t.Helper()
	if r.NotRun != "" {
		// The comparison with TCP is left out where iperf3 is missing, and says so.
		if _, err := exec.LookPath("iperf3"); err == nil {
			t.Errorf("%s: not run: %s", r.Name, r.NotRun)
		}
		return
	}
	if len(r.Values) == 0 {
		t.Errorf("%s: no values", r.Name)
	}
	// A rate has the CPU time that it took, and nothing else has.
	isRate := r.Unit == "GB/s" || r.Unit == "million/s"
	if isRate != (r.CPU != nil) || isRate && len(r.CPUValues) != len(r.Values) {
		t.Errorf("%s: %d values in %s, CPU time of %d", r.Name, len(r.Values), r.Unit, len(r.CPUValues))
	}
	for _, v := range r.CPUValues {
		if math.IsNaN(v) || math.IsInf(v, 0) || v <= 0 {
			t.Errorf("%s: %v CPU seconds for each GB", r.Name, v)
		}
	}
	mayBeZero := r.Unit == "% of core" || r.Unit == "" || strings.Contains(r.Name, "adds")
	for _, v := range r.Values {
		if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 || v == 0 && !mayBeZero {
			t.Errorf("%s: %v %s", r.Name, v, r.Unit)
		}
	}
	if (r.Verdict != "") != (r.Goal != nil) || (r.Ratio != nil) != (r.Against != "") {
		t.Errorf("%s: verdict %q of goal %v, ratio %v to %q", r.Name, r.Verdict, r.Goal, r.Ratio, r.Against)
	}
}

// A contender that fails is named, and leaves the others alone.
func TestFailureIsContained(t *testing.T) {
	calls := 0
	g := &group{"g", "a group", func(b *bench) ([]contender, error) {
		b.later(func() error { return errors.New("closing failed") })
		return []contender{
			{rows: []row{{name: "bad"}}, run: func(time.Duration) ([]float64, error) {
				calls++
				return nil, errors.New("broken")
			}},
			{rows: []row{{name: "good"}}, run: func(time.Duration) ([]float64, error) { return []float64{1}, nil }},
			{rows: []row{{name: "once"}}, once: true, run: func(time.Duration) ([]float64, error) { return []float64{2}, nil }},
		}, nil
	}}
	r := &report{}
	(&bench{settings: settings{rounds: 3}, report: r}).run(g)
	got := r.Groups[0]
	if r.Failed != 1 || !strings.Contains(got.Error, "bad: broken") || !strings.Contains(got.Error, "closing failed") {
		t.Errorf("failed %d, error %q", r.Failed, got.Error)
	}
	if calls != 1 || len(got.Rows[0].Values) != 0 || len(got.Rows[1].Values) != 3 || len(got.Rows[2].Values) != 1 {
		t.Errorf("%d calls, rows %+v", calls, got.Rows)
	}
}

// Figures for bytes that did not arrive are refused.
func TestArrivedBites(t *testing.T) {
	s := &side{spec: spec{Size: 100, Slots: 3}}
	s.tx.bytes, s.rx.bytes = make([]byte, 4096), make([]byte, 4096)
	fill(s.tx.bytes)
	if s.arrived() == nil {
		t.Error("nothing has arrived, and nobody noticed")
	}
	copy(s.rx.bytes, s.tx.bytes)
	if err := s.arrived(); err != nil {
		t.Error(err)
	}
	s.rx.bytes[2*s.stride()+99] ^= 1
	if s.arrived() == nil {
		t.Error("the last byte is wrong, and nobody noticed")
	}
	if err := s.forget(); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(s.rx.bytes, make([]byte, 4096)) {
		t.Error("forget remembers")
	}
}

func TestPeerRefuses(t *testing.T) {
	b := new(bench)
	p, err := b.newPeer()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.call(request{Op: "nonsense"}); err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("an unknown request: %v", err)
	}
	// It is still there, and ends when its input does.
	if _, err := p.call(request{Op: opIdle, For: time.Millisecond}); err != nil {
		t.Error(err)
	}
	start := time.Now()
	if err := b.closeAll(); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > 2500*time.Millisecond {
		t.Errorf("the peer took %v to end", d)
	}
}

// A suite that is killed leaves no peer behind.
func TestPeerEndsWithParent(t *testing.T) {
	parent, err := child.Start(nil, os.Args[0], parentArg)
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(parent.Out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(line, &pid); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	if !running(pid) {
		t.Fatalf("peer %d does not run", pid)
	}
	parent.Kill()
	for deadline := time.Now().Add(10 * time.Second); running(pid); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("peer %d lives on", pid)
		}
	}
}

// running reports whether a process is there and is no zombie.
func running(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := bytes.Cut(b, []byte(") "))
	return len(after) > 0 && after[0] != 'Z' && after[0] != 'X'
}

// The goal of many threads goes by the number of cores, and the note says which.
func TestThreadGoal(t *testing.T) {
	for _, c := range []struct {
		cores int
		want  float64
		note  []string
	}{
		{1, 0.9, []string{"≥ 0.9", "1 cores", "16", "≥ 6"}}, {15, 0.9, []string{"≥ 0.9", "15 cores", "≥ 6"}},
		{16, 6, []string{"≥ 6", "16 cores"}}, {64, 6, []string{"≥ 6", "64 cores", "16"}},
	} {
		g, note := threadGoal(c.cores, 6)
		if g.Op != "≥" || g.Value != c.want {
			t.Errorf("%d cores: the goal is %v", c.cores, g)
		}
		for _, want := range c.note {
			if !strings.Contains(note, want) {
				t.Errorf("%d cores: %q is not in %q", c.cores, want, note)
			}
		}
	}
}

// The CPU time of a child is its own, and that of its children.
func TestChildCPU(t *testing.T) {
	const work = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"
	cpu := func(script string) time.Duration {
		c, err := child.Start(nil, "/bin/sh", "-c", script)
		if err != nil {
			t.Fatal(err)
		}
		<-c.Ended()
		if err := c.Stop(); err != nil {
			t.Fatal(err)
		}
		return c.CPU()
	}
	idle := cpu("exit 0")
	for _, script := range []string{work, "(" + work + "); exit 0"} {
		if got := cpu(script); got < 2*idle {
			t.Errorf("%s: %v of CPU time, %v for nothing", script, got, idle)
		}
	}
}

func TestTable(t *testing.T) {
	ratio, cpu := 0.75, 0.567
	g := groupResult{Name: "g", Title: "a group", Note: "worth knowing", Rows: []rowResult{
		{Name: "µs and ≥ are one character each", Unit: "µs", Values: []float64{1}, Median: 1234, Min: 12.34, Max: 0.001234,
			Ratio: &ratio, Goal: &goal{"≥", 0.8}, Verdict: verdictBelow},
		{Name: "plain", Unit: "s", Values: []float64{0}, CPU: &cpu},
		{Name: "gone", NotRun: iperfMissing},
	}}
	g.trouble("plain", "retransmitted_packets", 3)
	var b strings.Builder
	printGroup(&b, &g)
	lines := strings.Split(b.String(), "\n")
	at := func(s, sub string) int { return utf8.RuneCountInString(s[:strings.Index(s, sub)+len(sub)]) }
	if at(lines[2], "1234") != at(lines[3], "0") {
		t.Errorf("medians are not aligned:\n%s", b.String())
	}
	for _, want := range []string{"1234", "12.3", "0.0012", "0.75", "≥ 0.8", "below", "0.567", "worth knowing", iperfMissing, "retransmitted_packets 3"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing:\n%s", want, b.String())
		}
	}
}

func TestReportAsJSON(t *testing.T) {
	r := &report{}
	r.begin(brief())
	r.add(groupResult{Name: "g", Rows: []rowResult{{Name: "a", Values: []float64{1}, Verdict: verdictBelow}, {Name: "b", NotRun: "x"}}})
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back report
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if back.Below != 1 || back.NotRun != 1 || back.Rounds != 2 || len(back.Conditions) < 5 || back.Groups[0].Rows[0].Name != "a" {
		t.Errorf("%s", b)
	}
}

func TestCheckFlags(t *testing.T) {
	for _, c := range []struct {
		args []string
		only string
		edit func(*settings)
		ok   bool
	}{
		{nil, "", func(*settings) {}, true},
		{nil, "^udp-", func(*settings) {}, true},
		{nil, "no such group", func(*settings) {}, false},
		{nil, "(", func(*settings) {}, false},
		{[]string{"x"}, "", func(*settings) {}, false},
		{nil, "", func(s *settings) { s.rounds = 0 }, false},
		{nil, "", func(s *settings) { s.duration = 0 }, false},
	} {
		s := defaults()
		c.edit(&s)
		if err := check(&s, c.args, c.only); (err == nil) != c.ok {
			t.Errorf("%v, only %q: %v", c.args, c.only, err)
		}
	}
}

// Names are typed after --only, and become names of files.
func TestGroupNames(t *testing.T) {
	seen := make(map[string]bool)
	for _, g := range groups {
		if !regexp.MustCompile(`^[a-z0-9-]+$`).MatchString(g.name) || seen[g.name] || g.title == "" {
			t.Errorf("group %q, %q", g.name, g.title)
		}
		seen[g.name] = true
	}
	b := &bench{settings: settings{profiles: "d"}, label: "udp-bw-64k-TCP (iperf3): µs"}
	if got := b.profilePath("-peer"); got != "d/udp-bw-64k-tcp-iperf3-s-peer.pprof" {
		t.Error(got)
	}
}
