package p2p

import (
	"fmt"
	"slices"
)

// Kind is what a PCI function is to the topology.
type Kind uint8

const (
	kindNone       Kind = iota
	Endpoint            // a PCIe device, also one that is integrated into the root complex
	RootPort            // a PCIe port of the root complex
	UpstreamPort        // the upper port of a switch
	DownstreamPort      // a lower port of a switch
	Bridge              // to or from conventional PCI
	Conventional        // a device without PCIe's capability
)

var kindNames = [...]string{"", "endpoint", "root port", "upstream port", "downstream port", "bridge", "conventional"}

// String names the kind.
func (k Kind) String() string {
	if int(k) < len(kindNames) && k != kindNone {
		return kindNames[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// bridges reports whether functions of this kind have a bus below them.
func (k Kind) bridges() bool { return k >= RootPort && k <= Bridge }

// MarshalText writes the name, for JSON.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads it.
func (k *Kind) UnmarshalText(b []byte) error {
	i := slices.Index(kindNames[:], string(b))
	if i <= 0 {
		return fmt.Errorf("kind %q: want one of %q", b, kindNames[1:])
	}
	*k = Kind(i)
	return nil
}

// Kernel is the version of Linux whose rules hold.
type Kernel string

const (
	Linux612 Kernel = "6.12"
	Linux72  Kernel = "7.2"
)

// Spec is a machine as plain data. It is what a JSON file has.
type Spec struct {
	// Kernel is whose rules hold; empty: Linux72.
	Kernel Kernel `json:"kernel,omitempty"`

	CPU CPU `json:"cpu"`

	// IOMMU: DMA addresses of devices are translated.
	IOMMU bool `json:"iommu,omitempty"`

	HostBridges []HostBridgeSpec `json:"host_bridges"`

	// Functions are the PCI functions of all buses, in any order. A function sits below the
	// bridge whose Secondary is its bus, or on a host bridge's root bus.
	Functions []FunctionSpec `json:"functions"`

	// Links are the vendors' own links between devices, beside PCI.
	Links []Link `json:"links,omitempty"`
}

// CPU is what the rules look at in the first CPU.
type CPU struct {
	Vendor string `json:"vendor,omitempty"` // as in /proc/cpuinfo: "AuthenticAMD"
	Family int    `json:"family,omitempty"`
	Model  int    `json:"model,omitempty"`
}

// HostBridgeSpec is a host bridge with its root bus.
type HostBridgeSpec struct {
	Domain uint32 `json:"domain"`
	Bus    uint8  `json:"bus"`

	// LastBus is the highest bus below the host bridge; 0: up to the next host bridge of the domain.
	LastBus uint8 `json:"last_bus,omitempty"`

	// NUMA is the node that it belongs to; nil: none.
	NUMA *int `json:"numa,omitempty"`

	// Windows are the addresses that it forwards; none: they are not known, and not checked.
	Windows []Window `json:"windows,omitempty"`
}

// String returns the name that /sys has for it.
func (h HostBridgeSpec) String() string { return fmt.Sprintf("pci%04x:%02x", h.Domain, h.Bus) }

// FunctionSpec is a PCI function.
type FunctionSpec struct {
	Address Address `json:"address"`
	Kind    Kind    `json:"kind"`
	ID      ID      `json:"id"`
	Class   Hex     `json:"class,omitempty"` // 24 bits, as in /sys
	Name    string  `json:"name,omitempty"`  // for people: "nvme0"
	Driver  string  `json:"driver,omitempty"`

	// Secondary and Subordinate are the buses below a bridge, first and last; 0: it has none yet.
	Secondary   uint8 `json:"secondary,omitempty"`
	Subordinate uint8 `json:"subordinate,omitempty"`

	// Windows are the addresses that a bridge forwards downwards.
	Windows []Window `json:"windows,omitempty"`

	// ACS is the access control that it has; nil: none.
	ACS *ACS `json:"acs,omitempty"`

	// Hidden: the configuration space could not be read beyond its first 64 bytes, as it is for
	// processes without privileges. Then Kind is guessed, and ACS is not known.
	Hidden bool `json:"hidden,omitempty"`

	BARs []BAR `json:"bars,omitempty"`

	// NonMappableBARs: the CPU cannot map the BARs, as on some devices of s390.
	NonMappableBARs bool `json:"non_mappable_bars,omitempty"`

	// P2PMem is peer-to-peer memory that its driver has added; nil: none.
	P2PMem *P2PMem `json:"p2pmem,omitempty"`

	// PhysFn is the physical function of a virtual one; nil: it is none.
	PhysFn *Address `json:"physfn,omitempty"`

	NUMA       *int `json:"numa,omitempty"`        // nil: no node
	IOMMUGroup *int `json:"iommu_group,omitempty"` // nil: no group
}

// Title returns the address, and the name if there is one.
func (f *FunctionSpec) Title() string {
	if f.Name == "" {
		return f.Address.String()
	}
	return f.Address.String() + " " + f.Name
}

// ACS is the access control of a port: capability and control bits.
type ACS struct {
	Capability ACSBits `json:"capability"`
	Control    ACSBits `json:"control"`
}

// ACSBits are bits of the ACS registers (PCIe 7.7.8).
type ACSBits uint16

const (
	SourceValidation ACSBits = 1 << iota
	TranslationBlocking
	RequestRedirect
	CompletionRedirect
	UpstreamForwarding
	EgressControl
	DirectTranslated

	allACS ACSBits = 1<<iota - 1
)

// redirects are the bits that send peer-to-peer traffic upwards.
const redirects = RequestRedirect | CompletionRedirect | EgressControl

var acsNames = [...]string{
	"source validation", "translation blocking", "request redirect", "completion redirect",
	"upstream forwarding", "egress control", "direct translated",
}

// Names returns the names of the bits.
func (b ACSBits) Names() []string {
	names := []string{}
	for i, name := range acsNames {
		if b&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// BAR is a base address register.
type BAR struct {
	Index   int  `json:"index"` // 0 to 5
	Address Hex  `json:"address"`
	Size    Hex  `json:"size"`
	IO      bool `json:"io,omitempty"` // ports, not memory

	Prefetchable bool `json:"prefetchable,omitempty"`
	Is64         bool `json:"64bit,omitempty"` // it takes the next index, too

	// Bus is the address on the bus; nil: Address, which is the CPU's.
	Bus *Hex `json:"bus,omitempty"`
}

// BusAddress returns the address of the first byte on the bus.
func (b *BAR) BusAddress() uint64 {
	if b.Bus != nil {
		return uint64(*b.Bus)
	}
	return uint64(b.Address)
}

// end returns the last address. The size is not 0.
func (b *BAR) end() uint64 { return uint64(b.Address) + uint64(b.Size) - 1 }

// Window is a range of addresses that a bridge forwards.
type Window struct {
	First        Hex  `json:"first"`
	Last         Hex  `json:"last"`
	IO           bool `json:"io,omitempty"`
	Prefetchable bool `json:"prefetchable,omitempty"`
}

// holds reports whether a range of the same kind lies inside.
func (w *Window) holds(first, last uint64, io bool) bool {
	return w.IO == io && uint64(w.First) <= first && last <= uint64(w.Last)
}

// P2PMem is peer-to-peer memory of a function: a part of a BAR.
type P2PMem struct {
	BAR    int `json:"bar"`
	Offset Hex `json:"offset,omitempty"`
	Size   Hex `json:"size"`

	// Available is how many bytes are free; it may be less than Size from the start, since a
	// driver may keep its queues there.
	Available Hex `json:"available"`

	// Published: orchestrators may choose it.
	Published bool `json:"published,omitempty"`
}

// Link is a link between two devices that is not PCI.
type Link struct {
	Kind string     `json:"kind"` // "NVLink", "XGMI"
	Ends [2]Address `json:"ends"`
	// Bandwidth is in bytes per second, in one direction.
	Bandwidth uint64 `json:"bandwidth"`
}
