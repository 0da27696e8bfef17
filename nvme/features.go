package nvme

// Features (NVMe Base 1.4, 5.13 and 5.21): settings of a controller. None outlives it, and none is of one namespace.

import "time"

// Feature identifiers.
const (
	FeatureArbitration        uint8 = 0x01
	FeaturePowerManagement    uint8 = 0x02
	FeatureTemperature        uint8 = 0x04
	FeatureErrorRecovery      uint8 = 0x05
	FeatureVolatileWriteCache uint8 = 0x06
	FeatureQueues             uint8 = 0x07
	FeatureCoalescing         uint8 = 0x08
	FeatureVector             uint8 = 0x09
	FeatureWriteAtomicity     uint8 = 0x0a
	FeatureAsyncEvents        uint8 = 0x0b
	FeatureKeepAlive          uint8 = 0x0f
	FeatureHostID             uint8 = 0x81
)

// keepAliveUnits is the granularity of keep-alive timeouts, in units of 100 ms.
const keepAliveUnits = 10

// featureInfo is what is true of a feature.
type featureInfo struct {
	known      bool
	changeable bool
	discovery  bool   // discovery controllers have it, too
	fabrics    bool   // only they have it
	pcie       bool   // only PCI functions have it
	mask       uint32 // the bits of CDW11 that can be set; others must be zero
	initial    uint32
}

var featureTable = [256]featureInfo{
	FeatureArbitration:        {known: true, changeable: true, mask: 0xffffff07},
	FeaturePowerManagement:    {known: true, changeable: true, mask: 0xe0}, // power state 0 is the only one
	FeatureTemperature:        {known: true, changeable: true, mask: 0x003fffff},
	FeatureErrorRecovery:      {known: true, changeable: true, mask: 0xffff},
	FeatureVolatileWriteCache: {known: true, changeable: true, mask: 1, initial: 1},
	FeatureQueues:             {known: true, changeable: true, mask: 0xffffffff},
	FeatureCoalescing:         {known: true, changeable: true, pcie: true, mask: 0xffff},
	FeatureVector:             {known: true, pcie: true},
	FeatureWriteAtomicity:     {known: true, changeable: true, mask: 1},
	FeatureAsyncEvents:        {known: true, changeable: true, discovery: true, mask: 0xffffffff},
	FeatureKeepAlive:          {known: true, changeable: true, discovery: true, fabrics: true, mask: 0xffffffff},
	FeatureHostID:             {known: true, changeable: true, discovery: true, mask: 1},
}

// features is the current settings.
type features struct {
	value      [256]uint32
	queues     int // I/O queues that were granted
	hostID     [16]byte
	thresholds [2]uint16 // of temperature: over and under
}

func (f *features) reset(c *Controller) {
	for id := range featureTable {
		f.value[id] = featureTable[id].initial
	}
	f.queues = c.cfg.IOQueues
	f.hostID = c.cfg.HostID
	f.thresholds = [2]uint16{0xffff, 0}
	f.value[FeatureQueues] = c.queuesValue(c.cfg.IOQueues)
	f.value[FeatureKeepAlive] = uint32(c.cfg.KeepAlive / time.Millisecond)
	if c.fabrics() {
		f.value[FeatureHostID] = 1 // 128 bits
	}
}

// queuesValue is the number of queues as the feature has it: submission and completion queues, less one.
func (c *Controller) queuesValue(n int) uint32 { return uint32(n-1) | uint32(n-1)<<16 }

// feature finds a feature that this controller has.
func (c *Controller) feature(cmd *Command) (*featureInfo, Status) {
	f := &featureTable[uint8(cmd.CDW10)]
	if !f.known || c.sub.cfg.Discovery && !f.discovery || f.fabrics && !c.fabrics() || f.pcie && c.fabrics() {
		return nil, StatusInvalidField | StatusDNR
	}
	return f, StatusSuccess
}

// selectBits is which value get features asks for: CDW10, bits 10:8.
const (
	selectCurrent = iota
	selectDefault
	selectSaved // the default, as nothing is saved
	selectCapabilities
)

func selected(cmd *Command) uint32 { return cmd.CDW10 >> 8 & 7 }

// featureBytes returns the length of the data: only the host identifier has any, of 8 or 16 bytes.
func (c *Controller) featureBytes(cmd *Command) (int, Status) {
	if _, st := c.feature(cmd); st != StatusSuccess {
		return 0, st
	}
	if uint8(cmd.CDW10) != FeatureHostID || cmd.Opcode == AdminGetFeatures && selected(cmd) == selectCapabilities {
		return 0, StatusSuccess
	}
	if cmd.CDW11&1 != 0 {
		return 16, StatusSuccess
	}
	if c.fabrics() { // 8 bytes are for PCIe alone
		return 0, StatusInvalidField | StatusDNR
	}
	return 8, StatusSuccess
}

