package wire

import (
	"hash/crc32"
	"net/netip"
)

// The invariant CRC (IBA 7.8.1, A17.3.3): CRC-32 over eight bytes of ones, the
// IP and UDP headers and the packet, with everything that a router may change
// replaced by ones; little-endian at the packet's end.
//
// Bytes are polynomials over GF(2), and a CRC is a remainder modulo P. So it is
// linear: a difference e in the register becomes e·x^8m mod P after m further
// bytes, whatever these are. Three uses of it:
//
//  1. A Pseudo holds the CRC of a flow's IP and UDP headers with lengths and
//     identification zero; Start xors in what these contribute, out of tables.
//  2. Header masks the BTH's fifth byte: the difference, carried back by four
//     bytes (times x^-32), is xor-ed into the CRC before the header is read, so
//     that header and payload take one pass.
//  3. Check does not know the IPv4 identification, which a UDP socket does not
//     show. It takes the difference d between the CRC received and the one for
//     the id expected, and carries it back to before the m bytes from the id on:
//     d·x^-8m. There two ids differ by id xor expected, in the 16 bits that enter
//     the register first, so the packet is undamaged if and only if the other 16 are
//     zero: half of the CRC checks the packet, the other half yields the id. That
//     takes one table of x^-8m and one carryless product.
//
// CRC-32 is reflected: bit 31 stands for x^0, bit 0 for x^31, and x·a is a
// right shift. hash/crc32 complements its argument and result, which changes no
// difference.

// Pseudo is the part of the ICRC that all packets of one flow share: addresses
// and ports. It is a value of a few bytes, made once for each flow and
// immutable.
type Pseudo struct {
	base CRC // over the prefix with lengths and identification zero
	v6   bool
}

// CRC is the ICRC of the part of a packet so far.
type CRC uint32

// Layout of the prefix: ones, IP header, UDP header.
const (
	onesLen    = 8
	prefix4Len = onesLen + IPv4Len + UDPLen
	prefix6Len = onesLen + IPv6Len + UDPLen

	total4At = onesLen + 2               // IPv4 total length
	id4At    = onesLen + 4               // IPv4 identification
	udp4At   = onesLen + IPv4Len + 4     // UDP length over IPv4
	length6  = onesLen + 4               // IPv6 payload length
	udp6At   = onesLen + IPv6Len + 4     // UDP length over IPv6
	idToEnd  = prefix4Len - id4At        // bytes from the id to the BTH
	maskedAt = 4                         // FECN, BECN and reserved bits in the BTH
	words    = (MaxPacket - ICRCLen) / 4 // of the longest packet
)

// NewPseudo prepares the ICRCs of a flow. IPv4 addresses may be in their
// IPv6-mapped form, as GIDs have them; on the wire they never are.
func NewPseudo(src, dst netip.Addr, srcPort, dstPort uint16) Pseudo {
	const ones = 0xff
	var buf [prefix6Len]byte
	for i := range onesLen {
		buf[i] = ones
	}
	src, dst = src.Unmap(), dst.Unmap()
	var p Pseudo
	var b []byte
	if src.Is4() && dst.Is4() {
		b = buf[:prefix4Len]
		ip := b[onesLen:]
		ip[0], ip[1], ip[6] = 0x45, ones, flagDF>>8
		ip[8], ip[9], ip[10], ip[11] = ones, protoUDP, ones, ones
		s, d := src.As4(), dst.As4()
		copy(ip[12:], s[:])
		copy(ip[16:], d[:])
	} else {
		p.v6 = true
		b = buf[:]
		ip := b[onesLen:]
		ip[0], ip[1], ip[2], ip[3] = 0x6f, ones, ones, ones
		ip[6], ip[7] = protoUDP, ones
		s, d := src.As16(), dst.As16()
		copy(ip[8:], s[:])
		copy(ip[24:], d[:])
	}
	udp := b[len(b)-UDPLen:]
	be.PutUint16(udp, srcPort)
	be.PutUint16(udp[2:], dstPort)
	udp[6], udp[7] = ones, ones
	p.base = ^CRC(feed(^uint32(0), b))
	return p
}

// Start begins the ICRC of a packet whose UDP payload, from the BTH through the
// ICRC, is udpPayloadLen bytes. The id is that of the IPv4 header; IPv6 has none.
func (p *Pseudo) Start(id uint16, udpPayloadLen int) CRC {
	n := uint16(udpPayloadLen + UDPLen)
	if p.v6 {
		return p.base ^ tables.length6.at(n)
	}
	return p.base ^ tables.udp4.at(n) ^ tables.total4.at(n+IPv4Len) ^ tables.id4.at(id)
}

// Header continues the ICRC with b, which begins with at least the first five bytes
// of a BTH; as much of the packet as is contiguous may follow.
func (c CRC) Header(b []byte) CRC {
	return (c ^ tables.masked[b[maskedAt]]).Add(b)
}

// Add continues the ICRC with more bytes.
func (c CRC) Add(b []byte) CRC { return CRC(update(uint32(c), b)) }

// AddPad continues the ICRC with 0 to 3 bytes of padding.
func (c CRC) AddPad(n uint8) CRC { return c.Add(zeros[:n]) }

// Append appends the finished ICRC.
func (c CRC) Append(b []byte) []byte {
	return append(b, byte(c), byte(c>>8), byte(c>>16), byte(c>>24))
}

