package device

import (
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
)

// QP is a queue pair: the protocol core with its lock, its transmit token and
// its place in the timers of its shard.
type QP struct {
	dev    *Device
	owner  interface{ unuse(n *int) } // its protection domain, or XRC domain
	sendCQ *CQ                        // nil for an XRC target
	recvCQ *CQ                        // nil for both halves of XRC
	srq    *SRQ
	recv   *recvQueue // nil with a shared queue, and for XRC
	number uint32

	home    *shard                // the one that its number leads to
	counted bool                  // in home's load
	shard   atomic.Pointer[shard] // the one that it is in: home or the first; changes under mu

	tx          atomic.Int32 // the transmit token, see transmit.go
	train       *train.Train // scratch of exchange; guarded by the token
	heldAnswers atomic.Bool  // there are answers in heldLeft
	listed      bool         // guarded by heldQPs' lock: in the device's list of queue pairs that wait for the link

	// Trains that wait until the link is less busy: the token's holder's alone.
	held       *batch // that heldLeft are from; nil: none wait
	heldLeft   []*train.Train
	heldAt     uint64 // Device.frees before the last batch was sent
	heldResets uint32 // resets of the core when that batch was pulled

	tokenFree chan struct{} // set before tx becomes txClosing; the token's holder at that time closes it

	queued atomic.Bool             // waits in the device's list of ready queue pairs
	peer   atomic.Pointer[peerUse] // changes under mu; nil without credits

	domain *xrcDomain // of an XRC target; or nil
	opens  int        // guarded by dev.mu: of an XRC target, how often it is open

	target *target // an XRC target whose domain other processes may have open; or nil
	proxy  *proxy  // of a proxy of such a target of another process; or nil

	working [qp.NumWorkKinds]atomic.Bool // deferred work of this kind is listed, or a worker does it

	mu     sync.Mutex // guards core; held only for steps that never wait
	core   *qp.QP
	armed  qp.Time // guarded by mu: when the timer heap will look at it; 0: never
	closed bool    // guarded by mu
	near   *QP     // guarded by mu: the queue pair that neighbour found last; perhaps it is closed
	nearAt uint64  // guarded by mu: how often both had been modified when they were found to be joined; 0: they were not

	heldUntil   qp.Time // guarded by mu: how long the first of heldLeft may wait, if it is a datagram; or 0
	heldExpired bool    // guarded by mu: heldUntil has passed
	heldRetry   qp.Time // guarded by mu: when to send heldLeft again, if the link does not report when it is free; or 0

	grants []*grant // guarded by mu: those given to the peer, by which it accesses our memory
	barred int      // guarded by mu: how many calls keep new grants from being given
	lends  lending  // guarded by mu: what has become of the latest grant to plain memory
	// shortLived is guarded by mu: the latest grant to memory that moves has served fewer than
	// grantWorth requests.
	shortLived bool

	mover     bool          // guarded by mu: there is a mover (move.go)
	more      atomic.Bool   // moves have come since the mover last looked
	moverGone chan struct{} // guarded by mu: closed when the mover ends; nil while no goroutine waits for that
	full      atomic.Bool   // at the last look, the queue pair could take no more by the loop link
	gaveUp    chan struct{} // guarded by mu: closed when requests are given up; nil while no goroutine waits for that

	posted   bool // guarded by mu: there was a post since the last message came
	answered int  // guarded by mu: how many messages in a row were followed by a post, up to conversation

	timerIndex int // place in the heap, guarded by the heap's lock

	closeOnce sync.Once
}

// recvQueue checks receives before it queues them.
type recvQueue struct {
	*queue.Recv
	op string
}

func newRecvQueue(op string, size, sges int) *recvQueue {
	return &recvQueue{queue.NewRecv(size, sges), op}
}

