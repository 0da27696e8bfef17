package qp

// State transitions (IBA 10.3.1 and 11.2.5.2): which attributes each needs,
// which it may have, by type of queue pair. Modify checks everything before it
// changes anything.

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/wire"
)

type edge struct{ from, to ib.QPState }

// rule is the attributes of one transition, besides the state itself.
type rule struct{ need, may ib.QPAttrMask }

const (
	mInit   = ib.QPMaskPKeyIndex | ib.QPMaskPort
	mPath   = ib.QPMaskAV | ib.QPMaskPathMTU | ib.QPMaskDestQPN | ib.QPMaskRQPSN
	mMayRTR = ib.QPMaskAccess | ib.QPMaskPKeyIndex
	mMayRTS = ib.QPMaskCurState | ib.QPMaskAccess
	mMaySQD = ib.QPMaskAccess | ib.QPMaskPKeyIndex | ib.QPMaskTimeout | ib.QPMaskAV | ib.QPMaskPort

	// what only one half of a reliable queue pair has
	mRequester = ib.QPMaskSQPSN | ib.QPMaskTimeout | ib.QPMaskRetryCnt | ib.QPMaskRNRRetry | ib.QPMaskMaxRDAtomic
	mResponder = ib.QPMaskMaxDestRDAtomic | ib.QPMaskMinRNRTimer
)

// transitions lists all that are legal. Every state may also go to RESET and to
// ERR, with no attributes.
var transitions = map[edge][ib.NumQPTypes]rule{
	{ib.QPReset, ib.QPInit}: {
		ib.RC:      {need: mInit | ib.QPMaskAccess},
		ib.UC:      {need: mInit | ib.QPMaskAccess},
		ib.UD:      {need: mInit | ib.QPMaskQKey},
		ib.XRCSend: {need: mInit | ib.QPMaskAccess},
		ib.XRCRecv: {need: mInit | ib.QPMaskAccess},
	},
	{ib.QPInit, ib.QPInit}: {
		ib.RC:      {may: mInit | ib.QPMaskAccess},
		ib.UC:      {may: mInit | ib.QPMaskAccess},
		ib.UD:      {may: mInit | ib.QPMaskQKey},
		ib.XRCSend: {may: mInit | ib.QPMaskAccess},
		ib.XRCRecv: {may: mInit | ib.QPMaskAccess},
	},
	{ib.QPInit, ib.QPRTR}: {
		ib.RC:      {need: mPath | mResponder, may: mMayRTR},
		ib.UC:      {need: mPath, may: mMayRTR},
		ib.UD:      {may: ib.QPMaskPKeyIndex | ib.QPMaskQKey},
		ib.XRCSend: {need: mPath, may: mMayRTR},
		ib.XRCRecv: {need: mPath | mResponder, may: mMayRTR},
	},
	{ib.QPRTR, ib.QPRTS}: {
		ib.RC:      {need: mRequester, may: mMayRTS | ib.QPMaskMinRNRTimer},
		ib.UC:      {need: ib.QPMaskSQPSN, may: mMayRTS},
		ib.UD:      {need: ib.QPMaskSQPSN, may: ib.QPMaskCurState | ib.QPMaskQKey},
		ib.XRCSend: {need: mRequester, may: mMayRTS},
		ib.XRCRecv: {need: ib.QPMaskSQPSN | ib.QPMaskTimeout, may: mMayRTS | ib.QPMaskMinRNRTimer},
	},
	{ib.QPRTS, ib.QPRTS}: {
		ib.RC:      {may: mMayRTS | ib.QPMaskMinRNRTimer},
		ib.UC:      {may: mMayRTS},
		ib.UD:      {may: ib.QPMaskCurState | ib.QPMaskQKey},
		ib.XRCSend: {may: mMayRTS},
		ib.XRCRecv: {may: mMayRTS | ib.QPMaskMinRNRTimer},
	},
	{ib.QPRTS, ib.QPSQD}: {
		ib.RC:      {may: ib.QPMaskSQDAsyncNotify},
		ib.UC:      {may: ib.QPMaskSQDAsyncNotify},
		ib.UD:      {may: ib.QPMaskSQDAsyncNotify},
		ib.XRCSend: {may: ib.QPMaskSQDAsyncNotify},
		ib.XRCRecv: {may: ib.QPMaskSQDAsyncNotify},
	},
	{ib.QPSQD, ib.QPRTS}: {
		ib.RC:      {may: mMayRTS | ib.QPMaskMinRNRTimer},
		ib.UC:      {may: mMayRTS},
		ib.UD:      {may: ib.QPMaskCurState | ib.QPMaskQKey},
		ib.XRCSend: {may: mMayRTS},
		ib.XRCRecv: {may: mMayRTS | ib.QPMaskMinRNRTimer},
	},
	{ib.QPSQD, ib.QPSQD}: {
		ib.RC:      {may: mMaySQD | mResponder | ib.QPMaskRetryCnt | ib.QPMaskRNRRetry | ib.QPMaskMaxRDAtomic},
		ib.UC:      {may: ib.QPMaskAccess | ib.QPMaskPKeyIndex | ib.QPMaskAV},
		ib.UD:      {may: ib.QPMaskPKeyIndex | ib.QPMaskQKey},
		ib.XRCSend: {may: mMaySQD | ib.QPMaskRetryCnt | ib.QPMaskRNRRetry | ib.QPMaskMaxRDAtomic},
		ib.XRCRecv: {may: mMaySQD | mResponder},
	},
	{ib.QPSQE, ib.QPRTS}: {
		ib.UC: {may: ib.QPMaskCurState | ib.QPMaskAccess},
		ib.UD: {may: ib.QPMaskCurState | ib.QPMaskQKey},
	},
}

