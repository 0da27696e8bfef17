package verbs

import (
	"net/netip"

	"github.com/verbena-rdma/verbena/ib"
)

// The nouns of package ib, where they are documented field by field.
type (
	Access           = ib.Access           // rights of a memory region, and of a connected peer
	Advice           = ib.Advice           // what AdviseMR is to do with memory that is about to be used
	AH               = ib.AH               // address handle: a peer that UD requests can be sent to
	AHAttr           = ib.AHAttr           // address of a peer
	AsyncEvent       = ib.AsyncEvent       // something that happened outside any work request
	AtomicCap        = ib.AtomicCap        // how far the atomicity of remote atomics reaches
	DeviceAttr       = ib.DeviceAttr       // a device's identity, capabilities and limits
	DeviceCap        = ib.DeviceCap        // capability bits of a device
	DeviceInfo       = ib.DeviceInfo       // a device that can be opened
	DMAHConfig       = ib.DMAHConfig       // hint for accesses to memory
	DMClass          = ib.DMClass          // class of device memory
	EventType        = ib.EventType        // kind of an asynchronous event
	Fence            = ib.Fence            // work that ends some time, and that requests can wait for
	QueuedFence      = ib.QueuedFence      // a Fence that is told who waits for it
	FlushLevel       = ib.FlushLevel       // which bytes a FLUSH is about
	FlushType        = ib.FlushType        // what a FLUSH ensures for the bytes
	GID              = ib.GID              // global identifier: an IP address
	LockMode         = ib.LockMode         // how registration keeps pinned memory where it is
	MKeyConfig       = ib.MKeyConfig       // what an indirect memory key is made of
	MKeyUpdate       = ib.MKeyUpdate       // how a key that may be configured already is configured
	MTU              = ib.MTU              // path MTU
	MWBind           = ib.MWBind           // what a memory window is bound to
	MWType           = ib.MWType           // type of a memory window
	ODPCaps          = ib.ODPCaps          // what on-demand paging a device does
	ODPTransportCaps = ib.ODPTransportCaps // the operations of one transport that may use on-demand memory
	Opcode           = ib.Opcode           // what a send request does
	OpError          = ib.OpError          // what every call that fails returns; wraps an errno
	PagingCounter    = ib.PagingCounter    // one counter of PagingStats with its name
	PagingStats      = ib.PagingStats      // counters of on-demand paging
	PortAttr         = ib.PortAttr         // attributes of a port
	PortState        = ib.PortState        // state of a port's link
	QPAttr           = ib.QPAttr           // attributes of a queue pair
	QPAttrMask       = ib.QPAttrMask       // which attributes Modify sets
	QPCap            = ib.QPCap            // sizes of a queue pair's queues
	QPState          = ib.QPState          // state of a queue pair
	QPType           = ib.QPType           // transport service of a queue pair
	RecvWR           = ib.RecvWR           // work request for a receive queue
	ReregError       = ib.ReregError       // what a re-registration that fails returns
	ReregState       = ib.ReregState       // what a region is after a re-registration that failed
	SendFlags        = ib.SendFlags        // modifiers of a send request
	SendWR           = ib.SendWR           // work request for a send queue
	SGE              = ib.SGE              // one piece of a scatter/gather list
	StatusError      = ib.StatusError      // a failed completion as an error
	Steering         = ib.Steering         // whose cache data is for
	Stride           = ib.Stride           // a source of an interleaved pattern
	TPHMemType       = ib.TPHMemType       // kind of memory that data is steered to
	WC               = ib.WC               // work completion
	WCFlags          = ib.WCFlags          // which optional fields of a completion are valid
	WCOpcode         = ib.WCOpcode         // what completed
	WCStatus         = ib.WCStatus         // how a request ended
)

// GIDFromAddr returns the GID of an IP address. The zone, if any, is dropped.
func GIDFromAddr(a netip.Addr) GID { return ib.GIDFromAddr(a) }

