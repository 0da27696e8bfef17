// Package qp is the protocol: what a queue pair does with work requests,
// packets and time. It does no I/O, starts no goroutine, has no lock of its own
// and never reads the clock.
//
// A queue pair is three machines, under their usual names:
//
//   - requester.go makes request trains of the send queue (Pull),
//   - responder.go executes a peer's requests (Receive), and responses.go makes
//     the trains that answer them (Pull),
//   - completer.go turns the peer's answers, and silence, into completions
//     (Receive, Tick).
//
// ahead.go and repair.go are what the responder and the requester do about packets that the
// network has lost, control.go is how much they send. datagram.go is all of that for
// UD, where nothing is acknowledged, and local.go
// the requests that send nothing. shortcut.go executes WRITEs and READs without a
// train.
// state.go has the state transitions, send_queue.go the checks at posting,
// faults.go the one place where faults become NAKs and statuses.
//
// Some requests have to wait for more than the peer. flush.go is the responder's
// part of FLUSH, which may wait for storage; pending.go is memory that has to be
// fetched, and the deferred work of the owner; hold.go is memory that is out of
// reach for a moment; staged.go, landing.go and loads.go are memory that the CPU
// does not address.
//
// The device, called the owner here, calls one method at a time. After any of them it
// should Pull until there is nothing more, and call Tick at Deadline.
package qp

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// Limits of the protocol core.
const (
	MaxRDAtomic   = 16      // READs and atomics outstanding, as initiator and as responder
	MaxMsgSize    = 1 << 30 // bytes; the PSN space bounds it at the smallest MTU
	WellKnownQKey = 1 << 31 // a Q_Key with this bit asks for the queue pair's own
)

// Time is monotonic time since some start that the owner chose.
type Time = time.Duration

// Config is what a queue pair is made of.
type Config struct {
	Type      ib.QPType
	Number    uint32
	PD        uint32
	Cap       ib.QPCap
	SignalAll bool
	SendCQ    *queue.CQ
	RecvCQ    *queue.CQ
	Recv      *queue.Recv // its own, or the shared one
	Shared    bool        // Recv is shared with others
	RecvPD    uint32      // the domain of receives: the SRQ's, or PD
	XRC       XRC
	Table     *mem.Table
	Event     func(ib.EventType) // raises an asynchronous event; must not call back
	Arrived   func()             // if set, is called with the first packet of the peer since RTR; must not call back
	AckFirst  bool               // no request goes before an acknowledgement
	// Stopped, if set, is called when requests are given up, before the program learns of
	// that and may use their memory. It must not call back.
	Stopped func()

	Scatter bool // short messages and results wait beside their completions (inline.go)
	// ScatterFailed is called by the poller, with no lock held, when inline data could not
	// be written back: it calls ScatterBroke.
	ScatterFailed func(mem.Fault) (vendor uint16)
}

// Path is how a queue pair's packets travel.
type Path struct {
	Flow    *train.Flow
	Window  int      // packets that may be under way
	Short   Short    // and how many where messages are short
	Credits *Credits // shared with other queue pairs to the same peer; nil: unlimited

	// Selective: lost packets alone are sent again, if the peer is a queue pair of this library
	// too, and what comes too early is kept. Packets may be marked on the way (ECN).
	Selective bool

	// Lossless paths lose nothing while the peer is there: an answer that takes long is
	// only delayed, and asking again would not help.
	Lossless bool

	// ByReference: the receiver of a train is in this process, and may leave its payload
	// where it lies (train.Lease). (Package link's payload by reference lies in another process.)
	ByReference bool

	// Carrier, if set, sends from memory that the CPU does not address, without loading it.
	Carrier Carrier
	Named   int // packets that may be under way of payloads that Carrier sends
}

// Carrier sends payloads by name, to a process that has opened their memory: the receiver's
// engine moves the bytes.
type Carrier interface {
	// Carries makes the first of n bytes of a list the train's payload, by name. Len of the
	// result is how many: a multiple of unit, or all; 0 if they have to be loaded. With
	// lease, they are a request's: the result holds their memory, for the caller to release,
	// and the peer may use it until GiveUp.
	Carries(t *train.Train, l *mem.List, n, unit uint64, lease bool) mem.SharedHold
	// GiveUp keeps the peer from using the payloads of requests that were carried so far.
	GiveUp()
}

// Short is how many packets of messages below a length may be under way. Such messages take
// more room on the link than longer ones, whose payload package link sends by reference. The
// zero value is no limit.
type Short struct {
	Below, Window int
}

// Address is what an address handle of the software device is made of.
type Address struct {
	PD     uint32
	Flow   *train.Flow
	Closed atomic.Bool
}

