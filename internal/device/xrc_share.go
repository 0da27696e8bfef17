package device

// XRC domains that several processes have open. The process that has a shared receive queue
// executes the messages that name it: the queue's receives, its completion queue and its
// memory are there, and their rights are checked there. The process that has the target
// receives everything, and hands the target off:
//
//	process with the target (T)              process with the queue (S)
//	a request names a queue of S
//	hand-off: target's state, train ───────▶ executes it on a proxy of the target,
//	more trains for S ─────────────────────▶ which answers the peer by itself
//	                       ◀──────────────── offer: the proxy's state after so many
//	takes the target back, unless              trains; nothing is left to answer
//	it has sent more meanwhile
//
// T alone decides which process holds the target. T drops a request for another queue that
// comes while S holds it, asks S for an offer (recall), and with the target back asks the peer
// to send again from there. A repetition of an executed request is answered by the process
// that executed it.
//
// If S dies while it holds the target, T cannot learn what S has executed, and the target
// fails; if S dies otherwise, only its queues are gone. If T dies, the connection is gone, and
// S forgets the proxy.

import (
	"slices"
	"sync"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
)

// target is what a target in a named domain needs; the queue pair's lock guards it.
type target struct {
	domain  host.Domain
	away    int    // the process that holds the target; here: this one
	handoff uint32 // serial of the last hand-off; 0 before the first
	sent    uint32 // trains sent with this hand-off
	missed  bool   // requests were dropped meanwhile: the peer must send again
	given   []int  // processes that have a proxy
}

const here = -1 // for a target's away

// say sends another process a control message, with a train or without. It reports whether
// it was sent; a fault is the train's.
func (d *Device) say(process int, w *controlMessage, t *train.Train) (bool, mem.Fault) {
	s, ok := d.link.(*link.Shared)
	if !ok {
		return false, mem.Fault{}
	}
	var b [longControl]byte
	return s.SendControl(process, w.append(b[:0]), t)
}

// forward sends a request to the process that executes it, or drops it until the target is
// back. It reports false, having done nothing, if this process executes the request; due is as
// for receive.
func (q *QP) forward(t *train.Train, now qp.Time) (passed bool, f mem.Fault, due bool) {
	process, known := q.dev.member.Find(t.SRQ)
	own := !known || process == q.dev.member.Slot()
	q.mu.Lock()
	to := q.routeLocked(t, process, own)
	turn, holder := q.target.handoff, q.target.away
	switch to {
	case toHolder:
		q.target.sent++
	case afterRecall:
		q.target.missed = true
	}
	q.mu.Unlock()
	switch to {
	case toHolder:
		f = q.sendMore(process, turn, t)
	case toFormerHolder:
		_, f = q.dev.say(process, &controlMessage{kind: ctlMore, qpn: q.number, handoff: 0}, t)
	case afterRecall:
		q.recallHandoff(holder, turn)
	case withHandoff:
		f, due = q.handOff(process, t, now)
	}
	return to != executeHere, f, due
}

// route is where a request of a target goes.
type route uint8

const (
	executeHere    route = iota
	toHolder             // to the process that holds the target: its queue is named
	toFormerHolder       // a repetition, to the process that executed the request
	afterRecall          // nowhere: the peer repeats it when the target is back
	withHandoff          // to the process whose queue is named, with the target
)

// routeLocked returns where a request goes that names a queue of a process. With own, that
// is this process, or no process has the queue.
func (q *QP) routeLocked(t *train.Train, process int, own bool) route {
	away, expected := q.target.away, q.core.Expected()
	repeated := t.PSN.Add(t.N).Sub(expected) <= 0
	switch state := q.core.State(); {
	case state != ib.QPRTR && state != ib.QPRTS && state != ib.QPSQD:
		return executeHere // which drops it
	case own && (away == here || repeated):
		return executeHere
	case !own && away == process:
		return toHolder
	case repeated:
		return toFormerHolder
	case away != here:
		return afterRecall
	case t.PSN.Sub(expected) > 0:
		return executeHere // which finds that a request before it is missing
	default:
		return withHandoff
	}
}

