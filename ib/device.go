package ib

import (
	"fmt"
	"net/netip"
)

// DeviceInfo names a device that can be opened.
type DeviceInfo struct {
	Name      string       // what Open takes, as "verbena0"
	Interface string       // the network interface it stands on
	Addrs     []netip.Addr // one GID each
}

// AtomicCap is how far the atomicity of remote atomics reaches.
type AtomicCap uint8

const (
	AtomicNone AtomicCap = iota + 1 // there are no atomics
	AtomicHCA                       // among requests through this device
	AtomicGlob                      // also with the CPU's own atomic instructions
)

var atomicCapNames = [...]string{AtomicNone: "ATOMIC_NONE", AtomicHCA: "ATOMIC_HCA", AtomicGlob: "ATOMIC_GLOB"}

// String returns the name without the prefix IBV_.
func (c AtomicCap) String() string { return nameOf(atomicCapNames[:], int(c), "AtomicCap") }

// DeviceCap are the capability bits of a device.
type DeviceCap uint32

const (
	CapSRQResize        DeviceCap = 1 << iota // a shared receive queue can be resized
	CapRCRNRNak                               // RNR NAKs are generated
	CapBadPKeyCntr                            // packets with a wrong P_Key are counted
	CapBadQKeyCntr                            // packets with a wrong Q_Key are counted
	CapCurrQPState                            // Modify honours CurState
	CapPortActiveEvent                        // port events are raised
	CapSysImageGUID                           // SysImageGUID is supported
	CapUDIPCsum                               // unused by this device
	CapMemMgtExtensions                       // SEND with invalidate
	CapAtomicWrite                            // ATOMIC WRITE
	CapFlushGlobal                            // FLUSH to global visibility
	CapFlushPersistent                        // FLUSH to persistence, of regions that are mapped files
	CapXRC                                    // extended reliable connections
	CapMemWindow                              // memory windows of type 1
	CapMemWindowType2B                        // memory windows of type 2, which serve one queue pair
)

// DeviceAttr are a device's identity, capabilities and limits.
type DeviceAttr struct {
	Name         string
	FWVersion    string
	NodeGUID     uint64
	SysImageGUID uint64
	VendorID     uint32
	VendorPartID uint32
	HWVersion    uint32
	PhysPortCnt  int
	Caps         DeviceCap
	AtomicCap    AtomicCap
	PageSizeCap  uint64

	MaxMRSize        uint64
	MaxQP            int
	MaxQPWR          int
	MaxSGE           int
	MaxSGERd         int
	MaxInlineData    int
	MaxCQ            int
	MaxCQE           int
	MaxMR            int
	MaxMW            int
	MaxPD            int
	MaxAH            int
	MaxSRQ           int
	MaxSRQWR         int
	MaxSRQSGE        int
	MaxQPRDAtom      int // as responder, for each queue pair
	MaxQPInitRDAtom  int // as initiator, for each queue pair
	MaxResRDAtom     int
	MaxPKeys         int
	MaxMcastGrp      int // multicast groups that one process may have members of
	MaxMcastQPAttach int // members that one group may have in one process
	// MaxTotalMcastQPAttach is how many members all groups together may have, in all
	// processes that share the device.
	MaxTotalMcastQPAttach int
	LocalCAAckDelay       int
	MaxDMSize             uint64   // bytes of device memory that all processes together may have
	MemoryLock            LockMode // how registration keeps pinned memory where it is
	Links                 []string // the links that the device uses, as "loop", "udp"
	Offloads              []string // kernel offloads that the links use, as "gso", "gro"
	StalePinnedRange      string   // how the device notices that a pinned range was unmapped, for people
	DMABuf                string   // whether dma-bufs may move while they are registered: "dynamic", or "pinned"
}

// LockMode is how registration keeps pinned memory where it is.
type LockMode uint8