func invalid(format string, args ...any) error {
	return ib.Errorf("modify_qp", syscall.EINVAL, format, args...)
}

// findRule returns the rule for a transition, or why there is none.
func (q *QP) findRule(to ib.QPState) (rule, error) {
	if to == ib.QPReset || to == ib.QPErr {
		return rule{}, nil
	}
	rules, ok := transitions[edge{q.state, to}]
	if !ok || q.state == ib.QPSQE && q.reliable {
		return rule{}, invalid("a %v queue pair cannot go from %v to %v", q.Type, q.state, to)
	}
	return rules[q.Type], nil
}

// CheckModify returns the state that Modify would lead to, or the error that Modify would
// return. The owner calls it before it prepares a path.
func (q *QP) CheckModify(a *ib.QPAttr, mask ib.QPAttrMask) (ib.QPState, error) {
	if mask&ib.QPMaskCurState != 0 && a.CurState != q.state {
		return 0, invalid("the queue pair is in state %v, not %v", q.state, a.CurState)
	}
	to := q.state
	if mask&ib.QPMaskState != 0 {
		to = a.State
	}
	if to < ib.QPReset || to > ib.QPErr || to == ib.QPSQE {
		return 0, invalid("a queue pair cannot be moved to state %v", to)
	}
	r, err := q.findRule(to)
	if err != nil {
		return 0, err
	}
	given := mask &^ ib.QPMaskState
	if missing := r.need &^ given; missing != 0 {
		return 0, invalid("%v → %v of a %v queue pair needs %v", q.state, to, q.Type, missing)
	}
	if extra := given &^ (r.need | r.may); extra != 0 {
		return 0, invalid("%v → %v of a %v queue pair does not take %v", q.state, to, q.Type, extra)
	}
	return to, q.checkValues(a, mask)
}

// checkValues checks the attributes themselves.
func (q *QP) checkValues(a *ib.QPAttr, mask ib.QPAttrMask) error {
	const rights = ib.AccessLocalWrite | ib.AccessRemote | ib.AccessMWBind | ib.AccessFlush
	for _, c := range []struct {
		bit   ib.QPAttrMask
		bad   bool
		why   string
		value any // what why has a verb for; nil: it has none
	}{
		{ib.QPMaskPort, a.Port != 1, "port %d: the device has port 1 alone", a.Port},
		{ib.QPMaskPKeyIndex, a.PKeyIndex != 0, "pkey_index %d: the table has one entry", a.PKeyIndex},
		{ib.QPMaskAccess, a.Access&^rights != 0, "access_flags %v are not rights of a queue pair", a.Access &^ rights},
		{ib.QPMaskPathMTU, a.PathMTU.Bytes() == 0, "path_mtu is none of 256 to 4096", nil},
		{ib.QPMaskDestQPN, a.DestQPN >= 1<<24, "dest_qpn is longer than 24 bits", nil},
		{ib.QPMaskRQPSN, a.RQPSN >= 1<<24, "rq_psn is longer than 24 bits", nil},
		{ib.QPMaskSQPSN, a.SQPSN >= 1<<24, "sq_psn is longer than 24 bits", nil},
		{ib.QPMaskTimeout, a.Timeout > 31, "timeout is longer than 5 bits", nil},
		{ib.QPMaskRetryCnt, a.RetryCnt > 7, "retry_cnt is above 7", nil},
		{ib.QPMaskRNRRetry, a.RNRRetry > 7, "rnr_retry is above 7", nil},
		{ib.QPMaskMinRNRTimer, a.MinRNRTimer > 31, "min_rnr_timer is longer than 5 bits", nil},
		{ib.QPMaskMaxRDAtomic, a.MaxRDAtomic > MaxRDAtomic, "max_rd_atomic is above %d", MaxRDAtomic},
		{ib.QPMaskMaxDestRDAtomic, a.MaxDestRDAtomic > MaxRDAtomic, "max_dest_rd_atomic is above %d", MaxRDAtomic},
	} {
		if mask&c.bit != 0 && c.bad {
			if c.value == nil {
				return invalid("%s", c.why)
			}
			return invalid(c.why, c.value)
		}
	}
	return nil
}

