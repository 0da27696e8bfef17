package cma

import (
	"net/netip"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// PortSpace is what a port number belongs to: enum rdma_ucm_port_space.
type PortSpace uint16

const (
	PSIPoIB PortSpace = 0x0002
	PSTCP   PortSpace = 0x0106 // connections
	PSUDP   PortSpace = 0x0111 // datagrams
	PSIB    PortSpace = 0x013F // either, by the type of the queue pair
)

// EventType is the type of an Event: enum rdma_cm_event_type.
type EventType int

const (
	AddrResolved EventType = iota
	AddrError
	RouteResolved
	RouteError
	ConnectRequest
	ConnectResponse
	ConnectError
	Unreachable
	Rejected
	Established
	Disconnected
	DeviceRemoval
	MulticastJoin
	MulticastError
	AddrChange
	TimewaitExit

	// Withdrawn is no event of the program: New, of which the sink has had ConnectRequest, lost its place
	// in the backlog before Seen was called, and is closed. See ID.ListenEvicting.
	Withdrawn EventType = -1
)

// Device is a device that ids can be bound to.
type Device struct {
	Name  string
	Index int // in the list of devices that the program sees
	Addrs []netip.Addr
	// Open opens the device, or counts one more user of it; release ends the use.
	Open func() (dev provider.Device, release func(), err error)
}

// Config configures a Manager.
type Config struct {
	// Devices returns the devices. No two have an address in common, and one that is open keeps its
	// addresses.
	Devices func() ([]Device, error)
	// Fixed is whether Devices always returns the same ones.
	Fixed bool
}

// ConnParam are the parameters of a connection: struct rdma_conn_param. Those that an event has are
// crossed already, as rdma_get_cm_event has them: ResponderResources is what this side may be asked
// to serve, InitiatorDepth what it may issue.
type ConnParam struct {
	QPN                uint32
	QKey               uint32
	Private            []byte // in events: all the room that the message has
	ResponderResources uint8
	InitiatorDepth     uint8
	FlowControl        bool
	RetryCount         uint8
	RNRRetry           uint8
	SRQ                bool
	ECE                ECE
}

// ECE are options that the vendor of a device defines: struct rdma_ucm_ece.
type ECE = cm.ECE

// UDParam is how a datagram peer is reached: struct rdma_ud_param.
type UDParam struct {
	AH      ib.AHAttr
	QPN     uint32
	QKey    uint32
	Private []byte // all the room that the message has
}

// Event is what has happened to an id.
type Event struct {
	ID     *ID  // ConnectRequest, Withdrawn: the listener
	New    *ID  // ConnectRequest, Withdrawn: the new id
	Again  bool // ConnectRequest: the request was turned away before, for lack of room
	Type   EventType
	Status int // a negative errno; Rejected: the reason; Unreachable of a datagram id: the SIDR status
	Conn   ConnParam
	UD     UDParam // Established of datagram ids, ConnectRequest of datagram ids (Private alone), MulticastJoin
	Join   *Join   // MulticastJoin, MulticastError
}

// Sink takes the events of an id, in order. It must neither block nor call methods of the id.
type Sink func(*Event)

// Path is the way to the peer, as a path record has it.
type Path struct {
	SGID, DGID   ib.GID
	FlowLabel    uint32
	HopLimit     uint8
	TrafficClass uint8
	PKey         uint16
	MTU          ib.MTU
	LifeTime     uint8 // packet life time, 4.096 µs × 2^LifeTime
}

// Info is what is known of an id so far: rdma_cm's QUERY.
type Info struct {
	Src, Dst netip.AddrPort // zero where not known; Src may have the unspecified address
	Dev      *Device        // nil: not bound to a device
	GUID     uint64         // node GUID of Dev, 0 without
	Port     uint8          // 1 with a device
	Paths    []Path         // none or one
}

// Option is an option of an id: RDMA_OPTION_ID_*.
type Option int

const (
	OptionTOS        Option = iota // traffic class
	OptionReuseAddr                // several ids may be bound to the address
	OptionAFOnly                   // an IPv6 wildcard does not stand for IPv4
	OptionACKTimeout               // local ACK timeout of the queue pair
)

// Join is a membership in a multicast group, or one in the making.
type Join struct {
	ID   *ID
	Addr netip.Addr
}
