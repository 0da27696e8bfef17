package p2p

import (
	"strings"
	"testing"
)

// bench is a machine with one device at each place that the rules tell apart.
type bench struct {
	*Builder
	hosts                               []*Part
	disk, second, same, other, far      *Part
	root1, root2, upstream, down, down2 *Part
	nested, bridged, bridged2           *Part
	integrated                          *Part
	t                                   *Topology
}

// newBench builds it: host bridge 0 has a root port with a switch (disk with a second function,
// same, and another switch with nested), a root port with other, a bridge with two conventional
// devices, and an integrated device; host bridge 1 has a root port with far.
func newBench(cpu CPU, first, second ID) *bench {
	b := &bench{Builder: NewBuilder(cpu)}
	h0, h1 := b.HostBridge(first), b.HostBridge(second)
	b.hosts = []*Part{h0, h1}
	b.root1 = h0.RootPort(nil)
	ports := b.root1.Switch(3, nil)
	b.upstream, b.down, b.down2 = b.root1.below[0], ports[0], ports[1]
	b.disk = ports[0].Endpoint("nvme0", idNVMe, ClassNVMe, regs(), cmb(64<<20)).P2PMem(2, 0, 64<<20)
	b.second = b.disk.Another("nvme9")
	b.same = ports[1].Endpoint("nvme1", idNVMe, ClassNVMe, regs())
	b.nested = ports[2].Switch(1, nil)[0].Endpoint("nvme2", idNVMe, ClassNVMe, regs())
	b.root2 = h0.RootPort(nil)
	b.other = b.root2.Endpoint("nvme3", idNVMe, ClassNVMe, regs())
	bridge := h0.Bridge()
	b.bridged, b.bridged2 = bridge.add(FunctionSpec{Kind: Conventional, ID: idNVMe}), bridge.add(FunctionSpec{Kind: Conventional, ID: idNVMe})
	b.integrated = h0.Endpoint("", idVerbena, ClassInfiniBand)
	b.far = h1.RootPort(nil).Endpoint("nvme4", idNVMe, ClassNVMe, regs())
	return b
}

func (b *bench) build(t testing.TB) *bench {
	t.Helper()
	b.t = must(b.Build())(t)
	return b
}

var (
	q35      = ID{0x8086, 0x29c0} // on no list
	skylake  = ID{0x8086, 0x2030}
	ivy      = ID{0x8086, 0x3c00} // for the same host bridge only
	dsa      = ID{0x8086, 0x0b25} // since 7.2
	google   = ID{0x1ae0, 0x1234}
	noDevice = ID{}
)

