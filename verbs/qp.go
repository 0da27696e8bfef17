package verbs

import "github.com/verbena-rdma/verbena/internal/provider"

// QPConfig is what a queue pair is made of.
type QPConfig struct {
	Type   QPType // RC, UC, UD or XRCSend
	SendCQ *CQ    // where sends complete
	RecvCQ *CQ    // where receives complete; may be the same
	SRQ    *SRQ   // where receives are taken from. Nil: the queue pair's own queue
	Cap    QPCap  // sizes. A zero field: no such queue, or no pieces

	// SignalAll makes every send request produce a completion, as if posted with
	// [SendSignaled]. False: only those that ask for one, and those that fail.
	SignalAll bool

	// NoScatterToCQE switches inline receive off for the queue pair. False: messages,
	// and results of READs and atomics, of up to 64 bytes wait beside their completion,
	// and the Poll that returns the completion copies them to memory. This is done for
	// RC, UC and XRC initiators, for requests that make a completion, and if the bytes
	// fit the first piece of the list, in host memory; not if VERBENA_SCATTER_TO_CQE=0
	// or MLX5_SCATTER_TO_CQE=0 is in the environment.
	//
	// The difference shows in three cases. If the memory is gone when the completion is
	// polled, its status is [WCLocProtErr] and the queue pair fails, though the peer has
	// seen success. If a page of on-demand memory has to be fetched first, Poll waits for
	// it. A peer that READs the memory before the poll finds the old bytes.
	NoScatterToCQE bool
}

// QP is a queue pair: a send queue and a receive queue, connected to one peer (RC,
// UC, XRC) or open to all (UD). See ibv_create_qp(3).
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
// copies the requests, with their SGL and Inline slices: the caller may use these
// again at once. Until the request has completed, the memory that the SGL names must
// stay registered; memory that is sent must also stay unchanged. See ibv_post_send(3).
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
// An ATOMIC_WRITE stores 8 bytes, aligned to 8, in one step: no reader sees a part of
// them, or sees them before all requests that were posted earlier are done, FLUSHes
// included. It needs the right to write.
//
// A FLUSH completes when all that was written before it on this queue pair, to
// the range or the whole region, is visible to everyone who can see the memory
// ([FlushGlobal]), or is in storage and survives a crash and the loss of power
// ([FlushPersistent]), for which the memory must be that of a file (see [PD.RegMR]).
// It needs [AccessFlushGlobal] or [AccessFlushPersistent], whichever it asks for, of
// the region and of the peer's queue pair. While storage takes long, the peer answers
// with RNR NAKs, so with a small RNRRetry the request may fail.
//
// Both count against MaxRDAtomic as READs and atomics do.
//
// BIND_MW, LOCAL_INV and CONFIGURE_MKEY concern this device alone: see [MW] and
// [MKey]. They take effect when all earlier requests have been sent, and before any
// later one is. With [SendFence] they wait until all earlier requests are done, READs,
// WRITEs and SENDs alike. LOCAL_INV is for windows of type 2 that are bound on this
// queue pair, for indirect keys, and for regions with [AccessRemoteInvalidate]; such a
// region can only be closed afterwards.
//
// A request keeps its place in the queue until the completion of it, or of one
// posted later, is polled: signal at least one request in every MaxSendWR, or
// the queue stays full for ever. This is how hardware behaves.
//
// Requests are taken in RTS; in SQD, where they wait; and in SQE and ERR, where
// they complete with [WCWRFlushErr].
//
// Errors: ENOMEM if the queue is full: poll, and post the rest again. EINVAL if
//
//   - the state is RESET, INIT or RTR, or the queue pair is nil or closed;
//   - the operation is unknown or not in the table for the type, or a flag is unknown;
//   - the request has more pieces than MaxSendSGE, more inline data than
//     MaxInlineData, or both pieces and inline data;
//   - it has inline data and is neither a SEND, a WRITE nor an ATOMIC_WRITE;
//   - it is an atomic or ATOMIC_WRITE that is not of 8 bytes, a FLUSH with data or
//     without a type and a level, or a CONFIGURE_MKEY that is both a list and a pattern
//     or has no Configure;
//   - it is longer than the port's MaxMsgSize;
//   - for UD, it has no address handle or a closed one;
//   - RemoteQPN (UD) or RemoteSRQN (XRC) has more than 24 bits.
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
// an SRQ or is one of XRC, a request has more pieces than MaxRecvSGE, or the queue
// pair is nil or closed; ENOMEM if the queue is full.
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
// [QP.ToRTS] list. Every state can go to RESET and to ERR, with no other attribute.
// RESET drops all requests, all completions that were not polled and all attributes;
// ERR flushes all requests, each with a completion.
//
// Errors: EINVAL if there is no such transition, the mask lacks an attribute
// that it needs or has one that it does not allow, a value is out of range
// (Timeout has 5 bits; RetryCnt and RNRRetry 3; MinRNRTimer 5; PSNs and DestQPN
// 24; MaxRDAtomic and MaxDestRDAtomic are bounded by MaxQPInitRDAtom and
// MaxQPRDAtom in [DeviceAttr]; PathMTU by the port's ActiveMTU), CurState is
// not the current state, [PD.CreateAH] would refuse the AV, attr is nil, or the queue
// pair is nil or closed. QPMaskAltPath, QPMaskPathMigState and QPMaskCap are never
// allowed, since the device has no alternate paths and does not resize queue pairs.
// EHOSTUNREACH if the links that the device may use do not reach the peer; EMFILE and
// ENFILE if there is no descriptor left for a socket.
func (qp *QP) Modify(attr *QPAttr, mask QPAttrMask) error {
	if !qp.ok() {
		return invalid("modify_qp", "nil queue pair")
	}
	if attr == nil {
		return invalid("modify_qp", "nil QPAttr")
	}
	return qp.p.Modify(attr, mask)
}

// Query returns the queue pair's attributes; Cap has the sizes of its queues. See
// ibv_query_qp(3).
//
// Errors: EINVAL if the queue pair is nil or closed.
func (qp *QP) Query() (QPAttr, error) {
	if !qp.ok() {
		return QPAttr{}, invalid("query_qp", "nil queue pair")
	}
	return qp.p.Query()
}

// Counters returns the queue pair's counters, in an order that does not change: those
// of [Device.Counters] that are about queue pairs. It returns nil for a nil queue
// pair.
func (qp *QP) Counters() []Counter {
	if !qp.ok() {
		return nil
	}
	return counters(qp.p.Counters())
}

// Close destroys the queue pair, in any state. Its requests are dropped without a
// completion, and so are its completions that were not polled; when Close has
// returned the device does not touch the requests' memory any more. The peer gets no
// notice: its next request ends in [WCRetryExcErr]. It is idempotent. See
// ibv_destroy_qp(3).
//
// Errors: EINVAL for a nil queue pair.
func (qp *QP) Close() error {
	if !qp.ok() {
		return invalid("destroy_qp", "nil queue pair")
	}
	return qp.p.Close()
}