// QP is a queue pair.
type QP struct {
	Config
	service
	attr  ib.QPAttr
	state ib.QPState
	mtu   int
	peer  netip.Addr
	path  Path

	sq   sendQueue
	req  requester
	resp responder

	deferred deferredWork
	signals  []signal // fences that the owner is to signal (WorkSignal)

	// Shortcut, if set, is for the WRITEs and READs in the send queue (shortcut.go).
	Shortcut Shortcut

	inlineData *inlineData // nil until there is some (inline.go)
	layout     mem.Layout  // scratch, to configure an indirect key without allocating
	short      Request     // scratch: the request that may take a shortcut
	mine       piece       // what a request writes
	named      piece       // what the peer names
	posted     piece       // what a request in the queue sends, or where its result goes
	taken      piece       // what a receive names

	// Counters count what the queue pair did.
	Counters Counters

	// Bound is set once a window of type 2 may have been bound to the queue pair.
	Bound bool

	established bool // a packet has come since RTR
	ours        bool // the peer is a queue pair of this library, and the path is Selective
	notices     notices
	resets      uint32 // how often it was reset
	modified    uint64 // how often its attributes were changed

	lease train.Lease // of payloads that receivers in this process may leave where they lie
	moves moves       // to, from and between memory that the CPU does not address
}

// New makes a queue pair in the RESET state.
func New(cfg Config) *QP {
	q := &QP{Config: cfg, service: services[cfg.Type], state: ib.QPReset}
	q.sq.init(cfg.Cap, cfg.Type == ib.UD)
	q.attr.Cap = cfg.Cap
	q.mine.init(cfg.Table)
	q.named.init(cfg.Table)
	q.posted.init(cfg.Table)
	q.taken.init(cfg.Table)
	q.mine.list.Actor, q.posted.list.Actor = q.Actor(), q.Actor()
	q.short.from = q
	return q
}

// piece is a list that is used again for each request, with room for one piece of memory.
type piece struct {
	list mem.List
	sge  [1]ib.SGE
	memo mem.Memo
}

func (p *piece) init(t *mem.Table) { p.list = mem.List{Table: t, SGEs: p.sge[:], Memo: &p.memo} }

// Flow is how the queue pair's packets travel, nil if it is not connected.
func (q *QP) Flow() *train.Flow { return q.path.Flow }

// Modified counts how often Modify has changed the queue pair.
func (q *QP) Modified() uint64 { return q.modified }

// Resets counts how often the queue pair was reset.
func (q *QP) Resets() uint32 { return q.resets }

// State returns the current state.
func (q *QP) State() ib.QPState { return q.state }

// Receive takes a train from the peer. If the train's own payload cannot be
// read, which happens only when it still lies in the sender's memory, nothing
// was done and the fault is returned for the sender.
func (q *QP) Receive(t *train.Train, now Time) mem.Fault {
	if !q.accepts(t) {
		return mem.Fault{}
	}
	q.Counters.add(CntRxPackets, t.N)
	if t.Len > 0 {
		q.Counters.add(CntRxBytes, t.Len)
	}
	if q.path.Selective {
		q.ours = q.ours || wire.Ours(t.Hints)
		if t.Marked > 0 {
			q.sawMarks(t, now)
		}
	}
	switch {
	case q.Type == ib.UD:
		return q.receiveDatagram(t)
	case t.Kind == wire.KindCNP && q.path.Selective:
		q.receiveNotice(t)
		return mem.Fault{}
	case t.IsAnswer():
		return q.receiveResponse(t, now)
	case q.half == initiator:
		q.Counters.add(CntDropTransport, t.N)
		return mem.Fault{}
	}
	f := q.receiveRequest(t)
	if len(q.resp.ahead.trains) > 0 {
		q.takeAhead()
	}
	return f
}

// service is how the types of queue pairs differ. XRC is RC in every respect
// but these: a queue pair has one of the two halves, and what the peer's
// requests find there depends on the shared receive queue that each names
// (xrc.go).
type service struct {
	transport wire.Transport
	reliable  bool // what is sent is acknowledged, or sent again
	half      half
}

// half is which machines a queue pair has.
type half uint8

const (
	bothHalves half = iota
	initiator       // the requester and the completer
	target          // the responder
)

var services = [ib.NumQPTypes]service{
	ib.RC:      {transport: wire.RC, reliable: true},
	ib.UC:      {transport: wire.UC},
	ib.UD:      {transport: wire.UD},
	ib.XRCSend: {transport: wire.XRC, reliable: true, half: initiator},
	ib.XRCRecv: {transport: wire.XRC, reliable: true, half: target},
}

// accepts makes the checks that come before any other (IBA 9.6): the state, the
// transport, the sender.
func (q *QP) accepts(t *train.Train) bool {
	switch q.state {
	case ib.QPRTR, ib.QPRTS, ib.QPSQD, ib.QPSQE:
	default:
		q.Counters.add(CntDropState, t.N)
		return false
	}
	if t.Transport != q.transport && !(q.path.Selective && (t.Transport == wire.Own || t.Transport == wire.CNP)) {
		q.Counters.add(CntDropTransport, t.N)
		return false
	}
	if q.Type != ib.UD && !q.IsPeer(t) {
		q.Counters.add(CntDropSource, t.N)
		return false
	}
	if !q.established && t.Kind != wire.KindCNP {
		q.established = true
		if q.Arrived != nil {
			q.Arrived()
		}
		if q.state == ib.QPRTR {
			q.Event(ib.EventCommEst)
		}
	}
	return true
}