// Rights of a memory region. Local reading is always allowed.
const (
	AccessLocalWrite       = ib.AccessLocalWrite       // the device may write on behalf of local work requests
	AccessRemoteWrite      = ib.AccessRemoteWrite      // peers may RDMA WRITE; needs AccessLocalWrite
	AccessRemoteRead       = ib.AccessRemoteRead       // peers may RDMA READ
	AccessRemoteAtomic     = ib.AccessRemoteAtomic     // peers may do atomics; needs AccessLocalWrite
	AccessMWBind           = ib.AccessMWBind           // memory windows may be bound to the region
	AccessZeroBased        = ib.AccessZeroBased        // addresses in requests are offsets from the region's start
	AccessOnDemand         = ib.AccessOnDemand         // pages are not pinned but faulted in when accessed
	AccessFlushGlobal      = ib.AccessFlushGlobal      // peers may FLUSH the region to global visibility
	AccessFlushPersistent  = ib.AccessFlushPersistent  // peers may FLUSH the region, a mapped file, to persistence
	AccessRelaxedOrdering  = ib.AccessRelaxedOrdering  // a hint without effect on this device
	AccessRemoteInvalidate = ib.AccessRemoteInvalidate // peers may invalidate the region's key, by SEND with invalidate
	AccessRemote           = ib.AccessRemote           // READ, WRITE and atomics
	AccessFlush            = ib.AccessFlush            // both kinds of FLUSH
)

// Transport services.
const (
	RC = ib.RC // reliable connection
	UC = ib.UC // unreliable connection
	UD = ib.UD // unreliable datagram

	XRCSend = ib.XRCSend // extended reliable connection, initiator: sends to shared receive queues
	XRCRecv = ib.XRCRecv // extended reliable connection, target: receives for the queues of its domain

	NumQPTypes = ib.NumQPTypes // the size of a table by type
)

// States of a queue pair.
const (
	QPReset = ib.QPReset // new: nothing can be posted
	QPInit  = ib.QPInit  // receives can be posted
	QPRTR   = ib.QPRTR   // ready to receive
	QPRTS   = ib.QPRTS   // ready to send
	QPSQD   = ib.QPSQD   // send queue drained: what is posted waits
	QPSQE   = ib.QPSQE   // send queue error: UC and UD after a failed send
	QPErr   = ib.QPErr   // error: all requests are flushed
)

// Attributes of a queue pair that [QP.Modify] is to set.
const (
	QPMaskState           = ib.QPMaskState
	QPMaskCurState        = ib.QPMaskCurState
	QPMaskAccess          = ib.QPMaskAccess
	QPMaskPKeyIndex       = ib.QPMaskPKeyIndex
	QPMaskPort            = ib.QPMaskPort
	QPMaskQKey            = ib.QPMaskQKey
	QPMaskAV              = ib.QPMaskAV
	QPMaskPathMTU         = ib.QPMaskPathMTU
	QPMaskTimeout         = ib.QPMaskTimeout
	QPMaskRetryCnt        = ib.QPMaskRetryCnt
	QPMaskRNRRetry        = ib.QPMaskRNRRetry
	QPMaskRQPSN           = ib.QPMaskRQPSN
	QPMaskMaxRDAtomic     = ib.QPMaskMaxRDAtomic
	QPMaskMinRNRTimer     = ib.QPMaskMinRNRTimer
	QPMaskSQPSN           = ib.QPMaskSQPSN
	QPMaskMaxDestRDAtomic = ib.QPMaskMaxDestRDAtomic
	QPMaskCap             = ib.QPMaskCap
	QPMaskDestQPN         = ib.QPMaskDestQPN
	QPMaskSQDAsyncNotify  = ib.QPMaskSQDAsyncNotify
	QPMaskAltPath         = ib.QPMaskAltPath      // has no field: there are no alternate paths
	QPMaskPathMigState    = ib.QPMaskPathMigState // has no field: there are no alternate paths
)

