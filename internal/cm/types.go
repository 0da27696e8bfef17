package cm

import (
	"errors"
	"net/netip"
	"strconv"
	"time"

	"github.com/verbena-rdma/verbena/ib"
)

// Time is a moment: how long after any fixed one.
type Time = time.Duration

// Config configures a Core. GUID, NewID, Rand and Listener must be set.
type Config struct {
	GUID     uint64        // CA GUID, in REQ and REP, and as additional information of REJ 4
	NewID    func() uint32 // returns a communication id, unique over all processes of the device, never 0
	Rand     func() uint64 // starting PSNs, transaction ids, eviction
	AckDelay uint8         // target ACK delay in REP, 5 bits

	// Listener returns the verdict on a REQ or SIDR_REQ that is no duplicate. It must not call the
	// core. It is also the place for the checks that need to know this machine: whether
	// Request.Path.Local is an address of the device (if not: RejectInvalidGID), whether the
	// addresses of Request.Header can be right, and whether the listener takes the transport.
	Listener func(*Request) Verdict

	// MaxPending is how many requests wait for Accept, AnswerSIDR or Reject; 0 means 1024. One more
	// takes the place of a random one, of which the peer hears nothing: it will repeat its REQ. If
	// the program has seen that one, it gets EventDropped for it, otherwise nothing at all.
	MaxPending int

	// MaxTimeWait is how many connections that the program has closed are remembered until their
	// time wait ends; 0 means 1024. One more takes the place of a random one.
	MaxTimeWait int
}

// Verdict is what becomes of a REQ or SIDR_REQ.
type Verdict struct {
	Listener any    // not nil: takes the request; comes back in the event
	Reject   Reason // Listener nil: the reason of the REJ, or the status of the SIDR_REP; 0: nothing is sent
	// Backlog, if it is not nil, is where the request waits until Conn.Seen is called. Only then does
	// it count for Config.MaxPending.
	Backlog *Backlog
}

// Path is the way of a connection.
type Path struct {
	Local, Remote netip.Addr // the GIDs of the REQ; IPv4 unmapped
	TClass        uint8
	HopLimit      uint8
	FlowLabel     uint32 // 20 bits
	MTU           ib.MTU
	AckTimeout    uint8 // local ACK timeout of the REQ; Connect: 0 means that it is made of LifeTime and Config.AckDelay
	LifeTime      uint8 // packet life time, 4.096 µs × 2^LifeTime: 16 on RoCE
}

// Transport is the transport service of a REQ. Values other than the named ones come from peers.
type Transport uint8

const (
	RC  Transport = 0
	UC  Transport = 1
	RD  Transport = 2 // nobody has it
	XRC Transport = 3
)

// Params are what the sender of a REQ or REP says of itself.
type Params struct {
	QPN, PSN           uint32 // 24 bits; PSN is the first one that the sender will receive
	ResponderResources uint8
	InitiatorDepth     uint8
	RetryCount         uint8 // REQ; more than 7 is sent as 7
	RNRRetry           uint8 // more than 7 is sent as 7
	FlowControl, SRQ   bool
	AckDelay           uint8  // REP received: target ACK delay
	ECE                ECE    // of REQ and REP
	Private            []byte // sent: at most the room; received: exactly the room
}

// ECE is the enhanced connection establishment: options that the vendor of a device defines. The zero
// value offers none, and is an answer to any offer.
type ECE struct {
	Vendor  uint32 // 24 bits, 0: none
	Options uint32
}

// The room for private data in the messages.
const (
	ReqPrivate       = 92 // REQ without an IPHeader
	ReqPrivateIP     = ReqPrivate - ipHeaderLen
	RepPrivate       = 196
	RejPrivate       = 148
	RejARI           = 72
	SIDRReqPrivate   = 216 // SIDR_REQ without an IPHeader
	SIDRReqPrivateIP = SIDRReqPrivate - ipHeaderLen
	SIDRRepPrivate   = 136
	SIDRRepInfo      = 72
)

// Request is a REQ or SIDR_REQ that has come.
type Request struct {
	Service   uint64
	SIDR      bool
	Transport Transport
	Path      Path       // of a REQ, turned: Local is this side; of a SIDR_REQ the addresses of the packet
	From, To  netip.Addr // of the packet
	Params    Params     // of a SIDR_REQ Private alone
	Header    *IPHeader  // nil if the service id is of no IP port space, or no IP version stands there
	PKey      uint16
	GUID      uint64 // CA GUID of the sender; 0 in a SIDR_REQ
	Again     bool   // it was turned away before, for lack of room in the Backlog
}

