package p2p

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// small is a machine that is all right: a root port 00:01.0 with a disk, and a switch behind root
// port 00:02.0 with one.
func small(t testing.TB) Spec {
	t.Helper()
	b := NewBuilder(intelMax)
	h := b.HostBridge(q35)
	h.RootPort(nil).Endpoint("nvme0", idNVMe, ClassNVMe, regs(), cmb(1<<20)).P2PMem(2, 0, 1<<20)
	h.RootPort(nil).Switch(1, nil)[0].Endpoint("nvme1", idNVMe, ClassNVMe, regs(), cmb(1<<20))
	return must(b.Build())(t).Spec()
}

// of returns the function at an address.
func (s *Spec) of(t testing.TB, a string) *FunctionSpec {
	t.Helper()
	for i := range s.Functions {
		if s.Functions[i].Address == addr(t, a) {
			return &s.Functions[i]
		}
	}
	t.Fatalf("there is no %s", a)
	return nil
}

func TestRefused(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Spec)
		want   string
	}{
		{"kernel", func(s *Spec) { s.Kernel = "2.4" }, `kernel "2.4"`},
		{"no host bridge", func(s *Spec) { s.HostBridges = nil }, "no bridge leads to bus 00"},
		{"a host bridge twice", func(s *Spec) { s.HostBridges = append(s.HostBridges, HostBridgeSpec{}) }, "two host bridges have the root bus pci0000:00"},
		{"host bridges that share buses", func(s *Spec) { s.HostBridges = append(s.HostBridges, HostBridgeSpec{Bus: 0x80}) }, "host bridges pci0000:00 and pci0000:80 have buses in common"},
		{"a last bus before the first", func(s *Spec) { s.HostBridges = append(s.HostBridges, HostBridgeSpec{Domain: 1, Bus: 9, LastBus: 8}) }, "its last bus, 08, is before its first"},
		{"buses outside the host bridge", func(s *Spec) { s.HostBridges[0].LastBus = 2 }, "leave those of pci0000:00"},
		{"a function twice", func(s *Spec) { s.Functions = append(s.Functions, s.Functions[0]) }, "two functions have the address 0000:00:00.0"},
		{"no kind", func(s *Spec) { s.of(t, "01:00.0").Kind = kindNone }, "it is of no kind"},
		{"a device number that there is not", func(s *Spec) { s.of(t, "01:00.0").Address.Device = 32 }, "a device is 00 to 1f"},
		{"a bus below an endpoint", func(s *Spec) { s.of(t, "01:00.0").Secondary, s.of(t, "01:00.0").Subordinate = 9, 9 }, "has no bus below it"},
		{"buses that end before they begin", func(s *Spec) { s.of(t, "00:02.0").Subordinate = 1 }, "the buses below it are 02 to 01"},
		{"a circle", func(s *Spec) { s.of(t, "02:00.0").Secondary = 2 }, "0000:02:00.0: the bus below it is 02: the buses would run in a circle"},
		{"a circle of two", func(s *Spec) { s.of(t, "03:00.0").Secondary = 2; s.of(t, "02:00.0").Secondary = 3 }, "run in a circle"},
		{"two ways to a bus", func(s *Spec) { s.of(t, "00:02.0").Secondary = 1 }, "bus 01 is below 0000:00:01.0 and below 0000:00:02.0"},
		{"a bridge to a root bus", func(s *Spec) {
			s.HostBridges[0].LastBus = 0x0f
			s.HostBridges = append(s.HostBridges, HostBridgeSpec{Bus: 0x10})
			s.of(t, "00:01.0").Secondary, s.of(t, "00:01.0").Subordinate = 0x10, 0x10
		}, "is the root bus of host bridge pci0000:10"},
		{"no way to a bus", func(s *Spec) { s.of(t, "01:00.0").Address.Bus = 9 }, "no bridge leads to bus 09"},
		{"buses of neighbours that overlap", func(s *Spec) { s.of(t, "00:01.0").Subordinate = 2 }, "the buses of 0000:00:01.0, 0x1-0x2, and of 0000:00:02.0, 0x2-0x4, overlap"},
		{"buses that leave the bridge above", func(s *Spec) { s.of(t, "02:00.0").Subordinate = 7 }, "leave those of 0000:00:02.0"},
		{"a root port below a port", func(s *Spec) { s.of(t, "02:00.0").Kind = RootPort }, "a function of kind root port is not below 0000:00:02.0, of kind root port"},
		{"an upstream port on a root bus", func(s *Spec) { s.of(t, "00:01.0").Kind = UpstreamPort }, "upstream port is not on a root bus"},
		{"a downstream port below a root port", func(s *Spec) { s.of(t, "02:00.0").Kind = DownstreamPort }, "downstream port is not below 0000:00:02.0"},
		{"ACS bits that there are not", func(s *Spec) { s.of(t, "00:01.0").ACS = &ACS{Control: 1 << 9} }, "ACS has no bits 0x200"},
		{"ACS of a conventional device", func(s *Spec) { s.of(t, "00:00.0").ACS = redirect }, "a conventional device has no ACS"},
		{"a physical function that is none", func(s *Spec) { s.of(t, "01:00.0").PhysFn = &Address{Bus: 77} }, "its physical function, 0000:4d:00.0, is none"},
		{"a bridge as a virtual function", func(s *Spec) { s.of(t, "00:01.0").PhysFn = &Address{} }, "a bridge is no virtual function"},
		{"class", func(s *Spec) { s.of(t, "01:00.0").Class = 1 << 24 }, "more than 24 bits"},

		{"BAR 6", func(s *Spec) { s.of(t, "01:00.0").BARs[1].Index = 6 }, "there is no BAR 6"},
		{"64 bits in BAR 5", func(s *Spec) { s.of(t, "01:00.0").BARs[1].Index = 5 }, "there is no BAR 5"},
		{"a bridge's BAR 2", func(s *Spec) { s.of(t, "00:01.0").BARs = []BAR{{Index: 2, Size: 4096}} }, "there is no BAR 2"},
		{"a BAR in the half of another", func(s *Spec) { s.of(t, "01:00.0").BARs[1].Index = 1 }, "BAR 1 is taken by the one before it"},
		{"no power of two", func(s *Spec) { s.of(t, "01:00.0").BARs[0].Size = 12 << 10 }, "a size of 0x3000"},
		{"no size", func(s *Spec) { s.of(t, "01:00.0").BARs[0].Size = 0 }, "a size of 0x0"},
		{"not aligned", func(s *Spec) { s.of(t, "01:00.0").BARs[1].Address += 4096 }, "is no multiple of its size"},
		{"beyond 32 bits", func(s *Spec) {
			s.of(t, "01:00.0").BARs[0].Is64 = false
			s.of(t, "01:00.0").BARs[0].Address = 1 << 40
		}, "do not fit into 32 bits"},
		{"larger than 32 bits", func(s *Spec) {
			s.of(t, "01:00.0").BARs[0] = BAR{Size: 1 << 40}
		}, "do not fit into 32 bits"},
		{"not aligned on the bus", func(s *Spec) {
			on := Hex(4096)
			s.of(t, "01:00.0").BARs[1].Bus = &on
		}, "on the bus 0x1000, is no multiple"},
		{"five windows", func(s *Spec) {
			s.of(t, "00:01.0").Windows = make([]Window, 5)
		}, "at most 4 windows"},
		{"prefetchable ports", func(s *Spec) { s.of(t, "01:00.0").BARs[1].IO = true }, "ports are neither"},
		{"a BAR outside the port's window", func(s *Spec) { s.of(t, "01:00.0").BARs[1].Address += 1 << 20 }, "0000:01:00.0: BAR 2, 0x380000100000-0x3800001fffff, is outside the windows of 0000:00:01.0"},
		{"ports outside the windows", func(s *Spec) { s.of(t, "01:00.0").BARs[0] = BAR{Address: 0x1000, Size: 0x100, IO: true} }, "is outside the windows of 0000:00:01.0"},
		{"a window outside the one above", func(s *Spec) { s.of(t, "02:00.0").Windows[0].Last += 1 << 20 }, "0000:02:00.0: its window, 0x80100000-0x802fffff, is outside the windows of 0000:00:02.0"},
		{"a window that ends before it begins", func(s *Spec) { s.of(t, "02:00.0").Windows[0].Last = 0 }, "ends before it begins"},
		{"windows that overlap", func(s *Spec) { s.of(t, "00:02.0").Windows[0].First -= 1 << 20 }, "the memory windows of 0000:00:01.0"},
		{"BARs that overlap", func(s *Spec) {
			s.of(t, "01:00.0").BARs = append(s.of(t, "01:00.0").BARs, BAR{Index: 4, Size: 4096, Address: s.of(t, "01:00.0").BARs[1].Address + 4096, Is64: true})
		}, "BAR 2 of 0000:01:00.0, 0x380000000000-0x3800000fffff, and BAR 4 of 0000:01:00.0"},
		{"BARs of two devices that overlap", func(s *Spec) {
			s.HostBridges[0].Windows = nil
			s.of(t, "00:01.0").Windows = append(s.of(t, "00:01.0").Windows, Window{First: 0x500000000000, Last: 0x5000ffffffff})
			s.of(t, "01:00.0").BARs[1].Address = 0x500000000000
			s.Functions = append(s.Functions, FunctionSpec{Address: addr(t, "00:09.0"), Kind: Endpoint, BARs: []BAR{{Size: 4096, Address: 0x500000001000, Is64: true}}})
		}, "BAR 2 of 0000:01:00.0, 0x500000000000-0x5000000fffff, and BAR 0 of 0000:00:09.0"},

		{"peer memory larger than its BAR", func(s *Spec) { s.of(t, "01:00.0").P2PMem.Size = 2 << 20 }, "peer-to-peer memory of 0x200000 bytes at 0x0 is not inside BAR 2, of 0x100000"},
		{"peer memory that passes its BAR's end", func(s *Spec) { s.of(t, "01:00.0").P2PMem.Offset = 4096 }, "is not inside BAR 2"},
		{"peer memory whose end wraps", func(s *Spec) {
			s.of(t, "01:00.0").P2PMem.Offset, s.of(t, "01:00.0").P2PMem.Size = 4096, ^Hex(0)
		}, "is not inside BAR 2"},
		{"peer memory in no BAR", func(s *Spec) { s.of(t, "01:00.0").P2PMem.BAR = 4 }, "in BAR 4, which it does not have"},
		{"peer memory in ports", func(s *Spec) {
			s.of(t, "01:00.0").BARs[1] = BAR{Index: 2, Size: 16, IO: true}
		}, "in BAR 2, which has ports"},
		{"more free than there is", func(s *Spec) { s.of(t, "01:00.0").P2PMem.Available = 2 << 20 }, "0x200000 bytes of 0x100000"},

		{"a link to nowhere", func(s *Spec) { s.Links = []Link{{"NVLink", [2]Address{addr(t, "01:00.0"), {Bus: 99}}, 1}} }, "there is no function 0000:63:00.0"},
		{"a link to itself", func(s *Spec) {
			s.Links = []Link{{"NVLink", [2]Address{addr(t, "01:00.0"), addr(t, "01:00.0")}, 1}}
		}, "to itself"},
		{"a link without bandwidth", func(s *Spec) {
			s.Links = []Link{{"NVLink", [2]Address{addr(t, "01:00.0"), addr(t, "04:00.0")}, 0}}
		}, "no bandwidth"},

		{"a name that moves the cursor", func(s *Spec) { s.of(t, "01:00.0").Name = "nvme\x1b[2J" }, `0000:01:00.0: the name "nvme\x1b[2J" has characters that cannot be printed`},
		{"a name of two lines", func(s *Spec) { s.of(t, "01:00.0").Name = "nvme\n0" }, `"nvme\n0" has characters`},
		{"a name that is no UTF-8", func(s *Spec) { s.of(t, "01:00.0").Name = "nvme\xff" }, `"nvme\xff" has characters`},
		{"a name that turns the text around", func(s *Spec) { s.of(t, "01:00.0").Name = "nvme\u202e0" }, `"nvme\u202e0" has characters`},
		{"a name no XML may have", func(s *Spec) { s.of(t, "01:00.0").Name = "nvme\uffff" }, `"nvme\uffff" has characters`},
		{"a name with a slash", func(s *Spec) { s.of(t, "01:00.0").Name = "../nvme0" }, `the name "../nvme0" cannot be the name of a file`},
		{"a name of dots", func(s *Spec) { s.of(t, "01:00.0").Name = ".." }, `the name ".." cannot be the name of a file`},
		{"a driver with a slash", func(s *Spec) { s.of(t, "01:00.0").Driver = "a/b" }, `the driver "a/b" cannot be the name of a file`},
		{"a driver with a NUL", func(s *Spec) { s.of(t, "01:00.0").Driver = "a\x00" }, `the driver "a\x00" has characters`},
		{"a vendor of two lines", func(s *Spec) { s.CPU.Vendor = "Intel\nmodel: 7" }, `the vendor "Intel\nmodel: 7" has characters`},
		{"a vendor with a slash", func(s *Spec) { s.CPU.Vendor = "a/b" }, `the vendor "a/b" has a slash`},
		{"a vendor with a space behind it", func(s *Spec) { s.CPU.Vendor = "Intel " }, `the vendor "Intel " has a slash, or spaces`},
		{"a kind of link with a bell", func(s *Spec) {
			s.Links = []Link{{"NV\aLink", [2]Address{addr(t, "01:00.0"), addr(t, "04:00.0")}, 1}}
		}, `the kind "NV\aLink" has characters`},
	}
	if err := func() error { s := small(t); return s.Check() }(); err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := small(t)
			tt.change(&s)
			err := s.Check()
			if !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v; want EINVAL and %q", err, tt.want)
			}
		})
	}
}

