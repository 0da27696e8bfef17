package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/verbena-rdma/verbena/p2p"
)

type topoCmd struct {
	Devices []string `arg:"" optional:"" name:"device" help:"PCI addresses or names: show the verdicts of these devices only."`
	From    string   `placeholder:"DIR|FILE" help:"Read another machine: a dump that --dump has made, or a JSON file."`
	Kernel  string   `placeholder:"VERSION" help:"Decide as this version of Linux does: 6.12 or 7.2. Default: the machine's own, or the older of the two."`
	All     bool     `short:"a" help:"Show the verdicts of all devices, also if there are many."`
	JSON    bool     `name:"json" help:"Print a JSON object: the machine, and the verdict of each provider and client."`
	SVG     string   `name:"svg" placeholder:"FILE" help:"Write a picture, too."`
	Dump    string   `placeholder:"DIR" help:"Write the files of /sys from which --from reads the machine again, to a new directory."`
}

// Help is shown below the flags.
func (topoCmd) Help() string {
	return `Shows the PCI devices of a machine as a tree, and which of them can read and write each other's memory without system memory (peer-to-peer DMA). The verdicts are those of Linux's P2PDMA, with what has decided: a common switch, ACS redirect at a port, the host bridge, the CPU.

As root it sees all of the configuration space; others do not see ACS.

Examples:

    verbena topo
    verbena topo nvme0 0000:41:00.0
    verbena topo --svg machine.svg
    verbena topo --dump there && verbena topo --from there --json`
}

func (c *topoCmd) Run(context.Context) error {
	t, err := c.read()
	if err != nil {
		return err
	}
	shown, left, err := c.choose(t)
	if err != nil {
		return err
	}
	if c.Dump != "" {
		if err := t.Dump(c.Dump); err != nil {
			return err
		}
	}
	if c.SVG != "" {
		if err := os.WriteFile(filepath.Clean(c.SVG), drawTopology(t, shown), 0o644); err != nil { //nolint:gosec // a picture for everybody
			return err
		}
	}
	if c.JSON {
		return printTopologyJSON(os.Stdout, t, shown)
	}
	printTopology(os.Stdout, t, shown, left)
	return nil
}

// read returns the machine, with the rules that were asked for.
func (c *topoCmd) read() (*p2p.Topology, error) {
	kernel := p2p.Kernel(c.Kernel)
	if !slices.Contains([]p2p.Kernel{"", p2p.Linux612, p2p.Linux72}, kernel) {
		return nil, usagef("--kernel %s: want %s or %s", kernel, p2p.Linux612, p2p.Linux72)
	}
	from := c.From
	if from == "" {
		from = "/"
	}
	t, err := p2p.Read(from)
	if err != nil || kernel == "" {
		return t, err
	}
	s := t.Spec()
	s.Kernel = kernel
	return p2p.New(s)
}

// mostShown is how many devices a terminal shows the matrix of.
const mostShown = 32

// choose returns the devices whose verdicts are shown, and how many others there are. Of many devices
// only those are shown that move data: storage, network, displays, accelerators.
func (c *topoCmd) choose(t *p2p.Topology) (shown []p2p.Address, left int, err error) {
	all := t.Devices()
	if len(c.Devices) > 0 {
		for _, name := range c.Devices {
			at, ok := find(t, name)
			if !ok {
				return nil, 0, usagef("there is no device %q", name)
			}
			shown = append(shown, at)
		}
		return shown, 0, nil
	}
	if len(all) <= mostShown || c.All {
		return all, 0, nil
	}
	for _, a := range all {
		f, _ := t.Function(a)
		if slices.Contains([]p2p.Hex{0x01, 0x02, 0x03, 0x0b, 0x12}, f.Class>>16) {
			shown = append(shown, a)
		}
	}
	return shown, len(all) - len(shown), nil
}

