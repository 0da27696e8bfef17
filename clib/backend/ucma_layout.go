//go:build cgo

package main

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cma"
)

// Structures of the kernel's headers: rdma/rdma_user_cm.h, rdma/ib_user_verbs.h,
// rdma/ib_user_sa.h, rdma/ib.h.

// native is the order of bytes of numbers in structures that do not say otherwise.
var native = binary.NativeEndian

// Address families, and sizes of socket addresses.
const (
	afINET, afINET6, afIB                      = 2, 10, 27
	sizeINET, sizeINET6, sizeIB                = 16, 28, 48
	sizeStorage                                = 128
	sizeConnParam, sizeEventResp               = 272, 336
	sizeQPAttr, sizeAH, sizePath               = 144, 32, 64
	sizeAddrResp, sizeAddrRespOld              = 280, 272
	sizeRouteResp, sizeRouteOld                = 208, 200
	sizePathRecord, maxPrivate, sizeECE        = 72, 256, 8
	noIndex                             uint32 = 0xffffffff // of a device: its GUID alone names it
)

// addrSize returns the size of a socket address by its family, or 0.
func addrSize(b []byte) int {
	switch native.Uint16(b) {
	case afINET:
		return sizeINET
	case afINET6:
		return sizeINET6
	case afIB:
		return sizeIB
	}
	return 0
}

// ibAddr is an address of family AF_IB.
type ibAddr [sizeIB]byte

// ibAddrs are the addresses of an id that was given any of family AF_IB.
type ibAddrs struct{ src, dst *ibAddr }

// ofChild returns the addresses of a listener's new id, which has those of the request.
func (ibAddrs) ofChild() ibAddrs { return ibAddrs{} }

// gid returns the GID that the address consists of.
func (a *ibAddr) gid() ib.GID { return ib.GID(a[8:24]) }

// addrPort returns the IP address and the port that stand for it: on RoCE a GID is an IP
// address, and the lower half of a service id is a port.
func (a *ibAddr) addrPort() netip.AddrPort {
	return netip.AddrPortFrom(a.gid().Addr(), uint16(binary.BigEndian.Uint64(a[24:])))
}

// service returns the address's service id, and the mask that says which of its bits count.
func (a *ibAddr) service() (id, mask uint64) {
	return binary.BigEndian.Uint64(a[24:]), binary.BigEndian.Uint64(a[32:])
}

// port returns the port of an address that an id is bound to.
func (a *ibAddr) port() uint16 {
	id, mask := a.service()
	return uint16(id & mask)
}

// isOf reports whether the service id can be one of a port space. Service ids of ports have the number of
// their space in front of the port. Ids of RDMA_PS_IB may have those of other spaces, too.
func (a *ibAddr) isOf(ps cma.PortSpace) bool {
	const prefix, portBits = 1 << 24, 16
	id, mask := a.service()
	mask &^= 1<<portBits - 1
	for _, space := range []cma.PortSpace{cma.PSTCP, cma.PSUDP, cma.PSIB} {
		if (ps == space || ps == cma.PSIB) && id&mask == (prefix|uint64(space&0xff)<<portBits)&mask {
			return true
		}
	}
	return false
}

// sockaddr reads a socket address. It returns the address of family AF_IB as such, too. A
// family that is not known gives the zero address.
func sockaddr(b []byte) (netip.AddrPort, *ibAddr) {
	switch native.Uint16(b) {
	case afINET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:])), nil
	case afINET6:
		a := netip.AddrFrom16([16]byte(b[8:24])).Unmap()
		if scope := native.Uint32(b[24:]); scope != 0 && a.Is6() {
			a = a.WithZone(zone(scope))
		}
		return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[2:])), nil
	case afIB:
		a := ibAddr(b[:sizeIB])
		return a.addrPort(), &a
	}
	return netip.AddrPort{}, nil
}

// zone returns the name of an interface, or its number if it has none.
func zone(scope uint32) string {
	if i, err := net.InterfaceByIndex(int(scope)); err == nil {
		return i.Name
	}
	return strconv.FormatUint(uint64(scope), 10)
}

