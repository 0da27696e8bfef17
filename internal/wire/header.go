package wire

import (
	"encoding/binary"
	"errors"
)

const (
	// RoCEPort is the UDP destination port of RoCE v2.
	RoCEPort = 4791
	// ManagementQP is the general services queue pair, which connection management goes by.
	ManagementQP = 1
	// MulticastQP is the destination queue pair of packets to a multicast group.
	MulticastQP = 0xffffff
	// DefaultPKey is the partition key with full membership that RoCE uses.
	DefaultPKey = 0xffff

	BTHLen  = 12 // base transport header
	ICRCLen = 4  // invariant checksum, at the end of every packet

	// MaxPayload is the largest path MTU.
	MaxPayload = 4096
	// MaxPacket is the longest UDP payload that any packet has: an XRC RDMA
	// WRITE Only with immediate data (XRCETH, RETH, immediate) of MaxPayload.
	MaxPacket = BTHLen + 4 + 16 + 4 + MaxPayload + ICRCLen
)

// The errors of Parse.
var (
	ErrShort   = errors.New("wire: packet shorter than its headers")
	ErrLong    = errors.New("wire: payload longer than the largest MTU")
	ErrVersion = errors.New("wire: transport header version not 0")
	ErrOpcode  = errors.New("wire: opcode unknown")
	ErrPad     = errors.New("wire: pad count does not fit the payload")
	ErrPayload = errors.New("wire: payload in a packet that has none")
)

// Header is a BTH and the extension headers that its opcode has. The fields of
// other extension headers are zero after Parse and ignored by Append.
type Header struct {
	Opcode    Opcode
	Solicited bool
	MigReq    bool
	Pad       uint8 // bytes after the payload, 0 to 3
	Version   uint8
	PKey      uint16
	FECN      bool
	BECN      bool
	DestQP    uint32 // 24 bits
	AckReq    bool
	Hints     uint8 // the seven bits beside AckReq, which the specification reserves
	PSN       PSN

	DETH   DETH
	XRCSRQ uint32 // XRCETH: the target's shared receive queue, 24 bits
	RETH   RETH
	Atomic AtomicETH
	AETH   AETH
	Orig   uint64 // AtomicAckETH: the value before the operation
	Imm    uint32 // immediate data, or the key to invalidate
}

// Parse reads the headers of a UDP payload that ends with the ICRC, and returns
// the packet's payload without padding and ICRC. It does not check the ICRC,
// and accepts any P_Key. Reserved bits are ignored (IBA 9.2), but for Hints.
func (h *Header) Parse(b []byte) (payload []byte, err error) {
	if len(b) < BTHLen+ICRCLen {
		return nil, ErrShort
	}
	if b[1]&0x0f != 0 {
		return nil, ErrVersion // first: another version may have its fields elsewhere
	}
	info := Opcode(b[0]).Info()
	if !info.Valid {
		return nil, ErrOpcode
	}
	n := len(b) - BTHLen - ICRCLen - info.HeaderLen // payload and padding
	pad := int(b[1] >> 4 & 3)
	switch {
	case n < 0:
		return nil, ErrShort
	case n != 0 && !info.Payload:
		return nil, ErrPayload
	case pad > n || n%4 != 0:
		return nil, ErrPad // a packet is a multiple of four bytes (IBA 9.2)
	case n > MaxPayload:
		return nil, ErrLong
	}

	*h = Header{} // and then field by field, which is faster than a literal
	h.Opcode = Opcode(b[0])
	h.Solicited = b[1]&0x80 != 0
	h.MigReq = b[1]&0x40 != 0
	h.Pad = uint8(pad)
	h.PKey = be.Uint16(b[2:])
	h.FECN = b[4]&0x80 != 0
	h.BECN = b[4]&0x40 != 0
	h.DestQP = be.Uint32(b[4:]) & mask24
	h.AckReq = b[8]&0x80 != 0
	h.Hints = b[8] & hintBits
	h.PSN = MakePSN(be.Uint32(b[8:]))
	rest := b[BTHLen:]
	if info.Headers != 0 {
		rest = h.parseExtensions(info.Headers, rest)
	}
	return rest[: n-pad : n-pad], nil
}

