package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/verbena-rdma/verbena/internal/section"
)

// table is what a part has measured.
type table struct {
	columns []string
	rows    [][]string
	notes   []string
	panel   *panel // of the plot; nil: none
}

func verdictOf(ok bool) string {
	if ok {
		return "ok"
	}
	return "below"
}

// print writes the table and its notes as Markdown, with columns aligned.
func (t *table) print(w io.Writer) {
	width := make([]int, len(t.columns))
	for _, row := range append([][]string{t.columns}, t.rows...) {
		for i, c := range row {
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	line := func(row []string) {
		var b strings.Builder
		for i, c := range row {
			b.WriteString("| " + c + strings.Repeat(" ", width[i]-utf8.RuneCountInString(c)+1))
		}
		fmt.Fprintln(w, b.String()+"|")
	}
	line(t.columns)
	fmt.Fprintln(w, strings.Repeat("|---", len(t.columns))+"|")
	for _, row := range t.rows {
		line(row)
	}
	for _, n := range t.notes {
		fmt.Fprintf(w, "\n%s\n", n)
	}
	fmt.Fprintln(w)
}

// renew puts tables into a document, each between the lines "<!-- bench-net NAME -->" and "<!-- end -->", and the plot
// beside the document if there are panels.
func renew(doc string, tables map[string]*table, conditions string) error {
	b, err := os.ReadFile(doc)
	if err != nil {
		return err
	}
	text := string(b)
	var panels []panel
	for _, p := range parts {
		t := tables[p.name]
		if t == nil {
			continue
		}
		if t.panel != nil {
			panels = append(panels, *t.panel)
		}
		var out strings.Builder
		t.print(&out)
		if text, err = section.Replace(text, "bench-net "+p.name, out.String()+conditions+"\n"); err != nil {
			return fmt.Errorf("%s: %w", doc, err)
		}
	}
	if err := os.WriteFile(doc, []byte(text), 0o666); err != nil { //nolint:gosec // G306: a document
		return err
	}
	if len(panels) == 0 {
		return nil
	}
	return os.WriteFile(strings.TrimSuffix(doc, filepath.Ext(doc))+".svg", []byte(plot(panels)), 0o666) //nolint:gosec // G306
}

// conditions are what a reader must know of the machine.
func conditions(s *settings) string {
	first := func(file string) string {
		b, err := os.ReadFile(file)
		if err != nil {
			return "unknown"
		}
		line, _, _ := strings.Cut(string(b), "\n")
		return line
	}
	model := "unknown processor"
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for l := range strings.Lines(string(b)) {
			if name, value, ok := strings.Cut(l, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%s, %s, %d cores, Linux %s, load average %s; MTU %d, messages of %d bytes, %d under way, %d rounds, or %d runs.", time.Now().UTC().Format(time.DateOnly),
		model, runtime.NumCPU(), first("/proc/sys/kernel/osrelease"), first("/proc/loadavg"), s.frame, s.size, s.depth, s.rounds, s.runs)
}