// sendMore sends a train to the process that holds the target. If that fails, the train is
// lost, as on any network: the recall has that process either ask the peer for it, or offer
// the target, and then this process asks.
func (q *QP) sendMore(process int, turn uint32, t *train.Train) mem.Fault {
	ok, f := q.dev.say(process, &controlMessage{kind: ctlMore, qpn: q.number, handoff: turn}, t)
	if ok {
		return f
	}
	far := t.Payload.Ref != nil
	q.mu.Lock()
	if g := q.target; g.handoff == turn && g.away == process {
		g.sent--
		g.missed = true
	}
	q.mu.Unlock()
	q.recallHandoff(process, turn)
	if far {
		return mem.Fault{} // no fault for the sender: it is asked to send again
	}
	return f
}

// recallHandoff asks the process that holds the target for an offer.
func (q *QP) recallHandoff(process int, turn uint32) {
	_, _ = q.dev.say(process, &controlMessage{kind: ctlRecall, qpn: q.number, handoff: turn}, nil) // if lost, a repetition causes another
}

// handOff hands the target off to a process, with a train. If it cannot now, the train counts
// as lost, and due is true: the peer must be asked to send it again.
func (q *QP) handOff(process int, t *train.Train, now qp.Time) (f mem.Fault, due bool) {
	d := q.dev
	q.mu.Lock()
	between := q.core.Between()
	q.mu.Unlock()
	if !between {
		d.transmit(q, now) // what is left to answer
	}
	q.mu.Lock()
	g := q.target
	if g.away != here || !q.core.Between() {
		q.core.Unread() // the peer sends it again in a moment
		q.mu.Unlock()
		return f, true
	}
	g.handoff++
	if g.handoff == 0 {
		g.handoff = 1
	}
	g.away, g.sent, g.missed = process, 1, false
	if !slices.Contains(g.given, process) {
		g.given = append(g.given, process)
	}
	w := controlMessage{kind: ctlHandoff, qpn: q.number, handoff: g.handoff, stand: q.core.HandOff(), domain: g.domain, attr: q.core.Query()}
	q.mu.Unlock()

	ok, f := d.say(process, &w, t)
	if ok {
		return f, false
	}
	q.mu.Lock()
	g.away = here
	q.core.TakeOver(w.stand)
	q.core.Unread()
	q.mu.Unlock()
	return f, true
}

// Control takes a control message from another process, with its train, if it has one.
func (r *receiver) Control(process int, b []byte, t *train.Train) {
	var w controlMessage
	if !w.parse(b) || (t != nil) != (w.kind == ctlHandoff || w.kind == ctlMore) {
		r.Drop(link.DropOther)
		return
	}
	if r.now == 0 {
		r.now = r.dev.now()
	}
	if w.kind == ctlOffer {
		r.takeOffer(process, &w)
		return
	}
	k := proxyKey{process, w.qpn}
	switch q := r.dev.proxies.get(k); {
	case w.kind == ctlEnd:
		r.dev.endProxy(k)
	case w.kind == ctlHandoff && (q == nil || q.proxy.attr != proxyAttr(&w.attr)):
		r.dev.makeProxy(k, &w)
	case q == nil: // the proxy is being made, or gone
	default:
		r.touched = append(r.touched, q) // to answer, and to offer the target
		q.mu.Lock()
		q.proxy.offered = false
		switch {
		case w.kind == ctlHandoff:
			q.proxy.handoff, q.proxy.got = w.handoff, 1
			q.core.SetDomain(r.dev.domainOf(w.domain))
			q.core.TakeOver(w.stand)
		case w.handoff == q.proxy.handoff && w.kind == ctlMore:
			q.proxy.got++
		case w.handoff == q.proxy.handoff: // recall
			if !q.core.Between() {
				q.core.Unread()
			}
		case w.handoff != 0:
			t = nil // of a hand-off that is over
		}
		q.mu.Unlock()
		if t != nil {
			_, _, _ = q.receive(t, r.now) // the bytes are here
		}
	}
}

// takeOffer takes the target back, if the process has got all the trains that were sent to it
// or has lost some, or if its proxy has failed.
func (r *receiver) takeOffer(process int, w *controlMessage) {
	q := r.dev.findQP(w.qpn)
	if q == nil || q.target == nil {
		return
	}
	q.mu.Lock()
	g := q.target
	failed := ib.EventType(0)
	due := false
	if g.away == process && g.handoff == w.handoff && (g.sent == w.count || w.lost || w.failed != 0) {
		g.away = here
		q.core.TakeOver(w.stand)
		if failed = w.failed; failed != 0 {
			_ = q.core.Modify(&ib.QPAttr{State: ib.QPErr}, ib.QPMaskState, nil, r.now) // from every state
		} else if g.missed || w.lost {
			q.core.Unread()
			due = true
		}
		g.missed = false
	}
	q.mu.Unlock()
	if failed != 0 {
		q.event(failed)
	}
	if due {
		r.touched = append(r.touched, q)
	}
}

