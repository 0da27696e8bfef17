package p2p

import (
	"slices"
	"sync"
)

// Topology is a machine whose parts have been checked and connected. It does not change, and its
// methods may be called by several goroutines.
type Topology struct {
	spec      Spec
	hosts     []*host
	nodes     []*node // by address
	byAddress map[Address]*node

	mu    sync.RWMutex // guards cache
	cache map[pair]decision
}

// host is a host bridge.
type host struct {
	*HostBridgeSpec
	last  uint8
	below []*node // the root bus's functions, by address; virtual functions are beside the physical ones
	entry entry   // what the kernel's list says of it
}

// node is a function.
type node struct {
	*FunctionSpec
	index     int
	parent    *node // nil: on a root bus
	host      *host
	depth     int // bridges above it
	below     []*node
	redirects int // of it and the bridges above: how many have ACS redirect set
}

// redirected reports whether the function sends peer-to-peer traffic upwards. As in the kernel, this
// is asked of endpoints, too: functions of one device may be separated by ACS.
func (f *FunctionSpec) redirected() bool { return f.ACS != nil && f.ACS.Control&redirects != 0 }

// finish computes what verdicts are made of.
func (t *Topology) finish() {
	t.cache = map[pair]decision{}
	for _, h := range t.hosts {
		h.entry = hostLists[t.spec.Kernel].lookup(h.first())
	}
	for _, n := range t.nodes {
		for up := n; up != nil; up = up.parent {
			if up.redirected() {
				n.redirects++
			}
		}
	}
}

// first returns the function that stands for a host bridge in the kernel's list: the first of the
// root bus, if it is device 00.0 or a root port.
func (h *host) first() *FunctionSpec {
	if len(h.below) == 0 {
		return nil
	}
	if f := h.below[0].FunctionSpec; f.Address.devfn() == 0 || f.Kind == RootPort {
		return f
	}
	return nil
}

// Spec returns the machine as plain data, in the order of addresses.
func (t *Topology) Spec() Spec { return t.spec.clone() }

// Functions returns the addresses of all functions, in order.
func (t *Topology) Functions() []Address {
	all := make([]Address, len(t.nodes))
	for i, n := range t.nodes {
		all[i] = n.Address
	}
	return all
}

// Devices returns the addresses of the functions that are no bridges, in order: those which can be
// clients and providers. Functions that stand for host bridges are left out, and those for buses of
// other kinds.
func (t *Topology) Devices() []Address {
	var all []Address
	for _, n := range t.nodes {
		if !n.Kind.bridges() && n.Class>>16 != 0x06 {
			all = append(all, n.Address)
		}
	}
	return all
}

// Function returns a function; ok is false if there is none with the address.
func (t *Topology) Function(a Address) (f FunctionSpec, ok bool) {
	n := t.byAddress[a]
	if n == nil {
		return FunctionSpec{}, false
	}
	return n.FunctionSpec.clone(), true
}

// Parent returns the bridge above a function; ok is false on a root bus, and if there is no such
// function.
func (t *Topology) Parent(a Address) (bridge Address, ok bool) {
	n := t.byAddress[a]
	if n == nil || n.parent == nil {
		return Address{}, false
	}
	return n.parent.Address, true
}

// Below returns the functions on the bus below a bridge.
func (t *Topology) Below(a Address) []Address {
	if n := t.byAddress[a]; n != nil {
		return addresses(n.below)
	}
	return nil
}

// OnRootBus returns the functions on the root bus of a host bridge.
func (t *Topology) OnRootBus(h HostBridgeSpec) []Address {
	for _, known := range t.hosts {
		if known.Domain == h.Domain && known.Bus == h.Bus {
			return addresses(known.below)
		}
	}
	return nil
}

func addresses(nodes []*node) []Address {
	var all []Address
	for _, n := range nodes {
		all = append(all, n.Address)
	}
	return all
}

// Links returns the vendors' links between two devices, in either direction.
func (t *Topology) Links(a, b Address) []Link {
	var found []Link
	for _, l := range t.spec.Links {
		if l.Ends == [2]Address{a, b} || l.Ends == [2]Address{b, a} {
			found = append(found, l)
		}
	}
	return found
}

func (s Spec) clone() Spec {
	s.HostBridges = slices.Clone(s.HostBridges)
	for i := range s.HostBridges {
		h := &s.HostBridges[i]
		h.Windows, h.NUMA = slices.Clone(h.Windows), cloned(h.NUMA)
	}
	s.Functions = slices.Clone(s.Functions)
	for i := range s.Functions {
		s.Functions[i] = s.Functions[i].clone()
	}
	s.Links = slices.Clone(s.Links)
	return s
}

func (f *FunctionSpec) clone() FunctionSpec {
	c := *f
	c.Windows, c.BARs = slices.Clone(f.Windows), slices.Clone(f.BARs)
	for i := range c.BARs {
		c.BARs[i].Bus = cloned(c.BARs[i].Bus)
	}
	c.ACS, c.P2PMem, c.PhysFn = cloned(f.ACS), cloned(f.P2PMem), cloned(f.PhysFn)
	c.NUMA, c.IOMMUGroup = cloned(f.NUMA), cloned(f.IOMMUGroup)
	return c
}

func cloned[T any](p *T) *T {
	if p == nil {
		return nil
	}
	c := *p
	return &c
}
