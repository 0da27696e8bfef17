package netsim

import (
	"fmt"
	"strings"
)

// The plot: how long the queue was, in one panel for each path, of four WRITE streams and of four
// connections of the model.

const (
	panelWidth, panelHeight = 380, 220
	plotLeft, plotTop       = 60, 30
	plotRight, plotBottom   = 12, 40
	pointsOfLine            = 300
)

// plot draws the queues of the cases of which they were kept.
func plot(results []*Result) string {
	type panel struct{ ours, cubic *Result }
	panels, names := map[string]*panel{}, []string{}
	for _, r := range results {
		path, what, _ := strings.Cut(r.Name, " 4×")
		p := panels[path]
		if p == nil {
			p = new(panel)
			panels[path], names = p, append(names, path)
		}
		switch what {
		case "WRITE":
			p.ours = r
		case "cubic":
			p.cubic = r
		}
	}
	const across = 2
	rows := (len(names) + across - 1) / across
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", across*panelWidth, rows*panelHeight+24)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", across*panelWidth, rows*panelHeight+24)
	for i, name := range names {
		p := panels[name]
		left, top := float64(i%across*panelWidth), float64(i/across*panelHeight)
		fmt.Fprintf(&b, `<text x="%.0f" y="%.0f" font-weight="bold">%s</text>`+"\n", left+plotLeft, top+18, name)
		line(&b, p.cubic, "#c7522a", left, top)
		line(&b, p.ours, "#0b6e99", left, top)
	}
	for i, s := range []struct{ name, colour string }{{"4×WRITE", "#0b6e99"}, {"4×cubic (model)", "#c7522a"}} {
		x, y := plotLeft+i*140, rows*panelHeight+10
		fmt.Fprintf(&b, `<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="%s" stroke-width="2"/>`, x, y, x+24, y, s.colour)
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", x+30, y+4, s.name)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// line draws how long the queue was, and the axes.
func line(b *strings.Builder, r *Result, colour string, left, top float64) {
	if r == nil {
		return
	}
	const w, h = panelWidth - plotLeft - plotRight, panelHeight - plotTop - plotBottom
	end := epoch + r.Warm + r.Time
	fmt.Fprintf(b, `<rect x="%.0f" y="%.0f" width="%d" height="%d" fill="none" stroke="#ccc"/>`, left+plotLeft, top+plotTop, w, h)
	fmt.Fprintf(b, `<text x="%.0f" y="%.0f" text-anchor="end">%d</text>`, left+plotLeft-4, top+plotTop+8, r.Link.Buffer>>10)
	fmt.Fprintf(b, `<text x="%.0f" y="%.0f" text-anchor="end">0</text>`, left+plotLeft-4, top+plotTop+h)
	fmt.Fprintf(b, `<text transform="translate(%.0f,%.0f) rotate(-90)" text-anchor="middle">queue, KiB</text>`, left+14, top+plotTop+h/2)
	fmt.Fprintf(b, `<text x="%.0f" y="%.0f" text-anchor="middle">%v</text>`+"\n", left+plotLeft+w/2, top+plotTop+h+16, r.Warm+r.Time)
	points := make([]string, 0, pointsOfLine)
	for i := range pointsOfLine { // the longest queue of each part of the time
		from := epoch + (end-epoch)*Time(i)/pointsOfLine
		to := epoch + (end-epoch)*Time(i+1)/pointsOfLine
		most := 0
		for _, s := range r.Samples {
			if s.at >= from && s.at < to {
				most = max(most, s.bytes)
			}
		}
		points = append(points, fmt.Sprintf("%.1f,%.1f", left+plotLeft+w*float64(i)/pointsOfLine, top+plotTop+h*(1-float64(most)/float64(r.Link.Buffer))))
	}
	fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s"/>`+"\n", strings.Join(points, " "), colour)
}
