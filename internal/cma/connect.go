package cma

import (
	"errors"
	"net/netip"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cm"
)

// udpQKey is the Q_Key of datagram ids: RDMA_UDP_QKEY.
const udpQKey = 0x01234567

// maxRetries is how often a message of the connection manager is repeated.
const maxRetries = 15

// transports are the transports of ids in a REQ.
var transports = map[ib.QPType]cm.Transport{ib.RC: cm.RC, ib.UC: cm.UC, ib.XRCSend: cm.XRC, ib.XRCRecv: cm.XRC}

// Connect asks the peer for a connection (or, of a datagram id, for its queue pair).
func (id *ID) Connect(q *ConnParam) error {
	const op = "connect"
	return id.do(op, func() (err error) {
		hdr := &cm.IPHeader{Src: id.src, Dst: id.dst.Addr()}
		service := uint64(id.ps)<<16 | uint64(id.dst.Port())
		path := cm.Path{Local: id.src.Addr(), Remote: id.dst.Addr(), TClass: id.path.TrafficClass, HopLimit: id.path.HopLimit,
			FlowLabel: id.path.FlowLabel, MTU: id.path.MTU, LifeTime: id.path.LifeTime, AckTimeout: id.ackTimeout}
		if id.isUD() {
			id.conn, err = id.port.core.Resolve(id.m.now(), service, &path, hdr, q.Private, maxRetries)
		} else {
			t, ok := transports[id.t]
			if !ok {
				return ib.Errorf(op, syscall.EINVAL, "a %v id", id.t)
			}
			params := id.params(q)
			id.conn, err = id.port.core.Connect(id.m.now(), service, t, &path, hdr, &params, maxRetries)
		}
		if err != nil {
			id.conn = nil
			return err
		}
		id.conn.Data, id.state, id.own = id, stateConnect, *q
		id.own.Private = nil
		id.recordLocked()
		return nil
	}, stateRouteResolved)
}

// params returns what a REQ or REP says of this side.
func (id *ID) params(q *ConnParam) cm.Params {
	return cm.Params{QPN: q.QPN, PSN: id.psn, ResponderResources: q.ResponderResources, InitiatorDepth: q.InitiatorDepth,
		RetryCount: min(q.RetryCount, 7), RNRRetry: min(q.RNRRetry, 7), FlowControl: q.FlowControl, SRQ: q.SRQ, Private: q.Private, ECE: q.ECE}
}

// Accept takes a request; with nil it confirms the peer's answer to Connect.
func (id *ID) Accept(q *ConnParam) error {
	const op = "accept"
	return id.do(op, func() error {
		switch {
		case id.conn == nil:
			return ib.Errorf(op, syscall.EINVAL, "the id has no connection")
		case q == nil:
			err := id.conn.Establish(id.m.now())
			id.recordLocked()
			return err
		}
		if err := id.port.mgmt.Reach(id.conn.Path().Local, id.conn.Path().Remote); err != nil {
			return err
		}
		if id.isUD() {
			err := id.conn.AnswerSIDR(id.m.now(), &cm.SIDRReply{QPN: q.QPN, QKey: udpQKey, Private: q.Private})
			id.recordLocked()
			return err
		}
		params := id.params(q)
		if err := id.conn.Accept(id.m.now(), &params); err != nil {
			return err
		}
		// The RTU may be lost. What the peer sends before it repeats that establishes the connection.
		id.endDataLocked()
		id.data = id.port.mgmt.AwaitData(q.QPN, func() { _ = id.Notify(ib.EventCommEst) }) // fails if the RTU was faster
		id.own, id.agreed = *q, true
		id.own.Private = nil
		id.recordLocked()
		return nil
	}, stateConnect)
}

// recordLocked lets the other processes of the device know the connection, or what has changed of it: what
// its peer is to hear if this process dies.
func (id *ID) recordLocked() {
	if id.conn == nil {
		return
	}
	l, ok := id.conn.Last()
	if !ok {
		id.forgetLocked()
		return
	}
	if id.record == nil {
		id.record = id.port.mgmt.Record()
	}
	if at := slices.Index(id.port.dev.Addrs, id.conn.Path().Local); at >= 0 {
		id.record.Set(uint8(l.State), at, id.conn.Path().Remote, l.ID, l.Peer, l.RemoteQPN)
	}
}

func (id *ID) endDataLocked() {
	if id.data != nil {
		id.data()
		id.data = nil
	}
}

