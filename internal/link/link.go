// Package link moves trains between queue pairs that do not share memory: udp
// for any RoCEv2 peer, and a seeded faulty link for tests. (The loop link needs
// no transport; it lives with the engine, which calls the peer directly.)
//
// The way of a train, top-down: packetize.go makes packets of it, udp_send.go hands
// them to the kernel; udp_recv.go takes them back, reassemble.go makes trains of
// them again and hands them to a Sink.
package link

import (
	"net/netip"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
)

// Link carries trains. Send may be called by any number of goroutines; Poll by
// one at a time; Wait by one at a time, also while somebody polls.
type Link interface {
	// Prepare fills in f.Link. It fails if the peer cannot be reached this way.
	Prepare(f *train.Flow) error

	// Send sends trains in order and returns how many it took. The payload has
	// been read when Send returns. It stops at a train whose payload it could
	// not read, and says so with a *PayloadError; a full socket buffer or an
	// unreachable peer is not an error but a loss: the train counts as sent. It also
	// stops, with ErrBusy, at a train for which there is no room now but will be.
	Send(ts []*train.Train) (int, error)

	// Poll hands what has arrived to the sink, without blocking, and returns
	// the number of packets; at most about budget of them.
	Poll(sink Sink, budget int) int

	// Wait blocks until something may have arrived, d has passed (negative:
	// for ever), Wake was called or the link was closed.
	Wait(d time.Duration)
	Wake()

	// MTU returns the largest payload, of 256 to 4096, that one packet to the
	// network can carry.
	MTU() int
	// Window returns how many packets of mtu bytes payload may be under way to
	// one queue pair of a peer.
	Window(mtu int) int
	// Addrs are the local addresses.
	Addrs() []netip.Addr
	// Offloads names what was found at open: "gso", "gro".
	Offloads() []string

	Close() error
}

// Freer is a Link that tells when Send, after an ErrBusy, is worth trying again: it counts,
// and after each count calls what its configuration has for that (SharedConfig.Freed).
// The trains that a Link without this was too busy for are tried again from time to time.
type Freer interface {
	// Frees returns how often what made Send return ErrBusy may have ended.
	Frees() uint64
}

// Sink takes what a link received. A train and its payload are valid until
// Deliver returns.
type Sink interface {
	Deliver(t *train.Train)
	// Drop counts a packet that was not even made a train.
	Drop(r Reason)
}

// Reason is why a link dropped a packet.
type Reason uint8

const (
	DropShort     Reason = iota // shorter than its headers
	DropOpcode                  // opcode unknown or not implemented
	DropICRC                    // checksum wrong: damaged, or an address was translated on the way
	DropVersion                 // transport header version other than 0
	DropPKey                    // P_Key other than the default one
	DropTruncated               // larger than any packet may be
	DropOther                   // anything else wrong with the headers
	NumReasons
)

// PayloadError reports that a train's payload could not be read. The packets
// before Packet were sent.
type PayloadError struct {
	Fault  mem.Fault
	Packet int
}

func (e *PayloadError) Error() string { return "payload: " + e.Fault.String() }