// Parted forgets the proxies of targets of a process that has ended, and fails the targets
// that it held.
func (r *receiver) Parted(process int) {
	d := r.dev
	for _, k := range d.proxies.of(process) {
		d.endProxy(k)
	}
	for _, q := range d.allQPs() {
		if q.target == nil {
			continue
		}
		q.mu.Lock()
		lost := q.target.away == process
		q.target.given = slices.DeleteFunc(q.target.given, func(p int) bool { return p == process })
		if lost {
			q.target.away = here
			_ = q.core.Modify(&ib.QPAttr{State: ib.QPErr}, ib.QPMaskState, nil, d.now()) // from every state
		}
		q.mu.Unlock()
		if lost {
			q.event(ib.EventQPFatal)
		}
	}
}

// endTurns makes other processes forget their proxies of a target that starts anew, fails or
// is closed.
func (q *QP) endHandoffs() {
	if q.target == nil {
		return
	}
	q.mu.Lock()
	given := q.target.given
	q.target.given, q.target.away, q.target.missed = nil, here, false
	q.mu.Unlock()
	for _, p := range given {
		_, _ = q.dev.say(p, &controlMessage{kind: ctlEnd, qpn: q.number}, nil) // if lost, the proxy ends with this process
	}
}

// proxy is what the queue pair needs that stands in here for another process's target; the
// queue pair's lock guards what changes.
type proxy struct {
	key     proxyKey
	attr    ib.QPAttr    // what it was made with
	handoff uint32       // serial of the hand-off
	got     uint32       // trains that came with it
	failed  ib.EventType // the first event, but for EventCommEst; or 0
	offered bool         // the target was offered back, and nothing has come since
}

type proxyKey struct {
	process int
	qpn     uint32
}

// proxies are the proxies of a device.
type proxies struct {
	mu     sync.Mutex // guards what follows
	byKey  map[proxyKey]*QP
	making map[proxyKey]bool
	closed bool
	wg     sync.WaitGroup // goroutines that make and end proxies
}

func (s *proxies) get(k proxyKey) *QP {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byKey[k]
}

// of returns the proxies of a process's targets, and cancels those that are being made.
func (s *proxies) of(process int) (keys []proxyKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.byKey {
		if k.process == process {
			keys = append(keys, k)
		}
	}
	for k := range s.making {
		if k.process == process {
			delete(s.making, k) // the goroutine that makes it sees that it is not wanted
		}
	}
	return keys
}

// proxyAttr returns the attributes that a proxy has in common with its target.
func proxyAttr(a *ib.QPAttr) ib.QPAttr {
	return ib.QPAttr{Access: a.Access, PathMTU: a.PathMTU, DestQPN: a.DestQPN, MinRNRTimer: a.MinRNRTimer, MaxDestRDAtomic: a.MaxDestRDAtomic, AV: a.AV}
}

// makeProxy makes a proxy for a hand-off, in a goroutine: to prepare the path to the peer may
// take long. The hand-off's train is lost, so the goroutine offers the target back (lost).
func (d *Device) makeProxy(k proxyKey, w *controlMessage) {
	d.endProxy(k) // one with other attributes
	first := *w
	d.proxies.mu.Lock()
	defer d.proxies.mu.Unlock()
	if d.proxies.closed || d.proxies.making[k] {
		return
	}
	if d.proxies.making == nil {
		d.proxies.making, d.proxies.byKey = make(map[proxyKey]bool), make(map[proxyKey]*QP)
	}
	d.proxies.making[k] = true
	d.proxies.wg.Go(func() {
		offer := controlMessage{kind: ctlOffer, qpn: k.qpn, handoff: first.handoff, stand: first.stand, lost: true}
		q, err := d.newProxy(k, &first)
		if err != nil {
			offer.failed = ib.EventQPFatal
		}
		d.proxies.mu.Lock()
		wanted := d.proxies.making[k] && !d.proxies.closed
		delete(d.proxies.making, k)
		if wanted && q != nil {
			d.proxies.byKey[k] = q
		}
		d.proxies.mu.Unlock()
		if !wanted {
			if q != nil {
				_ = q.Close() // it never fails
			}
			return
		}
		_, _ = d.say(k.process, &offer, nil) // if it does not arrive, there will be a recall
	})
}