// Send is a MAD to send, from queue pair 1 to queue pair 1.
type Send struct {
	From, To  netip.Addr
	TClass    uint8
	HopLimit  uint8
	FlowLabel uint32
	MAD       [Size]byte
}

// SIDRReply is the answer to a SIDR_REQ.
type SIDRReply struct {
	Status    uint8 // 0: QPN and QKey are valid
	QPN, QKey uint32
	Info      []byte // sent: at most SIDRRepInfo bytes; received: as many as the message says
	Private   []byte // sent: at most SIDRRepPrivate bytes; received: exactly as many
}

// Statuses of a SIDRReply.
const (
	SIDRValid       = 0
	SIDRUnsupported = 1 // nobody listens
	SIDRRejected    = 2
	SIDRNoQP        = 3
	SIDRRedirect    = 4
	SIDRVersion     = 5
)

// EventType is the type of an Event.
type EventType uint8

const (
	_                 EventType = iota
	EventRequest                // REQ came: the program shall Accept or Reject
	EventSIDRRequest            // SIDR_REQ came: the program shall AnswerSIDR or Reject
	EventReply                  // REP came: the program shall Establish or Reject
	EventReplyError             // REP came that cannot be used, for Reason: the program shall Reject or Close
	EventRejected               // REJ came, with Reason, ARI and Private
	EventEstablished            // RTU came, or Confirm was called
	EventUnreachable            // REQ, REP or SIDR_REQ is unanswered
	EventDisconnected           // DREQ came; or our DREQ was answered, or not (TimedOut). Once for a Conn
	EventTimewaitExit           // the time wait that follows EventDisconnected has ended
	EventSIDRReply              // SIDR_REP came, whatever its status
	EventDropped                // the request was given up to make room: see Config.MaxPending and Backlog
)

var eventNames = [...]string{"none", "request", "SIDR request", "reply", "reply error", "rejected", "established",
	"unreachable", "disconnected", "timewait exit", "SIDR reply", "dropped"}

func (t EventType) String() string {
	if int(t) < len(eventNames) {
		return eventNames[t]
	}
	return "event " + strconv.Itoa(int(t))
}

// Event is what has happened to a Conn.
type Event struct {
	Type     EventType
	Conn     *Conn
	Listener any      // EventRequest, EventSIDRRequest: of the Verdict
	Request  *Request // EventRequest, EventSIDRRequest
	Params   Params   // EventReply, EventReplyError: of the REP
	Reason   Reason   // EventRejected, EventReplyError
	ARI      []byte   // EventRejected: additional reject information, as much as the message says
	Private  []byte   // EventRejected: RejPrivate bytes
	TimedOut bool     // EventDisconnected: our DREQ is unanswered
	SIDR     SIDRReply
}

// Reason is the reason of a REJ.
type Reason uint16

const (
	RejectNoQP             Reason = 1
	RejectNoResources      Reason = 3
	RejectTimeout          Reason = 4
	RejectUnsupported      Reason = 5
	RejectInvalidCommID    Reason = 6
	RejectInvalidServiceID Reason = 8
	RejectInvalidTransport Reason = 9
	RejectStaleConn        Reason = 10
	RejectInvalidGID       Reason = 12
	RejectInvalidMTU       Reason = 26
	RejectConsumer         Reason = 28 // consumer defined
	RejectDuplicateCommID  Reason = 30
	RejectVendorOption     Reason = 35
)

// What methods of Core and Conn return.
var (
	ErrState     = errors.New("cm: not in this state of the connection")
	ErrConnected = errors.New("cm: established already")
	ErrLength    = errors.New("cm: private data too long")
	ErrNoID      = errors.New("cm: no communication id left")
	ErrParam     = errors.New("cm: invalid parameter")
)

// AckTimeout returns the ACK timeout of a queue pair, from the target ACK delay of its peer and the
// packet life time, as Linux rounds it.
func AckTimeout(ackDelay, lifeTime uint8) uint8 {
	t := int(lifeTime) + 1
	delay := int(ackDelay)
	if t >= delay {
		if delay >= t-1 {
			t++
		}
	} else {
		next := delay
		if t >= delay-1 {
			next++
		}
		t = next
	}
	return uint8(min(t, 31))
}