// Check reports whether a received UDP payload ends with its ICRC, and returns the
// IPv4 identification for which it does. The one expected is tried first, at the cost
// of the CRC alone; any other one is solved for, which weakens the check from 32
// bits to 16. IPv6 is always checked with 32 bits, and the id returned is
// expectID. DF is taken as set.
//
// Damage goes unnoticed if it looks like a change of the id. Damage of a single bit,
// or of up to three bits in a row, never does, at any place in a packet of any length
// up to MaxPacket. Random damage does in one packet of 65,536; the UDP checksum
// catches it earlier, unless the peer sends none.
func (p *Pseudo) Check(udpPayload []byte, expectID uint16) (id uint16, ok bool) {
	n := len(udpPayload) - ICRCLen
	if n < BTHLen {
		return 0, false
	}
	t := udpPayload[n : n+ICRCLen]
	got := CRC(t[0]) | CRC(t[1])<<8 | CRC(t[2])<<16 | CRC(t[3])<<24
	crc := p.Start(expectID, len(udpPayload)).Header(udpPayload[:n])
	if id, ok = p.solve(uint32(got^crc), n, expectID); !ok && IsFlush(udpPayload[:n]) {
		id, ok = p.solve(uint32(got^crc.Twice(udpPayload[:n])), 2*n, expectID)
	}
	return id, ok
}

// solve returns the id whose difference to the one expected becomes diff, n bytes
// after the prefix.
func (p *Pseudo) solve(diff uint32, n int, expectID uint16) (id uint16, ok bool) {
	if diff == 0 {
		return expectID, true
	}
	if p.v6 || n%4 != 0 || n/4 > words {
		return 0, false
	}
	e := mulmod(diff, tables.back[n/4])
	if e>>16 != 0 {
		return 0, false
	}
	// The id's first byte is its upper one, and a reflected CRC begins at the low end.
	return expectID ^ (uint16(e)<<8 | uint16(e)>>8), true
}

// Twice returns the ICRC that Linux's software device (rxe, up to 7.2) computes for a
// FLUSH. A FLUSH has no payload, and rxe's table of headers does not say where one
// would begin; so rxe takes the packet, up to the ICRC, for its payload, and adds it
// again with nothing masked. Check accepts such packets, and a requester that gets no
// answer to a FLUSH may send one.
func (c CRC) Twice(b []byte) CRC { return c.Add(b) }

// IsFlush reports whether a packet without its ICRC is a FLUSH of the reliable
// connection, by its length and its opcode.
func IsFlush(b []byte) bool {
	const length, opcode = BTHLen + 4 + 16, 0x1c
	return len(b) == length && b[0] == opcode
}

// field is the contribution of a 16-bit big-endian field to a CRC, at a fixed
// distance after it.
type field [2][256]CRC

func (f *field) at(v uint16) CRC { return f[0][v>>8] ^ f[1][v&0xff] }

// tables are made once, in some tens of microseconds: 8 KiB of fields, 1 KiB
// for the masked byte, 4 KiB of powers.
var tables = makeTables()

var zeros [4]byte

type tableSet struct {
	total4, udp4, id4, length6 field             // what the header fields contribute
	masked                     [256]CRC          // by the BTH's fifth byte: what Header xors in
	back                       [words + 1]uint32 // x^-8m for a packet of that many words
}

func makeTables() *tableSet {
	t := new(tableSet)
	fill := func(f *field, toEnd int) {
		for v := range 256 {
			f[0][v] ^= CRC(forward(uint32(v), toEnd))
			f[1][v] ^= CRC(forward(uint32(v)<<8, toEnd))
		}
	}
	fill(&t.total4, prefix4Len-total4At)
	fill(&t.udp4, prefix4Len-udp4At)
	fill(&t.id4, idToEnd)
	fill(&t.length6, prefix6Len-length6) // the same number stands in both headers
	fill(&t.length6, prefix6Len-udp6At)
	for v := range 256 {
		t.masked[v] = CRC(backward(uint32(v)^0xff, maskedAt))
	}
	const one = 1 << 31
	x := backward(one, idToEnd)
	for i := range t.back {
		t.back[i] = x
		x = backward(x, 4)
	}
	return t
}

// feed runs the CRC's register over b. Unlike crc32.Update it does not make b
// escape to the heap; it is for short prefixes.
func feed(crc uint32, b []byte) uint32 {
	for _, v := range b {
		crc = crc32.IEEETable[byte(crc)^v] ^ crc>>8
	}
	return crc
}

// forward multiplies by x^8n modulo P: the register after n zero bytes.
func forward(a uint32, n int) uint32 {
	for range 8 * n {
		a = a>>1 ^ -(a&1)&crc32.IEEE
	}
	return a
}

// backward divides by x^8n modulo P. P's constant term is 1, so x has an
// inverse: the top bit is set if forward has xor-ed P.
func backward(a uint32, n int) uint32 {
	for range 8 * n {
		top := a >> 31
		a = (a^-top&crc32.IEEE)<<1 | top
	}
	return a
}

// mulmod multiplies modulo P.
func mulmod(a, b uint32) uint32 {
	var r uint32
	for range 32 {
		r ^= -(b >> 31) & a // the coefficient of x^0, then x^1, …
		b <<= 1
		a = a>>1 ^ -(a&1)&crc32.IEEE
	}
	return r
}
