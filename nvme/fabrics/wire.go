package fabrics

import (
	"encoding/binary"
	"fmt"

	"github.com/verbena-rdma/verbena/nvme"
)

var le = binary.LittleEndian

// Refusal is why a target refuses a connection.
type Refusal uint16

// The refusals of the specification.
const (
	RefusedLength     Refusal = iota + 1 // the request's length
	RefusedFormat                        // its format
	RefusedQueue                         // the number of the queue
	RefusedSendSize                      // the size of the host's send queue
	RefusedRecvSize                      // the size of the host's receive queue
	RefusedResources                     // the target has no resources left
	RefusedIRD                           // the host's responder resources
	RefusedORD                           // the host's initiator depth
	RefusedController                    // the controller's number
)

var refusals = [...]string{
	RefusedLength: "the request has a wrong length", RefusedFormat: "the request has a format that is not known",
	RefusedQueue: "there is no such queue", RefusedSendSize: "the send queue's size", RefusedRecvSize: "the receive queue's size",
	RefusedResources: "the target has no resources left", RefusedIRD: "the host's responder resources", RefusedORD: "the host's initiator depth",
	RefusedController: "there is no such controller",
}

// String returns the refusal in words.
func (r Refusal) String() string {
	if int(r) < len(refusals) && refusals[r] != "" {
		return refusals[r]
	}
	return fmt.Sprintf("status %d", uint16(r))
}

// Lengths of what is said while a connection is made.
const (
	requestBytes = 32
	acceptBytes  = 32
	refuseBytes  = 4
)

// request is what a host says when it connects a queue.
type request struct {
	format     uint16
	qid        uint16
	recvSize   uint16 // how many answers the host has room for
	sendSize   uint16 // how many commands it has under way at most, less one
	controller uint16 // of queues other than the first
}

func parseRequest(b []byte) (r request, ok bool) {
	if len(b) < requestBytes {
		return r, false
	}
	for i, f := range []*uint16{&r.format, &r.qid, &r.recvSize, &r.sendSize, &r.controller} {
		*f = le.Uint16(b[2*i:])
	}
	return r, true
}

func (r *request) pack() []byte {
	b := make([]byte, requestBytes)
	for i, v := range []uint16{r.format, r.qid, r.recvSize, r.sendSize, r.controller} {
		le.PutUint16(b[2*i:], v)
	}
	return b
}

// accepted is what the target says: how many commands it has room for.
func accepted(size int) []byte {
	b := make([]byte, acceptBytes)
	le.PutUint16(b[2:], uint16(size)) //nolint:gosec // at most maxQueueSize
	return b
}

func refused(why Refusal) []byte {
	b := make([]byte, refuseBytes)
	le.PutUint16(b[2:], uint16(why))
	return b
}

// isInCapsule reports whether data lies behind the command; isKeyed, whether it lies in the host's memory.
func isInCapsule(d *nvme.SGL) bool { return d.Type == nvme.SGLData && d.Sub == nvme.SGLOffset }

func isKeyed(d *nvme.SGL) bool {
	return d.Type == nvme.SGLKeyed && (d.Sub == nvme.SGLAddress || d.Sub == nvme.SGLInvalidate)
}

// Sizes of capsules.
const (
	commandBytes = 64
	answerBytes  = 16
)

// Limits of queues.
const (
	maxQueueSize     = 256
	defaultQueueSize = 128
	adminQueueSize   = 32
	minQueueSize     = 2
	defaultInCapsule = 4096
	maxInCapsule     = 16 << 10
	defaultTransfer  = 1 << 20
)