// Modify changes attributes and state. For a transition that sets the address
// vector the owner passes the path that it prepared.
func (q *QP) Modify(a *ib.QPAttr, mask ib.QPAttrMask, path *Path, now Time) error {
	to, err := q.CheckModify(a, mask)
	if err != nil {
		return err
	}
	q.modified++
	q.set(a, mask, path)
	switch {
	case to == ib.QPReset:
		q.reset()
	case to == ib.QPErr:
		q.enterError()
	case to == ib.QPRTR && q.state == ib.QPInit:
		q.startReceiving()
	case to == ib.QPRTS && q.state == ib.QPRTR:
		q.startSending()
	case to == ib.QPSQD && q.state == ib.QPRTS:
		q.state = to
		q.req.draining = true
		q.attr.SQDAsyncNotify = a.SQDAsyncNotify && mask&ib.QPMaskSQDAsyncNotify != 0
		q.resumeWaiting(now)
		if r := &q.req; r.cur == q.sq.tail || !q.sq.at(r.cur).started {
			q.askAgain()
		}
	case to == ib.QPRTS:
		q.req.draining = false
	}
	q.state = to
	return nil
}

// set copies the attributes of the mask.
func (q *QP) set(a *ib.QPAttr, mask ib.QPAttrMask, path *Path) {
	has := func(m ib.QPAttrMask) bool { return mask&m != 0 }
	b := &q.attr
	if has(ib.QPMaskAccess) {
		b.Access = a.Access
	}
	if has(ib.QPMaskPKeyIndex) {
		b.PKeyIndex = a.PKeyIndex
	}
	if has(ib.QPMaskPort) {
		b.Port = a.Port
	}
	if has(ib.QPMaskQKey) {
		b.QKey = a.QKey
	}
	if has(ib.QPMaskAV) {
		b.AV = a.AV
		q.giveBack(q.req.heldCredits) // they are the old path's
		q.path, q.req.named = *path, false
		q.ours, q.notices = false, notices{}
		q.req.forgetRepairs()
		q.peer = path.Flow.Dst
		q.req.congestion.begin(path)
		q.req.noEarlyProbe = path.Lossless
	}
	if has(ib.QPMaskPathMTU) {
		b.PathMTU = a.PathMTU
	}
	if has(ib.QPMaskTimeout) {
		b.Timeout = a.Timeout
		q.req.timeout = wire.AckTimeout(a.Timeout)
	}
	if has(ib.QPMaskRetryCnt) {
		b.RetryCnt = a.RetryCnt
	}
	if has(ib.QPMaskRNRRetry) {
		b.RNRRetry = a.RNRRetry
	}
	if has(ib.QPMaskRQPSN) {
		b.RQPSN = a.RQPSN
	}
	if has(ib.QPMaskMaxRDAtomic) {
		b.MaxRDAtomic = a.MaxRDAtomic
	}
	if has(ib.QPMaskMinRNRTimer) {
		b.MinRNRTimer = a.MinRNRTimer
	}
	if has(ib.QPMaskSQPSN) {
		b.SQPSN = a.SQPSN
	}
	if has(ib.QPMaskMaxDestRDAtomic) {
		b.MaxDestRDAtomic = a.MaxDestRDAtomic
	}
	if has(ib.QPMaskDestQPN) {
		b.DestQPN = a.DestQPN
	}
	if has(ib.QPMaskSQDAsyncNotify) {
		b.SQDAsyncNotify = a.SQDAsyncNotify
	}
}

