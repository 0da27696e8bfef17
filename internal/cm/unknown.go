package cm

import "net/netip"

// AnswerUnknown returns the answer of a process that has no Core to a MAD: that nobody listens, or that
// the connection which the peer ends does not exist. ok is false if there is nothing to answer.
func AnswerUnknown(from, to netip.Addr, mad []byte) (m Send, ok bool) {
	h, d, ok := parseHeader(mad)
	if !ok {
		return m, false
	}
	if h.attr != AttrDREQ {
		return RejectNoListener(from, to, mad, 0)
	}
	p := &packet{from: from.Unmap(), to: to.Unmap(), tid: h.tid}
	return *p.drep(parseIDs(d)), true
}
