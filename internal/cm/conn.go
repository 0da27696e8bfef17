package cm

// Conn is one side of a connection, or of a SIDR exchange.
type Conn struct {
	Data any // the caller's

	core         *Core
	state        State
	passive      bool
	closed       bool // by the program: no event follows
	disconnected bool // EventDisconnected is out
	transport    Transport

	localID, remoteID   uint32
	guid                uint64 // of the peer
	localQPN, remoteQPN uint32
	vendor              uint32 // whose options this side's REQ offers: see ECE
	psn                 uint32
	tid                 uint64 // which this side's answers have: of the REQ or SIDR_REQ, later of the peer's DREQ
	path                Path
	wait                uint8 // how long packets may be under way, there and back: code of a timeout

	request *Request // passive
	unseen  *queued  // the event of request, while the program has not taken it
	backlog *Backlog // where the request waits; nil: not in one

	msg        *Send // REQ, REP, DREQ or SIDR_REQ that is repeated until there is an answer
	interval   Time  // at which msg is repeated
	left       int   // how often it will be
	timeout    Time  // the first interval of REQ, REP and DREQ
	maxRetries int
	deadline   Time
	timer      int // place in Core.timers, from 1; 0: no timer runs

	pool *pool // the one that the Conn is in, or nil
	slot int   // place there
}

// LocalID returns the communication id of this side.
func (n *Conn) LocalID() uint32 { return n.localID }

// RemoteID returns the communication id of the peer, 0 while it is not known.
func (n *Conn) RemoteID() uint32 { return n.remoteID }

// LocalQPN returns the QPN that this side has sent, 0 before.
func (n *Conn) LocalQPN() uint32 { return n.localQPN }

// RemoteQPN returns the QPN of the peer, 0 while it is not known.
func (n *Conn) RemoteQPN() uint32 { return n.remoteQPN }

// State returns the state.
func (n *Conn) State() State { return n.state }

// PSN returns the starting PSN that this side has sent: the first one that its queue pair receives.
func (n *Conn) PSN() uint32 { return n.psn }

// Path returns the path. The caller must not change it.
func (n *Conn) Path() *Path { return &n.path }

// Request returns the request that the Conn began with; nil at the active side.
func (n *Conn) Request() *Request { return n.request }

// AckTimeout returns the ACK timeout for the queue pair of this side: the passive one has it from the
// REQ, the active one computes it when the REP comes.
func (n *Conn) AckTimeout() uint8 {
	if n.passive {
		return n.path.AckTimeout
	}
	return n.wait
}

// ids returns the communication ids for a message of this side.
func (n *Conn) ids() ids { return ids{local: n.localID, remote: n.remoteID} }

// mad returns a MAD to the peer, on the path of the connection.
func (n *Conn) mad(attr Attr, tid uint64) (s *Send, data []byte) {
	p := &n.path
	s = &Send{From: p.Local, To: p.Remote, TClass: p.TClass, HopLimit: p.HopLimit, FlowLabel: p.FlowLabel}
	return s, header{tid: tid, attr: attr}.put(&s.MAD)
}

// emit queues an event of the Conn.
func (n *Conn) emit(e Event) {
	e.Conn = n
	n.core.emit(e)
}

// setPSN takes the program's starting PSN, or chooses one.
func (n *Conn) setPSN(psn uint32) {
	if psn == 0 {
		psn = uint32(n.core.cfg.Rand())
	}
	n.psn = psn & mask24
}

const mask24 = 1<<24 - 1

// register enters the peer into the tables of duplicates and stale connections.
func (n *Conn) register() {
	n.core.byID[remoteKey{n.guid, n.remoteID}] = n
	n.core.byQPN[remoteKey{n.guid, n.remoteQPN}] = n
}

// releaseQPN lets the peer use its QPN for another connection.
func (n *Conn) releaseQPN() {
	if key := (remoteKey{n.guid, n.remoteQPN}); n.core.byQPN[key] == n {
		delete(n.core.byQPN, key)
	}
}

// idle ends the Conn: the core forgets it.
func (n *Conn) idle() {
	c := n.core
	n.state = Idle
	n.cancel()
	n.releaseQPN()
	if c.conns[n.localID] == n {
		delete(c.conns, n.localID)
	}
	if key := (remoteKey{n.guid, n.remoteID}); c.byID[key] == n {
		delete(c.byID, key)
	}
	if key := (sidrKey{n.path.Remote, n.remoteID}); c.sidr[key] == n {
		delete(c.sidr, key)
	}
	n.pool.remove(n)
	if n.unseen != nil {
		c.unlink(n.unseen)
		n.unseen = nil
	}
}

// pool is a set of Conns from which a random one can be taken.
type pool struct{ conns []*Conn }

func (p *pool) add(n *Conn) {
	n.pool, n.slot = p, len(p.conns)
	p.conns = append(p.conns, n)
}

// remove takes n out of the pool that it is in, which may be none.
func (p *pool) remove(n *Conn) {
	if p == nil {
		return
	}
	end := len(p.conns) - 1
	last := p.conns[end]
	p.conns[n.slot], last.slot = last, n.slot
	p.conns[end] = nil
	p.conns = p.conns[:end]
	n.pool = nil
}

// random returns one of the pool, which must not be empty.
func (p *pool) random(r uint64) *Conn { return p.conns[r%uint64(len(p.conns))] }
