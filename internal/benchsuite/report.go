package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/figure"
)

const (
	verdictOK    = "ok"
	verdictBelow = "below"
)

// report is everything that a run found. With --json it is printed as it is,
// without as a table that grows while the run goes on.
type report struct {
	Started    time.Time     `json:"started"`
	Conditions []condition   `json:"conditions"`
	Rounds     int           `json:"rounds"`
	DurationS  float64       `json:"duration_s"`
	Groups     []groupResult `json:"groups"`
	Below      int           `json:"below"`   // goals that were not reached
	NotRun     int           `json:"not_run"` // figures that could not be taken
	Failed     int           `json:"failed"`  // groups that ended with an error
	TookS      float64       `json:"took_s"`

	table  io.Writer // nil: no table
	status io.Writer // where progress shows; nil: nowhere
}

type condition struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type groupResult struct {
	Name  string      `json:"name"`
	Title string      `json:"title"`
	Note  string      `json:"note,omitempty"` // what a reader must know about the goals
	Rows  []rowResult `json:"rows"`
	Error string      `json:"error,omitempty"`

	// Troubles are counters that should not move on a network that loses
	// nothing, by row, over all rounds.
	Troubles map[string]map[string]uint64 `json:"troubles,omitempty"`
}

func (g *groupResult) trouble(row, counter string, n uint64) {
	if g.Troubles == nil {
		g.Troubles = make(map[string]map[string]uint64)
	}
	if g.Troubles[row] == nil {
		g.Troubles[row] = make(map[string]uint64)
	}
	g.Troubles[row][counter] += n
}

type rowResult struct {
	Name      string    `json:"name"`
	Unit      string    `json:"unit"`
	Values    []float64 `json:"values"` // one for each round
	Median    float64   `json:"median"`
	Min       float64   `json:"min"`
	Max       float64   `json:"max"`
	CPUValues []float64 `json:"cpu_values,omitempty"`   // of rows that are rates: CPU seconds for each GB, one for each round
	CPU       *float64  `json:"cpu_s_per_gb,omitempty"` // their median
	Against   string    `json:"against,omitempty"`      // the row that Ratio divides by
	Ratio     *float64  `json:"ratio,omitempty"`        // median of the rounds' ratios
	Goal      *goal     `json:"goal,omitempty"`         // of Ratio, or without one of Median
	Verdict   string    `json:"verdict,omitempty"`
	NotRun    string    `json:"not_run,omitempty"`
}

func (r *report) begin(s settings) {
	r.Started = time.Now().UTC().Truncate(time.Second)
	r.Conditions = conditions()
	r.Rounds, r.DurationS = s.rounds, s.duration.Seconds()
	if r.table == nil {
		return
	}
	for _, c := range r.Conditions {
		fmt.Fprintf(r.table, "%-22s %s\n", c.Name, c.Value)
	}
	fmt.Fprintf(r.table, "\n%s\n", line("", "", "median", "min", "max", "CPU s/GB", "ratio", "goal", ""))
}

// add counts what a group found and prints it.
func (r *report) add(g groupResult) {
	r.Groups = append(r.Groups, g)
	for i := range g.Rows {
		switch row := &g.Rows[i]; {
		case row.NotRun != "":
			r.NotRun++
		case row.Verdict == verdictBelow:
			r.Below++
		}
	}
	if g.Error != "" {
		r.Failed++
	}
	r.progress("")
	if r.table != nil {
		printGroup(r.table, &g)
	}
}

