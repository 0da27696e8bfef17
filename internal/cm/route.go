package cm

import "net/netip"

// LastWords returns the DREQ that a process sends for another one, which has died.
func LastWords(localID, remoteID, remoteQPN uint32, tid uint64) (mad [Size]byte) {
	r := dreq{ids: ids{local: localID, remote: remoteID}, qpn: remoteQPN}
	r.put(header{tid: tid, attr: AttrDREQ}.put(&mad))
	return mad
}

// Classify returns which process a MAD is for: that of the service id for a REQ or SIDR_REQ,
// otherwise that of the communication id. localID is 0 in a REJ whose sender has no answer to its REQ
// yet: every process is to get it. ok is false if the MAD is no message of the connection manager that
// a Core handles.
func Classify(mad []byte) (attr Attr, localID uint32, service uint64, ok bool) {
	h, d, ok := parseHeader(mad)
	if !ok {
		return 0, 0, 0, false
	}
	switch h.attr {
	case AttrREQ, AttrSIDRREQ:
		return h.attr, 0, be.Uint64(d[8:]), true
	case AttrMRA, AttrREJ, AttrREP, AttrRTU, AttrDREQ, AttrDREP:
		return h.attr, parseIDs(d).remote, 0, true
	case AttrSIDRREP:
		return h.attr, be.Uint32(d), 0, true
	}
	return h.attr, 0, 0, false
}

// RejectNoListener returns the answer to a REQ or SIDR_REQ that no process takes: a REJ for the reason,
// or a SIDR_REP with it as status. Reason 0 means that nobody listens (REJ 8, status 1).
func RejectNoListener(from, to netip.Addr, mad []byte, reason Reason) (m Send, ok bool) {
	h, d, ok := parseHeader(mad)
	if !ok {
		return m, false
	}
	p := &packet{from: from.Unmap(), to: to.Unmap(), tid: h.tid}
	switch h.attr {
	case AttrREQ:
		if reason == 0 {
			reason = RejectInvalidServiceID
		}
		return *p.reject(&rej{ids: ids{remote: be.Uint32(d)}, of: ofREQ, reason: reason}), true
	case AttrSIDRREQ:
		if reason == 0 {
			reason = SIDRUnsupported
		}
		var r sidrReq
		r.parse(d)
		return *p.sidrRep(&r, uint8(reason)), true
	}
	return m, false
}