func TestVerdicts(t *testing.T) {
	type part = func(*bench) *Part
	disk := func(b *bench) *Part { return b.disk }
	second := func(b *bench) *Part { return b.second }
	same := func(b *bench) *Part { return b.same }
	nested := func(b *bench) *Part { return b.nested }
	other := func(b *bench) *Part { return b.other }
	far := func(b *bench) *Part { return b.far }
	integrated := func(b *bench) *Part { return b.integrated }
	bridged := func(b *bench) *Part { return b.bridged }
	bridged2 := func(b *bench) *Part { return b.bridged2 }
	acs := func(of part, bits ACSBits) func(*bench) {
		return func(b *bench) { of(b).Function.ACS = &ACS{Capability: bits, Control: bits} }
	}
	root1 := func(b *bench) *Part { return b.root1 }
	upstream := func(b *bench) *Part { return b.upstream }
	down := func(b *bench) *Part { return b.down }
	down2 := func(b *bench) *Part { return b.down2 }

	tests := []struct {
		name          string
		cpu           CPU
		first, second ID
		kernel        Kernel
		change        func(*bench)
		provider      part
		client        part
		want          MapType
		distance      int
		reason        string
	}{
		{"the same function", intelMax, q35, q35, "", nil, disk, disk, BusAddress, 0, "the provider itself"},
		{"functions of one device", intelMax, q35, q35, "", nil, disk, second, BusAddress, 2, "functions of one device, below downstream port 0000:02:00.0"},
		{"behind one switch", intelMax, q35, q35, "", nil, disk, same, BusAddress, 4, "below the common upstream port 0000:01:00.0"},
		{"behind a second switch", intelMax, q35, q35, "", nil, disk, nested, BusAddress, 6, "below the common upstream port 0000:01:00.0"},
		{"on one conventional bus", intelMax, q35, q35, "", nil, bridged, bridged2, BusAddress, 2, "below the common bridge 0000:00:03.0"},
		{"a bridge as the client", intelMax, q35, q35, "", nil, disk, upstream, BusAddress, 2, "is the bridge above the other"},

		{"request redirect at the provider's port", intelMax, q35, q35, "", acs(down, RequestRedirect), disk, same, NotSupported, -1, "ACS redirect at downstream port 0000:02:00.0 (request redirect) sends it up to the host bridge; host bridge pci0000:00, [8086:29c0 at 0000:00:00.0], is not on the kernel's list"},
		{"completion redirect at the client's port", intelMax, q35, q35, "", acs(down2, CompletionRedirect), disk, same, NotSupported, -1, "(completion redirect)"},
		{"egress control at the common bridge", intelMax, q35, q35, "", acs(upstream, EgressControl), disk, same, NotSupported, -1, "upstream port 0000:01:00.0 (egress control)"},
		{"above the common bridge nothing counts", intelMax, q35, q35, "", acs(root1, redirects), disk, same, BusAddress, 4, "no ACS redirect"},
		{"other ACS bits do not count", intelMax, q35, q35, "", acs(down, allACS&^redirects), disk, same, BusAddress, 4, "no ACS redirect"},
		{"redirect to a host bridge that is listed", intelMax, skylake, q35, "", acs(down, RequestRedirect), disk, same, ThroughHostBridge, 4, "on the kernel's list: [8086:2030 at 0000:00:00.0]"},
		{"redirect to a host bridge for the same only", intelMax, ivy, q35, "", acs(down, RequestRedirect), disk, same, ThroughHostBridge, 4, "on the kernel's list"},
		{"redirect beside a CPU that forwards", zen, q35, q35, "", acs(down, RequestRedirect), disk, same, ThroughHostBridge, 4, "AMD family 0x17, forwards"},
		{"a function that redirects its own traffic", intelMax, q35, q35, "", acs(disk, RequestRedirect), disk, disk, NotSupported, -1, "ACS redirect at endpoint 0000:03:00.0"},
		{"redirect between functions of one device", intelMax, q35, q35, "", acs(second, CompletionRedirect), disk, second, NotSupported, -1, "ACS redirect at endpoint 0000:03:00.1"},
		{"the common bridge of functions redirects", intelMax, skylake, q35, "", acs(down, RequestRedirect), disk, second, ThroughHostBridge, 2, "ACS redirect at downstream port"},

		{"another root port", intelMax, q35, q35, "", nil, disk, other, NotSupported, -1, "no common bridge; host bridge pci0000:00, [8086:29c0 at 0000:00:00.0], is not on the kernel's list"},
		{"another root port, listed", intelMax, skylake, q35, "", nil, disk, other, ThroughHostBridge, 6, "through host bridge pci0000:00, on the kernel's list: [8086:2030 at 0000:00:00.0]"},
		{"another root port, the same only", intelMax, ivy, q35, "", nil, disk, other, ThroughHostBridge, 6, "on the kernel's list"},
		{"another root port, a CPU that forwards", zen, q35, q35, "", nil, disk, other, ThroughHostBridge, 6, "AMD family 0x17, forwards"},
		{"an AMD before Zen", CPU{"AuthenticAMD", 0x15, 2}, q35, q35, "", nil, disk, other, NotSupported, -1, "not on the kernel's list"},
		{"Hygon is no AMD", CPU{"HygonGenuine", 0x18, 1}, q35, q35, "", nil, disk, other, NotSupported, -1, "not on the kernel's list"},
		{"an integrated device", intelMax, skylake, q35, "", nil, disk, integrated, ThroughHostBridge, 5, "through host bridge"},
		{"two host bridges, both listed", intelMax, skylake, skylake, "", nil, disk, far, ThroughHostBridge, 6, "through host bridges pci0000:00 and pci0000:80, on the kernel's list: [8086:2030 at 0000:00:00.0] and [8086:2030 at 0000:80:00.0]"},
		{"two host bridges, the client's not listed", intelMax, skylake, q35, "", nil, disk, far, NotSupported, -1, "host bridge pci0000:80, [8086:29c0 at 0000:80:00.0], is not"},
		{"two host bridges, the provider's not listed", intelMax, q35, skylake, "", nil, disk, far, NotSupported, -1, "host bridge pci0000:00, [8086:29c0 at 0000:00:00.0], is not"},
		{"two host bridges, one for the same only", intelMax, skylake, ivy, "", nil, disk, far, NotSupported, -1, "host bridge pci0000:80, [8086:3c00 at 0000:80:00.0], is on the kernel's list for devices below the same host bridge only"},
		{"two host bridges, a CPU that forwards", zen, q35, q35, "", nil, disk, far, ThroughHostBridge, 6, "through host bridges pci0000:00 and pci0000:80: the CPU"},
		{"no device 00.0: the first root port counts", intelMax, skylake, noDevice, "", func(b *bench) { b.hosts[1].below[0].Function.ID = skylake }, disk, far, ThroughHostBridge, 6, "[8086:2030 at 0000:80:00.0]"},
		{"neither 00.0 nor a root port first", intelMax, skylake, noDevice, "", func(b *bench) {
			b.hosts[1].below = append([]*Part{{}}, b.hosts[1].below...)
			b.hosts[1].below[0].Function = FunctionSpec{Kind: Endpoint, ID: skylake}
		}, disk, far, ThroughHostBridge, 6, ""}, // an endpoint at 00.0 counts as well

		{"7.2 has DSA", intelMax, dsa, q35, Linux72, nil, disk, other, ThroughHostBridge, 6, "[8086:0b25 at"},
		{"6.12 does not", intelMax, dsa, q35, Linux612, nil, disk, other, NotSupported, -1, "not on the kernel's list"},
		{"7.2 has all of Google", intelMax, google, google, Linux72, nil, disk, far, ThroughHostBridge, 6, "[1ae0:1234 at"},
		{"6.12 has none", intelMax, google, google, Linux612, nil, disk, far, NotSupported, -1, "not on the kernel's list"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(tt.cpu, tt.first, tt.second)
			b.Spec.Kernel = tt.kernel
			if tt.change != nil {
				tt.change(b)
			}
			b.build(t)
			for range 2 { // computed, and from the cache
				v := b.t.Verdict(tt.provider(b).Address(), tt.client(b).Address())
				if v.Map != tt.want || v.Distance != tt.distance || !strings.Contains(v.Reason, tt.reason) {
					t.Errorf("%v → %v: %v, distance %d, %s; want %v, %d, %s", v.Provider, v.Client, v.Map, v.Distance, v.Reason, tt.want, tt.distance, tt.reason)
				}
				back := b.t.Verdict(tt.client(b).Address(), tt.provider(b).Address())
				if back.Map != v.Map || back.Distance != v.Distance {
					t.Errorf("the other way: %v, distance %d, %s", back.Map, back.Distance, back.Reason)
				}
			}
		})
	}
}