// Path MTUs.
const (
	MTU256  = ib.MTU256
	MTU512  = ib.MTU512
	MTU1024 = ib.MTU1024
	MTU2048 = ib.MTU2048
	MTU4096 = ib.MTU4096
)

// Operations of send requests.
const (
	OpSend           = ib.OpSend           // SEND to the peer's receive queue
	OpSendImm        = ib.OpSendImm        // SEND with 4 bytes of immediate data
	OpSendInv        = ib.OpSendInv        // SEND that invalidates a key of the peer
	OpRDMAWrite      = ib.OpRDMAWrite      // WRITE to the peer's memory
	OpRDMAWriteImm   = ib.OpRDMAWriteImm   // WRITE that also consumes a receive there
	OpRDMARead       = ib.OpRDMARead       // READ of the peer's memory
	OpAtomicCmpSwap  = ib.OpAtomicCmpSwap  // compare 8 bytes with CompareAdd and, if equal, store Swap
	OpAtomicFetchAdd = ib.OpAtomicFetchAdd // add CompareAdd to 8 bytes
	OpAtomicWrite    = ib.OpAtomicWrite    // store 8 bytes in one step, after all earlier requests
	OpFlush          = ib.OpFlush          // make what was written visible to all, or persistent
	OpBindMW         = ib.OpBindMW         // bind a type 2 memory window
	OpLocalInv       = ib.OpLocalInv       // invalidate a key of this device: a type 2 memory window, an indirect key
	OpConfigureMKey  = ib.OpConfigureMKey  // make an indirect key of other regions
	OpWaitFence      = ib.OpWaitFence      // begin what follows when Fence is signalled
	OpSignalFence    = ib.OpSignalFence    // signal Fence when all earlier requests are done

	NumOpcodes = ib.NumOpcodes // the size of a table by operation
)

// What a FLUSH ensures, and for which bytes.
const (
	FlushGlobal     = ib.FlushGlobal     // the bytes are visible to all that can see the memory
	FlushPersistent = ib.FlushPersistent // the bytes survive the loss of power

	FlushRange = ib.FlushRange // RemoteLength bytes at RemoteAddr
	FlushMR    = ib.FlushMR    // all of the region; RemoteAddr and RemoteLength are ignored
)

// Flags of send requests.
const (
	SendSignaled  = ib.SendSignaled  // make a completion when done (failures always make one)
	SendSolicited = ib.SendSolicited // raise the peer's solicited completion event
	SendFence     = ib.SendFence     // wait for earlier READs and atomics of this queue; BIND_MW, LOCAL_INV and CONFIGURE_MKEY: for all earlier requests
)

// How an indirect key that may be configured already is configured.
const (
	MKeyInPlace    = ib.MKeyInPlace    // the key need not be free
	MKeyKeepAccess = ib.MKeyKeepAccess // with MKeyInPlace: its rights stay
	MKeyKeepLayout = ib.MKeyKeepLayout // with MKeyInPlace: its bytes stay
)

// DefaultFenceTimeout is how long an OpWaitFence waits if it does not say so itself.
const DefaultFenceTimeout = ib.DefaultFenceTimeout

// ErrFenceFlushed is what the fence of an OpSignalFence is signalled with that will not be
// executed: the queue pair has failed, or was reset or closed.
var ErrFenceFlushed = ib.ErrFenceFlushed

// MulticastQPN is the RemoteQPN of a message to a multicast group.
const MulticastQPN = ib.MulticastQPN

// GRHLength is the number of bytes in front of every UD message.
const GRHLength = ib.GRHLength