// find returns the function with a name or an address.
func find(t *p2p.Topology, name string) (p2p.Address, bool) {
	if a, err := p2p.ParseAddress(name); err == nil {
		_, ok := t.Function(a)
		return a, ok
	}
	for _, a := range t.Functions() {
		if f, _ := t.Function(a); f.Name == name {
			return a, true
		}
	}
	return p2p.Address{}, false
}

func printTopologyJSON(w io.Writer, t *p2p.Topology, shown []p2p.Address) error {
	verdicts := []p2p.Verdict{}
	for _, p := range shown {
		for _, c := range shown {
			verdicts = append(verdicts, t.Verdict(p, c))
		}
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(struct {
		Machine  *p2p.Topology `json:"machine"`
		Verdicts []p2p.Verdict `json:"verdicts"`
	}{t, verdicts})
}

func printTopology(w io.Writer, t *p2p.Topology, shown []p2p.Address, left int) {
	s := t.Spec()
	fmt.Fprintln(w, machineLine(&s))
	if len(s.Functions) == 0 {
		fmt.Fprintln(w, "This machine has no PCI devices.")
		return
	}
	printTree(w, t, &s)
	hidden := slices.ContainsFunc(s.Functions, func(f p2p.FunctionSpec) bool { return f.Hidden && f.Secondary != 0 })
	if hidden {
		fmt.Fprintln(w, "\nOnly root can read ACS: it is taken as not set.")
	}
	for i, l := range s.Links {
		if i == 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s between %s and %s: %s in each direction\n", l.Kind, title(t, l.Ends[0]), title(t, l.Ends[1]), rate(l.Bandwidth))
	}
	if left > 0 {
		fmt.Fprintf(w, "\n%d devices of other kinds are left out below; --all shows them.\n", left)
	}
	if len(shown) == 0 {
		fmt.Fprintln(w, "\nNone of them can be a provider or a client of peer-to-peer memory.")
		return
	}
	printMatrix(w, t, shown)
	printVerdicts(w, t, shown)
}

func machineLine(s *p2p.Spec) string {
	cpu := "CPU not known"
	if s.CPU.Vendor != "" {
		cpu = fmt.Sprintf("CPU %s family %#x model %#x", s.CPU.Vendor, s.CPU.Family, s.CPU.Model)
	}
	iommu := "off"
	if s.IOMMU {
		iommu = "on"
	}
	return fmt.Sprintf("%s, IOMMU %s, rules of Linux %s", cpu, iommu, s.Kernel)
}

// rate formats bytes per second as vendors do.
func rate(n uint64) string { return fmt.Sprintf("%.4g GB/s", float64(n)/1e9) }

func title(t *p2p.Topology, a p2p.Address) string {
	f, _ := t.Function(a)
	return f.Title()
}

func printTree(w io.Writer, t *p2p.Topology, s *p2p.Spec) {
	for _, h := range s.HostBridges {
		node := ""
		if h.NUMA != nil {
			node = fmt.Sprintf(", NUMA node %d", *h.NUMA)
		}
		fmt.Fprintf(w, "\nhost bridge %v%s\n", h, node)
		printBelow(w, t, t.OnRootBus(h), "")
	}
}

func printBelow(w io.Writer, t *p2p.Topology, below []p2p.Address, indent string) {
	for i, a := range below {
		branch, next := "├─ ", "│  "
		if i == len(below)-1 {
			branch, next = "└─ ", "   "
		}
		f, _ := t.Function(a)
		fmt.Fprintf(w, "%s%s%s\n", indent, branch, functionLine(&f))
		printBelow(w, t, t.Below(a), indent+next)
	}
}

// functionLine describes a function on one line.
func functionLine(f *p2p.FunctionSpec) string {
	parts := []string{f.Title(), fmt.Sprintf("%v [%v]", f.Kind, f.ID)}
	if f.Secondary != 0 {
		parts = append(parts, fmt.Sprintf("bus %02x-%02x", f.Secondary, f.Subordinate))
	}
	if f.ACS != nil && f.Secondary != 0 {
		set := "none set"
		if f.ACS.Control != 0 {
			set = strings.Join(f.ACS.Control.Names(), ", ")
		}
		parts = append(parts, "ACS: "+set)
	}
	for _, b := range f.BARs {
		if !b.IO && b.Size >= 1<<20 {
			parts = append(parts, fmt.Sprintf("BAR %d: %s", b.Index, bytesOf(uint64(b.Size))))
		}
	}
	if m := f.P2PMem; m != nil {
		what := "not published"
		if m.Published {
			what = "published"
		}
		parts = append(parts, fmt.Sprintf("p2pmem: %s, %s", bytesOf(uint64(m.Size)), what))
	}
	if f.PhysFn != nil {
		parts = append(parts, "virtual function of "+f.PhysFn.String())
	}
	if f.IOMMUGroup != nil {
		parts = append(parts, fmt.Sprintf("IOMMU group %d", *f.IOMMUGroup))
	}
	return strings.Join(parts, "; ")
}

// cellText is a verdict in the matrix.
func cellText(c p2p.Cell) string {
	switch c.Map {
	case p2p.BusAddress:
		return fmt.Sprint(c.Distance)
	case p2p.ThroughHostBridge:
		return fmt.Sprintf("%dh", c.Distance)
	}
	return "-"
}

func printMatrix(w io.Writer, t *p2p.Topology, shown []p2p.Address) {
	fmt.Fprintln(w, "\nDistances: a row for each provider, a column for each client; h: through the host bridge; -: not supported")
	widest, cell := 0, len(fmt.Sprint(len(shown)))+1
	for _, a := range shown {
		widest = max(widest, len(title(t, a)))
	}
	rows := t.Matrix(shown, shown)
	for _, row := range rows {
		for _, c := range row {
			cell = max(cell, len(cellText(c))+1)
		}
	}
	fmt.Fprintf(w, "%*s", 4+1+widest, "")
	for i := range shown {
		fmt.Fprintf(w, "%*d", cell, i+1)
	}
	fmt.Fprintln(w)
	for i, row := range rows {
		fmt.Fprintf(w, "%4d %-*s", i+1, widest, title(t, shown[i]))
		for _, c := range row {
			fmt.Fprintf(w, "%*s", cell, cellText(c))
		}
		fmt.Fprintln(w)
	}
}

// printVerdicts says for each pair why. Pairs with one reason stand together; a pair is the same in
// both directions.
func printVerdicts(w io.Writer, t *p2p.Topology, shown []p2p.Address) {
	type verdict struct {
		kind     p2p.MapType
		distance int
		reason   string
	}
	pairs := map[verdict][]string{}
	var order []verdict
	for i, a := range shown {
		for k := i; k < len(shown); k++ {
			v := t.Verdict(a, shown[k])
			key := verdict{v.Map, v.Distance, v.Reason}
			if pairs[key] == nil {
				order = append(order, key)
			}
			pairs[key] = append(pairs[key], fmt.Sprintf("%d-%d", i+1, k+1))
		}
	}
	slices.SortStableFunc(order, func(a, b verdict) int {
		rank := func(v verdict) int {
			if v.kind == p2p.NotSupported {
				return 1 << 20
			}
			return int(v.kind)<<10 + v.distance
		}
		return rank(a) - rank(b)
	})
	fmt.Fprintln(w, "\nVerdicts")
	for _, key := range order {
		if key.kind == p2p.NotSupported {
			fmt.Fprintf(w, "%v: %s\n", key.kind, key.reason)
		} else {
			fmt.Fprintf(w, "%v, distance %d: %s\n", key.kind, key.distance, key.reason)
		}
		for line := range slices.Chunk(pairs[key], 16) {
			fmt.Fprintf(w, "    %s\n", strings.Join(line, " "))
		}
	}
}
