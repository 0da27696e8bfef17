package qp

// Payloads from memory that the CPU does not address, over a link that needs their bytes.
// The bytes of each train are loaded to staging bytes first, some trains ahead of the one
// that is sent:
//
//   - those of the queue pair's own requests stay until they are acknowledged, since they
//     may have to be sent again;
//   - those of answers to READs are given up with the train.
//
// Staging bytes are given back when all trains that Pull has made have left (AllLeft).
//
// A payload that is sent to another process by name (Carrier) is called carried: it is not
// loaded, and the requester holds its memory until the peer has it.

import (
	"slices"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// How much is loaded ahead.
const (
	maxLoads = 4 << 20 // bytes, of requests and of answers each
	maxAhead = 64      // trains of requests
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

// loadKey names a train: by the number of the request or the serial of the responder
// resource that it is a part of, and the packet of that which it begins with.
type loadKey struct {
	of     uint32
	packet int
}

type loadState uint8

const (
	loading loadState = iota
	loaded
	given // not needed any more when all trains have left
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

// forget forgets all loads, and leaves their bytes to the garbage collector: a sender or an
// engine may still use them.
func (ls *loads) forget() { ls.list, ls.bytes = nil, 0 }

// free gives back the staging bytes of loads that are not needed any more.
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
// the CPU does not address, have to be loaded first. If not, and they are carried, h holds
// their memory for the caller.
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

// recall releases the memory of carried packets that the requester is to send again, when it
// stops until its memory is back. The peer has probably dropped them and will not acknowledge
// them, and the suspender of the memory must not wait for that.
func (q *QP) recall() {
	r := &q.req
	if n := len(r.carried); n > 0 && q.path.Carrier != nil && !r.carried[n-1].first.Less(r.nxt) {
		q.path.Carrier.GiveUp()
		r.uncarry(r.nxt)
	}
}

// carried is a part of a request that is under way by name: packets, and the hold on their
// memory.
type carried struct {
	first, end wire.PSN
	hold       mem.SharedHold
}

// carry notes n packets that are carried: the requester holds their memory until they are
// acknowledged.
func (r *requester) carry(h mem.SharedHold, first wire.PSN, n int) {
	r.uncarry(first)
	r.carried = append(r.carried, carried{first, first.Add(n), h})
}

// carriedPackets returns how many of the packets under way are carried.
func (r *requester) carriedPackets() (n int) {
	for i := range r.carried {
		n += r.carried[i].end.Sub(r.carried[i].first)
	}
	return n
}

// uncarry releases the memory of carried packets from first on.
func (r *requester) uncarry(first wire.PSN) {
	for n := len(r.carried); n > 0 && !r.carried[n-1].first.Less(first); n-- {
		r.carried[n-1].hold.Release()
		r.carried = r.carried[:n-1]
	}
}

// arrived releases the memory of carried packets before upTo: the peer has acknowledged their
// bytes. It does not wait until the acknowledgement comes into effect behind answers that wait
// for engines: those may wait for suspended memory, and the suspender for this release.
func (r *requester) arrived(upTo wire.PSN) {
	for len(r.carried) > 0 && !upTo.Less(r.carried[0].end) {
		r.carried[0].hold.Release()
		if r.carried = r.carried[1:]; len(r.carried) == 0 {
			r.carried = nil
		}
	}
}

// releaseUpTo releases the memory of carried parts that begin before psn, also of one that the
// peer has taken up to psn only: the rest is sent again, and is loaded then.
func (r *requester) releaseUpTo(psn wire.PSN) {
	for len(r.carried) > 0 && r.carried[0].first.Less(psn) {
		r.arrived(r.carried[0].end)
	}
}

// dropCarried releases the memory of all carried packets: their requests are given up.
func (r *requester) dropCarried() {
	for i := range r.carried {
		r.carried[i].hold.Release()
	}
	r.carried = nil
}

// loadRequest returns the bytes of request cur from packet done on, to the end of their load.
// ok is false if they are not loaded yet, or the request has failed.
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
		r.unacked = max(r.unacked, 1) // perhaps no packet before it has asked for an acknowledgement
		q.failLocal(ib.WCLocProtErr, vendorFault(l.fault), now)
		return nil, false
	}
	return l.bytes[(done-k.packet)*q.mtu:], true
}

// sourceStaged: the receiver of a train whose payload is by name, or lies in this process,
// cannot keep the payload. The bytes are loaded, and so are all others from now on.
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
	r.unacked = 1 // perhaps no packet before it has asked for an acknowledgement
}

// loadPart begins to load the payload of the train that begins with a packet of request i.
func (q *QP) loadPart(i uint32, packet int) *load {
	w := q.sq.at(i)
	off := packet * q.mtu
	return q.startLoad(&q.req.loads, loadKey{i, packet}, q.localList(i, uint64(off)), min(train.MaxBytes/q.mtu*q.mtu, int(w.len)-off))
}

// loadAhead begins to load what follows the load k, of its request and of those behind it.
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

// loadsAhead reports whether the bytes of a request behind the one being sent may be loaded.
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

// AllLeft gives back staging bytes. The owner calls it when all trains that Pull has made have
// left.
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

// loadAnswer returns the bytes of the next train of an answer. ok is false if they are not
// loaded yet, and the answer waits for them, or if the READ was refused.
func (q *QP) loadAnswer(j *resource) (b []byte, ok bool) {
	r, per := &q.resp, q.perLoad()
	if q.state == ib.QPErr { // see dropLoading
		r.n = 0
		return nil, false
	}
	j.loaded = true                  // the rest is loaded too: loads are found by where they begin
	for _, l := range r.loads.list { // give up loads of answers that are not made any more
		if l.state == loaded && l.key.of != j.serial && !q.answersStill(l.key.of) {
			l.state = given
		}
	}
	l := r.loads.find(loadKey{j.serial, j.done})
	// Loads of answers that are not made any more take all the room, until they are over.
	if l == nil && r.loads.bytes >= maxLoads && r.loads.loading() {
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

// answerPart returns where the bytes of an answer lie from a packet on, and how many there are,
// at most most.
func (q *QP) answerPart(j *resource, packet, most int) (from *mem.List, n int) {
	off := packet * q.mtu
	n = min(most, int(j.reth.Len)-off)
	return q.remoteList(ib.AccessRemoteRead, mem.Actor{PD: j.pd, QPN: q.Number}, j.reth.RKey, j.reth.VA+uint64(off), n), n
}

// carriesAnswer has the next bytes of an answer carried, and returns how many; 0 if they have
// to be loaded.
func (q *QP) carriesAnswer(t *train.Train, j *resource) int {
	if q.path.Carrier == nil || j.again || j.loaded {
		return 0
	}
	from, n := q.answerPart(j, j.done, q.perCarried())
	return int(q.path.Carrier.Carries(t, from, uint64(n), uint64(q.mtu), false).Len)
}

// answerLoaded lets answers go on that wait for a load: of their own bytes, or to make room.
func (q *QP) answerLoaded() {
	for i := range q.resp.n {
		if j := q.resp.at(i); j.loading {
			j.waiting, j.loading = false, false
		}
	}
}

// isLoading reports whether the bytes of a READ that the peer asks for again are being loaded.
// If so, that load stays the answer, and the peer gets an RNR NAK: to load the bytes again
// would take longer each time, and more room.
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
