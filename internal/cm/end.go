package cm

// The end: by REJ while there is no connection yet, by DREQ and DREP afterwards, and the time wait.

// rejectPacket answers a packet by a REJ. That of RejectInvalidGID has the receiver's GID as additional
// information.
func (c *Core) rejectPacket(p *packet, r *rej) {
	c.queue(p.reject(r))
}

func (p *packet) reject(r *rej) *Send {
	if r.reason == RejectInvalidGID && p.to.IsValid() {
		gid := p.to.As16()
		r.ariLen = uint8(copy(r.ari[:], gid[:]))
	}
	s, d := p.answer(AttrREJ)
	r.put(d)
	return s
}

// Reject sends a REJ, or a SIDR_REP with status 2. It ends the Conn; no event follows.
func (n *Conn) Reject(now Time, reason Reason, ari, private []byte) error {
	if n.state == SIDRReqRcvd {
		return n.AnswerSIDR(now, &SIDRReply{Status: SIDRRejected, Private: private})
	}
	if len(ari) > RejARI || len(private) > RejPrivate {
		return ErrLength
	}
	r, ok := rejectIn(n.state, n.ids())
	if !ok {
		return ErrState
	}
	r.reason, r.ariLen = reason, uint8(len(ari))
	copy(r.ari[:], ari)
	copy(r.private[:], private)
	wait := n.state == RepSent || n.state == MRARepRcvd
	s, d := n.mad(AttrREJ, n.tid)
	r.put(d)
	n.core.queue(s)
	if wait {
		n.enterTimeWait(now)
	} else {
		n.idle()
	}
	return nil
}

// rejectIn returns the REJ of a state, without a reason; ok is false if there is none.
func rejectIn(s State, i ids) (r rej, ok bool) {
	r = rej{ids: i, of: ofOther}
	switch s {
	case ReqSent, MRAReqRcvd, RepSent, MRARepRcvd:
	case ReqRcvd:
		r.local, r.of = 0, ofREQ
	case MRAReqSent:
		r.of = ofREQ
	case RepRcvd, MRARepSent:
		r.of = ofREP
	default:
		return r, false
	}
	return r, true
}

func (c *Core) onREJ(p *packet, d []byte) {
	var r rej
	r.parse(d)
	n := c.rejected(&r)
	if n == nil {
		return
	}
	wait := false
	switch n.state {
	case ReqSent, MRAReqRcvd, RepSent, MRARepRcvd, ReqRcvd, MRAReqSent:
		wait = r.reason == RejectStaleConn
	case DreqSent, RepRcvd, MRARepSent, Established:
		wait = true
	default:
		return
	}
	unseen := n.unseen != nil
	if wait && !unseen {
		n.enterTimeWait(p.now)
	} else {
		n.idle()
	}
	if !unseen { // otherwise the peer has withdrawn a request that the program does not know
		n.emit(Event{Type: EventRejected, Reason: r.reason, ARI: r.ari[:r.ariLen], Private: r.private[:]})
	}
}

// rejected returns the Conn that a REJ is for. The sender of REJ 4 does not know our id.
func (c *Core) rejected(r *rej) *Conn {
	switch {
	case r.reason == RejectTimeout:
		return c.byID[remoteKey{be.Uint64(r.ari[:]), r.local}]
	case r.of == ofREQ:
		return c.find(r.remote, 0)
	default:
		return c.find(r.remote, r.local)
	}
}

// Disconnect sends a DREQ, or a DREP if a DREQ came. After a DREQ, EventDisconnected follows; at last
// EventTimewaitExit.
func (n *Conn) Disconnect(now Time) error {
	switch n.state {
	case Established:
		n.state = DreqSent
		n.repeat(now, n.dreq())
	case DreqRcvd:
		n.core.queue(n.drep())
		n.enterTimeWait(now)
	default:
		return ErrState
	}
	return nil
}

func (n *Conn) dreq() *Send {
	s, d := n.mad(AttrDREQ, n.core.cfg.Rand())
	r := dreq{ids: n.ids(), qpn: n.remoteQPN}
	r.put(d)
	return s
}

func (n *Conn) drep() *Send {
	s, d := n.mad(AttrDREP, n.tid)
	n.ids().put(d)
	return s
}