// scope reverses zone.
func scope(zone string) uint32 {
	if i, err := net.InterfaceByName(zone); err == nil {
		return uint32(i.Index)
	}
	n, _ := strconv.ParseUint(zone, 10, 32) // 0: no such interface any more
	return uint32(n)
}

// putSockaddr writes an address, and returns its size. The zero address has none.
func putSockaddr(to []byte, a netip.AddrPort) int {
	switch ip := a.Addr(); {
	case !ip.IsValid():
		return 0
	case ip.Is4():
		native.PutUint16(to, afINET)
		b := ip.As4()
		copy(to[4:8], b[:])
		binary.BigEndian.PutUint16(to[2:], a.Port())
		return sizeINET
	default:
		native.PutUint16(to, afINET6)
		b := ip.As16()
		copy(to[8:24], b[:])
		if ip.Zone() != "" {
			native.PutUint32(to[24:], scope(ip.Zone()))
		}
		binary.BigEndian.PutUint16(to[2:], a.Port())
		return sizeINET6
	}
}

// putIBAddr writes an address of family AF_IB.
func putIBAddr(to []byte, gid ib.GID, pkey uint16, service uint64) {
	native.PutUint16(to, afIB)
	binary.BigEndian.PutUint16(to[2:], pkey)
	copy(to[8:24], gid[:])
	binary.BigEndian.PutUint64(to[24:], service)
}

// connParam reads struct rdma_ucm_conn_param, and whether it is valid. b has its size.
func connParam(b []byte, withQKey bool) (*cma.ConnParam, bool) {
	p := &cma.ConnParam{QPN: native.Uint32(b) & 0xffffff, Private: append([]byte(nil), b[8:8+int(b[264])]...), SRQ: b[265] != 0,
		ResponderResources: b[266], InitiatorDepth: b[267], FlowControl: b[268] != 0, RetryCount: b[269], RNRRetry: b[270]}
	if withQKey {
		p.QKey = native.Uint32(b[4:])
	}
	return p, b[271] != 0
}

// ece reads struct rdma_ucm_ece, the optional last part of a command.
func ece(b []byte, at int) (e cma.ECE) {
	if len(b) >= at+sizeECE {
		e = cma.ECE{Vendor: native.Uint32(b[at:]), Options: native.Uint32(b[at+4:])}
	}
	return e
}

func flag(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}

func putConnParam(to []byte, p *cma.ConnParam) {
	native.PutUint32(to, p.QPN)
	native.PutUint32(to[4:], p.QKey)
	to[264] = uint8(copy(to[8:8+maxPrivate-1], p.Private))
	to[265], to[266], to[267], to[268] = flag(p.SRQ), p.ResponderResources, p.InitiatorDepth, flag(p.FlowControl)
	to[269], to[270] = p.RetryCount, p.RNRRetry
}

func putUDParam(to []byte, p *cma.UDParam) {
	native.PutUint32(to, p.QPN)
	native.PutUint32(to[4:], p.QKey)
	if !p.AH.DGID.IsZero() {
		putAH(to[8:], &p.AH)
	}
	to[40+maxPrivate] = uint8(copy(to[40:40+maxPrivate-1], p.Private))
}

// putAH writes struct ib_uverbs_ah_attr.
func putAH(to []byte, a *ib.AHAttr) {
	copy(to, a.DGID[:])
	native.PutUint32(to[16:], a.FlowLabel)
	to[20], to[21], to[22] = uint8(a.SGIDIndex), a.HopLimit, a.TrafficClass
	to[26] = a.SL
	to[29] = 1 // it has a global route, as all on RoCE
	to[30] = max(a.PortNum, 1)
}

// eventResp is struct rdma_ucm_event_resp. It has one of conn, ud and arg.
type eventResp struct {
	uid               uint64
	id, event, status uint32
	conn              *cma.ConnParam
	ud                *cma.UDParam
	arg               []byte
}

