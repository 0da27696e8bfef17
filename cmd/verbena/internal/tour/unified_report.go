package tour

// What the legs have counted: a table, and the machine with the bytes on its links. Each flow of bytes takes the links
// from a device up to the nearest bridge that it shares with the other one, or up to system memory.

import (
	"fmt"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/p2p"
)

const nameWidth, figureWidth = 44, 11

// report prints the table and the picture.
func (m *unified) report(out *term.Printer, results []result) {
	row := func(name string, of func(r *result) string) {
		var b strings.Builder
		fmt.Fprintf(&b, "%-*s", nameWidth, name)
		for i := range results {
			fmt.Fprintf(&b, "%*s", figureWidth, of(&results[i]))
		}
		out.Printf("%s\n", b.String())
	}
	size := func(name string, of func(r *result) uint64) {
		row(name, func(r *result) string { return byteCount(of(r)) })
	}
	number := func(name string, of func(r *result) uint64) {
		row(name, func(r *result) string { return fmt.Sprint(of(r)) })
	}
	out.Printf("\n%s\n", out.Paint(term.Bold, m.heading("what was counted")))
	number("rounds", func(r *result) uint64 { return uint64(r.rounds) })
	number("checksums equal at the remote host", func(r *result) uint64 { return uint64(r.sums) })
	size("disk to GPU memory, peer to peer", func(r *result) uint64 { return r.disk.Bus })
	size("disk to the buffer while it is evicted", func(r *result) uint64 { return r.disk.System })
	size("disk to system memory, copied to the GPU", func(r *result) uint64 { return r.disk.Copied })
	size("copied by the GPU to system memory", func(r *result) uint64 { return r.copied })
	size("READ by the remote host", func(r *result) uint64 { return r.fetched })
	size("  of it from GPU memory", func(r *result) uint64 { return r.fromVRAM })
	size("  from the buffer while it is evicted", func(r *result) uint64 { return r.evicted })
	size("  while the buffer moves, from either", func(r *result) uint64 { return r.moving })
	number("moves of buffers", func(r *result) uint64 { return r.card.Moves })
	number("  evictions", func(r *result) uint64 { return r.card.Evictions })
	number("  returns", func(r *result) uint64 { return r.card.Returns })
	size("  bytes that moved", func(r *result) uint64 { return r.card.MovedBytes })
	number("faults: the disk finds the buffer moved", func(r *result) uint64 { return r.disk.Faults })
	number("faults: the adapter finds it moved", func(r *result) uint64 { return r.faults })
	row("time", func(r *result) string { return r.time.Round(10 * time.Microsecond).String() })
	row("time of a round", func(r *result) string {
		return (r.time / time.Duration(max(r.rounds, 1))).Round(time.Microsecond).String()
	})

	out.Printf("\n%s\n", out.Paint(term.Bold, m.heading("bytes on each link")))
	var loads []load
	for i := range results {
		loads = append(loads, m.load(legs[i], &results[i]))
	}
	line := func(text string, of func(l load) uint64) {
		row(text+" "+strings.Repeat("─", max(nameWidth-1-len([]rune(text)), 0)), func(r *result) string {
			for i := range results {
				if r == &results[i] {
					return byteCount(of(loads[i]))
				}
			}
			return ""
		})
	}
	line("system memory", func(l load) uint64 { return l.memory })
	for _, h := range m.t.Spec().HostBridges {
		out.Printf("└─ host bridge %v\n", h)
		m.draw(m.t.OnRootBus(h), "   ", out, line)
	}
}

// heading returns a line with the names of the legs.
func (m *unified) heading(s string) string {
	s = fmt.Sprintf("%-*s", nameWidth, s)
	for _, g := range legs {
		s += fmt.Sprintf("%*s", figureWidth, g.name)
	}
	return s
}

