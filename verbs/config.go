package verbs

import (
	"net/netip"

	"github.com/verbena-rdma/verbena/internal/provider"
)

// Config is how a device is opened. A nil *Config, and the zero value of each
// field, mean the default.
type Config struct {
	// Addrs are the addresses that the device stands on, one GID each, in this
	// order. They must be addresses of this host. The name given to Open is then
	// only what the device is called. Empty: the address that was named in Open, or
	// all addresses of the device or interface that was named there.
	Addrs []netip.Addr

	// Link restricts how requests may travel. Zero (LinkAny): by a call if the peer
	// is in this process, through shared memory if it is in another process of this
	// user on this host, and otherwise by RoCE v2 packets.
	Link LinkMode

	// Lock is how registration keeps pinned memory where it is. Zero (LockAuto): it
	// locks memory outside the Go heap where RLIMIT_MEMLOCK allows it. LockStrict:
	// the device holds the pages themselves, also after munmap(2).
	Lock LockMode

	// Limits lower what the device offers. Zero fields: the device's own.
	Limits Limits

	// PCAP names a file to which all packets are written, for tshark and
	// Wireshark; an existing file is overwritten. Requests between two queue
	// pairs of one process are written as the packets that they would have
	// been. (tshark guesses at what messages carry, and may call that malformed:
	// see docs/errors.md.) If a write fails, as on a full disk, the file ends with
	// the last whole packet: the device logs that once, counts the packets that are
	// missing (capture_lost_packets), and its Close returns the error. Empty: no
	// capture.
	PCAP string

	// Window is the largest number of packets that one queue pair has under way
	// to a peer. Zero: what the peer's socket buffer is expected to hold.
	Window int

	// Receivers is how many receivers the device has at most, of 8: each has a
	// socket of its own, and a goroutine while nobody polls. Connected queue pairs
	// are spread over them as they are made, so that several processors receive
	// packets. Zero: half as many as there are processors.
	Receivers int

	// NoGSO and NoGRO switch the kernel's segmentation and coalescing of
	// datagrams off. False: they are used where the kernel has them. They exist
	// for tests and for measuring.
	NoGSO bool
	NoGRO bool

	// PinDMABuf has the device hold dma-bufs in place while they are registered
	// ([PD.RegDMABufMR]), as some adapters do. False: their exporters may move them.
	PinDMABuf bool

	// DMSize is how many bytes of device memory the device has, for all processes
	// that share it: the first of them decides. Zero: the value of the environment
	// variable VERBENA_DM_SIZE (a number, with K, M or G after it for KiB, MiB and
	// GiB), and otherwise 256 MiB. Negative: none. It takes memory only as it is
	// used.
	DMSize int64
}

// LinkMode is which links a device may use.
type LinkMode string

const (
	LinkAny   LinkMode = ""      // the best that reaches the peer
	LinkLoop  LinkMode = "loop"  // only peers in this process; opens no socket
	LinkLocal LinkMode = "local" // only peers on this host: in this process, or by shared memory
	LinkUDP   LinkMode = "udp"   // only RoCE v2 packets, both ways: also to peers on this host, and to the device itself
)

// Limits are upper bounds on what a device offers; a zero field keeps the
// device's own. They appear in [DeviceAttr].
type Limits struct {
	QPs  int // queue pairs
	CQs  int // completion queues
	MRs  int // memory regions
	MWs  int // memory windows
	PDs  int // protection domains
	AHs  int // address handles
	SRQs int // shared receive queues

	QPWR  int // outstanding requests in each queue of a queue pair
	CQE   int // entries of a completion queue
	SRQWR int // outstanding receives in a shared receive queue
}

// provider returns the configuration as the provider takes it. Slices are
// copied: the caller may reuse its own.
func (c *Config) provider() *provider.Config {
	if c == nil {
		return &provider.Config{}
	}
	return &provider.Config{
		Addrs: append([]netip.Addr(nil), c.Addrs...),
		Link:  string(c.Link),
		Lock:  c.Lock,
		Limits: provider.Limits{
			QPs: c.Limits.QPs, CQs: c.Limits.CQs, MRs: c.Limits.MRs, MWs: c.Limits.MWs,
			PDs: c.Limits.PDs, AHs: c.Limits.AHs, SRQs: c.Limits.SRQs,
			QPWR: c.Limits.QPWR, CQE: c.Limits.CQE, SRQWR: c.Limits.SRQWR,
		},
		PCAP:      c.PCAP,
		Window:    c.Window,
		Receivers: c.Receivers,
		NoGSO:     c.NoGSO,
		NoGRO:     c.NoGRO,
		PinDMABuf: c.PinDMABuf,
		DMSize:    c.DMSize,
	}
}