// SetDatagramMTU sets the largest datagram of a UD queue pair: the port's MTU,
// since UD has no path.
func (q *QP) SetDatagramMTU(n int) { q.mtu = n }

func (q *QP) startReceiving() {
	if q.Type != ib.UD {
		q.mtu = q.attr.PathMTU.Bytes()
	}
	q.resp.epsn = wire.MakePSN(q.attr.RQPSN)
	q.established = false
}

func (q *QP) startSending() {
	r := &q.req
	r.una = wire.MakePSN(q.attr.SQPSN)
	r.nxt, r.max, r.executed = r.una, r.una, r.una
	r.cur = q.sq.head
}

// enterError is the transition to ERR: everything that waits is flushed, in
// order, the send queue first (IBA 10.3.1.7). Nothing is answered any more.
func (q *QP) enterError() {
	q.forgetHeld()
	q.forgetMoves()
	q.resp.answers.n = 0
	q.resp.ack.pending = false
	q.enterErrorAnswering()
}

// enterErrorAnswering goes to ERR but lets the answers out that are due. The last of them,
// if there are some, is the NAK with the cause.
func (q *QP) enterErrorAnswering() {
	if q.state == ib.QPErr || q.state == ib.QPReset {
		return
	}
	q.state = ib.QPErr
	q.notices = notices{}
	q.forgetHeld()
	q.forgetMoves()
	q.resp.dropLoading()
	q.flush()
}

// FlushReceive flushes what was posted to the receive queue in the error state.
func (q *QP) FlushReceive() {
	if q.state == ib.QPErr && !q.moves.flushing {
		q.flushReceive()
	}
}

// flushReceive completes the queue pair's own receives as flushed. Those of a
// shared queue stay for others (IBA 10.2.9.2).
func (q *QP) flushReceive() {
	r := &q.resp
	flush := func() {
		q.complete(&ib.WC{ID: r.taken.ID, Status: ib.WCWRFlushErr, Op: ib.WCRecv}, false)
	}
	if r.have {
		r.have = false
		flush()
	}
	for len(r.owed) > 0 && q.takeReceive() {
		flush()
	}
	if q.half != bothHalves {
		return // an XRC queue pair has no receive queue of its own
	}
	if q.Shared {
		q.Event(ib.EventQPLastWQEReached)
		return
	}
	for q.Recv.Take(&r.taken) {
		flush()
	}
}

// reset is the transition to RESET: everything is forgotten, nothing completes
// (IBA 10.3.1.1).
func (q *QP) reset() {
	q.stopped()
	q.giveBack(q.req.heldCredits)
	q.sq.head = q.sq.tail         // numbers go on, so that a late Sent finds nothing
	q.sq.freed = new(queue.Freed) // an earlier completion frees nothing when it is polled
	q.sq.freed.Store(q.sq.tail)
	q.sq.pieces.clear()
	for i := range q.sq.flows {
		q.sq.flows[i] = nil
	}
	if !q.Shared && q.half == bothHalves {
		q.Recv.Clear()
	}
	sges := q.resp.taken.SGEs
	q.forgetHeld()
	q.forgetMoves()
	q.moves.taken, q.moves.flushing, q.moves.status = nil, false, 0
	q.req.forgetRepairs()
	q.ours, q.notices = false, notices{}
	q.req, q.resp, q.deferred = requester{}, responder{}, deferredWork{}
	for _, p := range []*piece{&q.mine, &q.named, &q.posted, &q.taken} {
		p.memo = mem.Memo{}
	}
	q.resets++
	q.giveUpFences()
	q.resp.taken.SGEs = sges
	q.req.cur = q.sq.head
	q.path, q.established = Path{}, false
	capacity := q.attr.Cap
	q.attr = ib.QPAttr{Cap: capacity}
}

// Query returns the attributes.
func (q *QP) Query() ib.QPAttr {
	a := q.attr
	a.State, a.CurState = q.state, q.state
	a.SQDraining = q.state == ib.QPSQD && q.req.draining
	if q.state >= ib.QPRTS && q.state <= ib.QPSQE {
		a.SQPSN = uint32(q.req.max)
	}
	if q.state >= ib.QPRTR && q.state <= ib.QPSQE {
		a.RQPSN = uint32(q.resp.epsn)
	}
	return a
}