// How a request ended. The numbers are those of ibv_wc_status.
const (
	WCSuccess        = ib.WCSuccess        // done
	WCLocLenErr      = ib.WCLocLenErr      // message too long for the receive, or for the path
	WCLocQPOpErr     = ib.WCLocQPOpErr     // the request does not fit the queue pair's state or type
	WCLocEECOpErr    = ib.WCLocEECOpErr    // reliable datagram only: never from this device
	WCLocProtErr     = ib.WCLocProtErr     // a local SGE failed: key, bounds, rights or domain
	WCWRFlushErr     = ib.WCWRFlushErr     // the queue pair was in, or went to, the error state
	WCMWBindErr      = ib.WCMWBindErr      // a memory window could not be bound, an indirect key not configured, or a key not invalidated
	WCBadRespErr     = ib.WCBadRespErr     // the peer's answer does not fit the request
	WCLocAccessErr   = ib.WCLocAccessErr   // a peer's request took this receive and was refused for its key
	WCRemInvReqErr   = ib.WCRemInvReqErr   // the peer calls the request invalid
	WCRemAccessErr   = ib.WCRemAccessErr   // the peer refuses access to its memory
	WCRemOpErr       = ib.WCRemOpErr       // the peer could not complete the request
	WCRetryExcErr    = ib.WCRetryExcErr    // no answer, after all retries
	WCRNRRetryExcErr = ib.WCRNRRetryExcErr // the peer had no receive posted, after all retries
	WCLocRDDViolErr  = ib.WCLocRDDViolErr  // reliable datagram only: never from this device
	WCRemInvRDReqErr = ib.WCRemInvRDReqErr // reliable datagram only: never from this device
	WCRemAbortErr    = ib.WCRemAbortErr    // reliable datagram only: never from this device
	WCInvEECNErr     = ib.WCInvEECNErr     // reliable datagram only: never from this device
	WCInvEECStateErr = ib.WCInvEECStateErr // reliable datagram only: never from this device
	WCFatalErr       = ib.WCFatalErr       // the device failed
	WCRespTimeoutErr = ib.WCRespTimeoutErr // what was waited for did not come about in time
	WCGeneralErr     = ib.WCGeneralErr     // none of the others
)

// What completed.
const (
	WCSend            = ib.WCSend            // a SEND of any kind was sent
	WCRDMAWrite       = ib.WCRDMAWrite       // a WRITE of any kind was done
	WCRDMARead        = ib.WCRDMARead        // a READ was done
	WCCompSwap        = ib.WCCompSwap        // a compare-and-swap was done
	WCFetchAdd        = ib.WCFetchAdd        // a fetch-and-add was done
	WCRecv            = ib.WCRecv            // a SEND was received
	WCRecvRDMAWithImm = ib.WCRecvRDMAWithImm // a WRITE with immediate data consumed the receive
	WCAtomicWrite     = ib.WCAtomicWrite     // an ATOMIC WRITE was done
	WCFlush           = ib.WCFlush           // a FLUSH was done
	WCBindMW          = ib.WCBindMW          // a memory window was bound
	WCLocalInv        = ib.WCLocalInv        // a key of this device was invalidated
	WCConfigureMKey   = ib.WCConfigureMKey   // an indirect key was configured
	WCWaitFence       = ib.WCWaitFence       // a fence was waited for
	WCSignalFence     = ib.WCSignalFence     // a fence was signalled
)

// Which optional fields of a completion are valid.
const (
	WCGRH     = ib.WCGRH     // UD: the first 40 bytes of the buffer hold the routing header
	WCWithImm = ib.WCWithImm // Imm is valid
	WCWithInv = ib.WCWithInv // InvalidatedKey is valid
)

// Which headers a datagram came with: SL of its completion.
const (
	WCIPv6 = ib.WCIPv6 // UDP over IPv6
	WCIPv4 = ib.WCIPv4 // UDP over IPv4
)

