package p2p

import (
	"math/bits"
)

// Builder makes a machine in code. It numbers buses and devices, and gives BARs and windows their
// addresses.
//
//	b := p2p.NewBuilder(p2p.CPU{Vendor: "AuthenticAMD", Family: 0x19})
//	host := b.HostBridge(p2p.ID{Vendor: 0x1022, Device: 0x14a4})
//	ports := host.RootPort(nil).Switch(2, nil)
//	disk := ports[0].Endpoint("nvme0", p2p.ID{Vendor: 0x1b36, Device: 0x0010}, p2p.ClassNVMe, p2p.BAR{Index: 2, Size: 64 << 20, Is64: true})
//	disk.P2PMem(2, 0, 64<<20)
//	t, err := b.Build()
type Builder struct {
	// Spec is what the machine has besides its devices: kernel, CPU and IOMMU.
	Spec  Spec
	hosts []*Part
	links []partLink
}

// Classes of devices, as in /sys.
const (
	ClassNVMe       Hex = 0x010802
	ClassVGA        Hex = 0x030000
	ClassGPU        Hex = 0x030200
	ClassEthernet   Hex = 0x020000
	ClassInfiniBand Hex = 0x020700
	ClassHostBridge Hex = 0x060000
	ClassPCIBridge  Hex = 0x060400
)

// Part is a host bridge, a port or a device of a machine that is being built.
type Part struct {
	// Function is what it is; a host bridge has none. Its address, its buses and the addresses of
	// its BARs and windows are set by Build.
	Function FunctionSpec

	host   *HostBridgeSpec
	below  []*Part
	beside []*Part // further functions of the device
}

type partLink struct {
	Link
	ends [2]*Part
}

// NewBuilder begins a machine.
func NewBuilder(cpu CPU) *Builder { return &Builder{Spec: Spec{CPU: cpu}} }

// HostBridge adds a host bridge with a root bus of its own in domain 0, whose device 00.0 has the
// given numbers. With the zero ID there is no such device.
func (b *Builder) HostBridge(id ID) *Part {
	h := &Part{host: &HostBridgeSpec{}}
	if id != (ID{}) {
		h.below = append(h.below, &Part{Function: FunctionSpec{Kind: Conventional, ID: id, Class: ClassHostBridge}})
	}
	b.hosts = append(b.hosts, h)
	return h
}

// NUMA sets the node of a host bridge, and of all that is below it.
func (p *Part) NUMA(node int) *Part {
	p.host.NUMA = &node
	return p
}

func (p *Part) add(f FunctionSpec) *Part {
	n := &Part{Function: f}
	p.below = append(p.below, n)
	return n
}

// RootPort adds a root port to a host bridge.
func (p *Part) RootPort(acs *ACS) *Part {
	return p.add(FunctionSpec{Kind: RootPort, ID: ID{0x1b36, 0x000c}, Class: ClassPCIBridge, ACS: cloned(acs)})
}

// Switch adds a switch below a port, and returns its downstream ports, which have the given ACS.
func (p *Part) Switch(ports int, acs *ACS) []*Part {
	up := p.add(FunctionSpec{Kind: UpstreamPort, ID: ID{0x104c, 0x8232}, Class: ClassPCIBridge})
	down := make([]*Part, ports)
	for i := range down {
		down[i] = up.add(FunctionSpec{Kind: DownstreamPort, ID: ID{0x104c, 0x8233}, Class: ClassPCIBridge, ACS: cloned(acs)})
	}
	return down
}

// Bridge adds a bridge to conventional PCI.
func (p *Part) Bridge() *Part {
	return p.add(FunctionSpec{Kind: Bridge, ID: ID{0x8086, 0x244e}, Class: ClassPCIBridge})
}

// Endpoint adds a device below a port or on a root bus.
func (p *Part) Endpoint(name string, id ID, class Hex, bars ...BAR) *Part {
	return p.add(FunctionSpec{Kind: Endpoint, ID: id, Class: class, Name: name, BARs: append([]BAR{}, bars...)})
}

// Another adds a further function to a device, with the same numbers and without BARs.
func (p *Part) Another(name string) *Part {
	f := p.Function
	n := &Part{Function: FunctionSpec{Kind: f.Kind, ID: f.ID, Class: f.Class, Name: name}}
	p.beside = append(p.beside, n)
	return n
}

// P2PMem publishes a part of a BAR as peer-to-peer memory.
func (p *Part) P2PMem(bar int, offset, size Hex) *Part {
	p.Function.P2PMem = &P2PMem{BAR: bar, Offset: offset, Size: size, Available: size, Published: true}
	return p
}

// Address returns the address, after Build.
func (p *Part) Address() Address { return p.Function.Address }

