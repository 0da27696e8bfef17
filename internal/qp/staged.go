package qp

// Memory that the CPU does not address (mem.Engine): an engine moves its bytes while the
// queue pair goes on. The moves of a queue pair are one ordered stream.
//
//  1. A copy ends in a fault because an engine has to do it (mem.Fault.Staged). The
//     responder or completer accepts the request or the answer all the same, with its
//     payload, as a Move. Its acknowledgement and its completion wait.
//  2. The owner begins the moves in their order and waits for them, with no lock held
//     (NextMove, Move.Begin, Move.Wait), and hands them back (Moved).
//  3. Moves that are over come into effect in their order: requests in finishRequests,
//     answers in finishAnswers.
//
// Of a message whose payload lies in staging bytes, packets are acknowledged before that, but for
// the last one that has come: so the sender goes on, and is done when the bytes are there (front).
//
// A request behind moves that the same engine does not execute in the same direction waits
// until they are over (keepInOrder): so a program sees a WRITE and a flag behind it in this
// order, wherever the two lie.
//
// Where a link needs the bytes, what is to be sent from such memory is loaded first (loads.go).

import (
	"slices"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// How much of one queue pair may wait for engines: moves, and bytes of their payload.
// Windows are smaller. Only a peer in this process, one that sends by name, or one that exceeds
// its window reaches these bounds (Full).
const (
	maxMoves     = 256
	maxMoveBytes = 16 << 20
)

// How many moves and bytes may wait while packets are acknowledged early. Beyond them a sender stops
// at its window, which is smaller than what is left up to maxMoves and maxMoveBytes: it does not get
// an RNR NAK, which its program may not expect.
const (
	maxEarly      = maxMoves / 4
	maxEarlyBytes = maxMoveBytes / 4
)

// moveKind is what a move is for.
type moveKind uint8

const (
	moveRequest moveKind = iota // of the peer
	moveAnswer                  // of the peer, to a request of the queue pair
	moveLoad                    // of bytes that are to be sent
)

// Move is bytes on their way to, from or between memory that the CPU does not address.
type Move struct {
	kind     moveKind
	life     uint32 // moves.life when it was made; another value: it does not count any more
	transfer mem.Transfer
	train    *train.Train // what came; nil for a load
	to       mem.List
	sges     [1]ib.SGE
	bytes    int // of payload that is kept for it
	toEngine bool
	owner    any // of the engine; nil if there are several

	atomic *atomicMove // not nil: it is an atomic

	over  bool
	fault mem.Fault
	side  mem.Side

	psn    wire.PSN // of the first packet
	n      int      // PSNs that it takes
	ends   bool     // the message ends with it
	early  bool     // its packets may be acknowledged before it is over
	ackReq bool
	before responderState

	// The receive that completes with it, if any.
	completes  bool
	wc         ib.WC
	cq         *queue.CQ
	solicited  bool
	invalidate bool // wc.InvalidatedKey is invalidated before it completes

	load   *load
	joined []*Move // moves behind it that were made a part of it
}

// responderState is where the responder stood before a request.
type responderState struct {
	kind wire.Kind
	off  uint64
	msn  uint32
}

// atomicMove is an atomic on memory that the CPU does not address.
type atomicMove struct {
	table            *mem.Table
	who              mem.Actor
	key              uint32
	addr             uint64
	op               mem.AtomicOp
	compare, swapAdd uint64
	orig             uint64
}

// moves are the moves of a queue pair.
type moves struct {
	stream mem.Stream
	// chains hold the requests and the answers of a reliable connection, by kind. A failure ends
	// one, and what comes when the queue pair has dealt with it begins another.
	chains [moveLoad]*mem.Chain
	queue  []*Move // moves that NextMove has not returned yet, oldest first
	n      int     // how many moves are not over; without loads, which have their own bounds
	bytes  int     // of payload that is kept for those
	life   uint32  // how often all were forgotten
	begun  int     // moves of any life between NextMove and Moved

	// A queue pair that has failed completes what follows when begun is 0: until then
	// engines may be at the memory.
	flushing bool
	status   ib.WCStatus // of the oldest request, if that is what has failed
	vendor   uint16
	taken    []takenReceive // by messages that waited for engines
}

// takenReceive is the completion of a receive that a message had taken, and where it goes.
type takenReceive struct {
	wc ib.WC
	cq *queue.CQ
}

// Full reports whether the queue pair should be given no more trains for now: a sender in
// the same process that hands its trains over waits, and tries again.
func (q *QP) Full() bool {
	m := &q.moves
	return m.n >= maxMoves/2 || m.bytes >= maxMoveBytes/2 || q.resp.held != nil && q.resp.held.bytes > maxHeld/2
}

// Moving reports whether NextMove has a move to return.
func (q *QP) Moving() bool { return len(q.moves.queue) > 0 }

// NextMove returns the next move to begin, nil if there is none.
func (q *QP) NextMove() *Move {
	m := &q.moves
	if len(m.queue) == 0 {
		return nil
	}
	m.begun++
	next := m.pop()
	for len(m.queue) > 0 && next.joins(m.queue[0]) {
		next.joined = append(next.joined, m.pop())
	}
	return next
}

// pop takes the oldest out of the queue.
func (ms *moves) pop() *Move {
	m := ms.queue[0]
	ms.queue[0] = nil
	if ms.queue = ms.queue[1:]; len(ms.queue) == 0 {
		ms.queue = nil
	}
	return m
}

// joins makes the next move a part of m, if both are parts of one message whose payload is read
// where it lies (train.Lease), and reports whether it did: an engine moves a message in about
// the time of a packet.
func (m *Move) joins(next *Move) bool {
	return m.kind == next.kind && m.kind != moveLoad && m.atomic == nil && next.atomic == nil && !m.ends && m.transfer.N < maxJoined &&
		m.train.Lease != nil && m.train.Lease == next.train.Lease && m.train.LeaseAt == next.train.LeaseAt && m.transfer.Join(&next.transfer)
}

// maxJoined is the length from which on no other move is joined to a move.
const maxJoined = 4 << 20

// Begin begins the move. If it returns FaultPending, the caller waits for that fault, and then
// calls Begin again. ahead: moves before it are under way (see Short).
func (m *Move) Begin(ahead bool) mem.Fault {
	if m.atomic != nil || !m.fault.OK() {
		return mem.Fault{}
	}
	if m.train != nil && !m.train.Leased() {
		m.fail(mem.Fault{Kind: mem.FaultDead}, mem.Src)
		return mem.Fault{}
	}
	m.transfer.Ahead = ahead
	f, side := m.transfer.Begin()
	if f.Kind == mem.FaultPending {
		return f
	}
	if !f.OK() {
		m.fail(f, side)
	}
	return mem.Fault{}
}

func (m *Move) fail(f mem.Fault, side mem.Side) {
	m.transfer.Link.Fail() // the moves behind it change nothing
	if m.fault.OK() {
		m.fault, m.side = f, side
	}
}

// Wait waits until the move is over. FaultPending is as with Begin.
func (m *Move) Wait(s *mem.Stream) mem.Fault {
	if a := m.atomic; a != nil {
		if !m.fault.OK() {
			return mem.Fault{}
		}
		var f mem.Fault
		if a.orig, f = mem.AtomicWaiting(a.table, a.who, a.key, a.addr, a.op, a.compare, a.swapAdd, s, m.transfer.Link); f.Kind == mem.FaultPending {
			return f
		}
		if !f.OK() {
			m.fail(f, mem.Dst)
		}
		return mem.Fault{}
	}
	f, side := m.transfer.Wait()
	if f.Kind == mem.FaultPending {
		return f
	}
	if !f.OK() {
		m.fail(f, side)
	}
	if m.train != nil && !m.train.StillLeased() {
		m.fail(mem.Fault{Kind: mem.FaultDead}, mem.Src) // the sender may have changed what was read
	}
	return mem.Fault{}
}

// Failed reports whether the move has failed. The owner begins none behind it before it has
// handed this one back (Moved) and the queue pair has decided about the others.
func (m *Move) Failed() bool { return !m.fault.OK() }

// Short reports whether Begin has begun a part only, because staging bytes were short: the owner waits for the moves
// before this one, and calls Begin again.
func (m *Move) Short() bool { return m.fault.OK() && m.transfer.Short() }

// Over reports whether Wait would not wait.
func (m *Move) Over() bool { return m.atomic == nil && m.transfer.Over() }

// GiveUp ends a move that is not to be begun or waited for any more: its queue pair has been
// reset, or has failed.
func (m *Move) GiveUp() {
	m.fail(mem.Fault{Kind: mem.FaultDead}, mem.Dst)
	m.transfer.GiveUp()
}

// Lends reports whether the receiver of a train that the queue pair has sent within the process
// may still read its payload where it lies: the lease has not ended.
func (q *QP) Lends(t *train.Train) bool { return t.Lease == &q.lease && t.Leased() }

// Stream returns the order of the queue pair's moves.
func (q *QP) Stream() *mem.Stream { return &q.moves.stream }

// stage makes a move of a received train to a list. It returns nil if there is no room for it,
// or with a fault if the payload cannot be read.
func (q *QP) stage(kind moveKind, t *train.Train, to *mem.List, last bool) (*Move, mem.Fault) {
	ms := &q.moves
	if ms.n >= maxMoves || ms.bytes+t.Copies() > maxMoveBytes {
		return nil, mem.Fault{}
	}
	kept, by, f := t.KeepStaged()
	if !f.OK() {
		return nil, f
	}
	m := &Move{kind: kind, life: q.moves.life, train: kept, to: *to, psn: t.PSN, n: t.N, ends: t.End, ackReq: t.AckReq, bytes: by}
	if len(to.SGEs) == 1 { // the list is the queue pair's own, and used again
		m.sges[0] = to.SGEs[0]
		m.to.SGEs = m.sges[:]
	} else {
		m.to.SGEs = append([]ib.SGE(nil), to.SGEs...)
	}
	m.to.Memo = nil
	m.toEngine, m.owner = engineOf(&m.to, &kept.Payload, uint64(t.Len))
	m.transfer = mem.Transfer{Dst: &m.to, Src: &kept.Payload, N: uint64(t.Len), Last: last, Stream: &ms.stream, Link: q.chain(kind)}
	ms.push(m)
	return m, mem.Fault{}
}

// chain returns a new last place in the chain of a kind; none for unreliable queue pairs.
func (q *QP) chain(kind moveKind) (l mem.Link) {
	if !q.reliable {
		return l
	}
	c := &q.moves.chains[kind]
	if *c == nil {
		*c = new(mem.Chain)
	}
	return (*c).Add()
}

func (ms *moves) push(m *Move) {
	ms.queue = append(ms.queue, m)
	if m.kind != moveLoad {
		ms.n++
	}
	ms.bytes += m.bytes
}

// engineOf returns the owner of the engine that moves n bytes from one list to another, and
// whether they go to its memory.
func engineOf(to, from *mem.List, n uint64) (toEngine bool, owner any) {
	if owner = to.Owner(n); owner != nil {
		return true, owner
	}
	return false, from.Owner(n)
}

// front returns the PSN before which all packets of the peer may be acknowledged: of requests that
// have come into effect, and of the message behind them if its payload was kept. The last packet that
// has come is not among these, so that there is one to refuse when a move fails; nor is the last
// packet of a message, with which it completes.
func (r *responder) front() wire.PSN {
	psn := r.epsn
	for _, m := range r.moves {
		if !m.early {
			return m.psn
		}
		if psn = m.psn.Add(m.n - 1); m.ends {
			return psn
		}
	}
	return psn
}

// done returns how many of the peer's messages have come into effect, 24 bits.
func (r *responder) done() uint32 {
	if len(r.moves) > 0 {
		return r.moves[0].before.msn
	}
	return r.msn
}

// follows reports whether a request may be begun while others move: the same engine executes
// it behind them, in the same direction.
func (q *QP) follows(t *train.Train) bool {
	r := &q.resp
	last := r.moves[len(r.moves)-1]
	if last.owner == nil || t.Len == 0 || t.Extra == wire.WithInv {
		return false
	}
	if !q.sequence(t) {
		return false // it is refused when the requests before it are done
	}
	var to *mem.List
	n := uint64(t.Len) // bytes to check
	switch t.Kind {
	case wire.KindWrite:
		h, off := r.reth, r.off
		if t.Start {
			h, off = t.RETH, 0
		}
		left := uint64(h.Len) - off
		if q.attr.Access&ib.AccessRemoteWrite == 0 || h.Len > MaxMsgSize || n > left || t.End && n != left {
			return false
		}
		n = left
		to = q.remoteList(ib.AccessRemoteWrite, q.Actor(), h.RKey, h.VA+off, int(left))
	case wire.KindSend:
		if t.Start && !r.have {
			if r.have = q.takeReceive(); !r.have {
				return false
			}
		}
		off := r.off
		if t.Start {
			off = 0
		}
		if n > min(r.taken.Len, MaxMsgSize)-off {
			return false
		}
		to = q.receiveList(off)
	default:
		return false
	}
	if f := mem.Check(to, n); !f.OK() {
		return false
	}
	toEngine, owner := engineOf(to, &t.Payload, uint64(t.Len))
	return owner == last.owner && toEngine == last.toEngine
}

// take makes a move of a request whose bytes an engine has to move. If it returns nil, the
// request is not accepted: the payload cannot be read, which is the fault; or, without a
// fault, there is no room (pushBack).
func (q *QP) take(t *train.Train, to *mem.List) (*Move, mem.Fault) {
	r := &q.resp
	m, f := q.stage(moveRequest, t, to, t.End)
	if m == nil {
		if f.OK() {
			q.pushBack()
		}
		return nil, f
	}
	m.before = responderState{r.kind, r.off, r.msn}
	m.cq = q.RecvCQ
	m.early = q.reliable && m.bytes > 0 && q.moves.n <= maxEarly && q.moves.bytes <= maxEarlyBytes
	r.moves = append(r.moves, m)
	if m.early && m.ackReq && r.moves[0].psn.Less(r.front()) {
		r.partly = true
	}
	return m, mem.Fault{}
}

// pushBack: there is no room for a request. RC sends an RNR NAK, the others lose the message.
func (q *QP) pushBack() {
	if q.reliable {
		q.Counters.add(CntFaultRNR, 1)
		q.rnr()
		return
	}
	q.Counters.add(CntDropFault, 1)
	q.resp.kind, q.resp.skip = 0, true
}

// completeBehind completes a receive when the move m is over; if m is nil, when the moves
// before it are, or at once if there are none.
func (q *QP) completeBehind(m *Move, wc *ib.WC, solicited bool) {
	r := &q.resp
	if m == nil && len(r.moves) > 0 { // the completion must not overtake those of the moves
		m = &Move{kind: moveRequest, life: q.moves.life, over: true, ends: true, psn: r.epsn, cq: q.RecvCQ, before: responderState{msn: r.msn}}
		r.moves = append(r.moves, m)
	}
	if m == nil {
		q.completeReceive(wc, solicited)
		return
	}
	r.have = false
	m.completes, m.wc, m.solicited = true, *wc, solicited
}

// Moved takes a move back from the owner: it is over, or was given up. It returns a train
// whose payload could not be read, for its sender, and why.
func (q *QP) Moved(m *Move, now Time) (*train.Train, mem.Fault) {
	for _, j := range m.joined {
		j.fault, j.side = m.fault, m.side
		if j.life == q.moves.life {
			q.moves.drop(j)
			j.over = true
		}
	}
	if m.train != nil {
		defer m.train.Free()
	}
	if q.moves.begun--; q.moves.begun == 0 && q.moves.flushing {
		q.flush()
	}
	if m.life != q.moves.life {
		return nil, mem.Fault{}
	}
	q.moves.drop(m)
	m.over = true
	switch m.kind {
	case moveRequest:
		if !slices.Contains(q.resp.moves, m) {
			break // the request was given up
		}
		return q.finishRequests(now)
	case moveAnswer:
		if slices.Contains(q.req.answers, m) {
			return q.finishAnswers(now)
		}
	case moveLoad:
		m.load.over(m)
		q.answerLoaded()
	}
	return nil, mem.Fault{}
}

// finishRequests lets requests come into effect, in their order, as far as their moves are
// over. It returns what Moved returns.
func (q *QP) finishRequests(now Time) (*train.Train, mem.Fault) {
	r := &q.resp
	for len(r.moves) > 0 && r.moves[0].over {
		m := r.moves[0]
		if q.state != ib.QPRTR && q.state != ib.QPRTS && q.state != ib.QPSQD && q.state != ib.QPSQE {
			r.moves = nil
			return nil, mem.Fault{}
		}
		switch {
		case !m.fault.OK() && m.side == mem.Src:
			return q.unreadMove(m)
		case !m.fault.OK() && q.moveFailed(m):
			continue
		case !m.fault.OK():
			return nil, mem.Fault{}
		}
		if m.invalidate {
			if f := q.Table.Invalidate(m.wc.InvalidatedKey, q.Actor()); f.Kind == mem.FaultPending {
				q.fetch(WorkReceive, f, nil) // another process has to leave the memory first
				return nil, mem.Fault{}
			} else if !f.OK() {
				m.fail(f, mem.Dst) // those behind it change nothing
				continue
			}
		}
		if r.moves = r.moves[1:]; len(r.moves) == 0 {
			r.moves, r.tellMoves = nil, false
		}
		if m.ackReq && q.reliable && !(m.early && r.ackedAny && !r.acked.Less(m.psn.Add(m.n-1))) {
			r.partly = true
		}
		if a := m.atomic; a != nil { // the answer acknowledges
			r.full(q.attr.MaxDestRDAtomic) // repetitions make room for it
			behind := r.ack
			if a.op == mem.Store {
				r.answerRead(m.psn, 1, wire.RETH{}, a.who.PD, (m.before.msn+1)&(1<<24-1))
			} else {
				r.answerAtomic(m.psn, a.orig, (m.before.msn+1)&(1<<24-1))
			}
			if behind.pending && m.psn.Less(behind.psn) { // the answer to what came meanwhile
				r.ack = behind
			}
		}
		if m.completes {
			m.wc.QPN = q.Number
			q.pushed(m.cq.Push(&m.wc, m.solicited))
		}
	}
	if len(r.moves) == 0 && r.held != nil && r.held.inOrder {
		r.held.inOrder = false
		q.letGo()
	}
	return nil, mem.Fault{}
}

// unreadMove: the payload of a request could not be read from its sender's memory. It returns
// the train, for the sender. The request and those behind it count as not sent; the receives
// that they had taken are kept for them (owed).
func (q *QP) unreadMove(m *Move) (*train.Train, mem.Fault) {
	r := &q.resp
	behind := r.moves
	r.moves, r.ack.pending, r.partly = nil, false, false
	q.moves.forgetKind(moveRequest)
	if h := r.held; h != nil && len(h.requests) > 0 {
		free(h.drop()) // what waited behind them comes again, too
		h.inOrder, h.lost = false, false
		if !h.answers {
			h.until = 0
		}
	}
	if r.have { // of the last message
		r.owed = slices.Insert(r.owed, 0, queue.Taken{ID: r.taken.ID, Len: r.taken.Len, SGEs: slices.Clone(r.taken.SGEs)})
		r.have = false
	}
	var owed []queue.Taken
	for _, b := range behind {
		switch {
		case !b.completes:
		case q.half != bothHalves && len(owed) > 0: // it may be a receive of another queue
			q.pushed(b.cq.Push(&ib.WC{ID: b.wc.ID, Status: ib.WCWRFlushErr, Op: ib.WCRecv, QPN: q.Number}, false))
		default:
			owed = append(owed, b.receive())
		}
	}
	r.owed = append(owed, r.owed...)
	r.epsn, r.msn, r.kind, r.off = m.psn, m.before.msn, m.before.kind, m.before.off
	return m.train, m.fault
}

// receive returns the receive that the message of a move has taken; for a WRITE, which does
// not use them, without its pieces.
func (m *Move) receive() (t queue.Taken) {
	t.ID = m.wc.ID
	if m.train == nil || m.train.Kind != wire.KindSend {
		return t
	}
	t.SGEs = slices.Clone(m.to.SGEs)
	for i := range t.SGEs {
		t.Len += uint64(t.SGEs[i].Length)
	}
	return t
}

// forgetKind forgets the moves of a kind that have not been begun. The caller forgets the
// requests or answers of those that were, so that Moved ignores them.
func (ms *moves) forgetKind(kind moveKind) {
	ms.chains[kind] = nil // moves that were begun fail with the old chain
	kept := ms.queue[:0]
	for _, m := range ms.queue {
		if m.kind == kind {
			ms.drop(m)
		} else {
			kept = append(kept, m)
		}
	}
	clear(ms.queue[len(kept):])
	ms.queue = kept
}

// drop takes a move out of the counts, and out of this life.
func (ms *moves) drop(m *Move) {
	if m.kind != moveLoad {
		ms.n--
	}
	ms.bytes -= m.bytes
	m.life--
}

// moveFailed refuses a request that was accepted: its memory could not be accessed. The
// receive that its message has taken completes with the error, and those of later messages
// are flushed. A UC queue pair whose receive is not at fault only loses the message:
// moveFailed then reports true, and the requests behind go on.
func (q *QP) moveFailed(m *Move) (goesOn bool) {
	r := &q.resp
	psn := r.front() // of m, or of a packet behind it in the same message: those before it may be acknowledged
	why := accessError
	if m.train != nil && m.train.Kind == wire.KindSend && !m.invalidate {
		why = receiveError
	}
	goesOn = q.Type == ib.UC && why.nak != wire.NakRemoteOpError
	own, told := true, false // b belongs to the failed message; its receive has completed
	var behind []*Move
	for i, b := range r.moves {
		switch {
		case b.completes && own:
			q.giveTaken(b.cq, b.wc.ID, why.status, vendorFault(m.fault))
			told = true
		case b.completes && !goesOn:
			q.giveTaken(b.cq, b.wc.ID, ib.WCWRFlushErr, 0)
		}
		if own && b.ends {
			own = false
			behind = r.moves[i+1:]
		}
	}
	if goesOn {
		r.moves = behind
		q.pushTaken()
		q.Counters.add(why.count, 1)
		q.Counters.add(CntDropMalformed, 1)
		if own { // the rest of the message is still to come
			r.kind, r.skip = 0, true
		}
		return true
	}
	if own && r.have {
		r.have, told = false, true
		q.giveTaken(q.RecvCQ, r.taken.ID, why.status, vendorFault(m.fault))
	}
	r.moves, r.partly = nil, false
	q.moves.forgetKind(moveRequest)
	if q.Type == ib.UD {
		q.enterError()
		return false
	}
	q.Counters.add(why.count, 1)
	if q.reliable {
		r.drop(psn)
		r.epsn = psn
		q.nak(why.nak, psn)
	}
	if !told {
		q.Event(why.event)
	}
	q.enterErrorAnswering()
	return false
}

// giveTaken notes that a receive which a message had taken completes with an error; pushTaken
// completes it.
func (q *QP) giveTaken(cq *queue.CQ, id uint64, status ib.WCStatus, vendor uint16) {
	q.moves.taken = append(q.moves.taken, takenReceive{ib.WC{ID: id, Status: status, Op: ib.WCRecv, VendorErr: vendor, QPN: q.Number}, cq})
}

func (q *QP) pushTaken() {
	taken := q.moves.taken
	q.moves.taken = nil
	for i := range taken {
		q.pushed(taken[i].cq.Push(&taken[i].wc, false))
	}
}

// takeAtomic makes a move of an atomic on memory that the CPU does not address.
func (q *QP) takeAtomic(t *train.Train, a *atomicMove) mem.Fault {
	r := &q.resp
	a.table, a.who = q.Table, q.Actor()
	m := &Move{kind: moveRequest, life: q.moves.life, atomic: a, psn: t.PSN, n: 1, ends: true, before: responderState{msn: r.msn}}
	m.transfer.Link = q.chain(moveRequest)
	q.moves.push(m)
	r.moves = append(r.moves, m)
	r.epsn = r.epsn.Add(1)
	r.kind, r.msn = 0, (r.msn+1)&(1<<24-1)
	r.rdEnd, r.rdAny = r.epsn, true
	return mem.Fault{}
}

// keepInOrder keeps a request until the moves before it are over. It returns a fault if the
// payload cannot be read.
func (q *QP) keepInOrder(t *train.Train) mem.Fault {
	r := &q.resp
	if r.held == nil {
		r.held = new(heldRequests)
	}
	kept, f := r.held.keep(t)
	if !f.OK() {
		return f
	}
	if !kept {
		q.pushBack()
		return mem.Fault{}
	}
	r.held.inOrder = true
	return mem.Fault{}
}

// flush completes all requests and receives of a queue pair that has failed, requests first
// (IBA 10.3.1.7). While an engine is still at their memory it only stops sending, and Moved
// calls it again.
func (q *QP) flush() {
	m := &q.moves
	if m.flushing = m.begun > 0; m.flushing {
		q.stopSending()
		return
	}
	if status := m.status; status != 0 {
		m.status = 0
		q.failOldest(status, m.vendor)
	}
	q.flushSend()
	q.pushTaken()
	q.flushReceive()
}

// forgetMoves forgets all moves: the queue pair is reset, or has failed. Those that were
// begun end by themselves. The receives that their messages had taken are to be flushed
// (pushTaken).
func (q *QP) forgetMoves() {
	for _, m := range q.resp.moves {
		if m.completes {
			q.giveTaken(m.cq, m.wc.ID, ib.WCWRFlushErr, 0)
		}
	}
	q.resp.moves, q.resp.partly = nil, false
	q.req.landing = landing{}
	for _, m := range q.moves.queue {
		m.GiveUp()
	}
	q.moves.queue, q.moves.n, q.moves.bytes = nil, 0, 0
	q.moves.life++
	q.moves.chains = [moveLoad]*mem.Chain{}
	q.req.loads.forget()
	q.resp.loads.forget()
}
