// Package provider is the interface between package verbs and the device that does
// the work: the software device is one provider, a kernel device can be another.
//
// It is small, and its queues take and return slices rather than single requests.
// Providers check arguments and return *ib.OpError; package verbs adds types,
// lifetimes and documentation. All methods are safe for concurrent use, Close is
// idempotent, and Close of an object that other objects use fails with EBUSY.
package provider

import (
	"context"
	"net/netip"
	"os"

	"github.com/verbena-rdma/verbena/ib"
)

// Config is how a software device is opened; verbs.Config documents the fields.
type Config struct {
	Addrs  []netip.Addr
	Link   string // "", "loop", "local" or "udp": which links may carry traffic
	Lock   ib.LockMode
	Limits Limits
	PCAP   string
	Window int
	NoGSO  bool
	NoGRO  bool
	// Receivers is how many receivers, with sockets of their own, the device has at most; 0: by
	// the number of processors.
	Receivers int
	PinDMABuf bool  // dma-bufs are held in place while they are registered
	DMSize    int64 // bytes of device memory; 0: VERBENA_DM_SIZE, or the default; negative: none
}

// Limits lower a device's limits; zero fields keep the default.
type Limits struct {
	QPs, CQs, MRs, MWs, PDs, AHs, SRQs int
	QPWR, CQE, SRQWR                   int
}

// All returns pointers to the limits, always in the same order.
func (l *Limits) All() []*int {
	return []*int{&l.QPs, &l.CQs, &l.MRs, &l.MWs, &l.PDs, &l.AHs, &l.SRQs, &l.QPWR, &l.CQE, &l.SRQWR}
}

// Device is an open device.
type Device interface {
	Attr() ib.DeviceAttr
	Port(port int) (ib.PortAttr, error)
	GIDs() []ib.GID
	Counters() []Counter
	ODPCaps() ib.ODPCaps
	PagingStats() ib.PagingStats
	NextEvent(ctx context.Context) (ib.AsyncEvent, error)
	AllocPD() (PD, error)
	CreateChannel() (Channel, error)
	CreateCQ(entries int, ch Channel) (CQ, error)
	OpenXRCD(XRCDConfig) (XRCD, error)
	AllocDM(DMConfig) (DM, error)
	AllocDMAH(ib.DMAHConfig) (DMAH, error)
	// Management returns queue pair 1, nil if the provider leaves connections to others.
	Management() Management
	Close() error
}

// Counter is one named number of a device or a queue pair.
type Counter struct {
	Name  string
	Value uint64
}

// PeerCounters returns the counters of the process's PeerDirect clients. Package importer sets it.
var PeerCounters = func() []Counter { return nil }

// PD is a protection domain.
type PD interface {
	RegMR(buf []byte, access ib.Access) (MR, error)
	RegMRAddr(addr uintptr, length uint64, iova uint64, access ib.Access) (MR, error)
	RegImplicitMR(access ib.Access) (MR, error)
	RegDMMR(dm DM, off, length uint64, access ib.Access) (MR, error)
	// Advise prefetches; with flush it waits until that is done.
	Advise(advice ib.Advice, flush bool, sgl []ib.SGE) error
	AllocMR(length uint64, access ib.Access) (MR, error)
	OpenSharedMR(handle string, access ib.Access) (MR, error)
	AllocMW(ib.MWType) (MW, error)
	CreateMKey(pieces int) (MKey, error)
	CreateQP(QPConfig) (QP, error)
	CreateSRQ(SRQConfig) (SRQ, error)
	CreateAH(ib.AHAttr) (*ib.AH, error)
	Close() error
}

// MR is a memory region.
type MR interface {
	LKey() uint32
	RKey() uint32
	PagingStats() ib.PagingStats
	Addr() uint64 // the address that requests use: 0 if zero-based
	Length() uint64
	Access() ib.Access
	Locked() (bool, string) // whether its pages are locked, and why they are not
	Rereg(MRChange) error   // the error is an *ib.ReregError
	DMAH() DMAH             // nil: it was registered without
	Bytes() []byte          // the memory, if the library has allocated it
	Share() (handle string, err error)
	Close() error
}

// MRChange is what Rereg changes of a region; nil fields change nothing.
type MRChange struct {
	Buf    []byte   // new memory by slice
	Range  *MRRange // new memory by address
	Alloc  uint64   // new memory: so many bytes that the provider allocates; 0: none
	PD     PD
	Access *ib.Access

	KeepKeys bool // the keys stay if the memory does, as C programs expect
}

// MRRange is memory by address.
type MRRange struct {
	Addr   uintptr
	Length uint64
	IOVA   uint64 // its address in requests
}

// DMAH is a hint that regions are registered with.
type DMAH interface {
	Config() ib.DMAHConfig
	// Register has reg register a region of pd, and keeps the hint with it.
	Register(pd PD, access ib.Access, reg func() (MR, error)) (MR, error)
	Close() error // EBUSY while regions have it
}

// DMConfig describes the buffer that AllocDM allocates.
type DMConfig struct {
	Length   uint64
	LogAlign int
	Class    ib.DMClass
	Export   bool // Export may be called
}

// DM is a buffer of device memory.
type DM interface {
	Length() uint64
	Class() ib.DMClass
	WriteAt(b []byte, off int64) (int, error)
	ReadAt(b []byte, off int64) (int, error)
	Bytes() ([]byte, error) // coherent: the buffer itself
	// Export returns a file, which is the caller's, that shows the buffer from off
	// on.
	Export() (f *os.File, off int64, err error)
	Close() error
}