const (
	// LockAuto locks memory outside the Go heap where RLIMIT_MEMLOCK allows it. A
	// region that could not be locked works all the same; MR.Locked reports it.
	LockAuto LockMode = iota
	// LockOff never locks.
	LockOff
	// LockStrict holds the pages themselves, as an adapter's driver does: they stay
	// the region's when the program unmaps them, or maps something else at their
	// address. Each access costs a microsecond or more. Pages that cannot be held
	// (read-only mappings, shared mappings of files, no io_uring) are locked; a
	// region that can neither be held nor locked is refused.
	LockStrict
)

var lockModeNames = [...]string{LockAuto: "auto", LockOff: "off", LockStrict: "strict"}

// String returns the mode's name, "auto".
func (m LockMode) String() string { return nameOf(lockModeNames[:], int(m), "LockMode") }

// PortState is the state of a port's link.
type PortState uint8

const (
	PortDown   PortState = iota + 1 // the interface is down
	PortInit                        // InfiniBand only: never from this device
	PortArmed                       // InfiniBand only: never from this device
	PortActive                      // traffic flows
)

var portStateNames = [...]string{PortDown: "PORT_DOWN", PortInit: "PORT_INIT", PortArmed: "PORT_ARMED", PortActive: "PORT_ACTIVE"}

// String returns the name as ibv_devinfo prints it, "PORT_ACTIVE".
func (s PortState) String() string { return nameOf(portStateNames[:], int(s), "PortState") }

// PortAttr are the attributes of a port.
type PortAttr struct {
	State        PortState
	MaxMTU       MTU
	ActiveMTU    MTU // the largest that fits the network interface
	GIDTableLen  int
	PKeyTableLen int
	MaxMsgSize   uint32
	LinkLayer    string // "Ethernet"
	Interface    string // the network interface
	BadPKeyCntr  uint32
	QKeyViolCntr uint32
}

// EventType is the kind of an asynchronous event.
type EventType uint8

const (
	EventCQErr            EventType = iota + 1 // a completion queue overflowed
	EventQPFatal                               // a queue pair failed, and no completion says why
	EventQPReqErr                              // the responder side refused a malformed request
	EventQPAccessErr                           // the responder side refused access
	EventCommEst                               // a packet arrived before the queue pair was in RTS
	EventSQDrained                             // the send queue is drained
	EventQPLastWQEReached                      // a queue pair in ERR will take no more receives from its SRQ
	EventSRQErr                                // a shared receive queue failed
	EventSRQLimitReached                       // a shared receive queue fell below its limit
	EventPortActive                            // the port came up
	EventPortErr                               // the port went down
	EventDeviceFatal                           // the device failed
)

var eventNames = [...]string{EventCQErr: "CQ error", EventQPFatal: "local work queue catastrophic error",
	EventQPReqErr: "invalid request local work queue error", EventQPAccessErr: "local access violation work queue error",
	EventCommEst: "communication established", EventSQDrained: "send queue drained",
	EventQPLastWQEReached: "last WQE reached", EventSRQErr: "SRQ catastrophic error",
	EventSRQLimitReached: "SRQ limit reached", EventPortActive: "port active", EventPortErr: "port error",
	EventDeviceFatal: "local catastrophic error"}

// String returns the text of ibv_event_type_str.
func (t EventType) String() string { return nameOf(eventNames[:], int(t), "EventType") }

// AsyncEvent is something that happened outside any work request.
type AsyncEvent struct {
	Type EventType
	QPN  uint32 // queue pair events
	CQ   uint32 // completion queue events: the queue's number
	SRQ  uint32 // shared receive queue events: the queue's number
	Port uint8  // port events
}

// String returns what happened, and to which object.
func (e AsyncEvent) String() string {
	switch {
	case e.QPN != 0:
		return fmt.Sprintf("%v: QP %#06x", e.Type, e.QPN)
	case e.CQ != 0:
		return fmt.Sprintf("%v: CQ %d", e.Type, e.CQ)
	case e.SRQ != 0:
		return fmt.Sprintf("%v: SRQ %d", e.Type, e.SRQ)
	case e.Port != 0:
		return fmt.Sprintf("%v: port %d", e.Type, e.Port)
	}
	return e.Type.String()
}
