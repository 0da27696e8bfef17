package nvme

// Identify (NVMe Base 1.4, 5.15): 4096 bytes about a controller, a namespace, or which there are. Offsets are those of
// the specification's figures.

import (
	"slices"
)

// What identify returns: CDW10, bits 7:0.
const (
	CNSNamespace            uint8 = 0x00
	CNSController           uint8 = 0x01
	CNSActiveNamespaces     uint8 = 0x02
	CNSDescriptors          uint8 = 0x03
	CNSCommandSetNamespace  uint8 = 0x05
	CNSCommandSetController uint8 = 0x06
	CNSCommandSetActive     uint8 = 0x07
	CNSIndependentNamespace uint8 = 0x08
	CNSCommandSets          uint8 = 0x1c
)

const (
	identifySize            = 4096
	controllerTypeIO        = 1
	controllerTypeDiscovery = 2
	descriptorNGUID         = 2
	descriptorUUID          = 3
	descriptorCommandSet    = 4
	commandSetNVM           = 0
	asyncRequests           = 4  // that may wait: AERL + 1
	errorEntries            = 64 // of the error log: ELPE + 1
	compositeTemperature    = 310
)

// Bits of fields of identify controller.
const (
	cmicPorts, cmicControllers = 1 << 0, 1 << 1

	oncsCompare, oncsDSM, oncsWriteZeroes, oncsSelect = 1 << 0, 1 << 2, 1 << 3, 1 << 4

	ctratt128BitHostID, ctrattTrafficKeepAlive = 1 << 0, 1 << 6

	lpaEffects, lpaExtended = 1 << 1, 1 << 2

	vwcPresent, vwcFlushAll = 1 << 0, 3 << 1

	sglsSupported, sglsKeyed, sglsOffset = 1 << 0, 1 << 2, 1 << 20

	dlfeatZeros, dlfeatWriteZeroes = 1 << 0, 1 << 3
)

func (c *Controller) identify(cmd *Command, data [][]byte) Status {
	if !holds(data, identifySize) {
		return StatusDataSGLLength | StatusDNR
	}
	var b [identifySize]byte
	cns := uint8(cmd.CDW10)
	if c.sub.cfg.Discovery && cns != CNSController {
		return StatusInvalidField | StatusDNR
	}
	switch cns {
	case CNSCommandSetNamespace, CNSCommandSetController, CNSCommandSetActive:
		if cmd.CDW11>>24 != commandSetNVM {
			return StatusInvalidField | StatusDNR
		}
	}
	st := StatusSuccess
	switch cns {
	case CNSController:
		c.putController(&b)
	case CNSCommandSetController:
		b[3] = 0 // DMRL: as many ranges as the command can have; other limits: none
	case CNSCommandSets:
		le.PutUint64(b[:], 1<<commandSetNVM)
	case CNSActiveNamespaces, CNSCommandSetActive:
		st = c.putActive(&b, cmd.NSID)
	case CNSNamespace, CNSDescriptors, CNSCommandSetNamespace, CNSIndependentNamespace:
		st = c.identifyNamespace(&b, cns, cmd.NSID)
	default:
		st = StatusInvalidField | StatusDNR
	}
	if st == StatusSuccess {
		(&pieces{rest: data}).scatter(b[:])
	}
	return st
}

// putText writes ASCII, filled up with spaces.
func putText(b []byte, s string) {
	for i := copy(b, s); i < len(b); i++ {
		b[i] = ' '
	}
}

func (c *Controller) putController(b *[identifySize]byte) {
	s := &c.sub.cfg
	putText(b[4:24], s.Serial)
	putText(b[24:64], s.Model)
	putText(b[64:72], s.Firmware)
	b[76] = c.cmic()
	b[77] = c.cfg.MDTS
	le.PutUint16(b[78:], c.cfg.CNTLID)
	le.PutUint32(b[80:], Version14)
	le.PutUint32(b[92:], c.asyncSupported())
	attributes := uint32(ctratt128BitHostID)
	if c.fabrics() {
		attributes |= ctrattTrafficKeepAlive
		le.PutUint16(b[320:], keepAliveUnits)
	}
	le.PutUint32(b[96:], attributes)
	b[111] = controllerTypeIO
	if s.Discovery {
		b[111] = controllerTypeDiscovery
	}
	b[259] = asyncRequests - 1
	b[261] = lpaExtended
	le.PutUint16(b[514:], uint16(min(c.cfg.QueueEntries, 65535))) // MAXCMD
	copy(b[768:768+MaxNQN], s.NQN)
	c.putTransport(b)
	if s.Discovery {
		return
	}

	b[258] = maxAbortableCommandsACL
	b[260] = 1<<1 | 1 // one firmware slot, read-only
	b[261] |= lpaEffects
	b[262] = errorEntries - 1
	le.PutUint16(b[266:], 343) // WCTEMP, in Kelvin
	le.PutUint16(b[268:], 353) // CCTEMP
	b[512] = 0x66              // entries of 64 bytes
	b[513] = 0x44              // and of 16
	le.PutUint32(b[516:], s.MaxNamespaces)
	le.PutUint16(b[520:], oncsCompare|oncsDSM|oncsWriteZeroes|oncsSelect)
	b[525] = vwcPresent | vwcFlushAll
	le.PutUint32(b[540:], s.MaxNamespaces) // MNAN
}

