// Package term writes for people: lines that may carry colour, and on a
// terminal one line of progress at the bottom that the next line replaces.
package term

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// Style is how a piece of text looks on a terminal.
type Style string

const (
	Bold  Style = "\x1b[1m"
	Dim   Style = "\x1b[2m"
	Red   Style = "\x1b[31m"
	Green Style = "\x1b[32m"
	reset Style = "\x1b[0m"
)

// eraseLine goes to the start of the line and empties it.
const eraseLine = "\r\x1b[K"

// home goes to the upper left corner; eraseRest empties the rest of the line, eraseBelow
// the rest of the screen.
const (
	home       = "\x1b[H"
	eraseRest  = "\x1b[K"
	eraseBelow = "\x1b[J"
)

// Printer writes lines and progress to one stream. It is not safe for
// concurrent use.
type Printer struct {
	w        io.Writer
	terminal bool
	colour   bool
	width    func() int
	height   func() int
	progress bool // a progress line stands at the bottom
}

// New returns a Printer for a file: plain unless that is a terminal. The
// environment variable NO_COLOR, if not empty, turns colours off, and so does
// TERM=dumb, which has no progress line either.
func New(f *os.File) *Printer {
	p := &Printer{w: f, width: func() int { return 80 }, height: func() int { return 24 }}
	if term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb" {
		p.terminal = true
		p.colour = os.Getenv("NO_COLOR") == ""
		p.width = func() int {
			if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 {
				return w
			}
			return 80
		}
		p.height = func() int {
			if _, h, err := term.GetSize(int(f.Fd())); err == nil && h > 1 {
				return h
			}
			return 24
		}
	}
	return p
}

// Terminal reports whether progress lines are shown.
func (p *Printer) Terminal() bool { return p.terminal }

// Paint returns s in a style, or as it is where there are no colours.
func (p *Printer) Paint(style Style, s string) string {
	if !p.colour || s == "" {
		return s
	}
	return string(style) + s + string(reset)
}

// Printf writes a line, or several, instead of the progress line. It does not add a
// newline. It drops write errors: they could only be reported on the same stream.
func (p *Printer) Printf(format string, args ...any) {
	p.Clear()
	fmt.Fprintf(p.w, format, args...)
}

// Redraw replaces all that the terminal shows by some lines, as many of them as fit.
func (p *Printer) Redraw(text string) {
	p.Clear()
	lines := strings.SplitAfter(text, "\n")
	if most := p.height() - 1; len(lines) > most {
		lines = lines[:most]
	}
	fmt.Fprint(p.w, home+strings.ReplaceAll(strings.Join(lines, ""), "\n", eraseRest+"\n")+eraseBelow)
}

// Progress shows a line until the next call of any method. The line is shortened to the
// width of the terminal; if the stream is no terminal, it is not shown.
func (p *Printer) Progress(format string, args ...any) {
	if !p.terminal {
		return
	}
	line := []rune(fmt.Sprintf(format, args...))
	if most := p.width() - 1; len(line) > most {
		line = line[:most]
	}
	fmt.Fprint(p.w, eraseLine+p.Paint(Dim, string(line)))
	p.progress = true
}

// Clear removes the progress line.
func (p *Printer) Clear() {
	if p.progress {
		fmt.Fprint(p.w, eraseLine)
		p.progress = false
	}
}

// Table lays out rows in columns: the first is aligned to the left, the others
// to the right. Rows may have different lengths.
func Table(rows [][]string) []string {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], len([]rune(cell)))
		}
	}
	lines := make([]string, len(rows))
	for k, row := range rows {
		var b strings.Builder
		for i, cell := range row {
			space := strings.Repeat(" ", widths[i]-len([]rune(cell)))
			if i == 0 {
				b.WriteString(cell + space)
			} else {
				b.WriteString("  " + space + cell)
			}
		}
		lines[k] = strings.TrimRight(b.String(), " ")
	}
	return lines
}
