package cm

import "net/netip"

// IPHeader is the IP-CM header, with which the private data of a REQ or SIDR_REQ begins: the
// addresses that the programs used. The destination port is in the service id.
type IPHeader struct {
	Src       netip.AddrPort
	Dst       netip.Addr
	Version   byte // of the header: 0 is the only one there is
	IPVersion byte // 4 or 6; Connect and Resolve take it from Src
}

const ipHeaderLen = 36

// Port spaces of rdma_cm: bits 16 to 31 of the service ids that have an IP-CM header.
const (
	portSpaceIPoIB = 0x0002
	portSpaceTCP   = 0x0106
	portSpaceUDP   = 0x0111
	portSpaceIB    = 0x013f
)

// hasIPHeader reports whether requests for the service may begin with an IP-CM header.
func hasIPHeader(service uint64) bool {
	switch service >> 16 {
	case portSpaceIPoIB, portSpaceTCP, portSpaceUDP, portSpaceIB:
		return true
	}
	return false
}

// parseIPHeader returns the header of a request for the service, and the private data behind it. The
// header is nil if there is none: neither IP version stands there, which is how AF_IB looks.
func parseIPHeader(service uint64, private []byte) (*IPHeader, []byte) {
	if !hasIPHeader(service) || len(private) < ipHeaderLen {
		return nil, private
	}
	h := &IPHeader{Version: private[0], IPVersion: private[1] >> 4}
	var src netip.Addr
	switch h.IPVersion {
	case 4:
		src, h.Dst = netip.AddrFrom4([4]byte(private[16:])), netip.AddrFrom4([4]byte(private[32:]))
	case 6:
		src, h.Dst = netip.AddrFrom16([16]byte(private[4:])), netip.AddrFrom16([16]byte(private[20:]))
	default:
		return nil, private
	}
	h.Src = netip.AddrPortFrom(src, be.Uint16(private[2:]))
	return h, private[ipHeaderLen:]
}

// putPrivate writes the header, unless it is nil, and the program's private data.
func putPrivate(to []byte, h *IPHeader, private []byte) error {
	if h != nil {
		src, dst := h.Src.Addr(), h.Dst
		if !src.IsValid() || src.BitLen() != dst.BitLen() {
			return ErrParam
		}
		to[0] = h.Version
		be.PutUint16(to[2:], h.Src.Port())
		if src.Is4() {
			s, d := src.As4(), dst.As4()
			to[1] = 4 << 4
			copy(to[16:], s[:])
			copy(to[32:], d[:])
		} else {
			s, d := src.As16(), dst.As16()
			to[1] = 6 << 4
			copy(to[4:], s[:])
			copy(to[20:], d[:])
		}
		to = to[ipHeaderLen:]
	}
	if len(private) > len(to) {
		return ErrLength
	}
	copy(to, private)
	return nil
}
