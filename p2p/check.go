package p2p

// Stages of New: the host bridges and their buses (checkHosts), each function by itself
// (checkFunction), who sits below whom (connect), buses and windows of neighbours (checkBelow),
// BARs that overlap anywhere (checkOverlaps), links.

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// refuse makes the error of a machine that cannot be.
func refuse(format string, args ...any) error {
	return ib.Errorf("p2p_topology", syscall.EINVAL, format, args...)
}

// Check reports what is wrong with the machine, as [New] does: EINVAL with the reason. It refuses
//
//   - two functions with one address, two host bridges or bridges with one bus, buses that run in
//     a circle, that overlap, or that leave their host bridge; functions on a bus without a bridge,
//   - ports where PCIe has none: a root port below a bridge, a downstream port below anything but
//     an upstream port, an upstream port on a root bus,
//   - BARs whose size is no power of two, that are not aligned, share an index, overlap, or lie
//     outside the windows of the bridges above; windows that overlap or leave those above,
//   - peer-to-peer memory that is larger than its BAR,
//   - links that lead nowhere,
//   - names, drivers, kinds of links and a vendor of the CPU with characters that cannot be printed; names and drivers that
//     are no file names, and a vendor with a slash or with spaces around it.
func (s *Spec) Check() error {
	_, err := New(*s)
	return err
}

// New makes a topology. It keeps no part of s.
func New(s Spec) (*Topology, error) {
	s = s.clone()
	if s.Kernel == "" {
		s.Kernel = Linux72
	}
	if _, ok := hostLists[s.Kernel]; !ok {
		return nil, refuse("kernel %q: the rules of %s and %s are known", s.Kernel, Linux612, Linux72)
	}
	if err := checkVendor(s.CPU.Vendor); err != nil {
		return nil, err
	}
	t := &Topology{spec: s, byAddress: make(map[Address]*node, len(s.Functions))}
	for _, stage := range []func() error{t.checkHosts, t.checkFunctions, t.connect, t.checkBelow, t.checkOverlaps, t.checkLinks} {
		if err := stage(); err != nil {
			return nil, err
		}
	}
	t.finish()
	return t, nil
}

// checkHosts sorts the host bridges, and checks that each has buses of its own.
func (t *Topology) checkHosts() error {
	hosts := t.spec.HostBridges
	slices.SortFunc(hosts, func(a, b HostBridgeSpec) int {
		return cmp.Or(cmp.Compare(a.Domain, b.Domain), cmp.Compare(a.Bus, b.Bus))
	})
	for i := range hosts {
		h := &hosts[i]
		last := uint8(math.MaxUint8)
		if i+1 < len(hosts) && hosts[i+1].Domain == h.Domain {
			if hosts[i+1].Bus == h.Bus {
				return refuse("two host bridges have the root bus %v", h)
			}
			last = hosts[i+1].Bus - 1
		}
		switch {
		case h.LastBus != 0 && h.LastBus < h.Bus:
			return refuse("host bridge %v: its last bus, %02x, is before its first", h, h.LastBus)
		case h.LastBus > last:
			return refuse("host bridges %v and %v have buses in common", h, hosts[i+1])
		case h.LastBus != 0:
			last = h.LastBus
		}
		if err := checkWindows(h.String(), h.Windows); err != nil {
			return err
		}
		t.hosts = append(t.hosts, &host{HostBridgeSpec: h, last: last})
	}
	return nil
}

func checkWindows(of string, windows []Window) error {
	for _, w := range windows {
		if w.Last < w.First {
			return refuse("%s: window %v-%v ends before it begins", of, w.First, w.Last)
		}
	}
	return nil
}

// checkFunctions sorts the functions, and checks each by itself.
func (t *Topology) checkFunctions() error {
	fs := t.spec.Functions
	slices.SortFunc(fs, func(a, b FunctionSpec) int { return a.Address.Compare(b.Address) })
	for i := range fs {
		f := &fs[i]
		if i > 0 && fs[i-1].Address == f.Address {
			return refuse("two functions have the address %v", f.Address)
		}
		if err := checkFunction(f); err != nil {
			return err
		}
		n := &node{FunctionSpec: f, index: i}
		t.nodes = append(t.nodes, n)
		t.byAddress[f.Address] = n
	}
	return nil
}

