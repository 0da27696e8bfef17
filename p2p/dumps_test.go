package p2p

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write testdata/server anew")

// server is a machine with two sockets of Intel's Ice Lake. Socket 0 has a switch without ACS
// redirect with two GPUs, an adapter, a disk and an RDMA device of ours; socket 1 has a switch whose
// ports redirect, as they do when the IOMMU separates devices, with the same but ours.
func server() *Builder {
	b := NewBuilder(CPU{Vendor: "GenuineIntel", Family: 6, Model: 106})
	b.Spec.IOMMU = true
	var cards []*Part
	group := 0
	for socket := range 2 {
		h := b.HostBridge(ID{0x8086, 0x09a2}).NUMA(socket)
		var acs *ACS
		if socket == 1 {
			acs = &ACS{Capability: allACS, Control: SourceValidation | RequestRedirect | CompletionRedirect | UpstreamForwarding}
		}
		root := h.RootPort(&ACS{Capability: allACS &^ EgressControl, Control: SourceValidation | RequestRedirect | CompletionRedirect | UpstreamForwarding})
		root.Function.ID, root.Function.Driver = ID{0x8086, 0x347a}, "pcieport"
		ports := root.Switch(5, acs)
		root.below[0].Function.ID = ID{0x1000, 0xc030}
		for _, p := range ports {
			p.Function.ID = ID{0x1000, 0xc030}
		}
		n := "01"[socket : socket+1]
		for i, card := range []string{"card" + "02"[socket:socket+1], "card" + "13"[socket:socket+1]} {
			g := ports[i].Endpoint(card, ID{0x10de, 0x20b5}, ClassGPU, BAR{Index: 0, Size: 16 << 20}, BAR{Index: 1, Size: 64 << 30, Is64: true, Prefetchable: true})
			g.Function.Driver = "nvidia"
			cards = append(cards, g)
		}
		nic := ports[2].Endpoint("mlx5_"+n, ID{0x15b3, 0x101b}, ClassInfiniBand, BAR{Index: 0, Size: 32 << 20, Is64: true, Prefetchable: true})
		nic.Function.Driver = "mlx5_core"
		disk := ports[3].Endpoint("nvme"+n, ID{0x1344, 0x51c3}, ClassNVMe, BAR{Index: 0, Size: 16 << 10, Is64: true}, BAR{Index: 2, Size: 256 << 20, Is64: true, Prefetchable: true})
		disk.P2PMem(2, 0, 256<<20).Function.Driver = "nvme"
		if socket == 0 {
			ports[4].Endpoint("verbena0", idVerbena, ClassInfiniBand, BAR{Index: 2, Size: 64 << 20, Is64: true, Prefetchable: true}).P2PMem(2, 0, 64<<20)
		}
		h.RootPort(nil).Endpoint("eth"+n, ID{0x8086, 0x1592}, ClassEthernet, BAR{Index: 0, Size: 32 << 20, Is64: true, Prefetchable: true}).Function.Driver = "ice"
	}
	for _, l := range [][2]int{{0, 1}, {2, 3}, {0, 2}} {
		b.Link("NVLink", cards[l[0]], cards[l[1]], 300_000_000_000)
	}
	var groups func(p *Part)
	groups = func(p *Part) {
		if p.host == nil {
			g := group
			p.Function.IOMMUGroup = &g
			if p.Function.Kind != UpstreamPort {
				group++
			}
		}
		for _, below := range p.below {
			groups(below)
		}
	}
	for _, h := range b.hosts {
		groups(h)
	}
	return b
}

// The stored dump of the server is what the builder makes.
func TestServerDump(t *testing.T) {
	top := must(server().Build())(t)
	dir := filepath.Join("testdata", "server")
	if *rewrite {
		check(t, os.RemoveAll(dir))
		check(t, top.Dump(dir))
	}
	same(t, "the dump", must(ReadSys(dir))(t), top)
}