// MW is a memory window.
type MW interface {
	Type() ib.MWType
	RKey() uint32
	Close() error
}

// MKey is an indirect memory key.
type MKey interface {
	Key() uint32 // local and remote
	Close() error
}

// Channel delivers completion events.
type Channel interface {
	// Next waits for an event and returns the completion queue it is for.
	Next(ctx context.Context) (CQ, error)
	// Ready returns a channel that has a value when there may be an event. Who receives the value
	// calls Next until there is none.
	Ready() <-chan struct{}
	Close() error
}

// CQ is a completion queue.
type CQ interface {
	Number() uint32
	Cap() int
	Poll([]ib.WC) (int, error)
	// RequestNotify arms the queue: the next completion, or the next solicited
	// or failed one, raises an event.
	RequestNotify(solicitedOnly bool) error
	Ack(events int)
	Resize(entries int) error
	Close() error
}

// QPConfig is what a queue pair is made of.
type QPConfig struct {
	Type           ib.QPType
	SendCQ, RecvCQ CQ
	SRQ            SRQ
	Cap            ib.QPCap
	SignalAll      bool
	NoScatterToCQE bool // no inline receive
	// AckFirst makes the queue pair send the acknowledgements that are due before its
	// own next request, as adapters do. Programs that wait for events may rely on it.
	AckFirst bool
}

// QP is a queue pair.
type QP interface {
	Number() uint32
	Type() ib.QPType
	PostSend([]ib.SendWR) (int, error)
	PostRecv([]ib.RecvWR) (int, error)
	// BindMW posts a bind of a type 1 window and returns the rkey it will have.
	BindMW(mw MW, id uint64, flags ib.SendFlags, bind ib.MWBind) (rkey uint32, err error)
	Modify(*ib.QPAttr, ib.QPAttrMask) error
	Query() (ib.QPAttr, error)
	Counters() []Counter
	// AttachMcast makes a UD queue pair a member of a multicast group.
	AttachMcast(ib.GID) error
	DetachMcast(ib.GID) error
	Close() error
}

// SRQConfig is what a shared receive queue is made of.
type SRQConfig struct {
	MaxWR, MaxSGE int
	Limit         int
	XRCD          XRCD // not nil: a queue for XRC
	CQ            CQ   // XRC: where receives complete
}

// XRCDConfig is which XRC domain OpenXRCD opens.
type XRCDConfig struct {
	File      *os.File // names the domain; nil: it has no name
	Create    bool     // make the domain if there is none
	Exclusive bool     // with Create: fail if there is one
}

// XRCD is an open XRC domain.
type XRCD interface {
	// CreateQP makes a target in the domain, of type ib.XRCRecv.
	CreateQP() (QP, error)
	// OpenQP opens a target of the domain again. The target is gone when every QP
	// that CreateQP or OpenQP returned for it is closed.
	OpenQP(number uint32) (QP, error)
	Close() error
}

// SRQ is a shared receive queue.
type SRQ interface {
	Number() uint32
	PostRecv([]ib.RecvWR) (int, error)
	Modify(maxWR, limit int) error // a negative value keeps what is set
	Query() (maxWR, maxSGE, limit int, err error)
	Close() error
}

// DeviceOf returns what is behind a *verbs.Device, nil if the device is nil. Package verbs sets it when
// it is initialized: package cm works on devices that programs have opened, and verbs has no method
// for what is inside them.
var DeviceOf func(verbsDevice any) Device

// Management is queue pair 1 of a device, and what the processes that share the device know of
// each other's ports and connections.
type Management interface {
	GUID() uint64
	Addrs() []netip.Addr
	MTU() ib.MTU
	// MaxRDAtomic is how many READs and atomics a queue pair may have outstanding, either way.
	MaxRDAtomic() uint8
	// Handle has a function called, by one goroutine at a time, with each MAD that is for this process;
	// nil ends that, and waits for a call that is under way. The bytes are valid during the call.
	Handle(func(from, to netip.Addr, mad []byte))
	// Reach opens what MADs from an address of the device to another one need. After it, Send needs no
	// further descriptor for them.
	Reach(from, to netip.Addr) error
	// Send sends a MAD. A MAD that is lost on the way is not an error.
	Send(*MAD) error
	// NewCommID returns a communication id that no other process of the device has.
	NewCommID() uint32
	// BindPort binds a port (0x0106, 0x0111 or 0x013f is its space) at addresses of the device, by
	// their indexes. It fails with EADDRINUSE if another process has it. A process binds a port of
	// an address once.
	BindPort(space, port uint16, addrs []int, reuse bool) (BoundPort, error)
	// SetListening publishes whether this process listens on any port.
	SetListening(bool)
	// AwaitData has f called, once and as the function of Handle is called, when a queue
	// pair of this process receives its first packet. cancel ends that; a call may be under way.
	AwaitData(qpn uint32, f func()) (cancel func())
	// Record returns room for a connection whose peer is to hear of this process's death.
	Record() ConnRecord
}

// MAD is a management datagram to queue pair 1 of a peer.
type MAD struct {
	From, To  netip.Addr
	TClass    uint8
	HopLimit  uint8
	FlowLabel uint32
	Bytes     []byte
}

// BoundPort is a port that this process has bound.
type BoundPort interface {
	// Listen makes requests to the port come to this process.
	Listen() error
	Free()
}

// ConnRecord is a connection of this process that other processes know.
type ConnRecord interface {
	// Set records the connection. addr is the index of the device's address, state what package
	// cm's LastWords needs, not 0.
	Set(state uint8, addr int, peer netip.Addr, local, remote, qpn uint32)
	Free()
}