// PostRecv appends receives and returns how many; the first one that is
// refused ends it.
func (r *recvQueue) PostRecv(wrs []ib.RecvWR) (int, error) {
	good := wrs
	for i := range wrs {
		if len(wrs[i].SGL) > r.MaxSGE() {
			good = wrs[:i]
			break
		}
	}
	switch n := r.Post(good); {
	case n < len(good):
		return n, ib.Errorf(r.op, syscall.ENOMEM, "the receive queue is full (%d receives)", r.Size())
	case n < len(wrs):
		return n, ib.Errorf(r.op, syscall.EINVAL, "%d SGEs, the queue takes %d", len(wrs[n].SGL), r.MaxSGE())
	default:
		return n, nil
	}
}

// CreateQP makes a queue pair.
func (p *PD) CreateQP(cfg provider.QPConfig) (provider.QP, error) {
	d := p.dev
	q := newQP(d, p)
	if err := q.attach(&cfg); err != nil {
		return nil, err
	}
	if err := d.wantHeaders(cfg.Type); err != nil {
		return nil, err
	}
	if err := p.use("create_qp", &d.counts.qps, d.limits.QPs); err != nil {
		return nil, err
	}
	if err := q.claim(); err != nil {
		p.unuse(&d.counts.qps)
		return nil, err
	}
	c := qp.Config{Type: cfg.Type, PD: p.id, Cap: cfg.Cap, SignalAll: cfg.SignalAll, AckFirst: cfg.AckFirst, SendCQ: q.sendCQ.CQ}
	if !cfg.NoScatterToCQE {
		c.Scatter = d.scatter
	}
	switch {
	case q.recvCQ == nil: // XRC
	case q.srq != nil:
		c.RecvCQ, c.Recv, c.Shared, c.RecvPD = q.recvCQ.CQ, q.srq.Recv, true, q.srq.pd.id
	default:
		q.recv = newRecvQueue("post_recv", cfg.Cap.MaxRecvWR, cfg.Cap.MaxRecvSGE)
		c.RecvCQ, c.Recv, c.RecvPD = q.recvCQ.CQ, q.recv.Recv, p.id
	}
	if err := d.addQP(q, c); err != nil {
		q.release()
		p.unuse(&d.counts.qps)
		return nil, err
	}
	return q, nil
}

// addQP gives a queue pair its number and its core.
func (d *Device) addQP(q *QP, c qp.Config) error {
	q.chooseHome(c.Type)
	c.Table, c.Event, c.Stopped = d.table, q.event, q.stoppedLocked
	c.Arrived = func() { d.management.arrived(q.number) }
	c.ScatterFailed = q.scatterFailed
	err := addNumbered(d, "create_qp", q.home.qps, q.home.lease(), func(n uint32) *QP {
		q.number, c.Number = n, n
		q.core = qp.New(c)
		if c.Type == ib.UD {
			q.core.SetDatagramMTU(d.mtu)
		}
		return q
	})
	if err != nil {
		q.leaveHome()
		return err
	}
	d.counters.add(q)
	return nil
}

// wantHeaders makes the link report the fields of the IP header that a datagram's
// routing header shows. It costs time for every packet, so only UD asks for it.
func (d *Device) wantHeaders(t ib.QPType) error {
	l, ok := d.link.(interface{ WantHeaders() error })
	if !ok || t != ib.UD {
		return nil
	}
	return opError("create_qp", l.WantHeaders())
}

