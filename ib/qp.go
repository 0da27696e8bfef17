package ib

import "fmt"

func nameOf(names []string, i int, typ string) string {
	if i >= 0 && i < len(names) && names[i] != "" {
		return names[i]
	}
	return fmt.Sprintf("%s(%d)", typ, i)
}

// QPType is the transport service of a queue pair.
type QPType uint8

const (
	RC      QPType = iota + 1 // reliable connection
	UC                        // unreliable connection
	UD                        // unreliable datagram
	XRCSend                   // extended reliable connection, initiator: sends to shared receive queues
	XRCRecv                   // extended reliable connection, target: receives for the queues of its domain
)

// NumQPTypes is one more than the largest type: the size of a table by type.
const NumQPTypes = int(XRCRecv) + 1

var qpTypeNames = [...]string{RC: "RC", UC: "UC", UD: "UD", XRCSend: "XRC_SEND", XRCRecv: "XRC_RECV"}

// String returns the type's name without the prefix IBV_QPT_.
func (t QPType) String() string { return nameOf(qpTypeNames[:], int(t), "QPType") }

// QPState is a state of a queue pair (IBA 10.3.1).
type QPState uint8

const (
	QPReset QPState = iota + 1 // new: nothing can be posted
	QPInit                     // receives can be posted
	QPRTR                      // ready to receive
	QPRTS                      // ready to send
	QPSQD                      // send queue drained: what is posted waits
	QPSQE                      // send queue error: UC and UD after a failed send
	QPErr                      // error: all requests are flushed
)

var qpStateNames = [...]string{QPReset: "RESET", QPInit: "INIT", QPRTR: "RTR", QPRTS: "RTS",
	QPSQD: "SQD", QPSQE: "SQE", QPErr: "ERR"}

// String returns the state's name as IBA writes it, "RTS".
func (s QPState) String() string { return nameOf(qpStateNames[:], int(s), "QPState") }

// MTU is a path MTU, the payload of a full packet, as the code of ibv_mtu.
type MTU uint8

const (
	MTU256 MTU = iota + 1
	MTU512
	MTU1024
	MTU2048
	MTU4096
)

// Bytes returns the number of bytes, or 0 for an invalid MTU.
func (m MTU) Bytes() int {
	if m < MTU256 || m > MTU4096 {
		return 0
	}
	return 128 << m
}

// String returns the number of bytes.
func (m MTU) String() string { return fmt.Sprint(m.Bytes()) }

// QPCap are the sizes of a queue pair's queues. A new queue pair has at least what
// was asked for; its Query returns what it has.
type QPCap struct {
	MaxSendWR     int // outstanding send requests
	MaxRecvWR     int // outstanding receives; ignored with an SRQ
	MaxSendSGE    int // pieces of a send request
	MaxRecvSGE    int // pieces of a receive; ignored with an SRQ
	MaxInlineData int // bytes of a send request's Inline
}

// QPAttrMask is which fields of a [QPAttr] Modify sets. The names are those of
// IBV_QP_*, the bits are not.
type QPAttrMask uint32

const (
	QPMaskState QPAttrMask = 1 << iota
	QPMaskCurState
	QPMaskAccess
	QPMaskPKeyIndex
	QPMaskPort
	QPMaskQKey
	QPMaskAV
	QPMaskPathMTU
	QPMaskTimeout
	QPMaskRetryCnt
	QPMaskRNRRetry
	QPMaskRQPSN
	QPMaskMaxRDAtomic
	QPMaskMinRNRTimer
	QPMaskSQPSN
	QPMaskMaxDestRDAtomic
	QPMaskCap
	QPMaskDestQPN
	QPMaskSQDAsyncNotify
	QPMaskAltPath      // has no field: there are no alternate paths
	QPMaskPathMigState // has no field: there are no alternate paths
	numQPMask          = iota
)

var qpMaskNames = [numQPMask]string{"state", "cur_state", "access_flags", "pkey_index", "port", "qkey", "av",
	"path_mtu", "timeout", "retry_cnt", "rnr_retry", "rq_psn", "max_rd_atomic", "min_rnr_timer", "sq_psn",
	"max_dest_rd_atomic", "cap", "dest_qpn", "en_sqd_async_notify", "alt_path", "path_mig_state"}

// String lists the attributes of the mask.
func (m QPAttrMask) String() string {
	s := ""
	for i := range 32 {
		if m&(1<<i) == 0 {
			continue
		}
		if s != "" {
			s += ", "
		}
		if i < numQPMask {
			s += qpMaskNames[i]
		} else {
			s += fmt.Sprintf("bit %d", i)
		}
	}
	if s == "" {
		return "none"
	}
	return s
}

// QPAttr are the attributes of a queue pair that Modify sets and Query returns.
// Each that can be set has a bit in [QPAttrMask].
type QPAttr struct {
	State           QPState // Modify: the state to go to; Query: the current state
	CurState        QPState // Modify: the state that the caller believes to be current
	Access          Access  // what peers may do: the remote rights
	PKeyIndex       uint16  // there is one key, at 0
	Port            uint8   // there is one port, 1
	QKey            uint32  // UD: what requests to this queue pair must carry
	AV              AHAttr  // the peer's address
	PathMTU         MTU     // the same on both sides
	Timeout         uint8   // acknowledgement timeout, 4.096 µs × 2^Timeout; 0 waits for ever
	RetryCnt        uint8   // 0 to 7
	RNRRetry        uint8   // 0 to 7; 7 retries for ever
	RQPSN           uint32  // the first PSN expected: the peer's SQPSN
	MaxRDAtomic     uint8   // READs and atomics outstanding as initiator
	MinRNRTimer     uint8   // code of IBA table 45; 12 is 0.64 ms
	SQPSN           uint32  // the first PSN sent
	MaxDestRDAtomic uint8   // READs and atomics outstanding as responder
	Cap             QPCap   // the sizes of the queues
	DestQPN         uint32  // the peer's queue pair
	SQDAsyncNotify  bool    // raise EventSQDrained when SQD is reached

	// SQDraining is set by Query in SQD while requests that were begun are not done
	// yet. Modify ignores it.
	SQDraining bool
}