func printGroup(w io.Writer, g *groupResult) {
	fmt.Fprintf(w, "%s (%s)\n", g.Title, g.Name)
	if g.Note != "" {
		fmt.Fprintf(w, "  %s\n", g.Note)
	}
	for i := range g.Rows {
		r := &g.Rows[i]
		if len(r.Values) == 0 {
			if r.NotRun != "" {
				fmt.Fprintf(w, "  %s: not run: %s\n", r.Name, r.NotRun)
			}
			continue
		}
		cpu, ratio, goal := "", "", ""
		if r.CPU != nil {
			cpu = cpuNumber(*r.CPU)
		}
		if r.Ratio != nil {
			ratio = fmt.Sprintf("%.2f", *r.Ratio)
		}
		if r.Goal != nil {
			goal = fmt.Sprintf("%s %v", r.Goal.Op, r.Goal.Value)
		}
		fmt.Fprintln(w, line("  "+r.Name, r.Unit, figure.Number(r.Median), figure.Number(r.Min), figure.Number(r.Max), cpu, ratio, goal, r.Verdict))
		if r.NotRun != "" {
			fmt.Fprintf(w, "    no ratio: %s\n", r.NotRun)
		}
	}
	for _, row := range slices.Sorted(maps.Keys(g.Troubles)) {
		for _, counter := range slices.Sorted(maps.Keys(g.Troubles[row])) {
			fmt.Fprintf(w, "    %s: %s %d\n", row, counter, g.Troubles[row][counter])
		}
	}
	if g.Error != "" {
		fmt.Fprintf(w, "  FAILED: %s\n", g.Error)
	}
	fmt.Fprintln(w)
}

var columns = []struct {
	width int
	right bool
}{{42, false}, {9, false}, {9, true}, {9, true}, {9, true}, {9, true}, {7, true}, {8, true}, {6, false}}

// line lays cells out in columns. Widths count characters, not bytes.
func line(cells ...string) string {
	var b strings.Builder
	for i, c := range cells {
		pad := strings.Repeat(" ", max(0, columns[i].width-utf8.RuneCountInString(c)))
		if columns[i].right {
			b.WriteString(pad + c)
		} else {
			b.WriteString(c + pad)
		}
		b.WriteByte(' ')
	}
	return strings.TrimRight(b.String(), " ")
}

// cpuNumber prints CPU seconds for each GB. Copying takes a few hundredths, so there are
// three digits after the point.
func cpuNumber(v float64) string {
	if v < 1 {
		return fmt.Sprintf("%.3f", v)
	}
	return figure.Number(v)
}

// progress shows what is going on, over what was shown before.
func (r *report) progress(what string) {
	if r.status != nil {
		fmt.Fprintf(r.status, "\r%-78.78s\r%s", "", what)
	}
}

func (r *report) end() error {
	r.TookS = time.Since(r.Started).Seconds()
	if r.table == nil {
		e := json.NewEncoder(os.Stdout)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	goals := 0
	for _, g := range r.Groups {
		for i := range g.Rows {
			if g.Rows[i].Verdict != "" {
				goals++
			}
		}
	}
	fmt.Fprintf(r.table, "%d of %d goals reached, %d figures not run, %d groups failed; %.0f s\n",
		goals-r.Below, goals, r.NotRun, r.Failed, r.TookS)
	return nil
}

// conditions are what a reader must know to compare the figures with others.
func conditions() []condition {
	c := []condition{
		{"processor", cpuModel()},
		{"cores for this process", fmt.Sprint(runtime.NumCPU())},
		{"kernel", firstLine("/proc/sys/kernel/osrelease")},
		{"Go", runtime.Version() + " " + runtime.GOARCH},
		{"net.core.rmem_max", firstLine("/proc/sys/net/core/rmem_max")},
		{"load average", firstLine("/proc/loadavg")},
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" || s.Key == "vcs.modified" {
				c = append(c, condition{s.Key, s.Value})
			}
		}
	}
	return c
}

func firstLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return "unknown"
	}
	s, _, _ := strings.Cut(string(b), "\n")
	return s
}

func cpuModel() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err == nil {
		for l := range strings.Lines(string(b)) {
			if name, value, ok := strings.Cut(l, ":"); ok && strings.TrimSpace(name) == "model name" {
				return strings.TrimSpace(value)
			}
		}
	}
	return runtime.GOARCH
}