// mostWindows is how many windows of a bridge /sys shows: ports, memory, prefetchable memory; CardBus
// has two of ports.
const mostWindows = 4

func checkFunction(f *FunctionSpec) error {
	switch {
	case f.Kind == kindNone || int(f.Kind) >= len(kindNames):
		return refuse("%v: it is of no kind", f.Address)
	case f.Address.Device > 31 || f.Address.Function > 7:
		return refuse("%v: a device is 00 to 1f, a function 0 to 7", f.Address)
	case !f.Kind.bridges() && (f.Secondary != 0 || f.Subordinate != 0 || len(f.Windows) > 0):
		return refuse("%v: a function of kind %v has no bus below it", f.Address, f.Kind)
	case len(f.Windows) > mostWindows:
		return refuse("%v: a bridge has at most %d windows", f.Address, mostWindows)
	case f.Secondary == 0 && f.Subordinate != 0, f.Subordinate < f.Secondary:
		return refuse("%v: the buses below it are %02x to %02x", f.Address, f.Secondary, f.Subordinate)
	case f.Secondary != 0 && f.Secondary <= f.Address.Bus:
		return refuse("%v: the bus below it is %02x: the buses would run in a circle", f.Address, f.Secondary)
	case f.ACS != nil && (f.ACS.Capability|f.ACS.Control)&^allACS != 0:
		return refuse("%v: ACS has no bits %#x", f.Address, uint16((f.ACS.Capability|f.ACS.Control)&^allACS))
	case f.ACS != nil && f.Kind == Conventional:
		return refuse("%v: a conventional device has no ACS", f.Address)
	case f.Kind.bridges() && f.PhysFn != nil:
		return refuse("%v: a bridge is no virtual function", f.Address)
	case f.Class > 1<<24-1:
		return refuse("%v: class %v has more than 24 bits", f.Address, f.Class)
	}
	if err := checkFileName(f.Address.String(), "the name", f.Name); err != nil {
		return err
	}
	if err := checkFileName(f.Address.String(), "the driver", f.Driver); err != nil {
		return err
	}
	if err := checkWindows(f.Address.String(), f.Windows); err != nil {
		return err
	}
	return checkBARs(f)
}

func checkBARs(f *FunctionSpec) error {
	most := 6
	if f.Kind.bridges() {
		most = 2
	}
	slices.SortFunc(f.BARs, func(a, b BAR) int { return cmp.Compare(a.Index, b.Index) })
	free := 0 // the first index that is not taken
	for i := range f.BARs {
		b := &f.BARs[i]
		takes := 1
		if b.Is64 {
			takes = 2
		}
		switch {
		case b.Index < 0 || b.Index > most-takes:
			return refuse("%v: there is no BAR %d", f.Address, b.Index)
		case b.Index < free:
			return refuse("%v: BAR %d is taken by the one before it", f.Address, b.Index)
		case b.IO && (b.Is64 || b.Prefetchable):
			return refuse("%v: BAR %d: ports are neither prefetchable nor of 64 bits", f.Address, b.Index)
		case b.Size < 4 || !b.IO && b.Size < 16 || bits.OnesCount64(uint64(b.Size)) != 1:
			return refuse("%v: BAR %d: a size of %v; it is a power of two, and at least 16 bytes", f.Address, b.Index, b.Size)
		case uint64(b.Address)%uint64(b.Size) != 0 || b.BusAddress()%uint64(b.Size) != 0:
			return refuse("%v: BAR %d: %v, on the bus %#x, is no multiple of its size, %v", f.Address, b.Index, b.Address, b.BusAddress(), b.Size)
		case !b.Is64 && (b.Size > 1<<32 || b.BusAddress() > 1<<32-uint64(b.Size)):
			return refuse("%v: BAR %d: %v bytes at %#x do not fit into 32 bits", f.Address, b.Index, b.Size, b.BusAddress())
		}
		free = b.Index + takes
	}
	m := f.P2PMem
	if m == nil {
		return nil
	}
	b := f.bar(m.BAR)
	switch {
	case b == nil:
		return refuse("%v: its peer-to-peer memory is in BAR %d, which it does not have", f.Address, m.BAR)
	case b.IO:
		return refuse("%v: its peer-to-peer memory is in BAR %d, which has ports", f.Address, m.BAR)
	case m.Size == 0 || m.Offset >= b.Size || m.Size > b.Size-m.Offset:
		return refuse("%v: peer-to-peer memory of %v bytes at %v is not inside BAR %d, of %v", f.Address, m.Size, m.Offset, m.BAR, b.Size)
	case m.Available > m.Size:
		return refuse("%v: %v bytes of %v of peer-to-peer memory are free", f.Address, m.Available, m.Size)
	}
	return nil
}

