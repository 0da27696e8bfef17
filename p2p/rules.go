package p2p

// The host bridges that the kernel trusts with peer-to-peer traffic. drivers/pci/p2pdma.c has the
// lists; they are facts about hardware, by the numbers of vendors and devices.

const (
	vendorIntel  = 0x8086
	vendorGoogle = 0x1ae0
	anyDevice    = -1
)

// entry is what a list says of a host bridge.
type entry uint8

const (
	notListed entry = iota
	sameOnly        // between devices below the same host bridge
	listed
	nameless // there is no device that stands for the host bridge
)

// hostList is the list of one version of the kernel: for each vendor the devices, in the kernel's
// order; the first that fits decides.
type hostList []struct {
	vendor uint16
	device int
	entry  entry
}

func (l hostList) lookup(f *FunctionSpec) entry {
	if f == nil {
		return nameless
	}
	for _, e := range l {
		if e.vendor == f.ID.Vendor && (e.device == anyDevice || e.device == int(f.ID.Device)) {
			return e.entry
		}
	}
	return notListed
}

var linux612 = hostList{
	{vendorIntel, 0x3c00, sameOnly}, // Xeon E5
	{vendorIntel, 0x3c01, sameOnly},
	{vendorIntel, 0x2f00, sameOnly}, // Xeon E5 v3, E7 v3
	{vendorIntel, 0x2f01, sameOnly},
	{vendorIntel, 0x2030, listed}, // Skylake server and what came after
	{vendorIntel, 0x2031, listed},
	{vendorIntel, 0x2032, listed},
	{vendorIntel, 0x2033, listed},
	{vendorIntel, 0x2020, listed},
	{vendorIntel, 0x09a2, listed},
}

// since612 is what 7.2 has besides: accelerators that are the first device of their root bus.
var since612 = hostList{
	{vendorIntel, 0x0b25, listed}, // DSA of Sapphire Rapids
	{vendorIntel, 0x0cfe, listed}, // IAX of Sapphire Rapids
	{vendorIntel, 0x11fb, listed}, // DSA of Granite Rapids D
	{vendorIntel, 0x1212, listed}, // DSA of Diamond Rapids
	{vendorIntel, 0x1216, listed}, // IAA of Diamond Rapids
	{vendorIntel, 0x4940, listed}, // QAT 4xxx
	{vendorIntel, 0x4942, listed}, // QAT 401xx
	{vendorIntel, 0x4944, listed}, // QAT 402xx
	{vendorIntel, 0x4946, listed}, // QAT 420xx
	{vendorIntel, 0x4948, listed}, // QAT 6xxx
	{vendorGoogle, anyDevice, listed},
}

var hostLists = map[Kernel]hostList{
	Linux612: linux612,
	Linux72:  append(linux612[:len(linux612):len(linux612)], since612...),
}

// forwards reports whether the kernel trusts every host bridge beside this CPU: AMD's since Zen.
func (c *CPU) forwards() bool { return c.Vendor == "AuthenticAMD" && c.Family >= 0x17 }
