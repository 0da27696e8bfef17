package cm

import "net/netip"

// Last is what is to be known of a Conn for its last words.
type Last struct {
	State     State
	GUID      uint64 // CA GUID of this side
	ID, Peer  uint32 // communication ids
	RemoteQPN uint32 // in SIDRReqRcvd the service id
}

// Last returns what other processes are to know of the Conn; ok is false if the peer need not hear of the
// end of this process.
func (n *Conn) Last() (l Last, ok bool) {
	l = Last{State: n.state, GUID: n.core.cfg.GUID, ID: n.localID, Peer: n.remoteID, RemoteQPN: n.remoteQPN}
	switch n.state {
	case Idle, TimeWait, SIDRReqSent:
		return l, false
	case SIDRReqRcvd:
		l.RemoteQPN = uint32(n.request.Service)
	case Established:
		ok = !n.passive || n.transport != XRC // an XRC target outlives its creator
		return l, ok
	}
	return l, true
}

// LastWords returns what a process sends for another one, which has died with the connection: what
// Close would send. ok is false if that is nothing.
func LastWords(l *Last, tid uint64) (mad [Size]byte, ok bool) {
	i := ids{local: l.ID, remote: l.Peer}
	put := func(attr Attr, m interface{ put([]byte) }) ([Size]byte, bool) {
		m.put(header{tid: tid, attr: attr}.put(&mad))
		return mad, true
	}
	switch l.State {
	case Established, DreqSent:
		return put(AttrDREQ, &dreq{ids: i, qpn: l.RemoteQPN})
	case DreqRcvd:
		return put(AttrDREP, i)
	case SIDRReqRcvd:
		return put(AttrSIDRREP, &sidrRep{id: l.Peer, status: SIDRRejected, service: uint64(l.RemoteQPN)})
	}
	r, ok := rejectIn(l.State, i)
	if !ok {
		return mad, false
	}
	r.reason = RejectConsumer
	if l.State == ReqSent || l.State == MRAReqRcvd {
		r.reason, r.ariLen = RejectTimeout, 8
		be.PutUint64(r.ari[:], l.GUID)
	}
	return put(AttrREJ, &r)
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