func TestParseAddress(t *testing.T) {
	for _, s := range []string{"", "0000:00:00", "0000:00:20.0", "0000:00:00.8", "000:00:00.0", "0000:0:00.0", "g000:00:00.0", "000000000:00:00.0", "00:00.0.", "0000:00:0g.0", "0000:+1:00.0"} {
		if a, err := ParseAddress(s); err == nil {
			t.Errorf("%q is %v", s, a)
		}
	}
	for in, want := range map[string]string{"01:1f.7": "0000:01:1f.7", "0000:AB:00.0": "0000:ab:00.0", "10000:e1:00.0": "10000:e1:00.0"} {
		if got := addr(t, in).String(); got != want {
			t.Errorf("%q is %s", in, got)
		}
	}
}

func TestBadJSON(t *testing.T) {
	for in, want := range map[string]string{
		``:                                      "EOF",
		`[]`:                                    "cannot unmarshal",
		`{"frob": 1}`:                           "unknown field",
		`{} {}`:                                 "something follows",
		`{"functions":[{"address":"1"}]}`:       "PCI address",
		`{"functions":[{"id":"1"}]}`:            "PCI ids",
		`{"functions":[{"kind":"tree"}]}`:       "want one of",
		`{"functions":[{"class":"red"}]}`:       "want 64 bits",
		`{"host_bridges":[{"bus":256}]}`:        "cannot unmarshal",
		`{"functions":[{"address":"00:00.0"}]}`: "of no kind",
	} {
		if _, err := ParseJSON([]byte(in)); !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %s", in, err, want)
		}
	}
}