// forgetLocked takes back what other processes know of the connection.
func (id *ID) forgetLocked() {
	if id.record != nil {
		id.record.Free()
		id.record = nil
	}
}

// Reject refuses a request, or the peer's answer; reason 0 stands for 28, consumer defined.
func (id *ID) Reject(reason int, private []byte) error {
	const op = "reject"
	if reason == 0 {
		reason = int(cm.RejectConsumer)
	}
	return id.do(op, func() error {
		if id.conn == nil {
			return ib.Errorf(op, syscall.EINVAL, "the id has no connection")
		}
		err := id.conn.Reject(id.m.now(), cm.Reason(reason), nil, private)
		id.recordLocked()
		return err
	}, stateConnect)
}

// Disconnect ends the connection, or confirms that the peer has ended it. It fails with ENOTCONN if there
// is nothing to end: the connection is not established, or has ended.
func (id *ID) Disconnect() error {
	const op = "disconnect"
	return id.do(op, func() error {
		if id.conn == nil || id.isUD() {
			return ib.Errorf(op, syscall.EINVAL, "the id has no connection")
		}
		err := id.conn.Disconnect(id.m.now())
		id.recordLocked()
		if errors.Is(err, cm.ErrState) {
			return ib.Errorf(op, syscall.ENOTCONN, "the connection is not established, or has ended")
		}
		return err
	}, stateConnect)
}

// Notify tells the id of an asynchronous event of its queue pair: EventCommEst establishes the
// connection though the peer's last message is missing. All others are EINVAL.
func (id *ID) Notify(t ib.EventType) error {
	const op = "notify"
	return id.do(op, func() error {
		if id.conn == nil {
			return ib.Errorf(op, syscall.EINVAL, "the id has no connection")
		}
		if t != ib.EventCommEst {
			return ib.Errorf(op, syscall.EINVAL, "event %v says nothing of the connection", t)
		}
		return id.conn.Confirm(id.m.now())
	})
}

// judgeLocked returns the verdict on a request, as rdma_cm's checks have it.
func (m *Manager) judgeLocked(p *port, r *cm.Request) cm.Verdict {
	none, refused := cm.Verdict{Reject: cm.RejectInvalidServiceID}, cm.Verdict{Reject: cm.RejectConsumer}
	if r.SIDR {
		none, refused = cm.Verdict{Reject: cm.SIDRUnsupported}, cm.Verdict{Reject: cm.SIDRRejected}
	}
	var best *ID
	all := m.listeners[r.Service]
	for _, id := range all {
		h := r.Header
		if h == nil || h.Version != 0 {
			continue
		}
		at := id.src.Addr()
		exact := at == h.Dst
		wild := IsAny(at) && (at.Is4() == h.Dst.Is4() || at.Is6() && !id.afOnly || !at.IsValid())
		if (exact || wild && best == nil) && slices.ContainsFunc(id.claims, func(c *claim) bool { return c.key.p == p }) {
			best = id
		}
	}
	switch {
	case len(all) == 0:
		return none
	case best == nil || !slices.Contains(p.dev.Addrs, r.Header.Dst) || !isHost(r.Header.Src.Addr()):
		return refused
	case !slices.Contains(p.dev.Addrs, r.Path.Local):
		if r.SIDR {
			return refused
		}
		return cm.Verdict{Reject: cm.RejectInvalidGID}
	case r.SIDR != best.isUD() || !r.SIDR && transports[best.t] != r.Transport:
		return refused
	case best.backlog.Len() >= best.backlog.Max && !best.evicts:
		return cm.Verdict{} // the peer repeats it
	}
	return cm.Verdict{Listener: best, Backlog: best.backlog}
}

