package nvme

import "fmt"

// Status is how a command ended: bits 7:0 status code, 10:8 status code type, 13 more, 14 do not retry. It is the
// status field of a completion without the phase bit (NVMe Base 1.4, 4.6.1).
type Status uint16

// Bits beside the code.
const (
	StatusMore Status = 1 << 13 // the error log has more
	StatusDNR  Status = 1 << 14 // do not retry: the same command would fail again

	statusCode Status = 0x7ff
)

// Generic command status.
const (
	StatusSuccess              Status = 0x000
	StatusInvalidOpcode        Status = 0x001
	StatusInvalidField         Status = 0x002
	StatusCIDConflict          Status = 0x003
	StatusDataTransferError    Status = 0x004
	StatusPowerLoss            Status = 0x005
	StatusInternal             Status = 0x006
	StatusAbortRequested       Status = 0x007
	StatusSQDeleted            Status = 0x008
	StatusFusedFailed          Status = 0x009
	StatusFusedMissing         Status = 0x00a
	StatusInvalidNamespace     Status = 0x00b
	StatusCommandSequence      Status = 0x00c
	StatusInvalidSGLSegment    Status = 0x00d
	StatusInvalidSGLCount      Status = 0x00e
	StatusDataSGLLength        Status = 0x00f
	StatusMetadataSGLLength    Status = 0x010
	StatusSGLType              Status = 0x011
	StatusInvalidCMBUse        Status = 0x012
	StatusPRPOffset            Status = 0x013
	StatusAtomicWriteUnit      Status = 0x014
	StatusOperationDenied      Status = 0x015
	StatusSGLOffset            Status = 0x016
	StatusHostIDInconsistent   Status = 0x018
	StatusKeepAliveExpired     Status = 0x019
	StatusKeepAliveInvalid     Status = 0x01a
	StatusPreempted            Status = 0x01b
	StatusSGLBlockGranularity  Status = 0x01e
	StatusNotSupportedQueueCMB Status = 0x01f
	StatusWriteProtected       Status = 0x020
	StatusInterrupted          Status = 0x021
	StatusTransientTransport   Status = 0x022
	StatusLBAOutOfRange        Status = 0x080
	StatusCapacityExceeded     Status = 0x081
	StatusNamespaceNotReady    Status = 0x082
	StatusReservationConflict  Status = 0x083
	StatusFormatInProgress     Status = 0x084
)

// Command specific status.
const (
	StatusInvalidCQ               Status = 0x100
	StatusInvalidQueueID          Status = 0x101
	StatusInvalidQueueSize        Status = 0x102
	StatusAbortLimit              Status = 0x103
	StatusAsyncLimit              Status = 0x105
	StatusInvalidVector           Status = 0x108
	StatusInvalidLogPage          Status = 0x109
	StatusInvalidQueueDeletion    Status = 0x10c
	StatusFeatureNotSaveable      Status = 0x10d
	StatusFeatureNotChangeable    Status = 0x10e
	StatusFeatureNotPerNamespace  Status = 0x10f
	StatusConnectFormat           Status = 0x180 // of fabrics commands
	StatusConnectBusy             Status = 0x181
	StatusConnectInvalidParameter Status = 0x182
	StatusConnectRestart          Status = 0x183
	StatusConnectInvalidHost      Status = 0x184
	StatusInvalidQueueType        Status = 0x185
	StatusDiscoverRestart         Status = 0x190
	StatusAuthenticationRequired  Status = 0x191
)

// Media and data integrity errors.
const (
	StatusWriteFault         Status = 0x280
	StatusUnrecoveredRead    Status = 0x281
	StatusCompareFailure     Status = 0x285
	StatusAccessDenied       Status = 0x286
	StatusUnwrittenBlock     Status = 0x287
	StatusPathInternal       Status = 0x300 // path related
	StatusHostPathError      Status = 0x370
	StatusHostAbortedCommand Status = 0x371
)

