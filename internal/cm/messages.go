package cm

// ids are the communication ids with which all messages but REQ and those of SIDR begin: the sender's
// and the receiver's. RTU and DREP have nothing else (their private data is not used).
type ids struct{ local, remote uint32 }

func parseIDs(d []byte) ids { return ids{be.Uint32(d), be.Uint32(d[4:])} }

func (i ids) put(d []byte) {
	be.PutUint32(d, i.local)
	be.PutUint32(d[4:], i.remote)
}

// subject is the message that an MRA or REJ is about.
type subject uint8

const (
	ofREQ   subject = 0
	ofREP   subject = 1
	ofOther subject = 2
)

// mra is an MRA: IBA 12.6.6.
type mra struct {
	ids
	of      subject
	timeout uint8 // service timeout, 5 bits
}

func (m *mra) parse(d []byte) {
	m.ids, m.of, m.timeout = parseIDs(d), subject(d[8]>>6), d[9]>>3
}

func (m *mra) put(d []byte) {
	m.ids.put(d)
	d[8], d[9] = byte(m.of)<<6, m.timeout<<3
}

// rej is a REJ: IBA 12.6.7.
type rej struct {
	ids
	of      subject
	reason  Reason
	ariLen  uint8 // at most RejARI
	ari     [RejARI]byte
	private [RejPrivate]byte
}

func (r *rej) parse(d []byte) {
	r.ids, r.of, r.reason = parseIDs(d), subject(d[8]>>6), Reason(be.Uint16(d[10:]))
	r.ariLen = min(d[9]>>1, RejARI)
	r.ari = [RejARI]byte(d[12:])
	r.private = [RejPrivate]byte(d[84:])
}

func (r *rej) put(d []byte) {
	r.ids.put(d)
	d[8], d[9] = byte(r.of)<<6, r.ariLen<<1
	be.PutUint16(d[10:], uint16(r.reason))
	copy(d[12:], r.ari[:])
	copy(d[84:], r.private[:])
}

// dreq is a DREQ: IBA 12.6.10.
type dreq struct {
	ids
	qpn uint32 // of the receiver
}

func (r *dreq) parse(d []byte) { r.ids, r.qpn = parseIDs(d), uint24(d[8:]) }

func (r *dreq) put(d []byte) {
	r.ids.put(d)
	putUint24(d[8:], r.qpn)
}

// sidrReq is a SIDR_REQ: IBA 12.11.1.
type sidrReq struct {
	id      uint32
	pkey    uint16
	service uint64
	private [SIDRReqPrivate]byte
}

func (r *sidrReq) parse(d []byte) {
	r.id, r.pkey, r.service = be.Uint32(d), be.Uint16(d[4:]), be.Uint64(d[8:])
	r.private = [SIDRReqPrivate]byte(d[16:])
}

func (r *sidrReq) put(d []byte) {
	be.PutUint32(d, r.id)
	be.PutUint16(d[4:], r.pkey)
	be.PutUint64(d[8:], r.service)
	copy(d[16:], r.private[:])
}

// sidrRep is a SIDR_REP: IBA 12.11.2.
type sidrRep struct {
	id      uint32
	status  uint8
	infoLen uint8 // at most SIDRRepInfo
	vendor  uint32
	qpn     uint32
	service uint64
	qkey    uint32
	info    [SIDRRepInfo]byte
	private [SIDRRepPrivate]byte
}

func (r *sidrRep) parse(d []byte) {
	r.id, r.status = be.Uint32(d), d[4]
	r.infoLen = min(d[5], SIDRRepInfo)
	r.vendor = uint32(be.Uint16(d[6:]))<<8 | uint32(d[11])
	r.qpn, r.service, r.qkey = uint24(d[8:]), be.Uint64(d[12:]), be.Uint32(d[20:])
	r.info = [SIDRRepInfo]byte(d[24:])
	r.private = [SIDRRepPrivate]byte(d[96:])
}

func (r *sidrRep) put(d []byte) {
	be.PutUint32(d, r.id)
	d[4], d[5] = r.status, r.infoLen
	be.PutUint16(d[6:], uint16(r.vendor>>8))
	putUint24(d[8:], r.qpn)
	d[11] = byte(r.vendor)
	be.PutUint64(d[12:], r.service)
	be.PutUint32(d[20:], r.qkey)
	copy(d[24:], r.info[:])
	copy(d[96:], r.private[:])
}