// isHost reports whether an address can be that of one host.
func isHost(a netip.Addr) bool {
	return !a.IsUnspecified() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// requestLocked makes an id of a request that has come.
func (m *Manager) requestLocked(p *port, e *cm.Event) {
	l := e.Listener.(*ID)
	if l.state != stateListen {
		e.Conn.Close(m.now())
		return
	}
	r := e.Request
	id := m.newIDLocked(l.ps, l.t, l.sink)
	id.state, id.passive, id.port, id.conn, id.parent = stateConnect, true, p, e.Conn, l
	id.src, id.dst = netip.AddrPortFrom(r.Header.Dst, l.src.Port()), r.Header.Src
	id.tos, id.peer = r.Path.TClass, r.Params
	id.path = &Path{SGID: ib.GIDFromAddr(r.Path.Local), DGID: ib.GIDFromAddr(r.Path.Remote), FlowLabel: r.Path.FlowLabel,
		HopLimit: max(r.Path.HopLimit, 1), TrafficClass: r.Path.TClass, PKey: 0xffff, MTU: r.Path.MTU, LifeTime: r.Path.LifeTime}
	e.Conn.Data = id
	id.recordLocked()
	l.emitLocked(Event{Type: ConnectRequest, New: id, Again: r.Again, Conn: crossed(&r.Params), UD: UDParam{Private: r.Params.Private}})
}

// crossed returns the peer's parameters as this side has them.
func crossed(p *cm.Params) ConnParam {
	return ConnParam{QPN: p.QPN, Private: p.Private, ResponderResources: p.InitiatorDepth, InitiatorDepth: p.ResponderResources,
		FlowControl: p.FlowControl, RetryCount: p.RetryCount, RNRRetry: p.RNRRetry, SRQ: p.SRQ, ECE: p.ECE}
}

// coreEventLocked makes an event of an id of one of the protocol core.
func (m *Manager) coreEventLocked(p *port, e *cm.Event) {
	if e.Type == cm.EventRequest || e.Type == cm.EventSIDRRequest {
		m.requestLocked(p, e)
		return
	}
	id, _ := e.Conn.Data.(*ID)
	if id == nil || id.state == stateClosed {
		return
	}
	id.recordLocked()
	id.endDataLocked()
	switch e.Type {
	case cm.EventReply:
		id.peer = e.Params
		id.emitLocked(Event{Type: ConnectResponse, Conn: crossed(&e.Params)})
	case cm.EventReplyError:
		_ = id.conn.Reject(m.now(), cm.RejectConsumer, nil, nil) // valid in this state
		id.emitLocked(Event{Type: ConnectError, Status: -int(syscall.EINVAL)})
	case cm.EventRejected:
		id.emitLocked(Event{Type: Rejected, Status: int(e.Reason), Conn: ConnParam{Private: e.Private}})
	case cm.EventUnreachable:
		id.emitLocked(Event{Type: Unreachable, Status: -int(syscall.ETIMEDOUT)})
	case cm.EventEstablished:
		id.emitLocked(Event{Type: Established})
	case cm.EventDisconnected:
		ev := Event{Type: Disconnected}
		if e.TimedOut {
			ev.Status = -int(syscall.ETIMEDOUT)
		}
		id.emitLocked(ev)
	case cm.EventTimewaitExit:
		id.emitLocked(Event{Type: TimewaitExit})
	case cm.EventSIDRReply:
		id.sidrReplyLocked(&e.SIDR)
	case cm.EventDropped:
		if id.parent != nil {
			id.withdrawLocked()
			return
		}
		// As if the peer had given up.
		id.emitLocked(Event{Type: ConnectError, Status: -int(syscall.ENOMEM)})
	}
}

// withdrawLocked takes back a request that the program has not seen.
func (id *ID) withdrawLocked() {
	m, l := id.m, id.parent
	id.closeLocked()
	n := len(m.events)
	m.events = slices.DeleteFunc(m.events, func(e *Event) bool { return e.New == id })
	if len(m.events) == n { // the sink has it
		l.emitLocked(Event{Type: Withdrawn, New: id})
	}
}

// sidrReplyLocked takes the answer to a datagram id's request.
func (id *ID) sidrReplyLocked(r *cm.SIDRReply) {
	switch {
	case r.Status != cm.SIDRValid:
		id.emitLocked(Event{Type: Unreachable, Status: int(r.Status), UD: UDParam{Private: r.Private}})
	case r.QKey != udpQKey:
		id.emitLocked(Event{Type: AddrError, Status: -int(syscall.EINVAL)})
	default:
		id.emitLocked(Event{Type: Established, UD: UDParam{AH: id.ahLocked(), QPN: r.QPN, QKey: r.QKey, Private: r.Private}})
	}
}

// ahLocked returns the peer's address.
func (id *ID) ahLocked() ib.AHAttr {
	return ib.AHAttr{DGID: id.path.DGID, SGIDIndex: max(0, slices.Index(id.port.dev.Addrs, id.path.SGID.Addr())), FlowLabel: id.path.FlowLabel,
		HopLimit: id.path.HopLimit, TrafficClass: id.path.TrafficClass, PortNum: 1}
}
