package qp

// The responder's part of FLUSH (IBA annex A19).
//
//  1. executeFlush: what is asked for, rights, bounds. Everything the peer has
//     written before is in memory by then and visible to all.
//  2. For persistence the answer waits, in its place among the others, until the
//     owner has brought the bytes to storage (pending.go): nextSync, then synced.
//     Requests behind it are executed meanwhile, but for ATOMIC WRITEs.
//  3. notYet: the peer asks again for one that still waits. It gets an RNR NAK,
//     which keeps it from giving up.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// executeFlush takes a FLUSH.
func (q *QP) executeFlush(t *train.Train) mem.Fault {
	r := &q.resp
	f, ok := q.flushRange(&t.RETH)
	if !ok {
		return q.refuse(invalidRequest, 0)
	}
	if r.full(MaxRDAtomic) {
		return q.notReady()
	}
	if fault := q.Table.Flush(f, q.Actor()); !fault.OK() {
		return q.refuseFault(accessError, t, fault, nil)
	}
	psn, h := t.PSN, t.RETH
	q.accept(t, 1)
	r.rdEnd, r.rdAny = r.epsn, true
	if r.answerFlush(psn, h, q.PD, r.msn) {
		q.deferred.want |= WorkSync.bit()
	}
	return mem.Fault{}
}

// flushRange returns what a FLUSH asks for. ok is false if its header is not valid, or the
// queue pair does not grant the rights.
func (q *QP) flushRange(h *wire.RETH) (f mem.FlushRange, ok bool) {
	f = mem.FlushRange{Key: h.RKey, Addr: h.VA, Len: uint64(h.Len), Whole: h.Flush.Selectivity == wire.SelectRegion}
	if h.Flush.Placement&wire.PlaceGlobal != 0 {
		f.Acc |= ib.AccessFlushGlobal
	}
	if h.Flush.Placement&wire.PlacePersistent != 0 {
		f.Acc |= ib.AccessFlushPersistent
	}
	known := h.Flush.Placement&^(wire.PlaceGlobal|wire.PlacePersistent) == 0 && h.Flush.Selectivity <= wire.SelectRegion
	return f, q.reliable && known && f.Acc != 0 && f.Acc&^q.attr.Access == 0
}

// answerFlush notes the answer to a FLUSH, without data, and reports whether it
// has to wait for storage.
func (a *answers) answerFlush(psn wire.PSN, h wire.RETH, pd, msn uint32) bool {
	j := resource{flush: true, psn: psn, n: 1, pd: pd, msn: msn}
	if h.Flush.Placement&wire.PlacePersistent != 0 {
		j.waiting, j.reth = true, h
	}
	a.push(j)
	return j.waiting
}

// flushing reports whether a FLUSH waits for storage.
func (a *answers) flushing() bool {
	for i := range a.n {
		if j := a.at(i); j.waiting && j.flush {
			return true
		}
	}
	return false
}

// notYet reports whether a FLUSH that the peer asks for again still waits for storage, and
// if so has an RNR NAK sent. A FLUSH that was accepted and does not wait is done.
func (q *QP) notYet(psn wire.PSN) bool {
	r := &q.resp
	for i := range r.n {
		if j := r.at(i); j.waiting && j.flush && j.psn == psn {
			j.tell = true
			r.forget(psn)
			return true
		}
	}
	return false
}

// flushSync is a FLUSH that is to be brought to storage.
type flushSync struct {
	rng   mem.FlushRange
	actor mem.Actor
	psn   wire.PSN
}

// nextSync sets s to the oldest FLUSH that waits for storage, and reports whether there is one.
func (q *QP) nextSync(s *flushSync) bool {
	r := &q.resp
	for i := range r.n {
		if j := r.at(i); j.waiting && j.flush {
			f, _ := q.flushRange(&j.reth)
			*s = flushSync{f, mem.Actor{PD: j.pd, QPN: q.Number}, j.psn}
			return true
		}
	}
	return false
}

// synced lets a FLUSH be answered, which has reached storage, or refuses it if that failed.
func (q *QP) synced(s *flushSync, f mem.Fault) {
	r := &q.resp
	for i := range r.n {
		j := r.at(i)
		if !j.waiting || !j.flush || j.psn != s.psn {
			continue
		}
		if !f.OK() {
			q.flushFailed(j.psn, f)
			return
		}
		j.waiting, j.tell, j.reth = false, false, wire.RETH{}
		return
	}
}

// flushFailed refuses a FLUSH that was accepted.
func (q *QP) flushFailed(psn wire.PSN, f mem.Fault) {
	why := accessError
	if f.Kind == mem.FaultStorage {
		why = storageError
	}
	switch q.state {
	case ib.QPRTR, ib.QPRTS, ib.QPSQD:
		q.nakAnswer(why, psn)
	default:
		q.resp.drop(psn) // the queue pair has failed for another reason
	}
}