func (r *eventResp) bytes() []byte {
	b := make([]byte, sizeEventResp)
	native.PutUint64(b, r.uid)
	native.PutUint32(b[8:], r.id)
	native.PutUint32(b[12:], r.event)
	native.PutUint32(b[16:], r.status)
	switch {
	case r.conn != nil:
		putConnParam(b[20:], r.conn)
		native.PutUint32(b[sizeEventResp-sizeECE:], r.conn.ECE.Vendor)
		native.PutUint32(b[sizeEventResp-sizeECE+4:], r.conn.ECE.Options)
	case r.ud != nil:
		putUDParam(b[20:], r.ud)
	default:
		copy(b[20:28], r.arg)
	}
	return b
}

// putQPAttr writes struct ib_uverbs_qp_attr.
func putQPAttr(to []byte, a *ib.QPAttr, mask ib.QPAttrMask) {
	var bits uint32
	for i, m := range attrMasks {
		if mask&m != 0 {
			bits |= 1 << i
		}
	}
	for i, v := range [...]uint32{bits, verbsState(a.State), verbsState(a.CurState), uint32(a.PathMTU), 0, a.QKey, a.RQPSN, a.SQPSN, a.DestQPN, uint32(a.Access)} {
		native.PutUint32(to[4*i:], v)
	}
	if mask&ib.QPMaskAV != 0 {
		putAH(to[40:], &a.AV)
	}
	c := &a.Cap
	for i, v := range [...]int{c.MaxSendWR, c.MaxRecvWR, c.MaxSendSGE, c.MaxRecvSGE, c.MaxInlineData} {
		native.PutUint32(to[104+4*i:], uint32(v))
	}
	native.PutUint16(to[124:], a.PKeyIndex)
	copy(to[128:], []byte{flag(a.SQDAsyncNotify), flag(a.SQDraining), a.MaxRDAtomic, a.MaxDestRDAtomic, a.MinRNRTimer, a.Port, a.Timeout, a.RetryCnt, a.RNRRetry})
}

// verbsState returns the number of a state in verbs.h, where RESET is 0.
func verbsState(s ib.QPState) uint32 {
	if s == 0 {
		return 0
	}
	return uint32(s) - 1
}

// Path records, and the flags of the one that is used.
const (
	exactly     = 2 // a selector: the value is the one
	pathPrimary = 1<<0 | 1<<1 | 1<<3 | 1<<5
)

// putUserPath writes struct ib_user_path_rec.
func putUserPath(to []byte, p *cma.Path) {
	copy(to, p.DGID[:])
	copy(to[16:], p.SGID[:])
	binary.BigEndian.PutUint32(to[40:], p.FlowLabel)
	native.PutUint32(to[44:], 1) // reversible
	native.PutUint32(to[48:], uint32(p.MTU))
	binary.BigEndian.PutUint16(to[52:], p.PKey)
	to[54], to[55] = p.HopLimit, p.TrafficClass
	to[58], to[59], to[61], to[62] = exactly, exactly, exactly, p.LifeTime
}

// putPathRecord writes struct ib_path_rec_data, whose record is that of subnet administration.
func putPathRecord(to []byte, p *cma.Path) {
	native.PutUint32(to, pathPrimary)
	r := to[8:]
	copy(r[8:], p.DGID[:])
	copy(r[24:], p.SGID[:])
	binary.BigEndian.PutUint32(r[44:], p.FlowLabel&0xfffff<<8|uint32(p.HopLimit))
	r[48] = p.TrafficClass
	r[49] = 1 << 7 // reversible
	binary.BigEndian.PutUint16(r[50:], p.PKey)
	r[54] = exactly<<6 | uint8(p.MTU)
	r[55] = exactly << 6
	r[56] = exactly<<6 | p.LifeTime&0x3f
}

// pathRecord reads what putPathRecord writes.
func pathRecord(b []byte) *cma.Path {
	r := b[8:]
	word := binary.BigEndian.Uint32(r[44:])
	return &cma.Path{DGID: ib.GID(r[8:24]), SGID: ib.GID(r[24:40]), FlowLabel: word >> 8 & 0xfffff, HopLimit: uint8(word),
		TrafficClass: r[48], PKey: binary.BigEndian.Uint16(r[50:]), MTU: ib.MTU(r[54] & 0x3f), LifeTime: r[56] & 0x3f}
}
