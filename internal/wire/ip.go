package wire

import "net/netip"

// The IP and UDP headers that carry a packet. A UDP socket writes and removes
// them; they are rebuilt for captures and for the 40 bytes that precede a
// datagram in a UD receive buffer.

const (
	IPv4Len = 20
	IPv6Len = 40
	UDPLen  = 8
	GRHLen  = 40

	protoUDP = 17
	flagDF   = 0x4000
)

// The low two bits of the traffic class, for routers (RFC 3168).
const (
	ECNMask = 3
	ECT0    = 2 // the packet may be marked instead of being dropped
	ECNMark = 3 // CE: it met congestion
)

// AppendIPv4 appends the IPv4 header, DF set and with its checksum, of a
// datagram with udpPayloadLen bytes from the BTH through the ICRC. The addresses
// must be IPv4, possibly in their IPv6-mapped form.
func AppendIPv4(b []byte, src, dst netip.Addr, tclass, hopLimit uint8, id uint16, udpPayloadLen int) []byte {
	s, d := src.Unmap().As4(), dst.Unmap().As4()
	at := len(b)
	b = append(b, 0x45, tclass)
	b = be.AppendUint16(b, uint16(IPv4Len+UDPLen+udpPayloadLen))
	b = be.AppendUint16(b, id)
	b = be.AppendUint16(b, flagDF)
	b = append(b, hopLimit, protoUDP, 0, 0)
	b = append(b, s[:]...)
	b = append(b, d[:]...)
	be.PutUint16(b[at+10:], ^fold(sum16(0, b[at:])))
	return b
}

// AppendIPv6 appends the IPv6 header of such a datagram.
func AppendIPv6(b []byte, src, dst netip.Addr, tclass, hopLimit uint8, flowLabel uint32, udpPayloadLen int) []byte {
	s, d := src.As16(), dst.As16()
	b = be.AppendUint32(b, 6<<28|uint32(tclass)<<20|flowLabel&0xfffff)
	b = be.AppendUint16(b, uint16(UDPLen+udpPayloadLen))
	b = append(b, protoUDP, hopLimit)
	b = append(b, s[:]...)
	return append(b, d[:]...)
}

// AppendUDP4 appends the UDP header of a datagram over IPv4, without a checksum:
// IPv4 does not need one.
func AppendUDP4(b []byte, srcPort, dstPort uint16, udpPayloadLen int) []byte {
	b = be.AppendUint16(b, srcPort)
	b = be.AppendUint16(b, dstPort)
	b = be.AppendUint16(b, uint16(UDPLen+udpPayloadLen))
	return append(b, 0, 0)
}

// AppendUDP6 appends the UDP header and the payload of a datagram over IPv6,
// with the checksum that IPv6 demands (RFC 8200 8.1).
func AppendUDP6(b []byte, src, dst netip.AddrPort, payload []byte) []byte {
	s, d := src.Addr().As16(), dst.Addr().As16()
	at := len(b)
	b = AppendUDP4(b, src.Port(), dst.Port(), len(payload))
	b = append(b, payload...)
	sum := sum16(sum16(uint32(UDPLen+len(payload)+protoUDP), s[:]), d[:])
	check := ^fold(sum16(sum, b[at:]))
	if check == 0 {
		check = 0xffff // zero would mean "none"
	}
	be.PutUint16(b[at+6:], check)
	return b
}

// AppendGRH appends the 40 bytes that precede a message in a UD receive buffer:
// AppendGRH4 or AppendGRH6, by the family of the addresses.
func AppendGRH(b []byte, src, dst netip.Addr, tclass, hopLimit uint8, udpPayloadLen int) []byte {
	if src.Unmap().Is4() && dst.Unmap().Is4() {
		return AppendGRH4(b, src, dst, tclass, hopLimit, udpPayloadLen)
	}
	return AppendGRH6(b, src, dst, tclass, hopLimit, udpPayloadLen)
}

// AppendGRH4 appends 20 zero bytes and the IPv4 header (IBA A17.4.5.2), with
// identification 0, which a socket does not show.
func AppendGRH4(b []byte, src, dst netip.Addr, tclass, hopLimit uint8, udpPayloadLen int) []byte {
	b = append(b, make([]byte, GRHLen-IPv4Len)...)
	return AppendIPv4(b, src, dst, tclass, hopLimit, 0, udpPayloadLen)
}

// AppendGRH6 appends the IPv6 header, with flow label 0.
func AppendGRH6(b []byte, src, dst netip.Addr, tclass, hopLimit uint8, udpPayloadLen int) []byte {
	return AppendIPv6(b, src, dst, tclass, hopLimit, 0, udpPayloadLen)
}

// sum16 adds the 16-bit words of b, an odd last byte as the upper half of one.
// A datagram is too short for the sum to overflow.
func sum16(sum uint32, b []byte) uint32 {
	for ; len(b) >= 2; b = b[2:] {
		sum += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) > 0 {
		sum += uint32(b[0]) << 8
	}
	return sum
}

func fold(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
