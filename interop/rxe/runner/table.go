package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
)

// table collects results: a row for each case, a column for each kernel.
type table struct {
	suites   []string
	releases map[string]string // by suite
	rows     []string
	cells    map[string]map[string]*result.Case // by name and suite

	passed, failed, skipped int
}

func newTable() *table {
	return &table{releases: map[string]string{}, cells: map[string]map[string]*result.Case{}}
}

func (t *table) begin(suite string) {
	t.suites = append(t.suites, suite)
	fmt.Printf("== %s\n", suite)
}

// add adds a line of the guest of the last suite, and prints it.
func (t *table) add(l result.Line) {
	suite := t.suites[len(t.suites)-1]
	switch {
	case l.Plan != nil:
		t.releases[suite] = l.Plan.Release
		fmt.Printf("Linux %s, %d cases\n", l.Plan.Release, len(l.Plan.Cases))
		for _, name := range l.Plan.Cases {
			t.cell(name, suite, nil)
		}
	case l.Case != nil:
		t.cell(l.Case.Name, suite, l.Case)
		t.show(l.Case)
	case l.Speed != nil:
		printSpeed(suite, l.Speed)
	case l.Fatal != "":
		fmt.Println("FAIL  the guest:", l.Fatal)
	}
}

func (t *table) cell(name, suite string, c *result.Case) {
	if t.cells[name] == nil {
		t.cells[name] = map[string]*result.Case{}
		t.rows = append(t.rows, name)
	}
	t.cells[name][suite] = c
}

func (t *table) show(c *result.Case) {
	switch {
	case c.Skip != "":
		t.skipped++
		fmt.Printf("none  %-48s not in this kernel: %s\n", c.Name, c.Skip)
	case c.Err != "":
		t.failed++
		fmt.Printf("FAIL  %-48s %7.2f s\n      %s\n", c.Name, c.Took.Seconds(), strings.ReplaceAll(c.Err, "\n", "\n      "))
		if c.Capture != "" {
			fmt.Printf("      packets: %s\n", c.Capture)
		}
	default:
		t.passed++
		fmt.Printf("ok    %-48s %7.2f s\n", c.Name, c.Took.Seconds())
	}
}

// broken counts the cases as failed that a guest has announced and not run.
func (t *table) broken(suite string) {
	for _, row := range t.cells {
		if c, planned := row[suite]; planned && c == nil {
			t.failed++
		}
	}
}

// print prints the table.
func (t *table) print(w io.Writer) {
	if len(t.rows) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%-48s", "case")
	for _, s := range t.suites {
		fmt.Fprintf(w, " %-20s", s)
	}
	fmt.Fprintf(w, "\n%-48s", "")
	for _, s := range t.suites {
		fmt.Fprintf(w, " %-20s", t.releases[s])
	}
	fmt.Fprintln(w)
	for _, name := range t.rows {
		line := fmt.Sprintf("%-48s", name)
		for _, s := range t.suites {
			line += fmt.Sprintf(" %-20s", verdict(t.cells[name], s))
		}
		fmt.Fprintln(w, strings.TrimRight(line, " "))
	}
	fmt.Fprintln(w)
	if t.skipped > 0 {
		fmt.Fprintf(w, "%d not in this kernel, and neither passed nor failed\n", t.skipped)
	}
}

func verdict(row map[string]*result.Case, suite string) string {
	c, planned := row[suite]
	switch {
	case !planned:
		return "-"
	case c == nil:
		return "FAILED (not run)"
	case c.Skip != "":
		return "not in this kernel"
	case c.Err != "":
		return "FAILED"
	}
	return "ok " + c.Took.Round(10*time.Millisecond).String()
}
