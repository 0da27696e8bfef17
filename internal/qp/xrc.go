package qp

// XRC, extended reliable connections (IBA annex A14). Everything of RC holds: the
// same requester, responder and completer run, each in one of the two halves of a
// connection. What is different:
//
//   - An initiator (XRC_SEND) names a shared receive queue at the target in every
//     request, whether that takes a receive or not (XRCETH).
//   - A target (XRC_RECV) has no queues, no completion queue and no protection
//     domain. It belongs to an XRC domain; a request that names a queue of this
//     domain is executed with that queue's receives, completions and protection
//     domain. So any number of programs, each with a queue, share one connection.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/queue"
	"github.com/verbena-rdma/verbena/internal/train"
)

// XRC is the configuration of a target.
type XRC struct {
	Domain uint32 // its XRC domain; 0 is none
	// Find returns the queue with a number, or nil. It must not wait.
	Find func(number uint32) *SharedQueue
}

// SharedQueue is a shared receive queue, as requests find it.
type SharedQueue struct {
	Number uint32
	Domain uint32 // its XRC domain; 0 if it is an ordinary one
	PD     uint32
	Recv   *queue.Recv
	CQ     *queue.CQ
}

// find returns the queue that a request names; nil if there is none in the target's domain.
func (q *QP) find(number uint32) *SharedQueue {
	s := q.XRC.Find(number)
	if s == nil || s.Domain == 0 || s.Domain != q.XRC.Domain {
		return nil
	}
	return s
}

// bind makes the queue that a request names the queue pair's own, for the time
// of the message. It reports false if there is no such queue, or the packets of one
// message name different ones.
func (q *QP) bind(t *train.Train) bool {
	r := &q.resp
	s := q.find(t.SRQ)
	if s == nil || !t.Start && s.Number != r.srq {
		return false
	}
	if !t.Start || r.kind != 0 {
		return true // sequence refuses a start within a message
	}
	if r.have && q.Recv != s.Recv { // a message broke off and left a receive of another queue
		r.have = false
		q.complete(&ib.WC{ID: r.taken.ID, Status: ib.WCWRFlushErr, Op: ib.WCRecv}, false)
	}
	r.srq = s.Number
	q.Recv, q.RecvCQ, q.RecvPD, q.PD = s.Recv, s.CQ, s.PD, s.PD
	return true
}

// actorOf returns on whose behalf a repeated request accesses memory: that of the queue that
// it names, since the message under way may name another. If that queue is gone, the
// protection domain is 0, which is none.
func (q *QP) actorOf(t *train.Train) mem.Actor {
	if q.half != target {
		return q.Actor()
	}
	who := mem.Actor{QPN: q.Number}
	if s := q.find(t.SRQ); s != nil {
		who.PD = s.PD
	}
	return who
}
