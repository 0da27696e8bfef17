package verbs

import "github.com/verbena-rdma/verbena/internal/provider"

// QPConfig is what a queue pair is made of.
type QPConfig struct {
	Type   QPType // RC, UC, UD or XRCSend
	SendCQ *CQ    // where sends complete
	RecvCQ *CQ    // where receives complete; may be the same
	SRQ    *SRQ   // where receives are taken from. Nil: the queue pair's own queue
	Cap    QPCap  // sizes. A zero field: none of that, no queue or no pieces

	// SignalAll makes every send request complete visibly, as if posted with
	// [SendSignaled]. False: only those that ask for it, and those that fail.
	SignalAll bool

	// NoScatterToCQE switches inline receive off for the queue pair: short messages,
	// and results of short READs and atomics, never wait in the completion queue and
	// are never copied when they are polled. False: those of up to 64 bytes do, if they
	// go to host memory and make a completion, and are neither datagrams nor received by
	// XRC; unless VERBENA_SCATTER_TO_CQE=0 or MLX5_SCATTER_TO_CQE=0 is in the
	// environment. The program cannot tell the difference, but for one: if the memory is gone by the time of the poll, the
	// completion says [WCLocProtErr] and the queue pair fails, though the peer has
	// been told that all is well.
	NoScatterToCQE bool
}

// QP is a queue pair: a queue of sends and a queue of receives, connected to
// one peer (RC, UC) or open to all (UD). See ibv_create_qp(3).
type QP struct {
	p    provider.QP
	dev  *Device
	psn  uint32 // where this side's PSNs start: random, fixed at creation
	qkey uint32 // UD: random, fixed at creation; 0 for the others
}

func (qp *QP) ok() bool { return qp != nil && qp.p != nil }

// Number returns the queue pair's number, by which peers and completions name
// it.
func (qp *QP) Number() uint32 { return qp.p.Number() }

// Type returns the transport service.
func (qp *QP) Type() QPType { return qp.p.Type() }

// PostSend posts requests to the send queue, in order, and returns how many it
// took. If that is fewer than len(wrs), it is the index of the first bad one,
// and err says what is wrong with it; those before it are posted. The queue
// copies the requests, with their SGL and Inline slices: those may be used
// again at once. The memory that the SGL names must stay registered, and for
// what is sent unchanged, until the request has completed. See ibv_post_send(3).
//
// What each type of queue pair can do:
//
//	SEND, SEND_WITH_IMM                      RC  XRC_SEND  UC  UD
//	RDMA_WRITE, RDMA_WRITE_WITH_IMM          RC  XRC_SEND  UC
//	SEND_WITH_INV                            RC  XRC_SEND
//	RDMA_READ                                RC  XRC_SEND
//	ATOMIC_CMP_AND_SWP, ATOMIC_FETCH_AND_ADD RC  XRC_SEND
//	ATOMIC_WRITE, FLUSH                      RC  XRC_SEND
//	BIND_MW, LOCAL_INV, CONFIGURE_MKEY       RC            UC
//
// Every request of an XRC_SEND queue pair names a shared receive queue of the
// peer in RemoteSRQN, also those that take no receive.
//
// An ATOMIC_WRITE stores 8 bytes, aligned to 8, in one step: nobody sees a part
// of them, nor sees them before everything that was posted before is done, FLUSHes
// included. It needs the right to write.
//
// A FLUSH completes when all that was written before it on this queue pair, to
// the range or the whole region, is visible to everybody who can see the memory
// ([FlushGlobal]), or is in storage and survives a crash and the loss of power
// ([FlushPersistent]), for which the region must be a file (see [PD.RegMR]). It
// needs [AccessFlushGlobal] and [AccessFlushPersistent], of the region and of the
// peer's queue pair. Storage may take long; the peer says so when it is asked
// again (an RNR NAK), so that only a small RNRRetry makes the request fail for it.
//
// Both count against MaxRDAtomic as READs and atomics do.
//
// BIND_MW, LOCAL_INV and CONFIGURE_MKEY concern this device alone, and take effect
// when all that was posted before them has been sent and nothing behind them: see
// [MW] and [MKey]. With [SendFence] they wait until everything before them is done,
// READs, WRITEs and SENDs alike. LOCAL_INV is for windows of type 2, bound on this
// queue pair, for indirect keys, and for regions with [AccessRemoteInvalidate]; a
// region has to be closed afterwards.
//
// A request keeps its place in the queue until a completion of it, or of one
// posted later, is polled: signal at least one request in every MaxSendWR, or
// the queue stays full for ever. This is how hardware behaves.
//
// Requests are taken in RTS; in SQD, where they wait; and in SQE and ERR, where
// they complete with [WCWRFlushErr].
//
// Errors: EINVAL if the state is RESET, INIT or RTR, the operation is unknown
// or not one of the type's, the request has more pieces than MaxSendSGE or more
// inline data than MaxInlineData, has both, or is inline where that cannot be
// (READ, atomics that return something, FLUSH), is an atomic or ATOMIC_WRITE that
// is not of 8 bytes, is a FLUSH with data or without a type and a level, is a
// CONFIGURE_MKEY that is both a list and a pattern or has no Configure, is longer
// than the port's MaxMsgSize, or is for UD and has no address handle, a closed one
// or a RemoteQPN of more than 24 bits; EINVAL also if
// the queue pair is nil or closed, or the flags are unknown. ENOMEM if the queue
// is full: poll, and post the rest again.
//
// Everything else that can be wrong with a request shows in its completion: keys
// and addresses, and for UD a message longer than the port's MTU.
func (qp *QP) PostSend(wrs []SendWR) (int, error) {
	if !qp.ok() {
		return 0, invalid("post_send", "nil queue pair")
	}
	return qp.p.PostSend(wrs)
}