// draw draws functions and what is below them. A line of figures is the link from the function upwards. The downstream
// ports of a switch are left out: each has the bytes of the device below it.
func (m *unified) draw(functions []p2p.Address, indent string, out *term.Printer, line func(string, func(load) uint64)) {
	var shown []p2p.Address
	for _, a := range functions {
		if f, _ := m.t.Function(a); f.Kind == p2p.DownstreamPort {
			shown = append(shown, m.t.Below(a)...)
		} else if f.Kind == p2p.RootPort || f.Kind == p2p.UpstreamPort || f.Name != "" {
			shown = append(shown, a)
		}
	}
	for i, a := range shown {
		f, _ := m.t.Function(a)
		branch, below := "├─ ", "│  "
		if i == len(shown)-1 {
			branch, below = "└─ ", "   "
		}
		at := func(l load) uint64 { return l.link[a] }
		switch {
		case f.Kind == p2p.RootPort:
			out.Printf("%s%sroot port %v\n", indent, branch, a)
		case f.Kind == p2p.UpstreamPort:
			line(indent+branch+"switch "+a.String(), at)
		default:
			line(indent+branch+f.Name+" "+a.String(), at)
			if a == m.at.nic0 || a == m.at.nic1 {
				line(indent+below+"└─ network: the remote host", func(l load) uint64 { return l.network[a] })
			}
		}
		m.draw(m.t.Below(a), indent+below, out, line)
	}
}

// load is the bytes that have passed each link in a leg.
type load struct {
	link    map[p2p.Address]uint64 // from a function upwards
	network map[p2p.Address]uint64 // out of an adapter
	memory  uint64
}

// load distributes what was counted to the links.
func (m *unified) load(g leg, r *result) load {
	l := load{link: map[p2p.Address]uint64{}, network: map[p2p.Address]uint64{}}
	disk, nic := m.at.nvme0, m.at.nic0
	if g.system {
		disk, nic = m.at.nvme1, m.at.nic1
	}
	l.network[nic] = r.fetched
	m.between(&l, disk, m.at.gpu, r.disk.Bus)
	m.toMemory(&l, disk, r.disk.System+r.disk.Copied)
	m.toMemory(&l, m.at.gpu, r.disk.Copied) // from there to the GPU, each byte once
	m.toMemory(&l, m.at.gpu, r.copied)
	m.toMemory(&l, m.at.gpu, r.card.MovedBytes)
	m.between(&l, nic, m.at.gpu, r.fromVRAM)
	if g.system {
		m.toMemory(&l, nic, r.fetched)
		return l
	}
	m.toMemory(&l, nic, r.evicted)
	// What was read while the buffer moved came from the one or the other: only the adapter's own link is certain.
	l.link[nic] += r.fetched - r.fromVRAM - r.evicted
	return l
}

// above returns the functions from a function up to its root port.
func (m *unified) above(a p2p.Address) (all []p2p.Address) {
	for ok := true; ok; a, ok = m.t.Parent(a) {
		all = append(all, a)
	}
	return all
}

// toMemory has n bytes go between a device and system memory.
func (m *unified) toMemory(l *load, a p2p.Address, n uint64) {
	for _, at := range m.above(a) {
		l.link[at] += n
	}
	l.memory += n
}

// between has n bytes go from one device to another, by the nearest bridge that both have above them.
func (m *unified) between(l *load, a, b p2p.Address, n uint64) {
	common := map[p2p.Address]bool{}
	for _, at := range m.above(a) {
		common[at] = true
	}
	for _, at := range m.above(b) {
		if common[at] {
			break
		}
		l.link[at] += n
		delete(common, at)
	}
	for _, at := range m.above(b) {
		delete(common, at)
	}
	for _, at := range m.above(a) {
		if common[at] {
			l.link[at] += n
		}
	}
}

// byteCount writes a number of bytes with a unit in which it is a number of at most four digits.
func byteCount(n uint64) string {
	switch {
	case n == 0:
		return "0"
	case n < 10<<10:
		return fmt.Sprintf("%d B", n)
	case n < 10<<20:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}
