package ib

import "fmt"

// WCStatus is how a work request ended. The numbers are those of ibv_wc_status.
type WCStatus uint8

const (
	WCSuccess        WCStatus = 0  // done
	WCLocLenErr      WCStatus = 1  // message too long for the receive, or for the path
	WCLocQPOpErr     WCStatus = 2  // the request does not fit the queue pair's state or type
	WCLocEECOpErr    WCStatus = 3  // reliable datagram only: never from this device
	WCLocProtErr     WCStatus = 4  // a local SGE failed: key, bounds, rights or domain
	WCWRFlushErr     WCStatus = 5  // the queue pair was in, or went to, the error state
	WCMWBindErr      WCStatus = 6  // a memory window could not be bound, an indirect key not configured, or a key not invalidated
	WCBadRespErr     WCStatus = 7  // the peer's answer does not fit the request
	WCLocAccessErr   WCStatus = 8  // a peer's request took this receive and was refused for its key
	WCRemInvReqErr   WCStatus = 9  // the peer calls the request invalid
	WCRemAccessErr   WCStatus = 10 // the peer refuses access to its memory
	WCRemOpErr       WCStatus = 11 // the peer could not complete the request
	WCRetryExcErr    WCStatus = 12 // no answer, after all retries
	WCRNRRetryExcErr WCStatus = 13 // the peer had no receive posted, after all retries
	WCLocRDDViolErr  WCStatus = 14 // reliable datagram only: never from this device
	WCRemInvRDReqErr WCStatus = 15 // reliable datagram only: never from this device
	WCRemAbortErr    WCStatus = 16 // reliable datagram only: never from this device
	WCInvEECNErr     WCStatus = 17 // reliable datagram only: never from this device
	WCInvEECStateErr WCStatus = 18 // reliable datagram only: never from this device
	WCFatalErr       WCStatus = 19 // the device failed
	WCRespTimeoutErr WCStatus = 20 // what was waited for did not come about in time
	WCGeneralErr     WCStatus = 21 // none of the others
)

var wcStatusNames = [...]string{
	"success", "local length error", "local QP operation error", "local EE context operation error",
	"local protection error", "Work Request Flushed Error", "memory management operation error",
	"bad response error", "local access error", "remote invalid request error", "remote access error",
	"remote operation error", "transport retry counter exceeded", "RNR retry counter exceeded",
	"local RDD violation error", "remote invalid RD request", "aborted error",
	"invalid EE context number", "invalid EE context state", "fatal error", "response timeout error",
	"general error",
}

// String returns the text of ibv_wc_status_str.
func (s WCStatus) String() string { return nameOf(wcStatusNames[:], int(s), "WCStatus") }

// WCOpcode is what completed.
type WCOpcode uint8

const (
	WCSend            WCOpcode = iota + 1 // a SEND of any kind was sent
	WCRDMAWrite                           // a WRITE of any kind was done
	WCRDMARead                            // a READ was done
	WCCompSwap                            // a compare-and-swap was done
	WCFetchAdd                            // a fetch-and-add was done
	WCRecv                                // a SEND was received
	WCRecvRDMAWithImm                     // a WRITE with immediate data consumed the receive
	WCAtomicWrite                         // an ATOMIC WRITE was done
	WCFlush                               // a FLUSH was done
	WCBindMW                              // a memory window was bound
	WCLocalInv                            // a key of this device was invalidated
	WCConfigureMKey                       // an indirect key was configured
	WCWaitFence                           // a fence was waited for
	WCSignalFence                         // a fence was signalled
)

var wcOpcodeNames = [...]string{
	WCSend: "SEND", WCRDMAWrite: "RDMA_WRITE", WCRDMARead: "RDMA_READ", WCCompSwap: "COMP_SWAP",
	WCFetchAdd: "FETCH_ADD", WCRecv: "RECV", WCRecvRDMAWithImm: "RECV_RDMA_WITH_IMM",
	WCAtomicWrite: "ATOMIC_WRITE", WCFlush: "FLUSH", WCBindMW: "BIND_MW", WCLocalInv: "LOCAL_INV",
	WCConfigureMKey: "CONFIGURE_MKEY", WCWaitFence: "WAIT_FENCE", WCSignalFence: "SIGNAL_FENCE",
}

// String returns the name without the prefix IBV_WC_.
func (o WCOpcode) String() string { return nameOf(wcOpcodeNames[:], int(o), "WCOpcode") }

// WCFlags say which optional fields of a completion are valid.
type WCFlags uint8

const (
	WCGRH     WCFlags = 1 << iota // UD: the first 40 bytes of the buffer hold the routing header
	WCWithImm                     // Imm is valid
	WCWithInv                     // InvalidatedKey is valid
)

// SL of a datagram's completion. RoCE v2 has no service level; adapters report there
// which headers the message came with (IBA A17.4.5.1). UCX, for one, checks it and
// drops messages that it takes for those of other programs.
const (
	WCIPv6 = 8 | 1 // UDP over IPv6
	WCIPv4 = 8 | 2 // UDP over IPv4
)

// WC is a work completion. If Status is not WCSuccess only ID, Status, QPN and
// VendorErr are meaningful.
type WC struct {
	ID             uint64   // the request's
	Status         WCStatus // look at this first
	Op             WCOpcode
	Flags          WCFlags
	SL             uint8  // UD: WCIPv4 or WCIPv6
	PKeyIndex      uint16 // always 0
	VendorErr      uint16 // which check failed, for people; see docs/errors.md
	ByteLen        uint32 // received or read bytes; for UD with the 40 of the header
	Imm            uint32 // with WCWithImm: as the sender wrote it, in host order
	InvalidatedKey uint32 // with WCWithInv: the key that was invalidated
	QPN            uint32 // the local queue pair
	SrcQP          uint32 // UD: the sender's queue pair
}

// Err returns nil for a success and a *[StatusError] otherwise.
func (w *WC) Err() error {
	if w.Status == WCSuccess {
		return nil
	}
	return &StatusError{ID: w.ID, QPN: w.QPN, Status: w.Status}
}

// StatusError is a failed completion as an error. errors.As finds it:
//
//	var failed *ib.StatusError
//	if errors.As(err, &failed) && failed.Status == ib.WCRetryExcErr { … }
type StatusError struct {
	ID     uint64   // the request's
	QPN    uint32   // the local queue pair
	Status WCStatus // how it ended
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("work request %#x on QP %#06x: %v", e.ID, e.QPN, e.Status)
}