// A root bus may begin with a root port at another place than 00.0. If it begins with anything else
// there, it has no name for the list.
func TestNamelessHostBridge(t *testing.T) {
	s := newBench(intelMax, skylake, noDevice).build(t).t.Spec()
	for i := range s.Functions {
		if f := &s.Functions[i]; f.Address == addr(t, "0000:80:00.0") {
			f.Address.Device, f.ID = 3, skylake
		}
	}
	if v := must(New(s))(t).Verdict(addr(t, "0000:03:00.0"), addr(t, "0000:81:00.0")); v.Map != ThroughHostBridge || !strings.Contains(v.Reason, "[8086:2030 at 0000:80:03.0]") {
		t.Errorf("a root port that is the first device: %+v", v)
	}
	s.Functions = append(s.Functions, FunctionSpec{Address: addr(t, "0000:80:01.0"), Kind: Endpoint, ID: skylake})
	top := must(New(s))(t)
	v := top.Verdict(addr(t, "0000:03:00.0"), addr(t, "0000:81:00.0"))
	if v.Map != NotSupported || !strings.Contains(v.Reason, "host bridge pci0000:80 is not on the kernel's list: its root bus begins neither") {
		t.Errorf("%+v", v)
	}
}

// Virtual functions are below the bridge of the physical one, also on a bus of their own.
func TestVirtualFunctions(t *testing.T) {
	b := newBench(intelMax, q35, q35).build(t)
	s := b.t.Spec()
	physical := b.same.Address()
	vf := physical
	vf.Function = 1
	s.Functions = append(s.Functions, FunctionSpec{Address: vf, Kind: Endpoint, ID: idNVMe, PhysFn: &physical})
	top := must(New(s))(t)
	if v := top.Verdict(physical, vf); v.Map != BusAddress || v.Distance != 2 {
		t.Errorf("to its virtual function: %+v", v)
	}
	if v := top.Verdict(b.disk.Address(), vf); v.Map != BusAddress || v.Distance != 4 {
		t.Errorf("to a virtual function behind the switch: %+v", v)
	}
}

