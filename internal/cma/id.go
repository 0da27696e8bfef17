package cma

import (
	"math/rand/v2"
	"net/netip"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// state is what has been done with an id.
type state int

const (
	stateIdle state = iota
	stateBound
	stateAddrResolved
	stateRouteResolved
	stateConnect // a connection, or one in the making
	stateListen
	stateClosed
)

// ID is an end of a connection, a listener, or a datagram service: struct rdma_cm_id. All methods
// are safe for concurrent use. Errors are *ib.OpError with the errno that the kernel gives.
type ID struct {
	m  *Manager
	ps PortSpace
	t  ib.QPType

	// What follows is guarded by Manager.mu.
	sink     Sink
	state    state
	src, dst netip.AddrPort
	port     *port // nil: bound to no device
	claims   []*claim
	path     *Path

	reuse, afOnly bool
	tos           uint8
	ackTimeout    uint8 // 0: not set

	conn    *cm.Conn
	passive bool
	agreed  bool      // passive: Accept was called
	psn     uint32    // the first one that the id's queue pair receives
	own     ConnParam // what this side asks for, or has accepted
	peer    cm.Params // of the peer's REQ or REP
	record  provider.ConnRecord
	data    func() // ends the wait for data that establishes the connection; nil: there is none

	backlog *cm.Backlog // of a listener: requests that the program has not seen
	evicts  bool        // of a listener: see ListenEvicting
	parent  *ID         // the listener, while the request counts in its backlog
	joins   []*Join
}

// NewID makes an id whose events go to a sink.
func (m *Manager) NewID(ps PortSpace, t ib.QPType, sink Sink) (*ID, error) {
	const op = "create_id"
	switch ps {
	case PSTCP, PSUDP, PSIB, PSIPoIB:
	default:
		return nil, ib.Errorf(op, syscall.EINVAL, "port space %#x", uint16(ps))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, errClosed(op)
	}
	return m.newIDLocked(ps, t, sink), nil
}

func (m *Manager) newIDLocked(ps PortSpace, t ib.QPType, sink Sink) *ID {
	id := &ID{m: m, ps: ps, t: t, sink: sink, psn: 1 + rand.N(uint32(1<<24-1))}
	m.ids[id] = true
	return id
}

// SetSink makes later events go to another sink. When it returns, no call of the old one is under way.
func (id *ID) SetSink(s Sink) {
	id.m.mu.Lock()
	defer id.m.mu.Unlock()
	id.sink = s
	id.m.flushedLocked()
}

// isUD reports whether the id is for datagrams.
func (id *ID) isUD() bool { return id.t == ib.UD }

// do calls f under the lock, unless the id is in another state than those given; none: any but
// closed.
func (id *ID) do(op string, f func() error, in ...state) (err error) {
	id.m.change(func() {
		ok := len(in) == 0 && id.state != stateClosed
		for _, s := range in {
			ok = ok || id.state == s
		}
		if !ok {
			err = errState(op)
			return
		}
		err = opError(op, f())
	})
	return err
}

// look is do for an f that changes nothing.
func (id *ID) look(op string, f func() error) error {
	id.m.mu.Lock()
	defer id.m.mu.Unlock()
	if id.state == stateClosed {
		return errState(op)
	}
	return opError(op, f())
}

func errState(op string) error { return ib.Errorf(op, syscall.EINVAL, "not in this state of the id") }

// emitLocked queues an event.
func (id *ID) emitLocked(e Event) {
	e.ID = id
	id.m.events = append(id.m.events, &e)
}

// SetOption sets an option.
func (id *ID) SetOption(o Option, value int) error {
	const op = "set_option"
	return id.do(op, func() error {
		switch {
		case o == OptionTOS && value >= 0 && value < 256:
			id.tos = uint8(value)
		case o == OptionReuseAddr && (id.state == stateIdle || value != 0):
			id.reuse = value != 0
		case o == OptionAFOnly && id.state == stateIdle:
			id.afOnly = value != 0
		case o == OptionACKTimeout && value >= 0 && value < 32:
			if id.t != ib.RC && id.t != ib.XRCSend && id.t != ib.XRCRecv {
				return ib.Errorf(op, syscall.EINVAL, "a %v id has no acknowledgements", id.t)
			}
			id.ackTimeout = uint8(value)
		default:
			return ib.Errorf(op, syscall.EINVAL, "option %d, value %d", o, value)
		}
		return nil
	})
}

// Info returns what is known of the id.
func (id *ID) Info() Info {
	id.m.mu.Lock()
	defer id.m.mu.Unlock()
	in := Info{Src: id.src, Dst: id.dst}
	if id.port != nil {
		in.Dev, in.GUID, in.Port = &id.port.dev, id.port.mgmt.GUID(), 1
	}
	if id.path != nil {
		in.Paths = []Path{*id.path}
	}
	return in
}

// Close destroys the id: the peer hears of it. No event follows. It is idempotent.
func (id *ID) Close() error {
	id.m.change(func() { id.closeLocked() })
	id.m.mu.Lock()
	defer id.m.mu.Unlock()
	id.m.flushedLocked() // a call of the sink that is under way ends before Close returns
	return nil
}

func (id *ID) closeLocked() {
	if id.state == stateClosed {
		return
	}
	if id.conn != nil {
		id.conn.Data = nil
		id.conn.Close(id.m.now())
		id.conn = nil
	}
	id.parent = nil
	id.forgetLocked()
	id.endDataLocked()
	id.freePortsLocked()
	id.state = stateClosed
	delete(id.m.ids, id)
}

// Seen makes the request that the id came from count no more in its listener's backlog: the program
// has got the event. It reports whether the request is still there: see ListenEvicting.
func (id *ID) Seen() bool {
	there := false
	id.m.change(func() {
		there = id.state != stateClosed
		if id.parent != nil && id.conn != nil {
			id.conn.Seen()
		}
		id.parent = nil
	})
	return there
}