// IsPeer reports whether a train is from the peer's address, to the queue pair's. The queue
// pair must be connected.
func (q *QP) IsPeer(t *train.Train) bool { return t.From == q.peer && t.To == q.path.Flow.Src }

// Pull makes the next train to send, if there is one: answers before requests,
// since the peer's window waits for them.
func (q *QP) Pull(t *train.Train, now Time) bool {
	if !q.Pending() {
		q.req.stalledOnCredits = false
		return false
	}
	t.Reset()
	if !q.pullNotice(t) && !(q.ackYields() && q.pullRequest(t, now)) && !q.pullResponse(t) && !q.pullRequest(t, now) {
		return false
	}
	t.Flow = cmpOr(t.Flow, q.path.Flow)
	switch t.Kind {
	case wire.KindGaps:
		t.Transport = wire.Own
	case wire.KindCNP:
		t.Transport = wire.CNP
	default:
		t.Transport = q.transport
	}
	if q.path.Selective && t.Kind != wire.KindCNP {
		t.Hints |= wire.HintOurs
	}
	if q.path.ByReference && t.Payload.Table != nil {
		q.lease.Attach(t)
	}
	q.Counters.add(CntTxPackets, t.N)
	if t.Len > 0 {
		q.Counters.add(CntTxBytes, t.Len)
	}
	return true
}

// Answering reports whether there are answers to Pull.
func (q *QP) Answering() bool { return q.resp.due() }

// Pending reports whether there may be something to Pull.
func (q *QP) Pending() bool {
	return q.Answering() || q.notices.due || (q.req.cur != q.sq.tail || q.req.missing > 0 || q.req.tell) && (q.state == ib.QPRTS || q.state == ib.QPSQD)
}

func cmpOr(a, b *train.Flow) *train.Flow {
	if a != nil {
		return a
	}
	return b
}

// Sent completes requests of an unreliable queue pair: a link has taken the train.
func (q *QP) Sent(t *train.Train, now Time) {
	if t.Cookie == 0 || q.state != ib.QPRTS && q.state != ib.QPSQD {
		return
	}
	q.sentUnreliable(uint32(t.Cookie-1), now)
}

// SendFailed takes back a train whose payload could not be read: the request fails, or the
// READ response becomes a NAK; or they wait, if the memory is out of reach for now.
func (q *QP) SendFailed(t *train.Train, f mem.Fault, now Time) {
	q.uncount(t)
	if t.Kind == wire.KindReadResponse {
		q.readFailed(t, f)
		return
	}
	q.requestFailed(t, f, now)
}

// NotSent takes back a train that has not left, because the payload of one before it could
// not be read. An answer behind one that waits for its memory (hold.go) waits too. The NAK of a
// queue pair that has failed goes alone: it is the last answer that the peer gets.
func (q *QP) NotSent(t *train.Train) {
	q.uncount(t)
	h := q.resp.held
	if t.IsAnswer() && h != nil && h.answers || t.Kind == wire.KindAck && q.state == ib.QPErr {
		q.unsent(t)
	}
}

// uncount takes back what Pull has counted, and releases the memory that it holds for the
// train.
func (q *QP) uncount(t *train.Train) {
	if t.Carried && !t.IsAnswer() {
		q.req.uncarry(t.PSN)
	}
	c := &q.Counters
	c[CntTxPackets] -= min(c[CntTxPackets], uint64(t.N))
	c[CntTxBytes] -= min(c[CntTxBytes], uint64(max(t.Len, 0)))
	if t.Kind == wire.KindAck || t.Kind == wire.KindGaps {
		i := ackCounter(t.AETH.Syndrome)
		c[i] -= min(c[i], 1)
	}
}

// complete puts the completion of a receive into its queue.
func (q *QP) complete(wc *ib.WC, solicited bool) {
	wc.QPN = q.Number
	q.pushed(q.RecvCQ.Push(wc, solicited))
}

// pushed deals with a completion that did not fit: it is lost, and its queue
// pair with it (IBA 10.10.2.3).
func (q *QP) pushed(ok bool) {
	if ok || q.state == ib.QPErr || q.state == ib.QPReset {
		return
	}
	q.Event(ib.EventQPFatal)
	q.enterError()
}

// Grants reports whether the peer's requests have the rights acc, and would be executed.
func (q *QP) Grants(acc ib.Access) bool {
	switch q.state {
	case ib.QPRTR, ib.QPRTS, ib.QPSQD:
		return q.established && q.attr.Access&acc == acc && (acc&ib.AccessRemoteRead == 0 || q.attr.MaxDestRDAtomic > 0)
	}
	return false
}

// Actor returns on whose behalf memory is accessed: the same for the queue pair's own
// requests and for the peer's, which have the queue pair's rights.
func (q *QP) Actor() mem.Actor { return mem.Actor{PD: q.PD, QPN: q.Number} }
