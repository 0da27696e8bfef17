package cm

import (
	"net/netip"

	"github.com/verbena-rdma/verbena/ib"
)

// The passive side: REQ comes, the program accepts, REP goes out, RTU comes.

// onREQ makes a Conn of a REQ. First come the duplicates and the stale connections (IBA 12.9.8.3.1),
// then what is wrong with the REQ by itself, then the listener.
func (c *Core) onREQ(p *packet, d []byte) {
	var r req
	r.parse(d)
	if r.localID == 0 {
		return
	}
	if n := c.byID[remoteKey{r.guid, r.localID}]; n != nil {
		n.duplicateREQ(p)
		return
	}
	no := rej{ids: ids{remote: r.localID}, of: ofREQ}
	if old := c.byQPN[remoteKey{r.guid, r.qpn}]; old != nil {
		no.reason = RejectStaleConn
		c.rejectPacket(p, &no)
		old.disconnectStale(p.now)
		return
	}
	q := r.request(p)
	v := Verdict{Reject: q.flaw()}
	if v.Reject == 0 {
		v = c.cfg.Listener(q)
	}
	if v.Listener == nil {
		if no.reason = v.Reject; no.reason != 0 {
			c.rejectPacket(p, &no)
		}
		return
	}
	if !c.hasRoom(p.now, v.Backlog, q, r.localID) {
		return
	}
	n := c.newConn()
	if n == nil {
		return // as if the REQ were lost
	}
	n.state, n.passive, n.transport, n.request = ReqRcvd, true, q.Transport, q
	n.guid, n.remoteID, n.remoteQPN, n.tid = r.guid, r.localID, r.qpn, p.tid
	n.path = q.Path
	n.wait = min(n.path.LifeTime+1, 31)
	n.timeout, n.maxRetries = duration(r.localTimeout), int(r.maxRetries)
	n.register()
	n.await(v.Backlog)
	n.unseen = c.emit(Event{Type: EventRequest, Conn: n, Listener: v.Listener, Request: q, Params: q.Params})
}

// request returns what the program gets to know of a REQ.
func (r *req) request(p *packet) *Request {
	q := &Request{
		Service: r.service, Transport: Transport(r.transport), From: p.from, To: p.to, PKey: r.pkey, GUID: r.guid,
		Path: Path{
			Local: ib.GID(r.remoteGID).Addr(), Remote: ib.GID(r.localGID).Addr(), TClass: r.tclass, HopLimit: r.hopLimit,
			FlowLabel: r.flowLabel, MTU: ib.MTU(r.mtu), AckTimeout: r.ackTimeout, LifeTime: r.ackTimeout - min(r.ackTimeout, 1),
		},
		Params: Params{
			QPN: r.qpn, PSN: r.psn, ResponderResources: r.responderResources, InitiatorDepth: r.initiatorDepth,
			RetryCount: r.retryCount, RNRRetry: r.rnrRetry, FlowControl: r.flowControl, SRQ: r.srq,
			ECE: ECE{Vendor: r.vendor, Options: p.mod},
		},
	}
	if q.Transport == XRC && r.extended != xrcExtended {
		q.Transport = 4 + Transport(r.extended)
	}
	private := r.private
	q.Header, q.Params.Private = parseIPHeader(r.service, private[:])
	return q
}

// flaw returns why no listener can take the REQ; 0: one may.
func (q *Request) flaw() Reason {
	usable := func(a netip.Addr) bool { return !a.IsUnspecified() && !a.IsMulticast() }
	switch p := &q.Path; {
	case !p.valid() || !usable(p.Local) || !usable(p.Remote):
		return RejectInvalidGID
	case p.MTU.Bytes() == 0:
		return RejectInvalidMTU
	}
	return 0
}

// duplicateREQ answers a REQ that has come before.
func (n *Conn) duplicateREQ(p *packet) {
	switch n.state {
	case MRAReqSent:
		n.sendMRA(p, ofREQ)
	case TimeWait:
		n.core.rejectPacket(p, &rej{ids: ids{remote: n.remoteID}, of: ofREQ, reason: RejectStaleConn})
	}
}

// Accept sends a REP, and repeats it as often as the REQ said. The core chooses the starting PSN if
// params.PSN is 0: PSN returns it. EventEstablished, EventRejected, EventUnreachable or
// EventDisconnected follows.
func (n *Conn) Accept(now Time, params *Params) error {
	if n.state != ReqRcvd && n.state != MRAReqSent {
		return ErrState
	}
	if len(params.Private) > RepPrivate {
		return ErrLength
	}
	n.localQPN = params.QPN & mask24
	n.setPSN(params.PSN)
	r := rep{
		localID: n.localID, remoteID: n.remoteID, psn: n.psn, guid: n.core.cfg.GUID, vendor: params.ECE.Vendor & mask24,
		responderResources: params.ResponderResources, ackDelay: n.core.cfg.AckDelay & 31, rnrRetry: min(params.RNRRetry, 7),
	}
	if n.transport == XRC {
		r.eecn, r.srq = n.localQPN, true // a target issues nothing
	} else {
		r.qpn, r.srq, r.flowControl, r.initiatorDepth = n.localQPN, params.SRQ, params.FlowControl, params.InitiatorDepth
	}
	copy(r.private[:], params.Private)
	n.pool.remove(n)
	n.state = RepSent
	s, d := n.mad(AttrREP, n.tid)
	s.setOptions(params.ECE.Options)
	r.put(d)
	n.repeat(now, s)
	return nil
}

func (c *Core) onRTU(d []byte) {
	i := parseIDs(d)
	if n := c.find(i.remote, i.local); n != nil && (n.state == RepSent || n.state == MRARepRcvd) {
		n.established()
	}
}

func (n *Conn) established() {
	n.cancel()
	n.state = Established
	n.emit(Event{Type: EventEstablished})
}

// Confirm makes a Conn whose REP is sent established without an RTU: its queue pair has received
// something. EventEstablished follows. If the RTU was faster, Confirm returns ErrConnected.
func (n *Conn) Confirm(now Time) error {
	switch n.state {
	case RepSent, MRARepRcvd:
		n.established()
		return nil
	case Established:
		return ErrConnected
	}
	return ErrState
}
