package cm

import "encoding/binary"

// The codec: a struct for each message, with parse and put. A MAD is a header of 24 bytes and 232 of
// data; the offsets in this file and in messages.go are those of the data, as IBA 12.6 has them.

// Size is the size of a MAD.
const Size = 256

const headerLen = 24

// Attr is the attribute id of a MAD: which message it is.
type Attr uint16

const (
	AttrREQ     Attr = 0x10
	AttrMRA     Attr = 0x11
	AttrREJ     Attr = 0x12
	AttrREP     Attr = 0x13
	AttrRTU     Attr = 0x14
	AttrDREQ    Attr = 0x15
	AttrDREP    Attr = 0x16
	AttrSIDRREQ Attr = 0x17
	AttrSIDRREP Attr = 0x18
	AttrLAP     Attr = 0x19
	AttrAPR     Attr = 0x1a
)

var be = binary.BigEndian

// MAD header (IBA 13.4.3): what all messages of the connection manager have in it.
const (
	baseVersion  = 1
	classCM      = 0x07
	classVersion = 2
	methodSend   = 0x03
)

type header struct {
	tid  uint64
	attr Attr
	mod  uint32 // attribute modifier: the options of ECE
}

// parseHeader returns the header of a message of the connection manager, and its data.
func parseHeader(mad []byte) (h header, data []byte, ok bool) {
	if len(mad) != Size || mad[0] != baseVersion || mad[1] != classCM || mad[2] != classVersion || mad[3] != methodSend {
		return h, nil, false
	}
	h = header{tid: be.Uint64(mad[8:]), attr: Attr(be.Uint16(mad[16:])), mod: be.Uint32(mad[20:])}
	return h, mad[headerLen:], true
}

// setOptions sets the attribute modifier, which has the options of ECE.
func (s *Send) setOptions(o uint32) { be.PutUint32(s.MAD[20:], o) }

// put writes the header into a MAD of zeros and returns its data.
func (h header) put(mad *[Size]byte) []byte {
	mad[0], mad[1], mad[2], mad[3] = baseVersion, classCM, classVersion, methodSend
	be.PutUint64(mad[8:], h.tid)
	be.PutUint16(mad[16:], uint16(h.attr))
	be.PutUint32(mad[20:], h.mod)
	return mad[headerLen:]
}

func uint24(b []byte) uint32 { return uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2]) }

func putUint24(b []byte, v uint32) { b[0], b[1], b[2] = byte(v>>16), byte(v>>8), byte(v) }

func bit(b bool, shift uint) byte {
	if b {
		return 1 << shift
	}
	return 0
}

// req is a REQ: IBA 12.6.5. The alternate path is sent as zeros and not read.
type req struct {
	localID                            uint32
	vendor                             uint32 // of ECE, 24 bits
	service, guid                      uint64
	qkey                               uint32
	qpn                                uint32
	responderResources, initiatorDepth uint8
	remoteTimeout                      uint8 // remote CM response timeout
	transport, extended                uint8 // extended: of transport 3
	flowControl                        bool
	psn                                uint32
	localTimeout                       uint8 // local CM response timeout
	retryCount                         uint8
	pkey                               uint16
	mtu, rnrRetry                      uint8
	maxRetries                         uint8
	srq                                bool
	localLID, remoteLID                uint16
	localGID, remoteGID                [16]byte
	flowLabel                          uint32
	rate, tclass, hopLimit, sl         uint8
	subnetLocal                        bool
	ackTimeout                         uint8
	private                            [ReqPrivate]byte
}

