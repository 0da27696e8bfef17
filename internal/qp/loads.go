package qp

// Bytes that are to be sent from memory that the CPU does not address, over a link that
// does not carry them by reference. Each train's are loaded to staging bytes first, some
// trains ahead of the one that is sent:
//
//   - of the queue pair's own requests; those stay until they are acknowledged, since they
//     may have to be sent again;
//   - of answers to READs; those are given up with the train.
//
// Staging bytes are given back when the owner says that nobody sends what was pulled before
// (AllLeft).

import (
	"slices"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// How much is loaded ahead, for requests and for answers: bytes, and of requests trains.
const (
	maxLoads = 4 << 20
	maxAhead = 64
)

// load is the payload of a train.
type load struct {
	key   loadKey
	bytes []byte
	state loadState
	fault mem.Fault
	from  mem.List
	sges  []ib.SGE
}

// loadKey names a train: by the request or answer that it is a part of, and which of its
// packets it begins with.
type loadKey struct {
	of     uint32
	packet int
}

type loadState uint8

const (
	loading loadState = iota
	loaded
	given // nobody needs it any more, when all has left
)

// loads are the loads of one side of a queue pair, oldest first.
type loads struct {
	list  []*load
	bytes int
}

func (ls *loads) find(k loadKey) *load {
	for _, l := range ls.list {
		if l.key == k && l.state != given {
			return l
		}
	}
	return nil
}

// forget gives all up. Somebody may be sending them, or an engine be at them: the collector
// frees them.
func (ls *loads) forget() { ls.list, ls.bytes = nil, 0 }

// free gives back those that nobody needs.
func (ls *loads) free() {
	kept := ls.list[:0]
	for _, l := range ls.list {
		if l.state == given {
			ls.bytes -= len(l.bytes)
			mem.GiveStaging(l.bytes)
			continue
		}
		kept = append(kept, l)
	}
	clear(ls.list[len(kept):])
	ls.list = kept
}

// startLoad begins to load n bytes of a list.
func (q *QP) startLoad(ls *loads, k loadKey, from *mem.List, n int) *load {
	l := &load{key: k, bytes: mem.Staging(n), from: *from}
	l.sges = append(l.sges, from.SGEs...)
	l.from.SGEs, l.from.Memo = l.sges, nil
	m := &Move{kind: moveLoad, life: q.moves.life, load: l}
	m.to = mem.List{Raw: [][]byte{l.bytes}}
	m.transfer = mem.Transfer{Dst: &m.to, Src: &l.from, N: uint64(n), Stream: &q.moves.stream}
	ls.list = append(ls.list, l)
	ls.bytes += n
	q.moves.push(m)
	return l
}

// perLoad is how many packets one load has.
func (q *QP) perLoad() int { return train.MaxBytes / q.mtu }

// needsLoad reports whether the next packets of a request that is being sent, from memory that
// the CPU does not address, have to be loaded first. If not, some may be carried: then their
// memory is held.
func (q *QP) needsLoad(t *train.Train, w *wqe, done int) (h mem.SharedHold, needs bool) {
	again := q.req.nxt != q.req.max
	switch {
	case q.path.ByReference && !again:
		return h, false
	case q.path.Carrier == nil:
		return h, true
	}
	off := done * q.mtu
	list, size := q.localList(q.req.cur, uint64(off)), uint64(min(q.perCarried(), int(w.len)-off))
	if again {
		h, f := mem.HoldShared(list, size)
		h.Release()
		if f.Kind == mem.FaultPending && !f.Staged() {
			q.recall()
		}
		return h, true
	}
	h = q.path.Carrier.Carries(t, list, size, uint64(q.mtu), true)
	return h, h.Len == 0
}

// perCarried is how many bytes one train carries at most.
func (q *QP) perCarried() int { return train.MaxCarried / q.mtu * q.mtu }

// recall is for a requester that stands still until its memory is back, and would send again
// what it has carried: the peer has dropped that, most likely, and will never acknowledge it.
// So it must not be what whoever has the memory waits for.
func (q *QP) recall() {
	r := &q.req
	if n := len(r.carried); n > 0 && q.path.Carrier != nil && !r.carried[n-1].first.Less(r.nxt) {
		q.path.Carrier.GiveUp()
		r.uncarry(r.nxt)
	}
}

// carried is what of a request is on its way, and stays in its memory.
type carried struct {
	first, end wire.PSN
	hold       mem.SharedHold
}

// carry keeps the memory of n packets that are carried until they are acknowledged.
func (r *requester) carry(h mem.SharedHold, first wire.PSN, n int) {
	r.uncarry(first)
	r.carried = append(r.carried, carried{first, first.Add(n), h})
}

// carriedPackets returns how many packets are under way that are carried.
func (r *requester) carriedPackets() (n int) {
	for i := range r.carried {
		n += r.carried[i].end.Sub(r.carried[i].first)
	}
	return n
}

// uncarry lets go of the memory of what has not left, from a PSN on.
func (r *requester) uncarry(first wire.PSN) {
	for n := len(r.carried); n > 0 && !r.carried[n-1].first.Less(first); n-- {
		r.carried[n-1].hold.Release()
		r.carried = r.carried[:n-1]
	}
}

// arrived lets go of memory whose bytes the peer has, up to a PSN. Also if that comes into
// effect later only: what it waits for may be suspended, and who suspends it wait for us.
func (r *requester) arrived(upTo wire.PSN) {
	for len(r.carried) > 0 && !upTo.Less(r.carried[0].end) {
		r.carried[0].hold.Release()
		if r.carried = r.carried[1:]; len(r.carried) == 0 {
			r.carried = nil
		}
	}
}

// releaseUpTo lets go of the memory of what the peer has taken up to a PSN only, and of which the
// rest is sent again: it is loaded then.
func (r *requester) releaseUpTo(psn wire.PSN) {
	for len(r.carried) > 0 && r.carried[0].first.Less(psn) {
		r.arrived(r.carried[0].end)
	}
}

// dropCarried lets go of all of it: the requests are given up.
func (r *requester) dropCarried() {
	for i := range r.carried {
		r.carried[i].hold.Release()
	}
	r.carried = nil
}

// loadRequest returns the bytes of the request that is sent next from a packet on, at most so
// many as are loaded together. It is not ok if they are not here yet, or the request has failed.
func (q *QP) loadRequest(done int, now Time) (b []byte, ok bool) {
	r, per := &q.req, q.perLoad()
	k := loadKey{r.cur, done / per * per}
	l := r.loads.find(k)
	if l == nil {
		l = q.loadPart(r.cur, k.packet)
	}
	q.loadAhead(k)
	switch {
	case l.state == loading:
		return nil, false
	case !l.fault.OK():
		r.unacked = max(r.unacked, 1) // nobody knows whether what went before has asked
		q.failLocal(ib.WCLocProtErr, vendorFault(l.fault), now)
		return nil, false
	}
	return l.bytes[(done-k.packet)*q.mtu:], true
}

// sourceStaged: who took a train that was sent by reference cannot keep it. Its bytes are
// loaded, and so are all others from now on.
func (q *QP) sourceStaged(t *train.Train) {
	r := &q.req
	q.path.ByReference, q.path.Carrier = false, nil
	if t.Bounce || q.state == ib.QPSQD {
		if t.PSN.Less(r.nxt) {
			q.rewind(t.PSN)
		}
	} else {
		q.unsend(t.PSN)
	}
	if r.cur != q.sq.tail {
		q.sq.at(r.cur).staged = true
	}
	r.unacked = 1 // nobody knows whether what went before has asked
}

// loadPart begins to load what a train of a request has.
func (q *QP) loadPart(i uint32, packet int) *load {
	w := q.sq.at(i)
	off := packet * q.mtu
	return q.startLoad(&q.req.loads, loadKey{i, packet}, q.localList(i, uint64(off)), min(train.MaxBytes/q.mtu*q.mtu, int(w.len)-off))
}

// loadAhead begins to load what follows, of the request and of those behind it.
func (q *QP) loadAhead(k loadKey) {
	r, per := &q.req, q.perLoad()
	ahead := 0
	for i, packet := k.of, k.packet+per; i != q.sq.tail; i, packet = i+1, 0 {
		w := q.sq.at(i)
		if i != k.of && !q.loadsAhead(i, w) {
			return
		}
		for ; packet*q.mtu < int(w.len); packet += per {
			if ahead++; ahead > maxAhead || r.loads.bytes >= maxLoads {
				return
			}
			if r.loads.find(loadKey{i, packet}) == nil {
				q.loadPart(i, packet)
			}
		}
	}
}

// loadsAhead reports whether the bytes of a request that has not begun may be loaded.
func (q *QP) loadsAhead(i uint32, w *wqe) bool {
	return w.facts().data == dataOut && !w.facts().local && !w.inline && w.len > 0 && w.flags&ib.SendFence == 0 && q.state == ib.QPRTS &&
		q.localList(i, 0).Owner(uint64(w.len)) != nil
}

// over notes that a load is done, or has failed.
func (l *load) over(m *Move) {
	l.state, l.fault = loaded, m.fault
}

// givePast gives up the loads of requests that are acknowledged.
func (q *QP) givePast() {
	r := &q.req
	for _, l := range r.loads.list {
		if l.state != loaded {
			continue
		}
		if l.key.of-q.sq.head >= q.sq.tail-q.sq.head {
			l.state = given
			continue
		}
		if w := q.sq.at(l.key.of); w.started && q.reliable {
			if end := w.first.Add(min(l.key.packet+q.perLoad(), int(w.n))); !r.una.Less(end) {
				l.state = given
			}
		}
	}
}

// AllLeft tells that all trains have left that Pull has made: what they were made of is not
// needed any more.
func (q *QP) AllLeft() {
	if len(q.req.loads.list) > 0 || len(q.resp.loads.list) > 0 {
		q.freeLoads()
	}
}

func (q *QP) freeLoads() {
	q.givePast()
	q.req.loads.free()
	q.resp.loads.free()
}

// loadAnswer returns the bytes of the next train of an answer. It is not ok if they are not
// here yet: then the answer waits.
func (q *QP) loadAnswer(j *resource) (b []byte, ok bool) {
	r, per := &q.resp, q.perLoad()
	j.loaded = true                  // to its end: loads are found by where they begin
	for _, l := range r.loads.list { // of answers that are not made any more
		if l.state == loaded && l.key.of != j.serial && !q.answersStill(l.key.of) {
			l.state = given
		}
	}
	l := r.loads.find(loadKey{j.serial, j.done})
	if l == nil && r.loads.bytes >= maxLoads && r.loads.loading() { // for what is not answered any more
		j.waiting, j.loading = true, true
		return nil, false
	}
	if l == nil {
		l = q.loadAnswerPart(j, j.done)
	}
	for packet := j.done + per; packet < j.n && r.loads.bytes < maxLoads; packet += per {
		if r.loads.find(loadKey{j.serial, packet}) == nil {
			q.loadAnswerPart(j, packet)
		}
	}
	if l.state == loading {
		j.waiting, j.loading = true, true
		return nil, false
	}
	if !l.fault.OK() {
		l.state = given
		q.nakAnswer(accessError, j.psn.Add(j.done))
		return nil, false
	}
	l.state = given // with the train
	return l.bytes, true
}

func (q *QP) answersStill(serial uint32) bool {
	for i := range q.resp.n {
		if q.resp.at(i).serial == serial {
			return true
		}
	}
	return false
}

func (q *QP) loadAnswerPart(j *resource, packet int) *load {
	from, n := q.answerPart(j, packet, q.perLoad()*q.mtu)
	return q.startLoad(&q.resp.loads, loadKey{j.serial, packet}, from, n)
}

// answerPart returns the bytes of the train of an answer that begins with a packet: at most so
// many.
func (q *QP) answerPart(j *resource, packet, most int) (from *mem.List, n int) {
	off := packet * q.mtu
	n = min(most, int(j.reth.Len)-off)
	return q.remoteList(ib.AccessRemoteRead, mem.Actor{PD: j.pd, QPN: q.Number}, j.reth.RKey, j.reth.VA+uint64(off), n), n
}

// carriesAnswer returns how many of the next bytes of an answer need not be loaded.
func (q *QP) carriesAnswer(t *train.Train, j *resource) int {
	if q.path.Carrier == nil || j.again || j.loaded {
		return 0
	}
	from, n := q.answerPart(j, j.done, q.perCarried())
	return int(q.path.Carrier.Carries(t, from, uint64(n), uint64(q.mtu), false).Len)
}

// answerLoaded lets an answer go on that waited for its bytes, or for those of others.
func (q *QP) answerLoaded() {
	for i := range q.resp.n {
		if j := q.resp.at(i); j.loading {
			j.waiting, j.loading = false, false
		}
	}
}

// isLoading reports whether the bytes of a READ that the peer asks for again are being loaded.
// Then they are its answer, and the peer is told to wait: to load them anew would take longer
// each time, and more room.
func (a *answers) isLoading(psn wire.PSN, h *wire.RETH, pd uint32) bool {
	for i := range a.n {
		if j := a.at(i); j.loading && j.psn == psn && j.done == 0 && !j.cont && !j.part && j.reth == *h && j.pd == pd {
			j.tell = true
			a.forget(j.end())
			return true
		}
	}
	return false
}

// loading reports whether bytes are being loaded.
func (ls *loads) loading() bool {
	return slices.ContainsFunc(ls.list, func(l *load) bool { return l.state == loading })
}