// putTransport writes what identify controller says of data pointers and capsules.
func (c *Controller) putTransport(b *[identifySize]byte) {
	sgls := uint32(sglsSupported)
	if c.fabrics() {
		if c.cfg.Transport == TransportRDMA {
			sgls |= sglsKeyed
		}
		if c.cfg.InCapsule > 0 {
			sgls |= sglsOffset
		}
		le.PutUint32(b[1792:], uint32(64+c.cfg.InCapsule)/16) // IOCCSZ
		le.PutUint32(b[1796:], 1)                             // IORCSZ
		b[1803] = uint8(c.cfg.SGLs)                           // MSDBD
	}
	le.PutUint32(b[536:], sgls)
}

// cmic returns whether the subsystem has several controllers. Those of fabrics come as hosts connect; a PCI function
// that is alone says so, since hosts make paths of several of them.
func (c *Controller) cmic() uint8 {
	if c.fabrics() {
		return cmicPorts | cmicControllers
	}
	c.sub.mu.Lock()
	defer c.sub.mu.Unlock()
	if len(c.sub.controllers) > 1 {
		return cmicControllers
	}
	return 0
}

// putActive writes the numbers of the namespaces above one.
func (c *Controller) putActive(b *[identifySize]byte, above uint32) Status {
	if above >= 0xfffffffe {
		return StatusInvalidNamespace | StatusDNR
	}
	ids := c.sub.table.Load().ids
	from, _ := slices.BinarySearch(ids, above+1)
	for i, id := range ids[from:min(len(ids), from+identifySize/4)] {
		le.PutUint32(b[4*i:], id)
	}
	return StatusSuccess
}

// identifyNamespace writes one of the structures about a namespace. An inactive one is all zeros, where the
// specification has it so.
func (c *Controller) identifyNamespace(b *[identifySize]byte, cns uint8, nsid uint32) Status {
	if nsid == NSIDAll { // namespaces have nothing in common that could be told
		return StatusInvalidNamespace | StatusDNR
	}
	a, st := c.sub.lookup(nsid)
	if st.Code() == StatusInvalidField && (cns == CNSNamespace || cns == CNSCommandSetNamespace || cns == CNSIndependentNamespace) {
		return StatusSuccess
	}
	if st != StatusSuccess {
		return st
	}
	defer a.release()
	switch cns {
	case CNSNamespace:
		c.putNamespace(b, a)
	case CNSDescriptors:
		c.putDescriptors(b, nsid)
	case CNSIndependentNamespace:
		b[1] = c.nmic()
		b[8] = a.attributes()
		b[14] = 1 // NSTAT: ready
	case CNSCommandSetNamespace: // no protection information: all zeros
	}
	return StatusSuccess
}

// nmic returns whether several controllers have the namespace.
func (c *Controller) nmic() uint8 { return c.cmic() >> 1 & 1 }

// attributes returns NSATTR.
func (a *attached) attributes() uint8 {
	if a.readOnly {
		return 1
	}
	return 0
}

func (c *Controller) putNamespace(b *[identifySize]byte, a *attached) {
	le.PutUint64(b[0:], a.blocks())
	le.PutUint64(b[8:], a.blocks())
	le.PutUint64(b[16:], a.blocks())
	b[30] = c.nmic()
	b[33] = dlfeatZeros | dlfeatWriteZeroes
	le.PutUint64(b[48:], a.blocks()<<a.shift)
	b[99] = a.attributes()
	guid := c.sub.guid("nguid", a.nsid)
	copy(b[104:120], guid[:])
	b[130] = uint8(a.shift) // LBADS of the only format
}

func (c *Controller) putDescriptors(b *[identifySize]byte, nsid uint32) {
	guid, uuid := c.sub.guid("nguid", nsid), c.sub.uuid(nsid)
	rest := b[:]
	put := func(kind byte, id []byte) {
		rest[0], rest[1] = kind, byte(len(id))
		copy(rest[4:], id)
		rest = rest[4+len(id):]
	}
	put(descriptorNGUID, guid[:])
	put(descriptorUUID, uuid[:])
	put(descriptorCommandSet, []byte{commandSetNVM})
}
