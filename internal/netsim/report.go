package netsim

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/internal/section"
)

// Report runs the cases whose names match, and writes a table of each group. With a directory it
// puts them into network-sim.md there, and the plots beside it.
func Report(w io.Writer, seeds int, only *regexp.Regexp, dir string) error {
	tables := map[string]string{}
	var plots []*Result
	missed, ran := 0, 0
	for _, g := range Groups(seeds) {
		var b strings.Builder
		head := "| case | seed | of the link | goal | | Jain's index | goal | | mean wait | dropped | marked | lost | sent again | timeouts | probes | MB/s of each |\n|" + strings.Repeat("---|", 16) + "\n"
		b.WriteString(head)
		for i := range g.Cases {
			c := &g.Cases[i]
			if !only.MatchString(c.Name) {
				continue
			}
			start := time.Now()
			r, err := c.Run()
			if err != nil {
				return err
			}
			ran++
			if !r.Ok() {
				missed++
			}
			row := r.row()
			b.WriteString(row)
			fmt.Fprintf(w, "%s %.1fs\n", strings.TrimSpace(row), time.Since(start).Seconds())
			if c.Queue && c.Seed == 1 {
				plots = append(plots, r)
			}
		}
		tables[g.Name] = b.String()
	}
	fmt.Fprintf(w, "%d cases, %d missed a goal\n", ran, missed)
	if dir == "" {
		return nil
	}
	return write(dir, tables, plots)
}

func (r *Result) row() string {
	goal := func(got, want float64) string {
		switch {
		case want == 0:
			return "| |"
		case got < want:
			return fmt.Sprintf("| ≥ %g | below |", want)
		}
		return fmt.Sprintf("| ≥ %g | ok |", want)
	}
	jain := "|"
	if len(r.Rates) > 1 {
		jain = fmt.Sprintf("| %.2f ", r.Jain) + goal(r.Jain, r.Goals.Jain)
	} else {
		jain += " | |"
	}
	return fmt.Sprintf("| %s | %d | %.2f %s %s %v | %d | %d | %d | %d | %d | %d | %s |\n", r.Name, r.Seed, r.Rate, goal(r.Rate, r.Goals.Rate), jain,
		r.MeanWait.Round(time.Microsecond), r.Dropped, r.Marked, r.Lost, r.Again, r.Timeouts, r.Probes, rates(r.Rates)+" "+rates(r.Beside))
}

func rates(all []float64) string {
	var s []string
	for _, r := range all {
		s = append(s, fmt.Sprintf("%.0f", r/1e6))
	}
	return strings.Join(s, " ")
}

// write renews the document in a directory, and its plots.
func write(dir string, tables map[string]string, plots []*Result) error {
	doc := filepath.Join(dir, "network-sim.md")
	b, err := os.ReadFile(doc)
	if err != nil {
		return err
	}
	text := string(b)
	for name, table := range tables {
		if text, err = section.Replace(text, "netsim "+name, table); err != nil {
			return fmt.Errorf("%s: %w", doc, err)
		}
	}
	if err := os.WriteFile(doc, []byte(text), 0o666); err != nil { //nolint:gosec // G306: a document
		return err
	}
	return os.WriteFile(filepath.Join(dir, "network-sim.svg"), []byte(plot(plots)), 0o666) //nolint:gosec // G306
}
