package tools

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/verbena-rdma/verbena/verbs"
)

// udOverhead is the length of UDP, BTH, DETH and ICRC in a UD packet.
const udOverhead = 8 + 12 + 8 + 4

// CheckGRH checks the 40 bytes in front of a UD message of length bytes that came
// from src to dst: an IPv6 header or, for IPv4, an IPv4 header in the last 20
// bytes (IBA A17.4.5.2). It checks version and header length, the packet's length,
// that the packet is UDP, and the addresses. The checksum of an IPv4 header may be
// 0; otherwise it must be right.
func CheckGRH(grh []byte, src, dst verbs.GID, length int) error {
	if len(grh) != verbs.GRHLength {
		return fmt.Errorf("header has %d bytes, not %d", len(grh), verbs.GRHLength)
	}
	udpLen := udOverhead + (length+3)&^3
	if dst.Addr().Is4() {
		return checkIPv4(grh[verbs.GRHLength-20:], src.Addr(), dst.Addr(), 20+udpLen)
	}
	return checkIPv6(grh, src, dst, udpLen)
}

func checkIPv4(h []byte, src, dst netip.Addr, length int) error {
	if h[0] != 0x45 {
		return fmt.Errorf("IPv4 header starts with %#02x, not with 0x45", h[0])
	}
	if got := int(binary.BigEndian.Uint16(h[2:])); got != length {
		return fmt.Errorf("IPv4 total length is %d, not %d", got, length)
	}
	if h[9] != 17 {
		return fmt.Errorf("IPv4 protocol is %d, not UDP", h[9])
	}
	if got := netip.AddrFrom4([4]byte(h[12:16])); got != src {
		return fmt.Errorf("IPv4 source is %v, not %v", got, src)
	}
	if got := netip.AddrFrom4([4]byte(h[16:20])); got != dst {
		return fmt.Errorf("IPv4 destination is %v, not %v", got, dst)
	}
	if sum := binary.BigEndian.Uint16(h[10:]); sum != 0 && onesSum(h) != 0xffff {
		return fmt.Errorf("IPv4 checksum is %#04x, which is wrong", sum)
	}
	return nil
}

// onesSum returns the ones' complement sum of a header, 0xffff if its checksum is right.
func onesSum(h []byte) uint32 {
	var sum uint32
	for i := 0; i+1 < len(h); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return sum
}

func checkIPv6(h []byte, src, dst verbs.GID, length int) error {
	if h[0]>>4 != 6 {
		return fmt.Errorf("IPv6 header starts with %#02x", h[0])
	}
	if got := int(binary.BigEndian.Uint16(h[4:])); got != length {
		return fmt.Errorf("IPv6 payload length is %d, not %d", got, length)
	}
	// In a GRH 0x1b says that a BTH follows; in a RoCE v2 packet UDP follows.
	if h[6] != 17 && h[6] != 0x1b {
		return fmt.Errorf("IPv6 next header is %#02x, neither UDP nor IBA", h[6])
	}
	if !bytes.Equal(h[8:24], src[:]) {
		return fmt.Errorf("source is %v, not %v", verbs.GID(h[8:24]), src)
	}
	if !bytes.Equal(h[24:40], dst[:]) {
		return fmt.Errorf("destination is %v, not %v", verbs.GID(h[24:40]), dst)
	}
	return nil
}