// bar returns a BAR by its index, nil if there is none.
func (f *FunctionSpec) bar(index int) *BAR {
	for i := range f.BARs {
		if f.BARs[i].Index == index {
			return &f.BARs[i]
		}
	}
	return nil
}

// bus is a bus of a domain.
type bus struct {
	domain uint32
	number uint8
}

// connect finds the bridge or host bridge above each function.
func (t *Topology) connect() error {
	roots, above := map[bus]*host{}, map[bus]*node{}
	for _, h := range t.hosts {
		roots[bus{h.Domain, h.Bus}] = h
	}
	for _, n := range t.nodes {
		if n.Secondary == 0 {
			continue
		}
		b := bus{n.Address.Domain, n.Secondary}
		if h := roots[b]; h != nil {
			return refuse("%v: the bus below it is the root bus of host bridge %v", n.Address, h)
		}
		if other := above[b]; other != nil {
			return refuse("bus %02x is below %v and below %v", n.Secondary, other.Address, n.Address)
		}
		above[b] = n
	}
	for _, n := range t.nodes {
		at := n.Address
		if n.PhysFn != nil {
			physical := t.byAddress[*n.PhysFn]
			if physical == nil || physical.PhysFn != nil || physical.Address.Domain != at.Domain {
				return refuse("%v: its physical function, %v, is none", n.Address, *n.PhysFn)
			}
			at = physical.Address
		}
		b := bus{at.Domain, at.Bus}
		switch n.parent, n.host = above[b], roots[b]; {
		case n.host != nil:
			n.host.below = append(n.host.below, n)
		case n.parent != nil:
			n.parent.below = append(n.parent.below, n)
		default:
			return refuse("%v: no bridge leads to bus %02x", n.Address, at.Bus)
		}
	}
	return t.place()
}

// place tells each function its host bridge and its depth, and checks that a function of its kind
// can be where it is. A bridge is on a lower bus than what is below it, so parents come first.
func (t *Topology) place() error {
	byBus := slices.SortedStableFunc(slices.Values(t.nodes), func(a, b *node) int { return cmp.Compare(a.depthBus(t), b.depthBus(t)) })
	for _, n := range byBus {
		parent := kindNone
		if n.parent != nil {
			n.host, n.depth, parent = n.parent.host, n.parent.depth+1, n.parent.Kind
		}
		if err := checkPlace(n.FunctionSpec, n.parent, parent); err != nil {
			return err
		}
	}
	return nil
}

// depthBus returns the bus that decides where a function is: that of its physical function.
func (n *node) depthBus(t *Topology) uint8 {
	if n.PhysFn != nil {
		return t.byAddress[*n.PhysFn].Address.Bus
	}
	return n.Address.Bus
}

func checkPlace(f *FunctionSpec, above *node, kind Kind) error {
	where := "on a root bus"
	if above != nil {
		where = fmt.Sprintf("below %v, of kind %v", above.Address, kind)
	}
	var ok bool
	switch f.Kind {
	case RootPort:
		ok = kind == kindNone
	case UpstreamPort:
		ok = kind == RootPort || kind == DownstreamPort
	case DownstreamPort:
		ok = kind == UpstreamPort
	default:
		ok = kind != UpstreamPort || f.Kind == Endpoint // a switch may have functions beside its upper port's bus
	}
	if !ok {
		return refuse("%v: a function of kind %v is not %s", f.Address, f.Kind, where)
	}
	return nil
}

// span is a range that one of several neighbours has for itself.
type span struct {
	first, last uint64
	of          string
}

// overlap returns two spans that have something in common, if there are any.
func overlap(spans []span) (a, b span, found bool) {
	slices.SortFunc(spans, func(a, b span) int {
		return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.last, b.last), cmp.Compare(a.of, b.of))
	})
	for i := 1; i < len(spans); i++ {
		if spans[i].first <= spans[i-1].last {
			return spans[i-1], spans[i], true
		}
	}
	return a, b, false
}

