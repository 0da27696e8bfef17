package p2p

// Configuration space, as the file config of a function in /sys has it: what of it the topology
// needs is read (parseConfig), and written for dumps of machines that are not real (appendConfig).

import (
	"encoding/binary"
	"fmt"
	"slices"
)

const (
	configVisible  = 64   // what a process without privileges can read
	configPCI      = 256  // conventional
	configPCIe     = 4096 // with extended capabilities
	mostCaps       = 48   // capabilities are 4 bytes at least, and stand behind the header
	mostExtCaps    = (configPCIe - configPCI) / 8
	capPCIe        = 0x10
	extACS         = 0x000d
	placePCIe      = 0x40 // where appendConfig puts the capabilities
	placeACS       = 0x100
	typeEndpoint   = 0
	typeRootPort   = 4
	typeUpstream   = 5
	typeDownstream = 6
	typePCIBridge  = 7
)

// config is what configuration space says of a function.
type config struct {
	id          ID
	class       uint32
	bridge      bool // type 1 header
	multi       bool
	bars        [6]uint32
	secondary   uint8
	subordinate uint8
	pcie        bool
	portType    uint8
	acs         *ACS
	hidden      bool
}

// parseConfig reads configuration space, of which at least the first 64 bytes are there. Lists of
// capabilities that run in a circle or out of the space end there, as the kernel has it.
func parseConfig(b []byte) (*config, error) {
	if len(b) < configVisible {
		return nil, fmt.Errorf("%d bytes of configuration space: want at least %d", len(b), configVisible)
	}
	c := &config{
		id:     ID{binary.LittleEndian.Uint16(b), binary.LittleEndian.Uint16(b[2:])},
		class:  binary.LittleEndian.Uint32(b[8:]) >> 8,
		multi:  b[0x0e]&0x80 != 0,
		hidden: len(b) < configPCI,
	}
	if b[0x0e] == 0xff { // the device does not answer
		return &config{hidden: true}, nil
	}
	switch kind := b[0x0e] & 0x7f; kind {
	case 0:
		for i := range c.bars {
			c.bars[i] = binary.LittleEndian.Uint32(b[0x10+4*i:])
		}
	case 1, 2: // PCI and CardBus, which have these registers at the same place
		c.bridge = true
		c.bars[0] = binary.LittleEndian.Uint32(b[0x10:])
		if kind == 1 {
			c.bars[1] = binary.LittleEndian.Uint32(b[0x14:])
		}
		c.secondary, c.subordinate = b[0x19], b[0x1a]
	default:
		return nil, fmt.Errorf("a header of type %d", kind)
	}
	if at := findCap(b, capPCIe); at != 0 {
		c.pcie, c.portType = true, uint8(binary.LittleEndian.Uint16(b[at+2:])>>4&0xf)
	}
	if at := findExtCap(b, extACS); at != 0 && c.pcie {
		c.acs = &ACS{
			Capability: ACSBits(binary.LittleEndian.Uint16(b[at+4:])) & allACS,
			Control:    ACSBits(binary.LittleEndian.Uint16(b[at+6:])) & allACS,
		}
	}
	return c, nil
}

// findCap returns where a capability is of which at least 4 bytes can be read; 0: nowhere.
func findCap(b []byte, id byte) int {
	if binary.LittleEndian.Uint16(b[6:])&0x10 == 0 {
		return 0
	}
	at := int(b[0x34] &^ 3)
	for range mostCaps {
		if at < configVisible || at+4 > min(len(b), configPCI) || b[at] == 0xff {
			return 0
		}
		if b[at] == id {
			return at
		}
		at = int(b[at+1] &^ 3)
	}
	return 0
}

// findExtCap returns where an extended capability is of which at least 8 bytes can be read.
func findExtCap(b []byte, id uint16) int {
	at := configPCI
	for range mostExtCaps {
		if at < configPCI || at+8 > min(len(b), configPCIe) {
			return 0
		}
		header := binary.LittleEndian.Uint32(b[at:])
		if header == 0 {
			return 0
		}
		if uint16(header) == id {
			return at
		}
		at = int(header >> 20 &^ 3)
	}
	return 0
}

