package cm

// Service id resolution: a program asks for the queue pair of a datagram service. One message goes out,
// one comes back.

// Resolve sends a SIDR_REQ, and repeats it at most maxRetries times (15 at most). EventSIDRReply or
// EventUnreachable follows.
func (c *Core) Resolve(now Time, service uint64, p *Path, hdr *IPHeader, private []byte, maxRetries int) (*Conn, error) {
	if !p.valid() {
		return nil, ErrParam
	}
	r := sidrReq{pkey: defaultPKey, service: service}
	if err := putPrivate(r.private[:], hdr, private); err != nil {
		return nil, err
	}
	n := c.newConn()
	if n == nil {
		return nil, ErrNoID
	}
	n.state, n.tid = SIDRReqSent, c.cfg.Rand()
	n.setPath(p)
	n.timeout, n.maxRetries = duration(responseTimeout), int(retries(maxRetries))
	r.id = n.localID
	s, d := n.mad(AttrSIDRREQ, n.tid)
	r.put(d)
	n.repeat(now, s)
	return n, nil
}

func (c *Core) onSIDRREQ(p *packet, d []byte) {
	var r sidrReq
	r.parse(d)
	key := sidrKey{p.from, r.id}
	if c.sidr[key] != nil {
		return
	}
	private := r.private
	q := &Request{
		Service: r.service, SIDR: true, From: p.from, To: p.to, PKey: r.pkey,
		Path: Path{Local: p.to, Remote: p.from, HopLimit: defaultHopLimit},
	}
	q.Header, q.Params.Private = parseIPHeader(r.service, private[:])
	v := c.cfg.Listener(q)
	if v.Listener == nil {
		if v.Reject != 0 {
			c.queue(p.sidrRep(&r, uint8(v.Reject)))
		}
		return
	}
	if !c.hasRoom(p.now, v.Backlog, q, r.id) {
		return
	}
	n := c.newConn()
	if n == nil {
		return // as if the SIDR_REQ were lost
	}
	n.state, n.passive, n.request = SIDRReqRcvd, true, q
	n.remoteID, n.tid, n.path = r.id, p.tid, q.Path
	c.sidr[key] = n
	n.await(v.Backlog)
	n.unseen = c.emit(Event{Type: EventSIDRRequest, Conn: n, Listener: v.Listener, Request: q, Params: q.Params})
}

// sidrRep returns the answer to a SIDR_REQ that nobody takes.
func (p *packet) sidrRep(r *sidrReq, status uint8) *Send {
	s, d := p.answer(AttrSIDRREP)
	a := sidrRep{id: r.id, status: status, service: r.service}
	a.put(d)
	return s
}

// AnswerSIDR sends a SIDR_REP, which ends the Conn.
func (n *Conn) AnswerSIDR(now Time, r *SIDRReply) error {
	if n.state != SIDRReqRcvd {
		return ErrState
	}
	if len(r.Info) > SIDRRepInfo || len(r.Private) > SIDRRepPrivate {
		return ErrLength
	}
	a := sidrRep{id: n.remoteID, status: r.Status, infoLen: uint8(len(r.Info)), service: n.request.Service}
	if r.Status == SIDRValid {
		a.qpn, a.qkey = r.QPN&mask24, r.QKey
	}
	copy(a.info[:], r.Info)
	copy(a.private[:], r.Private)
	s, d := n.mad(AttrSIDRREP, n.tid)
	a.put(d)
	n.core.queue(s)
	n.idle()
	return nil
}

func (c *Core) onSIDRREP(d []byte) {
	var r sidrRep
	r.parse(d)
	n := c.find(r.id, 0)
	if n == nil || n.state != SIDRReqSent {
		return
	}
	n.remoteQPN = r.qpn
	n.idle()
	n.emit(Event{Type: EventSIDRReply, SIDR: SIDRReply{
		Status: r.status, QPN: r.qpn, QKey: r.qkey, Info: r.info[:r.infoLen], Private: r.private[:],
	}})
}