func (r *req) parse(d []byte) {
	r.localID = be.Uint32(d)
	r.vendor = uint24(d[5:])
	r.service = be.Uint64(d[8:])
	r.guid = be.Uint64(d[16:])
	r.qkey = be.Uint32(d[28:])
	r.qpn = uint24(d[32:])
	r.responderResources = d[35]
	r.initiatorDepth = d[39]
	r.remoteTimeout, r.transport, r.flowControl = d[43]>>3, d[43]>>1&3, d[43]&1 != 0
	r.psn = uint24(d[44:])
	r.localTimeout, r.retryCount = d[47]>>3, d[47]&7
	r.pkey = be.Uint16(d[48:])
	r.mtu, r.rnrRetry = d[50]>>4, d[50]&7
	r.maxRetries, r.srq, r.extended = d[51]>>4, d[51]&8 != 0, d[51]&7
	r.localLID, r.remoteLID = be.Uint16(d[52:]), be.Uint16(d[54:])
	r.localGID, r.remoteGID = [16]byte(d[56:]), [16]byte(d[72:])
	r.flowLabel, r.rate = uint24(d[88:])>>4, d[91]&0x3f
	r.tclass, r.hopLimit = d[92], d[93]
	r.sl, r.subnetLocal = d[94]>>4, d[94]&8 != 0
	r.ackTimeout = d[95] >> 3
	r.private = [ReqPrivate]byte(d[140:])
}

func (r *req) put(d []byte) {
	be.PutUint32(d, r.localID)
	putUint24(d[5:], r.vendor)
	be.PutUint64(d[8:], r.service)
	be.PutUint64(d[16:], r.guid)
	be.PutUint32(d[28:], r.qkey)
	putUint24(d[32:], r.qpn)
	d[35] = r.responderResources
	d[39] = r.initiatorDepth
	d[43] = r.remoteTimeout<<3 | r.transport&3<<1 | bit(r.flowControl, 0)
	putUint24(d[44:], r.psn)
	d[47] = r.localTimeout<<3 | r.retryCount&7
	be.PutUint16(d[48:], r.pkey)
	d[50] = r.mtu<<4 | r.rnrRetry&7
	d[51] = r.maxRetries<<4 | bit(r.srq, 3) | r.extended&7
	be.PutUint16(d[52:], r.localLID)
	be.PutUint16(d[54:], r.remoteLID)
	copy(d[56:72], r.localGID[:])
	copy(d[72:88], r.remoteGID[:])
	putUint24(d[88:], r.flowLabel<<4)
	d[91] = r.rate & 0x3f
	d[92], d[93] = r.tclass, r.hopLimit
	d[94] = r.sl<<4 | bit(r.subnetLocal, 3)
	d[95] = r.ackTimeout << 3
	copy(d[140:], r.private[:])
}

// rep is a REP: IBA 12.6.8. The bytes of the vendor id lie apart.
type rep struct {
	localID, remoteID                  uint32
	qkey                               uint32
	qpn                                uint32
	vendor                             uint32
	eecn                               uint32 // XRC: the QPN
	psn                                uint32
	responderResources, initiatorDepth uint8
	ackDelay, failover                 uint8
	flowControl                        bool
	rnrRetry                           uint8
	srq                                bool
	guid                               uint64
	private                            [RepPrivate]byte
}

func (r *rep) parse(d []byte) {
	r.localID, r.remoteID = be.Uint32(d), be.Uint32(d[4:])
	r.qkey = be.Uint32(d[8:])
	r.qpn, r.eecn, r.psn = uint24(d[12:]), uint24(d[16:]), uint24(d[20:])
	r.vendor = uint32(d[15])<<16 | uint32(d[19])<<8 | uint32(d[23])
	r.responderResources, r.initiatorDepth = d[24], d[25]
	r.ackDelay, r.failover, r.flowControl = d[26]>>3, d[26]>>1&3, d[26]&1 != 0
	r.rnrRetry, r.srq = d[27]>>5, d[27]&0x10 != 0
	r.guid = be.Uint64(d[28:])
	r.private = [RepPrivate]byte(d[36:])
}

func (r *rep) put(d []byte) {
	be.PutUint32(d, r.localID)
	be.PutUint32(d[4:], r.remoteID)
	be.PutUint32(d[8:], r.qkey)
	putUint24(d[12:], r.qpn)
	putUint24(d[16:], r.eecn)
	putUint24(d[20:], r.psn)
	d[15], d[19], d[23] = byte(r.vendor>>16), byte(r.vendor>>8), byte(r.vendor)
	d[24], d[25] = r.responderResources, r.initiatorDepth
	d[26] = r.ackDelay<<3 | r.failover&3<<1 | bit(r.flowControl, 0)
	d[27] = r.rnrRetry<<5 | bit(r.srq, 4)
	be.PutUint64(d[28:], r.guid)
	copy(d[36:], r.private[:])
}