// parseExtensions reads the headers of the set and returns what follows them. Parse
// has checked that b is long enough.
func (h *Header) parseExtensions(set Headers, b []byte) []byte {
	if set&HasDETH != 0 {
		h.DETH = DETH{QKey: be.Uint32(b), SrcQP: be.Uint32(b[4:]) & mask24}
		b = b[8:]
	}
	if set&HasXRCETH != 0 {
		h.XRCSRQ = be.Uint32(b) & mask24
		b = b[4:]
	}
	if set&HasFETH != 0 {
		h.RETH.Flush = makeFETH(be.Uint32(b))
		b = b[4:]
	}
	if set&HasRETH != 0 {
		h.RETH.VA, h.RETH.RKey, h.RETH.Len = be.Uint64(b), be.Uint32(b[8:]), be.Uint32(b[12:])
		b = b[16:]
	}
	if set&HasAtomicETH != 0 {
		h.Atomic = AtomicETH{
			VA: be.Uint64(b), RKey: be.Uint32(b[8:]),
			SwapAdd: be.Uint64(b[12:]), Compare: be.Uint64(b[20:]),
		}
		b = b[28:]
	}
	if set&HasAETH != 0 {
		h.AETH = AETH{Syndrome: Syndrome(b[0]), MSN: be.Uint32(b) & mask24}
		b = b[4:]
	}
	if set&HasAtomicAckETH != 0 {
		h.Orig = be.Uint64(b)
		b = b[8:]
	}
	if set&(HasImm|HasIETH) != 0 {
		h.Imm = be.Uint32(b)
		b = b[4:]
	}
	return b
}

// Len returns the number of bytes that Append adds.
func (h *Header) Len() int { return BTHLen + h.Opcode.Info().HeaderLen }

// Append appends the BTH and the extension headers that the opcode has. Reserved
// bits are zero, but for Hints; numbers wider than their field lose the upper bits.
func (h *Header) Append(b []byte) []byte {
	flags := h.Pad&3<<4 | h.Version&0x0f
	if h.Solicited {
		flags |= 0x80
	}
	if h.MigReq {
		flags |= 0x40
	}
	qp, psn := h.DestQP&mask24, uint32(h.Hints&hintBits)<<24|uint32(h.PSN)&mask24
	if h.FECN {
		qp |= 1 << 31
	}
	if h.BECN {
		qp |= 1 << 30
	}
	if h.AckReq {
		psn |= 1 << 31
	}
	b = append(b,
		byte(h.Opcode), flags, byte(h.PKey>>8), byte(h.PKey),
		byte(qp>>24), byte(qp>>16), byte(qp>>8), byte(qp),
		byte(psn>>24), byte(psn>>16), byte(psn>>8), byte(psn))
	if set := h.Opcode.Info().Headers; set != 0 {
		b = h.appendExtensions(set, b)
	}
	return b
}

func (h *Header) appendExtensions(set Headers, b []byte) []byte {
	if set&HasDETH != 0 {
		b = be.AppendUint32(b, h.DETH.QKey)
		b = be.AppendUint32(b, h.DETH.SrcQP&mask24)
	}
	if set&HasXRCETH != 0 {
		b = be.AppendUint32(b, h.XRCSRQ&mask24)
	}
	if set&HasFETH != 0 {
		b = be.AppendUint32(b, h.RETH.Flush.bits())
	}
	if set&HasRETH != 0 {
		b = be.AppendUint64(b, h.RETH.VA)
		b = be.AppendUint32(b, h.RETH.RKey)
		b = be.AppendUint32(b, h.RETH.Len)
	}
	if set&HasAtomicETH != 0 {
		b = be.AppendUint64(b, h.Atomic.VA)
		b = be.AppendUint32(b, h.Atomic.RKey)
		b = be.AppendUint64(b, h.Atomic.SwapAdd)
		b = be.AppendUint64(b, h.Atomic.Compare)
	}
	if set&HasAETH != 0 {
		b = be.AppendUint32(b, uint32(h.AETH.Syndrome)<<24|h.AETH.MSN&mask24)
	}
	if set&HasAtomicAckETH != 0 {
		b = be.AppendUint64(b, h.Orig)
	}
	if set&(HasImm|HasIETH) != 0 {
		b = be.AppendUint32(b, h.Imm)
	}
	return b
}

// PadFor returns how many bytes of padding follow a payload of n bytes.
func PadFor(n int) uint8 { return uint8(-n & 3) }

const mask24 = 1<<24 - 1

// Hints: what queue pairs of this library tell each other. A sender that follows the
// specification leaves these bits zero, and a receiver ignores them (IBA 9.2), so that nothing
// changes between a queue pair of this library and another one.
const (
	// HintOurs says that the sender is of this library, understands Gaps, and keeps what comes too early.
	// It is a pattern of several bits, since others may use one of them for something else.
	HintOurs  = 0x58
	HintProbe = 0x02 // sent again only to ask what has come; on an answer: it answers such a packet
	HintAlone = 0x01 // sent again alone: what was sent behind it does not come again
	HintFirst = 0x04 // with HintAlone: everything before it has been answered

	hintBits = 0x7f
	oursBits = 0x78
)

// Ours reports whether the hints of a packet are those of this library.
func Ours(hints uint8) bool { return hints&oursBits == HintOurs }

var be = binary.BigEndian
