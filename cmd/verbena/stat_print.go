package main

import (
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/units"
	"github.com/verbena-rdma/verbena/verbs"
)

// print shows a snapshot as text. With --watch each has the time above it, and on
// a terminal it replaces the one before.
func (c *statCmd) print(out *term.Printer, s *snapshot) error {
	var b strings.Builder
	if c.Watch > 0 {
		fmt.Fprintf(&b, "%s\n", out.Paint(term.Bold, s.at.Format("15:04:05.000")))
	}
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	if c.MR {
		c.regions(w, s)
	} else {
		c.processes(w, s)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if c.Watch > 0 && out.Terminal() {
		out.Redraw(b.String())
		return nil
	}
	if c.Watch > 0 {
		b.WriteByte('\n')
	}
	out.Printf("%s", b.String())
	return nil
}

// processes writes a block of counters for each process.
func (c *statCmd) processes(w *tabwriter.Writer, s *snapshot) {
	r := s.rates(c.All)
	for _, d := range s.devices {
		for i := range d.Processes {
			p := &d.Processes[i]
			// A line without tabs ends the columns above it, so each block has
			// columns of its own.
			fmt.Fprintf(w, "%v pid %d %s\n", d.Addr, p.PID, programOf(p))
			if !p.Answered {
				continue
			}
			for _, n := range deviceCounters(p, c.All) {
				fmt.Fprintf(w, "    %-34s\t%s\t", n.name, units.FormatCount(n.value))
				if v, ok := r.of(d.Addr, p, -1, n); ok {
					fmt.Fprintf(w, "%s/s\t", units.FormatFigure(v))
				} else if r.seconds > 0 {
					fmt.Fprint(w, "\t")
				}
				fmt.Fprintln(w)
			}
		}
	}
}

// regions writes a table with a line for each on-demand region, and each of a dma-buf.
func (c *statCmd) regions(w *tabwriter.Writer, s *snapshot) {
	head := []string{"ADDRESS", "PID", "MRN", "KIND", "LENGTH", "PRESENT"}
	for _, n := range regionCounters(&verbs.MRResource{Paging: new(verbs.PagingStats)}) {
		head = append(head, n.name)
	}
	fmt.Fprintln(w, strings.Join(head, "\t")+"\t")
	r := s.rates(c.All)
	for _, d := range s.devices {
		for i := range d.Processes {
			p := &d.Processes[i]
			if !p.Answered {
				fmt.Fprintf(w, "%v\t%d\t%s\t\n", d.Addr, p.PID, programOf(p))
			}
			for k := range p.MRs {
				m := &p.MRs[k]
				if m.Paging == nil {
					continue
				}
				fmt.Fprintf(w, "%v\t%d\t%d\t%s\t%s\t%d\t", d.Addr, p.PID, m.Number, m.Kind, bytesOf(m.Length), m.Present)
				for _, n := range regionCounters(m) {
					cell := strconv.FormatUint(n.value, 10)
					if v, ok := r.of(d.Addr, p, int(m.Number), n); ok && v > 0 {
						cell += " +" + units.FormatFigure(v) + "/s"
					}
					fmt.Fprintf(w, "%s\t", cell)
				}
				fmt.Fprintln(w)
			}
		}
	}
}

func programOf(p *verbs.ProcessResources) string {
	if !p.Answered {
		return "(does not answer)"
	}
	return p.Program
}