// kernelVerdict is what a kernel has said of a provider and a client: whether it lets them.
type kernelVerdict struct {
	Provider  Address `json:"provider"`
	Client    Address `json:"client"`
	Supported bool    `json:"supported"`
}

// The verdicts on the stored dumps of virtual machines are those that their kernels gave.
func TestKernelVerdicts(t *testing.T) {
	dirs := must(filepath.Glob("testdata/*/kernel.json"))(t)
	if len(dirs) < 2 {
		t.Fatalf("%d dumps carry verdicts", len(dirs))
	}
	for _, name := range dirs {
		t.Run(filepath.Base(filepath.Dir(name)), func(t *testing.T) {
			var all []kernelVerdict
			check(t, json.Unmarshal(must(os.ReadFile(name))(t), &all))
			top := must(ReadSys(filepath.Dir(name)))(t)
			if len(all) < 8 {
				t.Errorf("only %d verdicts", len(all))
			}
			for _, k := range all {
				if v := top.Verdict(k.Provider, k.Client); (v.Map != NotSupported) != k.Supported {
					t.Errorf("%v → %v: %v (%s); the kernel: %v", k.Provider, k.Client, v.Map, v.Reason, k.Supported)
				}
			}
		})
	}
}

// What a process without privileges reads has the same tree, and says that ACS is not known.
func TestHidden(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dump")
	whole := must(server().Build())(t)
	check(t, whole.Dump(dir))
	check(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Name() == "config" {
			return os.Truncate(path, configVisible)
		}
		return err
	}))
	part := must(ReadSys(dir))(t)
	a, b := whole.Spec(), part.Spec()
	for i := range a.Functions {
		x, y := a.Functions[i], b.Functions[i]
		if !y.Hidden || y.ACS != nil || x.Kind != y.Kind && x.Kind != Conventional || x.Secondary != y.Secondary {
			t.Errorf("%v %v becomes %v %v, hidden: %v", x.Address, x.Kind, y.Address, y.Kind, y.Hidden)
		}
	}
	v := part.Verdict(addr(t, "0000:83:00.0"), addr(t, "0000:84:00.0"))
	if v.Map != BusAddress || !strings.Contains(v.Reason, "could not be read") {
		t.Errorf("%+v", v)
	}
	if v := whole.Verdict(addr(t, "0000:83:00.0"), addr(t, "0000:84:00.0")); v.Map != ThroughHostBridge {
		t.Errorf("%+v", v)
	}
}

// This machine can be read, whatever it has.
func TestThisMachine(t *testing.T) {
	top := must(ReadSys("/"))(t)
	t.Logf("%d functions", len(top.Functions()))
	for _, a := range top.Functions() {
		if v := top.Verdict(a, a); v.Reason == "" {
			t.Errorf("%+v", v)
		}
	}
	survives(t, top)
}