// attach checks a configuration and finds its objects.
func (q *QP) attach(cfg *provider.QPConfig) error {
	bad := func(format string, args ...any) error { return ib.Errorf("create_qp", syscall.EINVAL, format, args...) }
	if cfg.Type < ib.RC || int(cfg.Type) >= ib.NumQPTypes {
		return bad("queue pair type %v is unknown", cfg.Type)
	}
	if cfg.Type == ib.XRCRecv {
		return bad("an XRC_RECV queue pair is made in an XRC domain, not in a protection domain")
	}
	if cfg.Type == ib.XRCSend { // it has no receive side
		cfg.Cap.MaxRecvWR, cfg.Cap.MaxRecvSGE = 0, 0
		if cfg.RecvCQ != nil || cfg.SRQ != nil {
			return bad("an XRC_SEND queue pair does not receive: it has neither a receive completion queue nor a shared receive queue")
		}
	}
	var ok [3]bool
	q.sendCQ, ok[0] = cfg.SendCQ.(*CQ)
	q.recvCQ, ok[1] = cfg.RecvCQ.(*CQ)
	ok[1] = ok[1] && q.recvCQ.dev == q.dev || cfg.Type == ib.XRCSend
	ok[2] = cfg.SRQ == nil
	if cfg.SRQ != nil {
		q.srq, ok[2] = cfg.SRQ.(*SRQ)
	}
	if !ok[0] || !ok[1] || !ok[2] || q.sendCQ.dev != q.dev || q.srq != nil && q.srq.pd.dev != q.dev {
		return bad("it needs a send and a receive completion queue, and these and the shared receive queue of the same device")
	}
	if q.srq != nil && cfg.Type == ib.UC {
		return bad("a UC queue pair cannot use a shared receive queue")
	}
	if q.srq != nil && q.srq.xrcd != nil {
		return bad("a shared receive queue of an XRC domain is for XRC")
	}
	l, c := q.dev.limits, cfg.Cap
	for _, f := range []struct {
		name       string
		value, top int
	}{
		{"max_send_wr", c.MaxSendWR, l.QPWR}, {"max_recv_wr", c.MaxRecvWR, l.QPWR},
		{"max_send_sge", c.MaxSendSGE, maxSGE}, {"max_recv_sge", c.MaxRecvSGE, maxSGE},
		{"max_inline_data", c.MaxInlineData, maxInline},
	} {
		if f.value < 0 || f.value > f.top {
			return bad("%s %d: 0 to %d are possible", f.name, f.value, f.top)
		}
	}
	return nil
}

// claim makes the queue pair a user of its queues.
func (q *QP) claim() error {
	d := q.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	closed := q.srq != nil && q.srq.closed.Load()
	q.eachCQ(func(c *CQ) { closed = closed || c.closed.Load() })
	if closed {
		return ib.Errorf("create_qp", syscall.EINVAL, "one of its queues is closed")
	}
	q.eachCQ(func(c *CQ) {
		c.refs++
		c.polls(d.first, nil)
	})
	if q.srq != nil {
		q.srq.refs++
	}
	return nil
}

func (q *QP) release() {
	q.dev.mu.Lock()
	q.eachCQ(func(c *CQ) {
		c.refs--
		c.polls(nil, q.shard.Load())
	})
	if q.srq != nil {
		q.srq.refs--
	}
	q.dev.mu.Unlock()
}

// eachCQ calls f once with each completion queue of the queue pair.
func (q *QP) eachCQ(f func(c *CQ)) {
	if q.sendCQ != nil {
		f(q.sendCQ)
	}
	if q.recvCQ != nil && q.recvCQ != q.sendCQ {
		f(q.recvCQ)
	}
}

func (q *QP) event(t ib.EventType) {
	ev := ib.AsyncEvent{Type: t, QPN: q.number}
	q.dev.events.push(ev)
}

func (q *QP) Number() uint32  { return q.number }
func (q *QP) Type() ib.QPType { return q.core.Type }

// PostSend appends requests and sends what can be sent now, in the caller.
func (q *QP) PostSend(wrs []ib.SendWR) (int, error) {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return 0, ib.Errorf("post_send", syscall.EINVAL, "the queue pair is closed")
	}
	q.posted = true
	done := q.byShortcut(wrs)
	if done == len(wrs) && done > 0 {
		owes := q.core.Answering() // a poll may have left answers
		q.mu.Unlock()
		if owes {
			q.dev.transmit(q, q.dev.now())
		}
		return done, nil
	}
	n, err := q.core.PostSend(wrs[done:])
	if n == 0 {
		q.mu.Unlock()
		return done, err
	}
	now := q.dev.now()
	owed, rest := q.exchange(now)
	q.wantsWorkLocked()
	q.mu.Unlock()
	owed.pay()
	if rest {
		q.shard.Load().posts.Add(1)
		q.dev.transmit(q, now)
	}
	return done + n, err
}