// PostRecv posts receives, in order, and returns how many it took; n and err
// are as for [QP.PostSend]. The memory must stay registered until the receive
// has completed. A UD message is preceded by [GRHLength] bytes of header, for
// which the memory must have room. See ibv_post_recv(3).
//
// Receives are taken in all states but RESET; in ERR they complete with
// [WCWRFlushErr].
//
// Errors: EINVAL if the state is RESET, the queue pair takes its receives from
// an SRQ or is one of XRC, a request has more pieces than MaxRecvSGE, or the queue pair is nil
// or closed; ENOMEM if the queue is full.
func (qp *QP) PostRecv(wrs []RecvWR) (int, error) {
	if !qp.ok() {
		return 0, invalid("post_recv", "nil queue pair")
	}
	return qp.p.PostRecv(wrs)
}

// Modify sets those attributes that the mask names, all of them or, if it
// fails, none. With [QPMaskState] it moves the queue pair to another state. See
// ibv_modify_qp(3).
//
// Each transition has attributes that it needs and others that it allows. The
// needed ones on the way to RTS are those that [QP.ToInit], [QP.ToRTR] and
// [QP.ToRTS] list. From every state the way to RESET and to ERR is open and
// needs nothing else. RESET forgets all requests, all completions that were not
// polled and all attributes; ERR flushes all requests, each with a completion.
//
// Errors: EINVAL if there is no such transition, the mask lacks an attribute
// that it needs or has one that it does not allow, a value is out of range
// (Timeout has 5 bits; RetryCnt and RNRRetry 3; MinRNRTimer 5; PSNs and DestQPN
// 24; MaxRDAtomic and MaxDestRDAtomic are bounded by MaxQPInitRDAtom and
// MaxQPRDAtom in [DeviceAttr]; PathMTU by the port's ActiveMTU), CurState is
// not the current state, or the AV is not one that [PD.CreateAH] would take.
// QPMaskAltPath, QPMaskPathMigState and QPMaskCap are never allowed, since the
// device has no alternate paths and does not resize queue pairs. EHOSTUNREACH
// if the links that the device may use do not reach the peer; EMFILE and ENFILE
// if there is no descriptor left for a socket. EINVAL if the
// queue pair or attr is nil, or it is closed.
func (qp *QP) Modify(attr *QPAttr, mask QPAttrMask) error {
	if !qp.ok() {
		return invalid("modify_qp", "nil queue pair")
	}
	if attr == nil {
		return invalid("modify_qp", "nil QPAttr")
	}
	return qp.p.Modify(attr, mask)
}

// Query returns the queue pair's attributes, with the sizes that it was given
// in Cap. See ibv_query_qp(3).
//
// Errors: EINVAL if the queue pair is nil or closed.
func (qp *QP) Query() (QPAttr, error) {
	if !qp.ok() {
		return QPAttr{}, invalid("query_qp", "nil queue pair")
	}
	return qp.p.Query()
}

// Counters returns what the queue pair has counted since it was made, in an order
// that does not change: the part of [Device.Counters] that is about queue pairs. A
// nil queue pair has counted nothing.
func (qp *QP) Counters() []Counter {
	if !qp.ok() {
		return nil
	}
	return counters(qp.p.Counters())
}

// Close destroys the queue pair, in any state. Its requests are gone without a
// completion, and so are its completions that were not polled; when Close has
// returned the device does not touch the requests' memory any more. The peer is
// not told: its next request ends in [WCRetryExcErr]. It is
// idempotent. See ibv_destroy_qp(3).
//
// Errors: EINVAL for a nil queue pair.
func (qp *QP) Close() error {
	if !qp.ok() {
		return invalid("destroy_qp", "nil queue pair")
	}
	return qp.p.Close()
}
