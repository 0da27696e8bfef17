// Package link moves trains between queue pairs of different processes or hosts: UDP
// reaches any RoCEv2 peer, Shared also the processes of this host through shared memory,
// and Faulty is a seeded network for tests. (The loop link, within a process, needs no
// transport: package device calls the peer queue pair itself.)
//
// A train by UDP, top-down: packetize.go makes packets of it and udp_send.go hands them to
// the kernel; udp_recv.go receives them, and reassemble.go makes trains of them again and
// hands those to a Sink. A train to another process of this host: shared.go.
package link

import (
	"net/netip"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
)

// Link carries trains. Any number of goroutines may call Send at once. A link is its own
// first receiver; a UDP link can have more (UDP.NewReceiver).
type Link interface {
	Receiver

	// Prepare fills in f.Link. It fails if the peer cannot be reached this way.
	Prepare(f *train.Flow) error

	// Send sends trains in order and returns how many it took. When it returns, the
	// payload has been read, unless the receiver fetches it (reference.go, opened.go).
	// Send stops at a train whose payload it could not read, with a *PayloadError, and
	// at one for which there is no room now but will be, with ErrBusy. A full socket
	// buffer or an unreachable peer is not an error but a loss: the train counts as sent.
	Send(ts []*train.Train) (int, error)

	// MTU returns the largest payload, of 256 to 4096, that one packet to the
	// network can carry.
	MTU() int
	// Window returns how many packets of mtu bytes payload may be under way to
	// one queue pair of a peer.
	Window(mtu int) int
	// Addrs are the local addresses.
	Addrs() []netip.Addr
	// Offloads names the kernel's offloads in use: "gso", "gro".
	Offloads() []string

	Close() error
}

// Receiver takes what arrives at some of a link's sockets. One goroutine at a time may call
// Poll, and one at a time Wait, also during a Poll.
type Receiver interface {
	// Poll hands what has arrived to the sink, without blocking, and returns
	// the number of packets; at most about budget of them.
	Poll(sink Sink, budget int) int

	// Wait blocks until something may have arrived, d has passed (negative:
	// for ever), Wake was called or the link was closed.
	Wait(d time.Duration)
	Wake()
}

// Freer is a Link that reports when Send, after an ErrBusy, is worth trying again: it counts
// such events, and after each calls what its configuration names (SharedConfig.Freed). With
// a Link that is no Freer, the sender of trains that met ErrBusy tries from time to time.
type Freer interface {
	// Frees returns how often the cause of an ErrBusy may have ended.
	Frees() uint64
}

// Sink takes what a link received. A train and its payload are valid until
// Deliver returns.
type Sink interface {
	Deliver(t *train.Train)
	// Drop counts a packet, or a record of a ring, that the link discards.
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

// PayloadError means that a train's payload could not be read. The packets before
// Packet were sent.
type PayloadError struct {
	Fault  mem.Fault
	Packet int
}

func (e *PayloadError) Error() string { return "payload: " + e.Fault.String() }