// kind returns what the function is. If the capabilities are hidden, that is guessed from the kind
// of the bridge above it.
func (c *config) kind(above Kind) Kind {
	switch {
	case c.bridge && c.pcie:
		switch c.portType {
		case typeRootPort:
			return RootPort
		case typeUpstream:
			return UpstreamPort
		case typeDownstream:
			return DownstreamPort
		}
		return Bridge
	case c.bridge && c.hidden:
		switch above {
		case kindNone:
			return RootPort
		case UpstreamPort:
			return DownstreamPort
		case RootPort, DownstreamPort:
			return UpstreamPort
		}
		return Bridge
	case c.bridge:
		return Bridge
	case c.pcie || c.hidden:
		return Endpoint
	}
	return Conventional
}

// busAddress returns the address that a BAR's register holds.
func (c *config) busAddress(index int, is64, io bool) uint64 {
	if io {
		return uint64(c.bars[index] &^ 3)
	}
	low := uint64(c.bars[index] &^ 0xf)
	if is64 && index+1 < len(c.bars) {
		low |= uint64(c.bars[index+1]) << 32
	}
	return low
}

// portTypes are the numbers in the capability of the kinds that have one.
var portTypes = map[Kind]uint16{
	Endpoint: typeEndpoint, RootPort: typeRootPort, UpstreamPort: typeUpstream, DownstreamPort: typeDownstream,
}

// appendConfig appends the configuration space of a function to b. A virtual function's BARs are 0
// there.
func appendConfig(b []byte, f *FunctionSpec, multi bool) []byte {
	size := configPCIe
	if f.Kind == Conventional || f.Kind == Bridge {
		size = configPCI
	}
	if f.Kind == Bridge && f.ACS != nil {
		size = configPCIe
	}
	start := len(b)
	b = append(slices.Grow(b, size), make([]byte, size)...)
	c := b[start:]
	put16, put32 := binary.LittleEndian.PutUint16, binary.LittleEndian.PutUint32
	put16(c, f.ID.Vendor)
	put16(c[2:], f.ID.Device)
	put16(c[4:], 0x0006) // memory accesses, bus master
	put32(c[8:], uint32(f.Class)<<8)
	if f.Kind.bridges() {
		c[0x0e] = 1
		c[0x18], c[0x19], c[0x1a] = f.Address.Bus, f.Secondary, f.Subordinate
		putWindows(c, f.Windows)
	}
	if multi {
		c[0x0e] |= 0x80
	}
	if f.PhysFn == nil {
		putBARs(c, f.BARs)
	}
	portType, pcie := portTypes[f.Kind]
	if f.Kind == Bridge && f.ACS != nil {
		portType, pcie = typePCIBridge, true
	}
	if pcie {
		put16(c[6:], 0x10) // there are capabilities
		c[0x34] = placePCIe
		c[placePCIe] = capPCIe
		put16(c[placePCIe+2:], portType<<4|2)
	}
	if f.ACS != nil {
		put32(c[placeACS:], 1<<16|extACS)
		put16(c[placeACS+4:], uint16(f.ACS.Capability))
		put16(c[placeACS+6:], uint16(f.ACS.Control))
	}
	if f.Hidden {
		return b[:start+configVisible]
	}
	return b
}

func putBARs(c []byte, bars []BAR) {
	for i := range bars {
		bar := &bars[i]
		at, address := c[0x10+4*bar.Index:], bar.BusAddress()
		low := uint32(address)
		switch {
		case bar.IO:
			low |= 1
		case bar.Is64:
			low |= 4
			binary.LittleEndian.PutUint32(at[4:], uint32(address>>32))
		}
		if bar.Prefetchable {
			low |= 8
		}
		binary.LittleEndian.PutUint32(at, low)
	}
}

// putWindows writes what a bridge's registers can say of its windows: one of ports, one of memory,
// one of prefetchable memory.
func putWindows(c []byte, windows []Window) {
	put16, put32 := binary.LittleEndian.PutUint16, binary.LittleEndian.PutUint32
	c[0x1c], c[0x1d] = 0xf0, 0 // closed: they end before they begin
	put16(c[0x20:], 0xfff0)
	put16(c[0x24:], 0xfff0)
	for _, w := range windows {
		first, last := uint64(w.First), uint64(w.Last)
		switch {
		case w.IO:
			c[0x1c], c[0x1d] = byte(first>>8&0xf0), byte(last>>8&0xf0)
		case w.Prefetchable:
			put16(c[0x24:], uint16(first>>16)&0xfff0|1)
			put16(c[0x26:], uint16(last>>16)&0xfff0|1)
			put32(c[0x28:], uint32(first>>32))
			put32(c[0x2c:], uint32(last>>32))
		default:
			put16(c[0x20:], uint16(first>>16)&0xfff0)
			put16(c[0x22:], uint16(last>>16)&0xfff0)
		}
	}
}
