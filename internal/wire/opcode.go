package wire

// Opcode is the first byte of a BTH: three bits of transport, five of
// operation (IBA 9.2.1).
type Opcode uint8

// OpCNP is the congestion notification packet (IBA A17.9.3): an opcode of a
// transport of its own, with 16 reserved bytes where a payload would be.
const OpCNP Opcode = 0x81

// Headers is the set of extension headers that follow a BTH.
type Headers uint16

const (
	HasDETH         Headers = 1 << iota // datagram: Q_Key and source queue pair
	HasXRCETH                           // XRC: the target's shared receive queue
	HasFETH                             // FLUSH: what is asked for
	HasRETH                             // RDMA: address, key, length
	HasAtomicETH                        // atomic request
	HasAETH                             // acknowledge
	HasAtomicAckETH                     // atomic acknowledge: the value before the operation
	HasImm                              // immediate data
	HasIETH                             // key to invalidate
)

// headerLen has the lengths of the extension headers, in the order of their bits,
// which is also their order on the wire (IBA 9.3).
var headerLen = [9]int{8, 4, 4, 16, 28, 4, 8, 4, 4}

// Len returns the number of bytes that the headers take.
func (s Headers) Len() int {
	n := 0
	for i, l := range headerLen {
		if s>>i&1 != 0 {
			n += l
		}
	}
	return n
}

// OpInfo is what an opcode implies.
type OpInfo struct {
	Valid     bool // the opcode exists and is implemented; if not, only Transport is set
	Name      string
	Transport Transport
	Kind      Kind
	Pos       Pos
	Extra     Extra // on Last and Only packets
	Headers   Headers
	HeaderLen int  // bytes of headers after the BTH
	Payload   bool // whether a payload, possibly empty, may follow the headers
}

// Info returns what the opcode implies. It is never nil.
func (o Opcode) Info() *OpInfo { return &opcodes[o] }

// String returns the opcode's name, as protocol analysers print it.
func (o Opcode) String() string {
	if i := &opcodes[o]; i.Valid {
		return i.Name
	}
	const hex = "0123456789ABCDEF"
	return "opcode 0x" + string([]byte{hex[o>>4], hex[o&15]})
}

// Op returns the opcode of a packet, or false if there is none: the transport does
// not have the operation, an Extra is not at the end of a message, or a message that
// is always one packet is not Only.
func Op(t Transport, k Kind, p Pos, x Extra) (Opcode, bool) {
	if t >= numTransports || k >= NumKinds || p >= numPos || x >= numExtras {
		return 0, false
	}
	e := opcodeOf[t][k][p][x]
	return Opcode(e), e&hasOpcode != 0
}

const (
	numTransports = 8 // three bits
	numPos        = 4
	numExtras     = 3

	hasOpcode = 1 << 8 // an entry of opcodeOf that is set
)

// Sets of transports, for the table.
const (
	inRC  = 1 << RC
	inUC  = 1 << UC
	inUD  = 1 << UD
	inCNP = 1 << CNP
	inXRC = 1 << XRC
	inOwn = 1 << Own
)