func (c *Controller) getFeature(cmd *Command, data [][]byte) (uint64, Status) {
	f, st := c.feature(cmd)
	if st != StatusSuccess {
		return 0, st
	}
	n, st := c.featureBytes(cmd)
	if st != StatusSuccess {
		return 0, st
	}
	if !holds(data, n) {
		return 0, StatusDataSGLLength | StatusDNR
	}
	id := uint8(cmd.CDW10)
	value := &features{}
	switch selected(cmd) {
	case selectCapabilities:
		if f.changeable {
			return 1 << 2, StatusSuccess
		}
		return 0, StatusSuccess
	case selectDefault, selectSaved:
		value.reset(c)
	case selectCurrent:
		c.mu.Lock()
		*value = c.features
		c.mu.Unlock()
	default:
		return 0, StatusInvalidField | StatusDNR
	}
	switch id {
	case FeatureHostID:
		(&pieces{rest: data}).scatter(value.hostID[:n])
	case FeatureTemperature:
		which, st := threshold(cmd)
		return uint64(value.thresholds[which]) | uint64(cmd.CDW11&0x3f0000), st
	case FeatureVector:
		return uint64(cmd.CDW11 & 0xffff), StatusSuccess // not coalesced
	}
	return uint64(value.value[id]), StatusSuccess
}

// threshold returns which threshold of the composite temperature is meant. There are no other sensors.
func threshold(cmd *Command) (which int, st Status) {
	sensor, kind := cmd.CDW11>>16&0xf, cmd.CDW11>>20&3
	if sensor != 0 && (sensor != 0xf || cmd.Opcode == AdminGetFeatures) || kind > 1 {
		return 0, StatusInvalidField | StatusDNR
	}
	return int(kind), StatusSuccess
}

func (c *Controller) setFeature(cmd *Command, data [][]byte) (uint64, Status) {
	f, st := c.feature(cmd)
	switch {
	case st != StatusSuccess:
		return 0, st
	case cmd.CDW10>>31 != 0:
		return 0, StatusFeatureNotSaveable | StatusDNR
	case !f.changeable:
		return 0, StatusFeatureNotChangeable | StatusDNR
	case cmd.NSID != 0 && cmd.NSID != NSIDAll:
		return 0, StatusFeatureNotPerNamespace | StatusDNR
	case cmd.CDW11&^f.mask != 0:
		return 0, StatusInvalidField | StatusDNR
	}
	n, st := c.featureBytes(cmd)
	if st != StatusSuccess {
		return 0, st
	}
	if !holds(data, n) {
		return 0, StatusDataSGLLength | StatusDNR
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.setFeatureLocked(uint8(cmd.CDW10), n, cmd, data)
}

func (c *Controller) setFeatureLocked(id uint8, n int, cmd *Command, data [][]byte) (uint64, Status) {
	switch id {
	case FeatureQueues:
		if cmd.CDW11&0xffff == 0xffff || cmd.CDW11>>16 == 0xffff {
			return 0, StatusInvalidField | StatusDNR
		}
		// One number for both kinds: a pair of queues for each.
		want := max(int(cmd.CDW11&0xffff), int(cmd.CDW11>>16)) + 1
		c.features.queues = min(want, c.cfg.IOQueues)
		c.features.value[id] = c.queuesValue(c.features.queues)
		return uint64(c.features.value[id]), StatusSuccess
	case FeatureTemperature:
		which, st := threshold(cmd)
		if st == StatusSuccess {
			c.features.thresholds[which] = uint16(cmd.CDW11)
		}
		return 0, st
	case FeatureHostID:
		if c.fabrics() { // connect has said it
			return 0, StatusCommandSequence | StatusDNR
		}
		c.features.hostID = [16]byte{}
		(&pieces{rest: data}).gather(c.features.hostID[:n])
	case FeatureKeepAlive:
		const unit = keepAliveUnits * 100
		if cmd.CDW11 > 1<<32-unit {
			return 0, StatusKeepAliveInvalid | StatusDNR
		}
		c.features.value[id] = (cmd.CDW11 + unit - 1) / unit * unit // rounded up to the granularity
		return 0, StatusSuccess
	case FeatureVolatileWriteCache:
		c.writeThrough.Store(cmd.CDW11&1 == 0)
	}
	c.features.value[id] = cmd.CDW11
	return 0, StatusSuccess
}
