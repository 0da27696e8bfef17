package wire

// Transport is the service that the top three bits of a BTH opcode name.
type Transport uint8

const (
	RC  Transport = 0
	UC  Transport = 1
	RD  Transport = 2 // reliable datagram: not implemented, but counted
	UD  Transport = 3
	CNP Transport = 4 // congestion notification
	XRC Transport = 5
	Own Transport = 6 // reserved by the specification: between queue pairs of this library
)

// Kind is what a message is for. A transport, a kind, a position and an extra
// together name an opcode; code above the opcode table uses no opcodes.
type Kind uint8

const (
	KindSend Kind = iota + 1
	KindWrite
	KindReadRequest
	KindReadResponse
	KindAck // also NAK and RNR NAK
	KindAtomicAck
	KindCmpSwap
	KindFetchAdd
	KindAtomicWrite
	KindFlush
	KindCNP  // congestion notification: no queue pair's message
	KindGaps // an acknowledgement, with what has come behind it (Gaps)
	NumKinds
)

// isRequest reports whether requesters send messages of this kind; the others are
// answers.
func (k Kind) isRequest() bool {
	switch k {
	case KindSend, KindWrite, KindReadRequest, KindCmpSwap, KindFetchAdd, KindAtomicWrite, KindFlush:
		return true
	}
	return false
}

// Pos is a packet's place in its message.
type Pos uint8

const (
	First Pos = iota
	Middle
	Last
	Only
)

// Starts reports whether the packet is its message's first.
func (p Pos) Starts() bool { return p == First || p == Only }

// Ends reports whether the packet is its message's last.
func (p Pos) Ends() bool { return p == Last || p == Only }

// Extra is the header that the last packet of a SEND or WRITE may carry.
type Extra uint8

const (
	NoExtra Extra = iota
	WithImm
	WithInv
)

// RETH is the RDMA extended transport header.
type RETH struct {
	VA   uint64
	RKey uint32
	Len  uint32

	// Flush is what a FLUSH asks for. On the wire it is a header of its own, in
	// front of the range that it is about.
	Flush FETH
}

// FETH is the header of a FLUSH (IBA annex A19): 32 bits, of which the low six
// mean something.
type FETH struct {
	Placement   uint8 // what is ensured: bits PlaceGlobal and PlacePersistent; 4 bits wide
	Selectivity uint8 // for which bytes: SelectRange or SelectRegion; 2 bits wide
}

// The fields of a FETH.
const (
	PlaceGlobal     = 1 << 0 // the bytes are visible to all that can see the memory
	PlacePersistent = 1 << 1 // the bytes survive the loss of power

	SelectRange  = 0 // the range of the RETH
	SelectRegion = 1 // all of the region; the range is ignored
)

func makeFETH(v uint32) FETH { return FETH{Placement: uint8(v & 0xf), Selectivity: uint8(v >> 4 & 3)} }

func (f FETH) bits() uint32 { return uint32(f.Selectivity&3)<<4 | uint32(f.Placement&0xf) }

// AtomicETH is the header of an atomic request.
type AtomicETH struct {
	VA      uint64
	RKey    uint32
	SwapAdd uint64
	Compare uint64
}

// AETH is the acknowledgement header. MSN, 24 bits, is how many messages the
// responder has completed.
type AETH struct {
	Syndrome Syndrome
	MSN      uint32
}

// DETH is the datagram header.
type DETH struct {
	QKey  uint32
	SrcQP uint32 // 24 bits
}

// Syndrome is the first byte of an AETH (IBA table 43): three bits of type and
// five of value.
type Syndrome uint8

const (
	// AckNoCredits is a plain acknowledgement without end-to-end flow control
	// (credit count 31, "invalid").
	AckNoCredits Syndrome = 0x1f

	NakPSNSequence   Syndrome = 0x60
	NakInvalidReq    Syndrome = 0x61
	NakRemoteAccess  Syndrome = 0x62
	NakRemoteOpError Syndrome = 0x63
	NakInvalidRD     Syndrome = 0x64
)

// RNRNak makes the syndrome of an RNR NAK with a timer code of IBA table 45.
func RNRNak(timer uint8) Syndrome { return 0x20 | Syndrome(timer&0x1f) }

// IsAck reports whether the syndrome is an acknowledgement; the other types are RNR
// NAK, NAK and a reserved one.
func (s Syndrome) IsAck() bool { return s>>5 == 0 }

// IsRNR reports whether the syndrome is a receiver-not-ready NAK.
func (s Syndrome) IsRNR() bool { return s>>5 == 1 }

// IsNak reports whether the syndrome is a NAK.
func (s Syndrome) IsNak() bool { return s>>5 == 3 }

// Value returns the five low bits: credits, RNR timer code or NAK code.
func (s Syndrome) Value() uint8 { return uint8(s & 0x1f) }