// operations is the table of all opcodes (IBA 9.2.1; annex A14 for XRC, A19 for
// FLUSH and ATOMIC WRITE). A row has the low five bits of the opcode, and the
// transports that have the operation. buildOpcodes adds the headers that a transport
// has in all of its packets.
var operations = []struct {
	code    uint8
	name    string
	kind    Kind
	pos     Pos
	extra   Extra
	headers Headers
	payload bool
	in      uint8
}{
	{0x00, "Send First", KindSend, First, NoExtra, 0, true, inRC | inUC | inXRC},
	{0x01, "Send Middle", KindSend, Middle, NoExtra, 0, true, inRC | inUC | inXRC},
	{0x02, "Send Last", KindSend, Last, NoExtra, 0, true, inRC | inUC | inXRC},
	{0x03, "Send Last Immediate", KindSend, Last, WithImm, HasImm, true, inRC | inUC | inXRC},
	{0x04, "Send Only", KindSend, Only, NoExtra, 0, true, inRC | inUC | inUD | inXRC},
	{0x05, "Send Only Immediate", KindSend, Only, WithImm, HasImm, true, inRC | inUC | inUD | inXRC},
	{0x06, "RDMA Write First", KindWrite, First, NoExtra, HasRETH, true, inRC | inUC | inXRC},
	{0x07, "RDMA Write Middle", KindWrite, Middle, NoExtra, 0, true, inRC | inUC | inXRC},
	{0x08, "RDMA Write Last", KindWrite, Last, NoExtra, 0, true, inRC | inUC | inXRC},
	{0x09, "RDMA Write Last Immediate", KindWrite, Last, WithImm, HasImm, true, inRC | inUC | inXRC},
	{0x0a, "RDMA Write Only", KindWrite, Only, NoExtra, HasRETH, true, inRC | inUC | inXRC},
	{0x0b, "RDMA Write Only Immediate", KindWrite, Only, WithImm, HasRETH | HasImm, true, inRC | inUC | inXRC},
	{0x0c, "RDMA Read Request", KindReadRequest, Only, NoExtra, HasRETH, false, inRC | inXRC},
	{0x0d, "RDMA Read Response First", KindReadResponse, First, NoExtra, HasAETH, true, inRC | inXRC},
	{0x0e, "RDMA Read Response Middle", KindReadResponse, Middle, NoExtra, 0, true, inRC | inXRC},
	{0x0f, "RDMA Read Response Last", KindReadResponse, Last, NoExtra, HasAETH, true, inRC | inXRC},
	{0x10, "RDMA Read Response Only", KindReadResponse, Only, NoExtra, HasAETH, true, inRC | inXRC},
	{0x11, "Acknowledge", KindAck, Only, NoExtra, HasAETH, false, inRC | inXRC},
	{0x12, "Atomic Acknowledge", KindAtomicAck, Only, NoExtra, HasAETH | HasAtomicAckETH, false, inRC | inXRC},
	{0x13, "Compare Swap", KindCmpSwap, Only, NoExtra, HasAtomicETH, false, inRC | inXRC},
	{0x14, "Fetch Add", KindFetchAdd, Only, NoExtra, HasAtomicETH, false, inRC | inXRC},
	{0x16, "Send Last Invalidate", KindSend, Last, WithInv, HasIETH, true, inRC | inXRC},
	{0x17, "Send Only Invalidate", KindSend, Only, WithInv, HasIETH, true, inRC | inXRC},
	{0x1c, "Flush", KindFlush, Only, NoExtra, HasFETH | HasRETH, false, inRC | inXRC},
	{0x1d, "Atomic Write", KindAtomicWrite, Only, NoExtra, HasRETH, true, inRC | inXRC},
	{0x01, "", KindCNP, Only, NoExtra, 0, true, inCNP},
	{0x11, "Gaps", KindGaps, Only, NoExtra, HasAETH, true, inOwn},
}

var transportName = [numTransports]string{RC: "RC", UC: "UC", RD: "RD", UD: "UD", CNP: "CNP", XRC: "XRC", Own: "Verbena"}

// String returns the transport's name.
func (t Transport) String() string {
	if t < numTransports && transportName[t] != "" {
		return transportName[t]
	}
	return "reserved transport"
}

var opcodes, opcodeOf = buildOpcodes()

func buildOpcodes() (info [256]OpInfo, of [numTransports][NumKinds][numPos][numExtras]uint16) {
	for o := range info {
		info[o].Transport = Transport(o >> 5)
	}
	for _, r := range operations {
		for t := range Transport(numTransports) {
			if r.in>>t&1 == 0 {
				continue
			}
			h := r.headers
			switch {
			case t == UD:
				h |= HasDETH
			case t == XRC && r.kind.isRequest():
				h |= HasXRCETH
			}
			name := t.String()
			if r.name != "" {
				name += " " + r.name
			}
			o := uint8(t)<<5 | r.code
			info[o] = OpInfo{
				Valid: true, Name: name, Transport: t, Kind: r.kind, Pos: r.pos, Extra: r.extra,
				Headers: h, HeaderLen: h.Len(), Payload: r.payload,
			}
			of[t][r.kind][r.pos][r.extra] = hasOpcode | uint16(o)
		}
	}
	return info, of
}
