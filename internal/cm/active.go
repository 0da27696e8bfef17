package cm

// The active side: REQ goes out, REP comes, RTU goes out. An MRA instead of the REP gives the peer's
// program more time; a REJ ends it (end.go).

const (
	defaultPKey = 0xffff
	anyLID      = 0xffff // RoCE has none: Linux sends this with a hop limit above 1
	xrcExtended = 1      // the extended transport that is XRC
)

// Connect sends a REQ, and repeats it at most maxRetries times (15 at most). The core chooses the
// starting PSN if params.PSN is 0: Conn.PSN returns it. EventReply, EventRejected or EventUnreachable
// follows.
func (c *Core) Connect(now Time, service uint64, t Transport, p *Path, hdr *IPHeader, params *Params, maxRetries int) (*Conn, error) {
	if !p.valid() || t != RC && t != UC && t != XRC {
		return nil, ErrParam
	}
	r := req{
		vendor: params.ECE.Vendor & mask24, service: service, guid: c.cfg.GUID,
		qpn: params.QPN & mask24, initiatorDepth: params.InitiatorDepth,
		remoteTimeout: responseTimeout, localTimeout: responseTimeout, maxRetries: retries(maxRetries),
		transport: uint8(t), flowControl: params.FlowControl, pkey: defaultPKey,
		mtu: uint8(p.MTU), localGID: p.Local.As16(), remoteGID: p.Remote.As16(), flowLabel: p.FlowLabel & (1<<20 - 1),
		tclass: p.TClass, hopLimit: p.HopLimit, subnetLocal: p.HopLimit <= 1, ackTimeout: p.AckTimeout & 31,
	}
	if t == XRC {
		r.extended = xrcExtended // an initiator serves and receives nothing
	} else {
		r.responderResources, r.srq = params.ResponderResources, params.SRQ
		r.retryCount, r.rnrRetry = min(params.RetryCount, 7), min(params.RNRRetry, 7)
	}
	if r.ackTimeout == 0 {
		r.ackTimeout = AckTimeout(c.cfg.AckDelay&31, p.LifeTime&31)
	}
	if !r.subnetLocal {
		r.localLID, r.remoteLID = anyLID, anyLID
	}
	if err := putPrivate(r.private[:], hdr, params.Private); err != nil {
		return nil, err
	}
	n := c.newConn()
	if n == nil {
		return nil, ErrNoID
	}
	n.state, n.transport, n.localQPN, n.tid = ReqSent, t, r.qpn, c.cfg.Rand()
	n.setPath(p)
	n.path.AckTimeout = r.ackTimeout
	n.setPSN(params.PSN)
	n.timeout = 2*duration(n.path.LifeTime) + duration(responseTimeout)
	n.maxRetries = int(r.maxRetries)
	r.localID, r.psn = n.localID, n.psn
	n.vendor = r.vendor
	s, d := n.mad(AttrREQ, n.tid)
	s.setOptions(params.ECE.Options)
	r.put(d)
	n.repeat(now, s)
	return n, nil
}

// valid reports whether a connection can take the path.
func (p *Path) valid() bool {
	return p.Local.IsValid() && p.Remote.IsValid() && p.Local.Unmap().Is4() == p.Remote.Unmap().Is4()
}

// setPath takes the path of a Conn of the active side.
func (n *Conn) setPath(p *Path) {
	n.path = *p
	n.path.Local, n.path.Remote = p.Local.Unmap(), p.Remote.Unmap()
	n.path.LifeTime &= 31
	n.wait = min(n.path.LifeTime+1, 31)
}

// retries returns how often a message may be repeated, of what the program wants.
func retries(n int) uint8 { return uint8(max(0, min(n, maxCMRetries))) }

// onMRA gives the peer more time, once for a REQ and once for a REP. As in Linux, the message is still
// repeated when that time is over.
func (c *Core) onMRA(p *packet, d []byte) {
	var m mra
	m.parse(d)
	var n *Conn
	next := MRAReqRcvd
	switch m.of {
	case ofREQ:
		if n = c.find(m.remote, 0); n == nil || n.state != ReqSent {
			return
		}
	case ofREP:
		next = MRARepRcvd
		if n = c.find(m.remote, m.local); n == nil || n.state != RepSent {
			return
		}
	default:
		return
	}
	n.state = next
	n.interval = duration(m.timeout) + duration(n.wait)
	n.arm(p.now + n.interval)
}

func (c *Core) onREP(p *packet, d []byte) {
	var r rep
	r.parse(d)
	if r.localID == 0 {
		return
	}
	n := c.find(r.remoteID, 0)
	if n == nil {
		c.duplicateREP(p, &r)
		return
	}
	if n.state != ReqSent && n.state != MRAReqRcvd {
		return
	}
	qpn := r.qpn
	if n.transport == XRC {
		qpn = r.eecn
	}
	if c.byID[remoteKey{r.guid, r.localID}] != nil {
		return
	}
	if old := c.byQPN[remoteKey{r.guid, qpn}]; old != nil {
		c.rejectPacket(p, &rej{ids: ids{local: r.remoteID, remote: r.localID}, of: ofREP, reason: RejectStaleConn})
		old.disconnectStale(p.now)
		return
	}
	n.cancel()
	n.state = RepRcvd
	n.guid, n.remoteID, n.remoteQPN = r.guid, r.localID, qpn
	n.wait = AckTimeout(r.ackDelay, n.path.LifeTime)
	n.register()
	e := Event{Type: EventReply, Params: Params{
		QPN: qpn, PSN: r.psn, ResponderResources: r.responderResources, InitiatorDepth: r.initiatorDepth,
		RNRRetry: r.rnrRetry, FlowControl: r.flowControl, SRQ: r.srq, AckDelay: r.ackDelay, Private: r.private[:],
		ECE: ECE{Vendor: r.vendor, Options: p.mod},
	}}
	if r.vendor != 0 && r.vendor != n.vendor { // options of a vendor whose options the REQ did not offer
		e.Type, e.Reason = EventReplyError, RejectVendorOption
	}
	n.emit(e)
}

// duplicateREP repeats the answer to a REP.
func (c *Core) duplicateREP(p *packet, r *rep) {
	n := c.find(r.remoteID, r.localID)
	if n == nil || n.passive {
		return
	}
	switch n.state {
	case MRARepSent:
		n.sendMRA(p, ofREP)
	case Established:
		s, d := p.answer(AttrRTU)
		n.ids().put(d)
		c.queue(s)
	}
}

// sendMRA answers a duplicate of a message that the program is at work on.
func (n *Conn) sendMRA(p *packet, of subject) {
	s, d := p.answer(AttrMRA)
	m := mra{ids: n.ids(), of: of, timeout: serviceTimeout}
	m.put(d)
	n.core.queue(s)
}

// Establish sends an RTU, after EventReply.
func (n *Conn) Establish(now Time) error {
	if n.state != RepRcvd && n.state != MRARepSent {
		return ErrState
	}
	n.state = Established
	s, d := n.mad(AttrRTU, n.tid)
	n.ids().put(d)
	n.core.queue(s)
	return nil
}
