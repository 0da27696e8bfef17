package main

// The picture of a topology. Stages: each function gets a column or, above several, the middle of
// theirs (layout); boxes, lines and vendor links are drawn, then the matrix below them.

import (
	"bytes"
	"fmt"
	"html"
	"slices"

	"github.com/verbena-rdma/verbena/p2p"
)

const (
	boxWidth, boxHeight = 176, 58
	columnWidth         = boxWidth + 24
	rowHeight           = boxHeight + 40
	margin              = 24
	laneHeight          = 26  // of a vendor link
	cellWidth           = 44  // of the matrix
	cellHeight          = 22  //
	labelWidth          = 240 // of a row's name in the matrix
	charWidth           = 7   // of the font below, at most
	lettersInBox        = (boxWidth - 12) / charWidth
)

// box is a host bridge or a function of the picture.
type box struct {
	x, y  int // of the upper left corner
	lines []string
	fill  string
	line  string // colour of the border
	below []*box
	at    p2p.Address
	links int // vendor links that leave it
}

// picture is what is drawn.
type picture struct {
	bytes.Buffer
	t     *p2p.Topology
	boxes []*box
	leaf  map[p2p.Address]*box
	next  int // the first column that is free
	depth int
}

// drawTopology returns the picture as SVG.
func drawTopology(t *p2p.Topology, shown []p2p.Address) []byte {
	p := &picture{t: t, leaf: map[p2p.Address]*box{}}
	s := t.Spec()
	var roots []*box
	for _, h := range s.HostBridges {
		b := &box{lines: []string{"host bridge", h.String()}, fill: "#e8eef7", line: "#3b5b8c"}
		if h.NUMA != nil {
			b.lines = append(b.lines, fmt.Sprintf("NUMA node %d", *h.NUMA))
		}
		for _, a := range t.OnRootBus(h) {
			b.below = append(b.below, p.function(a))
		}
		p.place(b, 0)
		roots = append(roots, b)
	}
	lanes := margin + 30 + (p.depth+1)*rowHeight
	matrix := lanes + len(s.Links)*laneHeight + margin
	width := max(2*margin+p.next*columnWidth, 2*margin+labelWidth+len(shown)*cellWidth, 800)
	height := matrix + (len(shown)+3)*cellHeight + margin
	fmt.Fprintf(p, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="DejaVu Sans Mono, monospace" font-size="11">`+"\n", width, height, width, height)
	fmt.Fprintf(p, `<rect x="0" y="0" width="%d" height="%d" fill="white"/>`+"\n", width, height)
	p.text(margin, margin+6, "start", "bold", machineLine(&s))
	for _, b := range roots {
		p.lines(b)
	}
	var labels []func()
	for i, l := range s.Links {
		labels = append(labels, p.link(&l, lanes+i*laneHeight))
	}
	for _, label := range labels {
		label()
	}
	for _, b := range p.boxes {
		p.box(b)
	}
	p.matrix(shown, matrix)
	fmt.Fprintln(p, "</svg>")
	return p.Bytes()
}

// function makes the box of a function, and of what is below it.
func (p *picture) function(a p2p.Address) *box {
	f, _ := p.t.Function(a)
	b := &box{at: a, lines: []string{a.String(), f.Kind.String()}, fill: "#f7f7f7", line: "#777777"}
	if f.Name != "" {
		b.lines[1], b.fill = f.Name, "#fdf6e3"
	}
	b.lines = append(b.lines, "["+f.ID.String()+"]")
	if f.P2PMem != nil {
		b.lines[2], b.fill, b.line = "p2pmem "+bytesOf(uint64(f.P2PMem.Size)), "#e3f4e3", "#2f7d32"
	}
	if f.ACS != nil && f.ACS.Control&(p2p.RequestRedirect|p2p.CompletionRedirect|p2p.EgressControl) != 0 {
		b.lines[2], b.line = "ACS redirect", "#c62828"
	}
	for _, below := range p.t.Below(a) {
		b.below = append(b.below, p.function(below))
	}
	return b
}

// place gives a box and all below it their places. Each subtree has columns of its own, so that boxes
// do not overlap.
func (p *picture) place(b *box, depth int) {
	p.depth = max(p.depth, depth)
	b.y = margin + 30 + depth*rowHeight
	first := p.next
	for _, below := range b.below {
		p.place(below, depth+1)
	}
	if p.next == first {
		p.next++
	}
	b.x = margin + (first+p.next-1)*columnWidth/2
	p.boxes = append(p.boxes, b)
	p.leaf[b.at] = b
}

// lines draws what connects a box with those below it.
func (p *picture) lines(b *box) {
	for _, below := range b.below {
		x, y, middle := b.x+boxWidth/2, b.y+boxHeight, below.y-20
		fmt.Fprintf(p, `<polyline points="%d,%d %d,%d %d,%d %d,%d" fill="none" stroke="#777777"/>`+"\n",
			x, y, x, middle, below.x+boxWidth/2, middle, below.x+boxWidth/2, below.y)
		p.lines(below)
	}
}

// link draws a vendor's link in a lane of its own below all boxes. It returns what draws the label,
// which belongs above the lines of other links.
func (p *picture) link(l *p2p.Link, lane int) (label func()) {
	var x, y [2]int
	for i, end := range l.Ends {
		b := p.leaf[end]
		b.links++
		x[i], y[i] = b.x+min(8+14*b.links, boxWidth-8), b.y+boxHeight
	}
	fmt.Fprintf(p, `<polyline points="%d,%d %d,%d %d,%d %d,%d" fill="none" stroke="#6a1b9a" stroke-width="1.5" stroke-dasharray="5 3"/>`+"\n", x[0], y[0], x[0], lane, x[1], lane, x[1], y[1])
	text := fmt.Sprintf("%s %s", l.Kind, rate(l.Bandwidth))
	middle := (x[0] + x[1]) / 2
	return func() {
		fmt.Fprintf(p, `<rect x="%d" y="%d" width="%d" height="14" fill="white"/>`+"\n", middle-len(text)*charWidth/2-2, lane-7, len(text)*charWidth+4)
		p.text(middle, lane+4, "middle", "normal", text)
	}
}

func (p *picture) box(b *box) {
	fmt.Fprintf(p, `<rect class="box" x="%d" y="%d" width="%d" height="%d" rx="5" fill="%s" stroke="%s"/>`+"\n", b.x, b.y, boxWidth, boxHeight, b.fill, b.line)
	for i, line := range b.lines {
		p.text(b.x+boxWidth/2, b.y+16+17*i, "middle", "normal", cut(line, lettersInBox))
	}
}

// cut shortens what is too long for its place.
func cut(s string, most int) string {
	if r := []rune(s); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return s
}

func (p *picture) text(x, y int, anchor, weight, s string) {
	fmt.Fprintf(p, `<text x="%d" y="%d" text-anchor="%s" font-weight="%s">%s</text>`+"\n", x, y, anchor, weight, html.EscapeString(s))
}

// matrix draws the distances of the devices that are shown.
func (p *picture) matrix(shown []p2p.Address, y int) {
	if len(shown) == 0 {
		p.text(margin, y, "start", "normal", "No device can be a provider or a client.")
		return
	}
	p.text(margin, y, "start", "bold", "Distances, provider by client: green by bus address, yellow through the host bridge, red not supported")
	y += cellHeight
	colours := []string{"#f8d7da", "#d4edda", "#fff3cd"}
	for i, row := range p.t.Matrix(shown, shown) {
		top := y + (i+1)*cellHeight
		p.text(margin+labelWidth+i*cellWidth+cellWidth/2, y+15, "middle", "bold", fmt.Sprint(i+1))
		p.text(margin, top+15, "start", "normal", cut(fmt.Sprintf("%d %s", i+1, title(p.t, shown[i])), (labelWidth-8)/charWidth))
		for k, cell := range row {
			x := margin + labelWidth + k*cellWidth
			colour := colours[slices.Index([]p2p.MapType{p2p.NotSupported, p2p.BusAddress, p2p.ThroughHostBridge}, cell.Map)]
			fmt.Fprintf(p, `<rect x="%d" y="%d" width="%d" height="%d" fill="%s" stroke="white"/>`+"\n", x, top, cellWidth, cellHeight, colour)
			p.text(x+cellWidth/2, top+15, "middle", "normal", cellText(cell))
		}
	}
}
