package qp

// Counter names a kind of event that queue pairs count, each event once, where it happens.
type Counter uint8

const (
	CntTxPackets       Counter = iota // packets handed to a link
	CntTxBytes                        // payload bytes in them
	CntRxPackets                      // packets that reached a queue pair
	CntRxBytes                        // payload bytes in them
	CntRetransmits                    // packets sent again
	CntProbes                         // packets sent again only to ask for an acknowledgement
	CntTimeouts                       // acknowledgement timeouts
	CntAcksSent                       // acknowledgements sent
	CntNaksSent                       // NAKs of any kind but RNR sent
	CntRNRNaksSent                    // RNR NAKs sent
	CntNaksReceived                   // NAKs of any kind but RNR received
	CntRNRNaksReceived                // RNR NAKs received
	CntDuplicates                     // duplicate requests
	CntOutOfSequence                  // requests with a PSN after the expected one
	CntResponseLost                   // READ or atomic responses found missing
	CntGhostAcks                      // responses to nothing that was sent, or to what is long done
	CntDropState                      // packets for a queue pair in a state that does not take them
	CntDropTransport                  // packets of another transport than the queue pair's
	CntDropSource                     // packets from another address than the peer's
	CntDropQKey                       // datagrams with a wrong Q_Key
	CntDropNoReceive                  // UC and UD messages for which no receive was posted
	CntDropBroken                     // UC messages with packets missing
	CntDropMalformed                  // requests that no peer may send, on UC and UD
	CntReqErr                         // requests refused as invalid (NAK)
	CntAccessErr                      // requests refused for memory rights (NAK)
	CntOpErr                          // requests that failed at this side (NAK)
	CntFaultRNR                       // RNR NAKs because memory had to be fetched, or too much waits for engines
	CntFaultWaits                     // times that the requester stopped while its memory was fetched
	CntDropFault                      // UC and UD messages dropped for the same reasons as CntFaultRNR
	CntHeld                           // requests and answers kept while memory was out of reach (hold.go)
	CntInline                         // messages and results that became inline data (inline.go)
	CntByGrant                        // WRITEs and READs executed by the peer's grant; the grant counts them
	CntFenceWaits                     // times that the requester stopped for a fence that was pending
	CntGapsSent                       // acknowledgements that told which requests are missing
	CntGapsReceived                   // such acknowledgements of the peer
	CntMarked                         // packets that a router has marked (ECN)
	CntNoticesSent                    // congestion notifications sent
	CntNotices                        // congestion notifications received
	NumCounters
)

var counterNames = [NumCounters]string{
	"tx_packets", "tx_bytes", "rx_packets", "rx_bytes", "retransmitted_packets", "ack_probes",
	"local_ack_timeouts", "acks_sent", "naks_sent", "rnr_naks_sent", "naks_received", "rnr_naks_received",
	"duplicate_requests", "out_of_sequence", "implied_nak_seq_err", "ghost_acks",
	"drop_qp_state", "drop_transport", "drop_source_address", "drop_bad_qkey", "drop_no_receive",
	"drop_broken_message", "drop_malformed", "resp_invalid_request", "resp_remote_access_errors",
	"resp_remote_operation_errors", "page_fault_rnr_naks", "page_fault_waits", "drop_page_fault", "memory_holds", "inline_receives",
	"local_direct", "fence_waits", "gap_reports_sent", "gap_reports_received",
	"np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled",
}

func (c Counter) String() string { return counterNames[c] }

// Counters are one queue pair's, or the sum of several's. They have no lock of
// their own: a queue pair's owner calls one method at a time.
type Counters [NumCounters]uint64

func (c *Counters) add(i Counter, n int) { c[i] += uint64(n) }

// Sum adds the counters o to c.
func (c *Counters) Sum(o *Counters) {
	for i := range c {
		c[i] += o[i]
	}
}