// newProxy makes the queue pair that is a proxy, in state RTR.
func (d *Device) newProxy(k proxyKey, w *controlMessage) (*QP, error) {
	q := newQP(d, nobody{})
	q.number, q.proxy = k.qpn, &proxy{key: k, attr: proxyAttr(&w.attr), handoff: w.handoff, offered: true}
	q.core = qp.New(qp.Config{Type: ib.XRCRecv, Number: k.qpn, XRC: qp.XRC{Domain: d.domainOf(w.domain), Find: d.findSRQ},
		Table: d.table, Event: q.proxyEvent, Stopped: d.giveUpFetches})
	a := proxyAttr(&w.attr)
	a.Port, a.State = 1, ib.QPInit
	err := q.core.Modify(&a, ib.QPMaskState|ib.QPMaskPort|ib.QPMaskPKeyIndex|ib.QPMaskAccess, nil, d.now())
	if err != nil {
		return nil, err
	}
	a.State, a.RQPSN = ib.QPRTR, uint32(w.stand.Expected)
	mask := ib.QPMaskState | ib.QPMaskAV | ib.QPMaskPathMTU | ib.QPMaskDestQPN | ib.QPMaskRQPSN | ib.QPMaskMaxDestRDAtomic | ib.QPMaskMinRNRTimer
	if _, err := q.core.CheckModify(&a, mask); err != nil {
		return nil, err
	}
	path, use, err := d.makePath(q, &a, mask)
	if err != nil {
		return nil, err
	}
	if err := q.core.Modify(&a, mask, path, d.now()); err != nil {
		d.peers.leave(use)
		return nil, err
	}
	q.peer.Store(use)
	q.core.TakeOver(w.stand)
	d.counters.add(q)
	return q, nil
}

// nobody is the owner of a proxy: it counts in no domain here.
type nobody struct{}

func (nobody) unuse(*int) {}

// proxyEvent keeps the event for the process that has the target: offerHandoff sends it.
func (q *QP) proxyEvent(t ib.EventType) {
	if t != ib.EventCommEst && q.proxy.failed == 0 {
		q.proxy.failed = t
	}
}

// endProxy forgets a proxy, and closes it in the background.
func (d *Device) endProxy(k proxyKey) {
	d.proxies.mu.Lock()
	defer d.proxies.mu.Unlock()
	delete(d.proxies.making, k)
	q := d.proxies.byKey[k]
	delete(d.proxies.byKey, k)
	if q != nil && !d.proxies.closed {
		d.proxies.wg.Go(func() { _ = q.Close() }) // it never fails
	}
}

// closeProxies closes all proxies, and waits for those that are being made or closed.
func (d *Device) closeProxies() {
	d.proxies.mu.Lock()
	d.proxies.closed = true
	all := d.proxies.byKey
	d.proxies.byKey = nil
	d.proxies.mu.Unlock()
	for _, q := range all {
		_ = q.Close() // it never fails
	}
	d.proxies.wg.Wait()
}

// offerHandoff offers the target back when the proxy has nothing left to answer, or has
// failed.
func (q *QP) offerHandoff() {
	tw := q.proxy
	q.mu.Lock()
	dead := q.core.State() == ib.QPErr && !q.core.Answering()
	ready := !tw.offered && (q.core.Quiescent() || dead)
	w := controlMessage{kind: ctlOffer, qpn: q.number, handoff: tw.handoff, count: tw.got}
	if ready {
		w.stand = q.core.HandOff()
		tw.offered = true
	}
	if dead {
		if w.failed = tw.failed; w.failed == 0 {
			w.failed = ib.EventQPFatal
		}
	}
	q.mu.Unlock()
	if ready {
		_, _ = q.dev.say(tw.key.process, &w, nil) // if it does not arrive, there will be a recall
	}
}

// domainOf returns this process's number of a domain, or 0 if it is not open here.
func (d *Device) domainOf(name host.Domain) uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if x := d.domains.byFile[sys.FileIDOf(name)]; x != nil {
		return x.id
	}
	return 0
}

// meet connects channels to the processes that have a domain open, before a hand-off needs
// them.
func (d *Device) meet(name host.Domain) {
	if s, ok := d.link.(*link.Shared); ok && d.member != nil {
		for _, p := range d.member.DomainHolders(name) {
			s.Connect(p)
		}
	}
}
