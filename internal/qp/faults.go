package qp

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// This file is the one place where the three error spaces meet: faults of
// memory, syndromes on the wire and statuses of completions.

// nakStatus is how a request ends that the peer refused (IBA 9.9.2.4).
var nakStatus = map[wire.Syndrome]ib.WCStatus{
	wire.NakInvalidReq:    ib.WCRemInvReqErr,
	wire.NakRemoteAccess:  ib.WCRemAccessErr,
	wire.NakRemoteOpError: ib.WCRemOpErr,
}

// refusal is how a responder ends a request that it does not execute
// (IBA 9.9.3): the NAK for the peer, the status of the receive that the request
// had taken or would have taken, the event if there is none, the counter.
type refusal struct {
	nak    wire.Syndrome
	status ib.WCStatus
	event  ib.EventType
	count  Counter
}

var (
	// The request is malformed, out of order, or not enabled here.
	invalidRequest = refusal{wire.NakInvalidReq, ib.WCRemInvReqErr, ib.EventQPReqErr, CntReqErr}
	// The message is longer than the receive.
	tooLong = refusal{wire.NakInvalidReq, ib.WCLocLenErr, ib.EventQPReqErr, CntReqErr}
	// The key, its rights or its bounds forbid the access.
	accessError = refusal{wire.NakRemoteAccess, ib.WCLocAccessErr, ib.EventQPAccessErr, CntAccessErr}
	// The receive's own memory cannot be written: not the peer's fault.
	receiveError = refusal{wire.NakRemoteOpError, ib.WCLocProtErr, ib.EventQPFatal, CntOpErr}
	// The storage behind the memory failed a FLUSH: not the peer's fault.
	storageError = refusal{wire.NakRemoteOpError, ib.WCLocAccessErr, ib.EventQPFatal, CntOpErr}
)

// Vendor error codes, for people: what exactly was found. Faults of memory are
// vendorFaultBase plus their kind; NAKs are their syndrome.
const (
	vendorFaultBase    uint16 = 0x100
	vendorNoRDAtomic   uint16 = 0x201 // READ or atomic on a queue pair with MaxRDAtomic 0
	vendorDatagramSize uint16 = 0x202 // datagram larger than the MTU
	vendorAddressPD    uint16 = 0x203 // address handle of another protection domain
	vendorResponseKind uint16 = 0x204 // a response of another kind than the request
	vendorResponseSize uint16 = 0x205 // a READ response of the wrong size
	vendorRetry        uint16 = 0x206 // retries used up
	vendorRNR          uint16 = 0x207 // RNR retries used up
	vendorTooLong      uint16 = 0x208 // message longer than the receive
	vendorSRQ          uint16 = 0x209 // XRC: no such queue in the domain
)

func vendorFault(f mem.Fault) uint16 { return vendorFaultBase + uint16(f.Kind) }