var statusNames = map[Status]string{
	StatusSuccess:              "success",
	StatusInvalidOpcode:        "invalid command opcode",
	StatusInvalidField:         "invalid field in command",
	StatusCIDConflict:          "command ID conflict",
	StatusDataTransferError:    "data transfer error",
	StatusPowerLoss:            "aborted due to power loss",
	StatusInternal:             "internal error",
	StatusAbortRequested:       "command abort requested",
	StatusSQDeleted:            "aborted as its submission queue was deleted",
	StatusFusedFailed:          "aborted as the other fused command failed",
	StatusFusedMissing:         "aborted as the other fused command is missing",
	StatusInvalidNamespace:     "invalid namespace or format",
	StatusCommandSequence:      "command sequence error",
	StatusInvalidSGLSegment:    "invalid SGL segment descriptor",
	StatusInvalidSGLCount:      "invalid number of SGL descriptors",
	StatusDataSGLLength:        "data SGL length invalid",
	StatusMetadataSGLLength:    "metadata SGL length invalid",
	StatusSGLType:              "SGL descriptor type invalid",
	StatusInvalidCMBUse:        "invalid use of controller memory buffer",
	StatusPRPOffset:            "PRP offset invalid",
	StatusAtomicWriteUnit:      "atomic write unit exceeded",
	StatusOperationDenied:      "operation denied",
	StatusSGLOffset:            "SGL offset invalid",
	StatusHostIDInconsistent:   "host identifier inconsistent format",
	StatusKeepAliveExpired:     "keep-alive timeout expired",
	StatusKeepAliveInvalid:     "keep-alive timeout invalid",
	StatusPreempted:            "aborted due to preempt and abort",
	StatusSGLBlockGranularity:  "SGL data block granularity invalid",
	StatusNotSupportedQueueCMB: "command not supported for queue in controller memory buffer",
	StatusWriteProtected:       "namespace is write protected",
	StatusInterrupted:          "command interrupted",
	StatusTransientTransport:   "transient transport error",
	StatusLBAOutOfRange:        "LBA out of range",
	StatusCapacityExceeded:     "capacity exceeded",
	StatusNamespaceNotReady:    "namespace not ready",
	StatusReservationConflict:  "reservation conflict",
	StatusFormatInProgress:     "format in progress",

	StatusInvalidCQ:               "completion queue invalid",
	StatusInvalidQueueID:          "invalid queue identifier",
	StatusInvalidQueueSize:        "invalid queue size",
	StatusAbortLimit:              "abort command limit exceeded",
	StatusAsyncLimit:              "asynchronous event request limit exceeded",
	StatusInvalidVector:           "invalid interrupt vector",
	StatusInvalidLogPage:          "invalid log page",
	StatusInvalidQueueDeletion:    "invalid queue deletion",
	StatusFeatureNotSaveable:      "feature identifier not saveable",
	StatusFeatureNotChangeable:    "feature not changeable",
	StatusFeatureNotPerNamespace:  "feature not namespace specific",
	StatusConnectFormat:           "connect: incompatible format",
	StatusConnectBusy:             "connect: controller busy",
	StatusConnectInvalidParameter: "connect: invalid parameters",
	StatusConnectRestart:          "connect: restart discovery",
	StatusConnectInvalidHost:      "connect: invalid host",
	StatusInvalidQueueType:        "invalid queue type",
	StatusDiscoverRestart:         "discover restart",
	StatusAuthenticationRequired:  "authentication required",

	StatusWriteFault:         "write fault",
	StatusUnrecoveredRead:    "unrecovered read error",
	StatusCompareFailure:     "compare failure",
	StatusAccessDenied:       "access denied",
	StatusUnwrittenBlock:     "deallocated or unwritten logical block",
	StatusPathInternal:       "internal path error",
	StatusHostPathError:      "host pathing error",
	StatusHostAbortedCommand: "command aborted by the host",
}

// Code returns the status without the bits for more and do not retry: what the constants are compared with.
func (s Status) Code() Status { return s & statusCode }

// DNR reports whether a host should not try the same command again.
func (s Status) DNR() bool { return s&StatusDNR != 0 }

// String names the status in the words of the specification.
func (s Status) String() string {
	name, ok := statusNames[s.Code()]
	if !ok {
		name = fmt.Sprintf("status code type %d, code %#02x", s.Code()>>8, uint8(s))
	}
	if s.DNR() {
		name += ", do not retry"
	}
	return name
}

// Error makes every status but success an error. See Err.
func (s Status) Error() string { return s.String() }

// Err returns the status as an error, or nil for success.
func (s Status) Err() error {
	if s.Code() == StatusSuccess {
		return nil
	}
	return s
}

// Is lets errors.Is find a status whether or not the host may retry.
func (s Status) Is(target error) bool {
	t, ok := target.(Status)
	return ok && s.Code() == t.Code()
}