// checkBelow checks what each bridge and each host bridge has below it.
func (t *Topology) checkBelow() error {
	for _, h := range t.hosts {
		if err := checkChildren(h.String(), h.Bus, h.last, h.Windows, len(h.Windows) == 0, h.below); err != nil {
			return err
		}
	}
	for _, n := range t.nodes {
		if len(n.below) == 0 {
			continue
		}
		if err := checkChildren(n.Address.String(), n.Secondary, n.Subordinate, n.Windows, n.subtractive(), n.below); err != nil {
			return err
		}
	}
	return nil
}

// subtractive reports whether a bridge forwards what nobody else takes: then its windows say
// nothing.
func (f *FunctionSpec) subtractive() bool { return f.Class == 0x060401 }

func checkChildren(above string, first, last uint8, windows []Window, anywhere bool, below []*node) error {
	var buses []span
	var memory, ports []span
	inside := func(what string, first, last uint64, io bool) error {
		if anywhere || slices.ContainsFunc(windows, func(w Window) bool { return w.holds(first, last, io) }) {
			return nil
		}
		return refuse("%s, %#x-%#x, is outside the windows of %s", what, first, last, above)
	}
	for _, n := range below {
		if n.Address.Bus < first || n.Address.Bus > last {
			return refuse("%v: its bus is not one of %s, %02x to %02x", n.Address, above, first, last)
		}
		if n.Secondary != 0 {
			if n.Subordinate > last {
				return refuse("%v: its buses, %02x to %02x, leave those of %s, which end at %02x", n.Address, n.Secondary, n.Subordinate, above, last)
			}
			buses = append(buses, span{uint64(n.Secondary), uint64(n.Subordinate), n.Address.String()})
		}
		for _, b := range n.BARs {
			if b.Address == 0 {
				continue // not assigned
			}
			if err := inside(fmt.Sprintf("%v: BAR %d", n.Address, b.Index), uint64(b.Address), b.end(), b.IO); err != nil {
				return err
			}
		}
		for _, w := range n.Windows {
			what := fmt.Sprintf("%v: its window", n.Address)
			if err := inside(what, uint64(w.First), uint64(w.Last), w.IO); err != nil {
				return err
			}
			if w.IO {
				ports = append(ports, span{uint64(w.First), uint64(w.Last), n.Address.String()})
			} else {
				memory = append(memory, span{uint64(w.First), uint64(w.Last), n.Address.String()})
			}
		}
	}
	for what, spans := range map[string][]span{"buses": buses, "memory windows": memory, "port windows": ports} {
		if a, b, found := overlap(spans); found {
			return refuse("the %s of %s, %#x-%#x, and of %s, %#x-%#x, overlap", what, a.of, a.first, a.last, b.of, b.first, b.last)
		}
	}
	return nil
}

// checkOverlaps checks that no two BARs of the machine have an address in common.
func (t *Topology) checkOverlaps() error {
	var memory, ports []span
	for _, n := range t.nodes {
		for _, b := range n.BARs {
			if b.Address == 0 {
				continue
			}
			s := span{uint64(b.Address), b.end(), fmt.Sprintf("BAR %d of %v", b.Index, n.Address)}
			if b.IO {
				ports = append(ports, s)
			} else {
				memory = append(memory, s)
			}
		}
	}
	for _, spans := range [][]span{memory, ports} {
		if a, b, found := overlap(spans); found {
			return refuse("%s, %#x-%#x, and %s, %#x-%#x, overlap", a.of, a.first, a.last, b.of, b.first, b.last)
		}
	}
	return nil
}

func (t *Topology) checkLinks() error {
	for _, l := range t.spec.Links {
		if err := checkWord(fmt.Sprintf("the link between %v and %v", l.Ends[0], l.Ends[1]), "the kind", l.Kind); err != nil {
			return err
		}
		switch a, b := l.Ends[0], l.Ends[1]; {
		case l.Kind == "" || l.Bandwidth == 0:
			return refuse("the link between %v and %v has no kind or no bandwidth", a, b)
		case t.byAddress[a] == nil:
			return refuse("%s: there is no function %v", l.Kind, a)
		case t.byAddress[b] == nil:
			return refuse("%s: there is no function %v", l.Kind, b)
		case a == b:
			return refuse("%s: it leads from %v to itself", l.Kind, a)
		}
	}
	return nil
}