// Link adds a vendor's link; bandwidth is in bytes per second, in one direction.
func (b *Builder) Link(kind string, from, to *Part, bandwidth uint64) {
	b.links = append(b.links, partLink{Link{Kind: kind, Bandwidth: bandwidth}, [2]*Part{from, to}})
}

// layout numbers what is below one host bridge.
type layout struct {
	spec *Spec
	numa *int
	bus  int
	mem  uint64 // next free address below 4 GiB
	pref uint64 // next free address above
}

const windowUnit = 1 << 20 // windows of memory begin and end at multiples

// Build makes the topology. Errors: EINVAL if the machine has more buses, devices or memory than
// PCI can number, and those of [New].
func (b *Builder) Build() (*Topology, error) {
	s := b.Spec
	if len(b.hosts) > 8 {
		return nil, refuse("%d host bridges: a builder makes at most 8", len(b.hosts))
	}
	each := 256 / max(len(b.hosts), 1)
	for i, h := range b.hosts {
		h.host.Bus, h.host.LastBus = uint8(i*each), uint8((i+1)*each-1)
		l := layout{
			spec: &s, numa: h.host.NUMA, bus: i * each,
			mem:  0x80000000 + uint64(i)*(0x70000000/8),
			pref: 0x380000000000 + uint64(i)<<40,
		}
		firstMem, firstPref := l.mem, l.pref
		if err := l.place(h.below, i*each); err != nil {
			return nil, err
		}
		switch {
		case l.bus > int(h.host.LastBus):
			return nil, refuse("host bridge %d has more than %d buses", i, each)
		case l.mem-firstMem > 0x70000000/8 || l.pref-firstPref > 1<<40:
			return nil, refuse("host bridge %d has too much memory below it", i)
		}
		h.host.Windows = []Window{
			{First: Hex(firstMem), Last: Hex(firstMem + 0x70000000/8 - 1)},
			{First: Hex(firstPref), Last: Hex(firstPref + 1<<40 - 1), Prefetchable: true},
		}
		s.HostBridges = append(s.HostBridges, *h.host)
	}
	for _, l := range b.links {
		l.Ends = [2]Address{l.ends[0].Address(), l.ends[1].Address()}
		s.Links = append(s.Links, l.Link)
	}
	return New(s)
}

// place numbers the devices of a bus, and what is below them.
func (l *layout) place(parts []*Part, bus int) error {
	if len(parts) > 32 {
		return refuse("%d devices on bus %02x", len(parts), bus)
	}
	for i, p := range parts {
		if len(p.beside) > 7 {
			return refuse("a device with %d functions", 1+len(p.beside))
		}
		for k, f := range append([]*Part{p}, p.beside...) {
			f.Function.Address = Address{Bus: uint8(bus), Device: uint8(i), Function: uint8(k)}
			if f.Function.NUMA == nil {
				f.Function.NUMA = cloned(l.numa)
			}
			if err := l.function(f); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *layout) function(p *Part) error {
	f := &p.Function
	for i := range f.BARs {
		bar := &f.BARs[i]
		next := &l.mem
		if bar.Is64 && bar.Prefetchable {
			next = &l.pref
		}
		if bar.Size == 0 || bits.OnesCount64(uint64(bar.Size)) != 1 || bar.Size > 1<<40 {
			return refuse("a BAR of %v bytes", bar.Size)
		}
		*next = (*next + uint64(bar.Size) - 1) &^ (uint64(bar.Size) - 1)
		bar.Address = Hex(*next)
		*next += uint64(bar.Size)
	}
	if !f.Kind.bridges() {
		l.spec.Functions = append(l.spec.Functions, *f)
		return nil
	}
	l.bus++
	if l.bus > 255 {
		return refuse("more than 256 buses")
	}
	f.Secondary = uint8(l.bus)
	l.align()
	mem, pref := l.mem, l.pref
	if err := l.place(p.below, l.bus); err != nil {
		return err
	}
	l.align()
	f.Subordinate = uint8(l.bus)
	f.Windows = nil
	if l.mem > mem {
		f.Windows = append(f.Windows, Window{First: Hex(mem), Last: Hex(l.mem - 1)})
	}
	if l.pref > pref {
		f.Windows = append(f.Windows, Window{First: Hex(pref), Last: Hex(l.pref - 1), Prefetchable: true})
	}
	l.spec.Functions = append(l.spec.Functions, *f)
	return nil
}

func (l *layout) align() {
	l.mem = (l.mem + windowUnit - 1) &^ (windowUnit - 1)
	l.pref = (l.pref + windowUnit - 1) &^ (windowUnit - 1)
}