// Room returns how many requests can be posted now.
func (q *QP) Room() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.core.Room()
}

// PostRecv appends receives.
func (q *QP) PostRecv(wrs []ib.RecvWR) (int, error) {
	if q.srq != nil {
		return 0, ib.Errorf("post_recv", syscall.EINVAL, "the queue pair receives from a shared receive queue")
	}
	if q.recv == nil {
		return 0, ib.Errorf("post_recv", syscall.EINVAL, "a %v queue pair has no receive queue", q.Type())
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || q.core.State() == ib.QPReset {
		return 0, ib.Errorf("post_recv", syscall.EINVAL, "the queue pair is in state RESET, it must be in INIT or later")
	}
	n, err := q.recv.PostRecv(wrs)
	q.core.FlushReceive()
	return n, err
}

// Modify changes attributes and state.
func (q *QP) Modify(a *ib.QPAttr, mask ib.QPAttrMask) error {
	d := q.dev
	var path *qp.Path
	var use *peerUse
	if mask&ib.QPMaskAV != 0 {
		// Preparing a path may open a socket: not under the lock.
		q.mu.Lock()
		_, err := q.core.CheckModify(a, mask)
		q.mu.Unlock()
		if err != nil {
			return err
		}
		if path, use, err = d.makePath(q, a, mask); err != nil {
			return err
		}
	}
	if mask&ib.QPMaskState != 0 && (a.State == ib.QPReset || a.State == ib.QPErr) {
		d.finishAnswers(q)
		q.endHandoffs()
	}
	q.barGrants()
	q.mu.Lock()
	q.unbarLocked()
	if q.closed {
		q.mu.Unlock()
		d.peers.leave(use)
		return ib.Errorf("modify_qp", syscall.EINVAL, "the queue pair is closed")
	}
	err := q.core.Modify(a, mask, path, d.now())
	left := use // on failure
	if reset := err == nil && q.core.State() == ib.QPReset; err == nil && (path != nil || reset) {
		left = q.peer.Swap(use)
	}
	if !q.sendsLocked() || path != nil {
		q.core.Shortcut = nil
	}
	q.changeShardLocked(q.core.Flow())
	reset := err == nil && q.core.State() == ib.QPReset
	if reset {
		q.eachCQ(func(c *CQ) { c.Remove(q.number) })
	}
	q.wantsWorkLocked()
	q.mu.Unlock()
	if reset {
		q.awaitMoves()
	}
	if err == nil {
		d.transmit(q, d.now())
		d.runWaiting(q.peer.Load(), d.now())
	}
	d.leavePeer(left)
	return err
}

// Query returns the attributes.
func (q *QP) Query() (ib.QPAttr, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return ib.QPAttr{}, ib.Errorf("query_qp", syscall.EINVAL, "the queue pair is closed")
	}
	q.absorbLocked()
	return q.core.Query(), nil
}

// Close destroys the queue pair: its requests and completions are gone.
func (q *QP) Close() error {
	q.closeOnce.Do(func() {
		d := q.dev
		q.home.qps.Remove(q.number)
		q.endHandoffs()
		d.finishAnswers(q)
		q.barGrants()
		q.mu.Lock()
		q.closed = true
		q.unbarLocked()
		q.core.Shortcut = nil
		_ = q.core.Modify(&ib.QPAttr{State: ib.QPReset}, ib.QPMaskState, nil, d.now())
		use := q.peer.Swap(nil)
		q.wantsWorkLocked() // fences of requests that are given up
		q.mu.Unlock()
		q.detachAll()
		q.takeToken()
		q.awaitMoves()
		q.core.Stream().Close()
		if q.core.Bound {
			d.table.ReleaseQP(q.number)
		}
		if q.held != nil {
			q.held.release()
			q.held = nil
		}
		q.shard.Load().timers.remove(q)
		q.leaveHome()
		d.counters.remove(q)
		d.leavePeer(use)
		q.eachCQ(func(c *CQ) { c.Remove(q.number) })
		q.release()
		q.owner.unuse(&d.counts.qps)
	})
	return nil
}