// What /sys cannot say is an error that names the function.
func TestBadDumps(t *testing.T) {
	const disk = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
	tests := []struct {
		name   string
		change func(dir string) error
		want   string
	}{
		{"no configuration space", func(d string) error { return os.Remove(d + "/" + disk + "/config") }, "0000:01:00.0: 0 bytes of configuration space"},
		{"too short", func(d string) error { return os.Truncate(d+"/"+disk+"/config", 63) }, "63 bytes of configuration space"},
		{"a file that is a link out of the dump", func(d string) error {
			name := d + "/" + disk + "/config"
			if err := os.Remove(name); err != nil {
				return err
			}
			return os.Symlink("/etc/passwd", name)
		}, "is no plain file"},
		{"a CMB larger than its BAR", func(d string) error { return os.WriteFile(d+"/"+disk+"/p2pmem/size", []byte("2097152\n"), 0o600) }, "0000:01:00.0: peer-to-peer memory of 0x200000 bytes"},
		{"a CMB in no BAR", func(d string) error { return os.WriteFile(d+"/"+disk+"/nvme/nvme0/cmbloc", []byte("5\n"), 0o600) }, "in BAR 5"},
		{"no number", func(d string) error { return os.WriteFile(d+"/"+disk+"/class", []byte("red\n"), 0o600) }, "class: strconv"},
		{"resources", func(d string) error { return os.WriteFile(d+"/"+disk+"/resource", []byte("a b c\n"), 0o600) }, "resource: line 1"},
		{"a link out of the tree", func(d string) error {
			return os.Symlink("../../../../etc", d+"/sys/bus/pci/devices/0000:07:00.0")
		}, "the link of 0000:07:00.0 leads to"},
		{"a name that is no address", func(d string) error { return os.Symlink("x", d+"/sys/bus/pci/devices/frob") }, `PCI address "frob"`},
		{"an empty directory", func(d string) error { return os.RemoveAll(d + "/sys") }, "there is no directory sys"},
	}
	top := must(New(small(t)))(t)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "dump")
			check(t, top.Dump(dir))
			check(t, tt.change(dir))
			if _, err := ReadSys(dir); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v; want %q", err, tt.want)
			}
		})
	}
	dir := t.TempDir()
	check(t, top.Dump(dir))
	if err := top.Dump(dir); err == nil || !strings.Contains(err.Error(), "is not empty") {
		t.Errorf("a dump over another: %v", err)
	}
}