func TestUnknownFunctions(t *testing.T) {
	b := newBench(zen, q35, q35).build(t)
	nobody := addr(t, "0000:ff:1f.7")
	if v := b.t.Verdict(nobody, b.disk.Address()); v.Map != NotSupported || v.Distance != -1 || !strings.Contains(v.Reason, "the provider, 0000:ff:1f.7, is no PCI function") {
		t.Errorf("%+v", v)
	}
	if v := b.t.Verdict(b.disk.Address(), nobody); v.Map != NotSupported || v.Distance != -1 || !strings.Contains(v.Reason, "the client, 0000:ff:1f.7, is no PCI function") {
		t.Errorf("%+v", v)
	}
}

func TestDistanceMany(t *testing.T) {
	b := newBench(intelMax, q35, q35).build(t)
	disk, second, same, other := b.disk.Address(), b.second.Address(), b.same.Address(), b.other.Address()
	for _, tt := range []struct {
		clients []Address
		want    int
		why     string
	}{
		{nil, -1, "no clients"},
		{[]Address{disk}, 0, ""},
		{[]Address{disk, second, same}, 6, ""},
		{[]Address{same, same}, 8, ""},
		{[]Address{same, other}, -1, "not on the kernel's list"},
		{[]Address{same, {Bus: 200}}, -1, "is no PCI function"},
	} {
		if sum, why := b.t.DistanceMany(disk, tt.clients); sum != tt.want || !strings.Contains(why, tt.why) {
			t.Errorf("%v: %d, %q; want %d, %q", tt.clients, sum, why, tt.want, tt.why)
		}
	}
}

func TestFindMany(t *testing.T) {
	b := NewBuilder(intelMax)
	h := b.HostBridge(q35)
	ports := h.RootPort(nil).Switch(4, nil)
	var near []*Part
	for i := range 3 {
		near = append(near, ports[i].Endpoint("", idNVMe, ClassNVMe, cmb(1<<20)).P2PMem(2, 0, 1<<20))
	}
	client := ports[3].Endpoint("", idGPU, ClassGPU)
	alone := h.RootPort(nil).Endpoint("", idNVMe, ClassNVMe, cmb(1<<20)).P2PMem(2, 0, 1<<20)
	near[2].Function.P2PMem.Published = false
	top := must(b.Build())(t)

	chosen := map[Address]int{}
	for seed := range uint64(200) {
		p, sum, ok := top.FindMany([]Address{client.Address()}, seed)
		again, _, _ := top.FindMany([]Address{client.Address()}, seed)
		if !ok || sum != 4 || again != p {
			t.Fatalf("seed %d: %v at %d, %v; again %v", seed, p, sum, ok, again)
		}
		chosen[p]++
	}
	if len(chosen) != 2 || chosen[near[0].Address()] < 50 || chosen[near[1].Address()] < 50 {
		t.Errorf("chosen: %v; want the two published ones about equally", chosen)
	}
	if p, sum, ok := top.FindMany([]Address{client.Address(), near[1].Address()}, 1); !ok || p != near[1].Address() || sum != 4 {
		t.Errorf("a client that is a provider itself: %v at %d, %v", p, sum, ok)
	}
	if p, _, ok := top.FindMany([]Address{client.Address(), alone.Address()}, 1); ok {
		t.Errorf("%v reaches both", p)
	}
	if p, sum, ok := top.FindMany([]Address{alone.Address()}, 1); !ok || p != alone.Address() || sum != 0 {
		t.Errorf("%v at %d, %v", p, sum, ok)
	}
	if _, _, ok := top.FindMany(nil, 1); ok {
		t.Error("a provider for no clients")
	}
}

// Virtual functions that do not fit on the bus of the physical one get the next bus, to which no
// bridge leads.
func TestVirtualFunctionsOnABusOfTheirOwn(t *testing.T) {
	port := FunctionSpec{Address: addr(t, "00:01.0"), Kind: RootPort, Secondary: 1, Subordinate: 2}
	physical := addr(t, "01:00.0")
	s := Spec{CPU: intelMax, HostBridges: []HostBridgeSpec{{}}, Functions: []FunctionSpec{
		port, {Address: physical, Kind: Endpoint}, {Address: addr(t, "02:00.0"), Kind: Endpoint, PhysFn: &physical},
	}}
	top := must(New(s))(t)
	if v := top.Verdict(physical, addr(t, "02:00.0")); v.Map != BusAddress || v.Distance != 2 {
		t.Errorf("%+v", v)
	}
	s.Functions[0].Subordinate = 1
	if _, err := New(s); err == nil || !strings.Contains(err.Error(), "0000:02:00.0: its bus is not one of 0000:00:01.0") {
		t.Errorf("a virtual function outside the port's buses: %v", err)
	}
}
