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
	RC QPType = iota + 1 // reliable connection
	UC                   // unreliable connection
	UD                   // unreliable datagram
)

var qpTypeNames = [...]string{RC: "RC", UC: "UC", UD: "UD"}

func (t QPType) String() string { return nameOf(qpTypeNames[:], int(t), "QPType") }

// QPState is a state of IBA 10.3.1's queue pair state machine.
type QPState uint8

const (
	QPReset QPState = iota + 1
	QPInit
	QPRTR // ready to receive
	QPRTS // ready to send
	QPSQD // send queue drained
	QPSQE // send queue error: UC and UD after a failed send
	QPErr
)

var qpStateNames = [...]string{QPReset: "RESET", QPInit: "INIT", QPRTR: "RTR", QPRTS: "RTS",
	QPSQD: "SQD", QPSQE: "SQE", QPErr: "ERR"}

func (s QPState) String() string { return nameOf(qpStateNames[:], int(s), "QPState") }

// MTU is a path MTU: the payload of a full packet.
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

func (m MTU) String() string { return fmt.Sprint(m.Bytes()) }

// QPCap are the sizes of a queue pair's queues. What a new queue pair was given
// is at least what was asked for.
type QPCap struct {
	MaxSendWR     int // outstanding send requests
	MaxRecvWR     int // outstanding receives; ignored with an SRQ
	MaxSendSGE    int
	MaxRecvSGE    int
	MaxInlineData int // bytes
}

// QPAttrMask says which fields of a QPAttr count, as IBV_QP_*.
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
	QPMaskAltPath
	QPMaskPathMigState
	numQPMask = iota
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
// The names in [QPAttrMask] correspond one to one.
type QPAttr struct {
	State           QPState
	CurState        QPState
	Access          Access // what peers may do: the remote rights
	PKeyIndex       uint16
	Port            uint8
	QKey            uint32
	AV              AHAttr
	PathMTU         MTU
	Timeout         uint8 // acknowledgement timeout, 4.096 µs × 2^Timeout; 0 waits for ever
	RetryCnt        uint8 // 0 to 7
	RNRRetry        uint8 // 0 to 7; 7 retries for ever
	RQPSN           uint32
	MaxRDAtomic     uint8 // READs and atomics outstanding as initiator
	MinRNRTimer     uint8 // code of IBA table 45; 12 is 0.64 ms
	SQPSN           uint32
	MaxDestRDAtomic uint8 // READs and atomics outstanding as responder
	Cap             QPCap
	DestQPN         uint32
	SQDAsyncNotify  bool
}
