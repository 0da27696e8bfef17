package main

// The plot of the loss tables: rates over losses, one panel for each table, on logarithmic scales. A loss of zero has a
// place of its own at the left.

import (
	"fmt"
	"math"
	"strings"
)

// curve is one contender's rates, in MiB/s, one for each of losses.
type curve struct {
	name  string
	rates []float64
}

// panel is one diagram.
type panel struct {
	title  string
	curves []curve
}

var colours = []string{"#0b6e99", "#c7522a", "#5b8c3a", "#777777"}

const (
	panelWidth, panelHeight = 400, 280
	plotLeft, plotTop       = 62, 34
	plotRight, plotBottom   = 12, 46
	leastRate, mostRate     = 1, 10_000 // MiB/s
)

// plot returns panels side by side, as SVG.
func plot(panels []panel) string {
	var b strings.Builder
	width := panelWidth * len(panels)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width, panelHeight+24)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, panelHeight+24)
	for i := range panels {
		panels[i].draw(&b, float64(i*panelWidth))
	}
	if len(panels) > 0 {
		for k, c := range panels[0].curves {
			x := plotLeft + k*110
			fmt.Fprintf(&b, `<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="%s" stroke-width="2"/>`, x, panelHeight+10, x+24, panelHeight+10, colours[k%len(colours)])
			fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", x+30, panelHeight+14, c.name)
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func (p *panel) draw(b *strings.Builder, left float64) {
	const w, h = panelWidth - plotLeft - plotRight, panelHeight - plotTop - plotBottom
	x := func(i int) float64 {
		return left + plotLeft + w*(float64(i)+0.5)/float64(len(losses))
	}
	y := func(rate float64) float64 {
		part := math.Log(max(rate, leastRate)/leastRate) / math.Log(mostRate/leastRate)
		return plotTop + h*(1-part)
	}
	fmt.Fprintf(b, `<text x="%.0f" y="18" font-weight="bold">%s</text>`+"\n", left+plotLeft, p.title)
	for rate := float64(leastRate); rate <= mostRate; rate *= 10 {
		fmt.Fprintf(b, `<line x1="%.0f" y1="%.1f" x2="%.0f" y2="%.1f" stroke="#ddd"/>`, left+plotLeft, y(rate), left+plotLeft+w, y(rate))
		fmt.Fprintf(b, `<text x="%.0f" y="%.1f" text-anchor="end">%.0f</text>`+"\n", left+plotLeft-6, y(rate)+4, rate)
	}
	for i, l := range losses {
		fmt.Fprintf(b, `<text x="%.1f" y="%d" text-anchor="middle">%g %%</text>`, x(i), plotTop+h+16, float64(l.perMille)/10)
	}
	fmt.Fprintf(b, `<text x="%.0f" y="%d" text-anchor="middle">packets lost, in each direction</text>`+"\n", left+plotLeft+w/2, plotTop+h+34)
	fmt.Fprintf(b, `<text transform="translate(%.0f,%d) rotate(-90)" text-anchor="middle">MiB/s</text>`+"\n", left+16, plotTop+h/2)
	for k, c := range p.curves {
		colour := colours[k%len(colours)]
		var points []string
		for i, r := range c.rates {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(i), y(r)))
			fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, x(i), y(r), colour)
		}
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(points, " "), colour)
	}
}