// disconnectStale ends a connection whose peer uses its QPN for another one.
func (n *Conn) disconnectStale(now Time) {
	if n.state == Established {
		n.state = DreqSent
		n.repeat(now, n.dreq())
	}
}

func (c *Core) onDREQ(p *packet, d []byte) {
	var r dreq
	r.parse(d)
	n := c.find(r.remote, r.local)
	if n == nil {
		c.answerDREQ(p, &r)
		return
	}
	if r.qpn != n.localQPN {
		return
	}
	switch n.state {
	case RepSent, MRARepRcvd, Established, DreqSent:
		n.cancel()
		n.state, n.tid = DreqRcvd, p.tid
		n.emitDisconnected(false)
	case TimeWait:
		c.answerDREQ(p, &r)
	}
}

// answerDREQ sends a DREP that needs no Conn.
func (c *Core) answerDREQ(p *packet, r *dreq) { c.queue(p.drep(r.ids)) }

// drep returns the DREP to a DREQ with these ids.
func (p *packet) drep(of ids) *Send {
	s, d := p.answer(AttrDREP)
	ids{local: of.remote, remote: of.local}.put(d)
	return s
}

func (c *Core) onDREP(p *packet, d []byte) {
	i := parseIDs(d)
	n := c.find(i.remote, i.local)
	if n == nil || n.state != DreqSent && n.state != DreqRcvd {
		return
	}
	n.enterTimeWait(p.now)
	n.emitDisconnected(false)
}

// emitDisconnected reports the end of the connection, once, also if both sides have ended it.
func (n *Conn) emitDisconnected(timedOut bool) {
	if !n.disconnected {
		n.disconnected = true
		n.emit(Event{Type: EventDisconnected, TimedOut: timedOut})
	}
}

// enterTimeWait waits until no packet of the connection can be under way any more. The peer may use its
// QPN again, but a duplicate of its REQ is still known.
func (n *Conn) enterTimeWait(now Time) {
	n.cancel()
	n.pool.remove(n)
	n.releaseQPN()
	n.state = TimeWait
	n.arm(now + duration(n.wait))
}

// Close ends the Conn and sends what Linux sends when an id is destroyed, so that a peer does not wait in
// vain. A DREQ is sent once. No event follows. It is idempotent.
func (n *Conn) Close(now Time) {
	if n.closed {
		return
	}
	n.closed = true
	c := n.core
	wait := n.passive
	switch n.state {
	case ReqSent, MRAReqRcvd:
		var guid [8]byte
		be.PutUint64(guid[:], c.cfg.GUID)
		_ = n.Reject(now, RejectTimeout, guid[:], nil) // valid in this state
	case ReqRcvd, MRAReqSent, RepRcvd, MRARepSent, RepSent, MRARepRcvd:
		wait = wait && (n.state == RepSent || n.state == MRARepRcvd)
		_ = n.Reject(now, RejectConsumer, nil, nil) // valid in this state
	case Established:
		if !n.passive || n.transport != XRC { // an XRC target outlives its creator
			c.queue(n.dreq())
		}
	case DreqRcvd:
		c.queue(n.drep())
	case SIDRReqRcvd:
		_ = n.Reject(now, RejectConsumer, nil, nil) // valid in this state
		return
	case DreqSent, TimeWait:
	case Idle, SIDRReqSent:
		wait = false
	}
	key, until := remoteKey{n.guid, n.remoteID}, now+duration(n.wait)
	if n.state == TimeWait {
		until = n.deadline
	}
	n.idle()
	if wait {
		c.remember(key, until)
	}
}

// remember keeps the time wait of a passive side that the program has closed: a late duplicate of its
// REQ is no new request. A DREQ of the peer is answered without it.
func (c *Core) remember(key remoteKey, until Time) {
	if len(c.waiting.conns) >= c.cfg.MaxTimeWait {
		c.waiting.random(c.cfg.Rand()).idle()
	}
	n := &Conn{core: c, state: TimeWait, passive: true, closed: true, guid: key.guid, remoteID: key.num}
	c.byID[key] = n
	c.waiting.add(n)
	n.arm(until)
}