// Words in a dump that cannot be printed: a name is read with them escaped, as a network interface may have it, and is the
// same in the next dump; others are refused. No error has them as they are.
func TestWordsOfADump(t *testing.T) {
	b := NewBuilder(intelMax)
	b.HostBridge(q35).RootPort(nil).Endpoint("eth0", ID{0x8086, 0x1572}, ClassEthernet).Function.Driver = "i40e"
	top := must(b.Build())(t)
	const device = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
	changed := func(change func(dir string) error) (*Topology, error) {
		t.Helper()
		dir := filepath.Join(t.TempDir(), "dump")
		check(t, top.Dump(dir))
		check(t, change(dir))
		return ReadSys(dir)
	}
	renamed := must(changed(func(dir string) error {
		return os.Rename(filepath.Join(dir, device, "net/eth0"), filepath.Join(dir, device, "net/\x1b[31m\xffé"))
	}))(t)
	if f, _ := renamed.Function(addr(t, "01:00.0")); f.Name != `\x1b[31m\xffé` {
		t.Errorf("the name is %q", f.Name)
	}
	survives(t, renamed)
	relink := func(name, target string) func(string) error {
		return func(dir string) error {
			name := filepath.Join(dir, name)
			return errors.Join(os.Remove(name), os.Symlink(target, name))
		}
	}
	for what, change := range map[string]func(string) error{
		"a driver":    relink(device+"/driver", "../drivers/i40e\x1b"),
		"a directory": relink(sysDevices+"/0000:01:00.0", "../../../devices/\x1b/pci0000:00/0000:01:00.0"),
		"a vendor": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "proc/cpuinfo"), []byte("vendor_id\t: Genuine\x1b[2J\n"), 0o600)
		},
	} {
		if _, err := changed(change); !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), `\x1b`) || strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%s: %q", what, err)
		}
	}
	if _, err := changed(relink(sysDevices+"/0000:01:00.0", "../\x1b")); err == nil || strings.Contains(err.Error(), "\x1b") {
		t.Errorf("a link to another place: %q", err)
	}
	in := `{"cpu":{},"host_bridges":[{}],"functions":[{"address":"00:00.0","kind":"endpoint","id":"0:0","name":"a\u001b"}]}`
	_, err := ParseJSON([]byte(in))
	wantErr(t, "JSON", err, syscall.EINVAL, `the name "a\x1b" has characters that cannot be printed`)
}

// A virtual function has no ids in its configuration space, and zeros in its BARs; a device that does
// not answer has ones everywhere; CardBus has a header of its own. None of them spoils the machine.
func TestOddFunctions(t *testing.T) {
	s := small(t)
	physical := addr(t, "01:00.0")
	s.of(t, "00:01.0").Windows[1].Last += 1 << 20
	s.of(t, "00:02.0").Windows[1].First += 1 << 20
	s.of(t, "00:02.0").Windows[1].Last += 1 << 20
	for _, a := range []string{"02:00.0", "03:00.0"} {
		s.of(t, a).Windows[1].First += 1 << 20
		s.of(t, a).Windows[1].Last += 1 << 20
	}
	s.of(t, "04:00.0").BARs[1].Address += 1 << 20
	s.Functions = append(s.Functions,
		FunctionSpec{Address: addr(t, "01:00.1"), Kind: Endpoint, ID: idNVMe, Class: ClassNVMe, PhysFn: &physical,
			BARs: []BAR{{Index: 0, Address: s.of(t, "01:00.0").BARs[1].Address + 1<<20, Size: 1 << 16, Is64: true, Prefetchable: true}}},
		FunctionSpec{Address: addr(t, "00:05.0"), Kind: Endpoint, ID: idGPU, Class: ClassGPU},
		FunctionSpec{Address: addr(t, "00:06.0"), Kind: Bridge, ID: ID{0x104c, 0xac56}, Class: 0x060700, Secondary: 9, Subordinate: 9},
	)
	top := must(New(s))(t)
	dir := filepath.Join(t.TempDir(), "dump")
	check(t, top.Dump(dir))
	change := func(function string, change func(b []byte)) {
		t.Helper()
		file := filepath.Join(dir, "sys/devices/pci0000:00", function, "config")
		b := must(os.ReadFile(file))(t)
		change(b)
		check(t, os.WriteFile(file, b, 0o600))
	}
	change("0000:00:01.0/0000:01:00.1", func(b []byte) { b[0], b[1], b[2], b[3] = 0xff, 0xff, 0xff, 0xff })
	change("0000:00:05.0", func(b []byte) {
		for i := range b {
			b[i] = 0xff
		}
	})
	change("0000:00:06.0", func(b []byte) { b[0x0e] = 2 })
	got := must(ReadSys(dir))(t).Spec()
	want := top.Spec()
	want.of(t, "00:05.0").Hidden = true
	same(t, "odd functions", must(New(got))(t), must(New(want))(t))
}