// Kinds of asynchronous events.
const (
	EventCQErr            = ib.EventCQErr            // a completion queue overflowed
	EventQPFatal          = ib.EventQPFatal          // a queue pair failed, and no completion says why
	EventQPReqErr         = ib.EventQPReqErr         // the responder side refused a malformed request
	EventQPAccessErr      = ib.EventQPAccessErr      // the responder side refused access
	EventCommEst          = ib.EventCommEst          // a packet arrived before the queue pair was in RTS
	EventSQDrained        = ib.EventSQDrained        // the send queue is drained
	EventQPLastWQEReached = ib.EventQPLastWQEReached // a queue pair in ERR will take no more receives from its SRQ
	EventSRQErr           = ib.EventSRQErr           // a shared receive queue failed
	EventSRQLimitReached  = ib.EventSRQLimitReached  // a shared receive queue fell below its limit
	EventPortActive       = ib.EventPortActive       // the port came up
	EventPortErr          = ib.EventPortErr          // the port went down
	EventDeviceFatal      = ib.EventDeviceFatal      // the device failed
)

// How far the atomicity of remote atomics reaches.
const (
	AtomicNone = ib.AtomicNone // there are no atomics
	AtomicHCA  = ib.AtomicHCA  // among requests through this device
	AtomicGlob = ib.AtomicGlob // also with the CPU's own atomic instructions
)

// Capabilities of a device.
const (
	CapSRQResize        = ib.CapSRQResize        // a shared receive queue can be resized
	CapRCRNRNak         = ib.CapRCRNRNak         // RNR NAKs are generated
	CapBadPKeyCntr      = ib.CapBadPKeyCntr      // packets with a wrong P_Key are counted
	CapBadQKeyCntr      = ib.CapBadQKeyCntr      // packets with a wrong Q_Key are counted
	CapCurrQPState      = ib.CapCurrQPState      // Modify honours CurState
	CapPortActiveEvent  = ib.CapPortActiveEvent  // port events are raised
	CapSysImageGUID     = ib.CapSysImageGUID     // SysImageGUID is supported
	CapUDIPCsum         = ib.CapUDIPCsum         // unused by this device
	CapMemMgtExtensions = ib.CapMemMgtExtensions // SEND with invalidate
	CapAtomicWrite      = ib.CapAtomicWrite      // ATOMIC WRITE
	CapFlushGlobal      = ib.CapFlushGlobal      // FLUSH to global visibility
	CapFlushPersistent  = ib.CapFlushPersistent  // FLUSH to persistence, of regions that are mapped files
	CapXRC              = ib.CapXRC              // extended reliable connections
	CapMemWindow        = ib.CapMemWindow        // memory windows of type 1
	CapMemWindowType2B  = ib.CapMemWindowType2B  // memory windows of type 2, which serve one queue pair
)

// Classes of device memory.
const (
	DMPlain    = ib.DMPlain    // the program only copies to it and from it
	DMCoherent = ib.DMCoherent // the program also accesses it with loads, stores and atomic instructions
)

// Kinds of memory that data is steered to.
const (
	TPHVolatile   = ib.TPHVolatile   // ordinary memory
	TPHPersistent = ib.TPHPersistent // persistent memory
)

// Types of memory windows.
const (
	MWType1 = ib.MWType1 // bound by QP.BindMW, for all queue pairs of its domain
	MWType2 = ib.MWType2 // bound by OpBindMW, for the queue pair it is bound on
)

// What a region is after a re-registration that failed.
const (
	ReregOldValid = ib.ReregOldValid // nothing has changed: the old keys work
	ReregNewValid = ib.ReregNewValid // it is changed as asked for: only the new keys work
	ReregUnusable = ib.ReregUnusable // no key works
)

// States of a port's link.
const (
	PortDown   = ib.PortDown   // the interface is down
	PortInit   = ib.PortInit   // InfiniBand only: never from this device
	PortArmed  = ib.PortArmed  // InfiniBand only: never from this device
	PortActive = ib.PortActive // traffic flows
)

// How registration keeps pinned memory where it is.
const (
	LockAuto   = ib.LockAuto   // lock memory outside the Go heap where the limit allows it
	LockOff    = ib.LockOff    // never lock
	LockStrict = ib.LockStrict // hold the pages themselves; lock those that cannot be held, or refuse the region
)
