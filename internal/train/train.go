// Package train defines the unit that travels between queue pairs and links: a
// run of consecutive packets of one message, with one set of headers, a range
// of PSNs and a list that says where the payload lies.
//
// A single packet is a train of one. The loop link delivers trains as they are, and
// the link between processes of a host packs them whole; the UDP link packetizes them
// and reassembles received packets into trains. Queue pairs never see packets, links
// never see queue pairs.
package train

import (
	"net/netip"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// MaxBytes is the most payload of a train that is not Carried: the quantum of copying.
// It bounds how long a queue pair's lock and a region's read section are held.
const MaxBytes = 256 << 10

// MaxCarried is the most payload of a train that an engine copies from where it lies: one that is
// Carried, or whose memory the CPU does not address. It may exceed MaxBytes, because no goroutine
// copies it under a lock. A GPU copies it in some ten microseconds, and to hand a train over takes
// almost as long.
const MaxCarried = 64 << 20

// LeastCarried is the length from which on messages are carried in large numbers, and parts
// of messages are carried at all: each is a move of its own, and the receiver takes only so
// many moves.
const LeastCarried = 64 << 10

// MaxSGE is the longest scatter/gather list of a request.
const MaxSGE = 32

// MaxInline is the most inline data of a request.
const MaxInline = 512

// Train is a run of consecutive packets of one message.
type Train struct {
	Flow *Flow      // outgoing: the way to the peer
	From netip.Addr // incoming: the peer's address
	To   netip.Addr // incoming: the address of ours that it was sent to

	// incoming: from the IP header of the first packet, for the routing header
	// in front of a UD message
	TClass   uint8
	HopLimit uint8

	Transport wire.Transport
	Kind      wire.Kind
	Extra     wire.Extra // on the packet that ends the message
	Start     bool       // the first packet is the message's first
	End       bool       // the last packet is the message's last

	DestQP uint32
	SRQ    uint32   // XRC requests: the shared receive queue there; on every packet
	PSN    wire.PSN // of the first packet
	N      int      // packets, at least 1
	// MTU is the payload of every packet but the message's last. In an incoming
	// train that is a message's last packet alone it is Len, because that packet
	// does not show the MTU.
	MTU int

	Hints     uint8 // on every packet
	Marked    int   // incoming: packets that met congestion on their way
	AckReq    bool  // outgoing: on the last packet; incoming: on any
	Solicited bool  // on the packet that ends the message

	// Headers: Kind, Transport, Start and End determine which are valid. A READ
	// response has an AETH on its message's first and last packet.
	RETH   wire.RETH
	Atomic wire.AtomicETH
	AETH   wire.AETH
	Orig   uint64 // atomic acknowledge: the value before
	Imm    uint32 // immediate data, or the key to invalidate
	DETH   wire.DETH

	Len     int      // payload bytes of the whole train, without padding
	Payload mem.List // outgoing: what to send; incoming: what came

	// Bounce asks the link to copy the payload before checksumming it. The CPU may
	// write the payload meanwhile: of a READ response that is legal, and of a
	// retransmission it may have broken the checksum before.
	Bounce bool
	// Lent is set if the payload is valid only until the link or the peer's queue pair has
	// taken the train.
	Lent bool
	// Carried is set if the payload stays in memory that the CPU does not address: the
	// receiving process has opened that memory (mem.Sharing), and Name says where it lies.
	Carried bool
	Name    Name
	// Kept is set if the receiver has kept the payload by reference: no byte was moved yet.
	Kept bool
	// Again is set if the train, or the message that it is a part of, was sent before.
	Again bool
	// Expired is set if a datagram has waited for a busy link as long as it may.
	Expired bool

	// Lease, if set, allows the receiver to keep the payload by reference: the payload may
	// be read as long as Leased returns true.
	Lease   *Lease
	LeaseAt uint64

	// Cookie is for the sending queue pair, which gets it back in Sent.
	Cookie uint64
	// Ticket is the ticket of the sending device, from before the payload was resolved: see
	// link.Shared.Ticket.
	Ticket uint64

	// Storage that Payload of an outgoing train refers to: the train outlives the queue slot
	// that it was made from.
	sge  [1]ib.SGE
	raw  [1][]byte
	memo mem.Memo
	room *room // for longer lists and inline data; nil until first needed, then reused
}

// room is storage for scatter/gather lists of several entries, and for inline data.
type room struct {
	sges   [MaxSGE]ib.SGE
	inline [MaxInline]byte
}

// more returns the train's room, and allocates it when it is first needed.
func (t *Train) more() *room {
	if t.room == nil {
		t.room = new(room)
	}
	return t.room
}

// copySGEs copies a list, which is at most MaxSGE long, into the train's storage.
func (t *Train) copySGEs(sges []ib.SGE) []ib.SGE {
	if len(sges) <= len(t.sge) {
		return t.sge[:copy(t.sge[:], sges)]
	}
	to := &t.more().sges
	return to[:copy(to[:], sges)]
}

// Flow is the way from one of our addresses to a peer's. It is made once for each
// connection or address handle, and shared by its trains, which do not change it.
type Flow struct {
	Src, Dst netip.Addr
	SrcPort  uint16 // a hint: 0xC000 and up, for equal-cost paths
	TClass   uint8
	HopLimit uint8
	Label    uint32

	// Link is what the link's Prepare has made: socket address, checksum prefix.
	Link any
}

// SetSGEs makes the payload n bytes of a list, from off on. It copies the SGEs that these
// bytes lie in.
func (t *Train) SetSGEs(table *mem.Table, actor mem.Actor, access ib.Access, sges []ib.SGE, off uint64, n int) {
	for len(sges) > 0 && off >= uint64(sges[0].Length) {
		off -= uint64(sges[0].Length)
		sges = sges[1:]
	}
	end, k := off+uint64(n), 0
	for k < len(sges) && end > 0 {
		end -= min(end, uint64(sges[k].Length))
		k++
	}
	t.Len = n
	t.Payload = mem.List{Table: table, Actor: actor, Access: access, SGEs: t.copySGEs(sges[:k]), Off: off, Memo: &t.memo}
}

// SetInline makes the payload a copy of b, which is at most MaxInline long.
func (t *Train) SetInline(b []byte) {
	to := &t.more().inline
	t.raw[0] = to[:copy(to[:], b)]
	t.Len = len(t.raw[0])
	t.Payload = mem.List{Raw: t.raw[:]}
}

// SetRange makes the payload a range of one region.
func (t *Train) SetRange(table *mem.Table, actor mem.Actor, access ib.Access, key uint32, addr uint64, n int) {
	t.sge[0] = ib.SGE{Addr: addr, Length: uint32(n), LKey: key}
	t.Len = n
	t.Payload = mem.List{Table: table, Actor: actor, Access: access, SGEs: t.sge[:], Memo: &t.memo}
}

// SetNone makes the payload empty.
func (t *Train) SetNone() {
	t.Len = 0
	t.Payload = mem.List{}
}

// Reset clears everything but the Ticket and the storage of the payload.
func (t *Train) Reset() {
	t.Flow, t.From, t.To = nil, netip.Addr{}, netip.Addr{}
	t.TClass, t.HopLimit = 0, 0
	t.Transport, t.Kind, t.Extra, t.Start, t.End = 0, 0, 0, false, false
	t.DestQP, t.SRQ, t.PSN, t.N, t.MTU = 0, 0, 0, 0, 0
	t.Hints, t.Marked, t.AckReq, t.Solicited = 0, 0, false, false
	t.RETH, t.Atomic, t.AETH, t.Orig, t.Imm, t.DETH = wire.RETH{}, wire.AtomicETH{}, wire.AETH{}, 0, 0, wire.DETH{}
	t.Len, t.Bounce, t.Again, t.Expired, t.Lent, t.Carried, t.Kept, t.Cookie = 0, false, false, false, false, false, false, 0
	t.Lease, t.LeaseAt, t.Name = nil, 0, Name{}
	t.Payload = mem.List{} // alone: in a tuple assignment the compiler would build it elsewhere and copy it
}

// Keep returns a copy of an incoming train that stays valid after Deliver has returned: with
// a copy of the payload, or by reference if the CPU does not address it and there is a Lease.
// A fault says why the payload could not be read. The copy is in staging bytes, which Free gives
// back.
func (t *Train) Keep() (*Train, mem.Fault) {
	c := new(Train)
	*c = *t
	c.raw[0], c.room = nil, nil
	if t.Len == 0 {
		c.Payload = mem.List{}
		return c, mem.Fault{}
	}
	if t.Lease != nil {
		if _, staged := mem.CheckStaged(&t.Payload, uint64(t.Len)); staged {
			c.refer(t)
			return c, mem.Fault{}
		}
	}
	c.Lease = nil
	if t.Len <= mem.Quantum {
		c.raw[0] = mem.Staging(t.Len)
	} else {
		c.raw[0] = make([]byte, t.Len)
	}
	c.Payload = mem.List{Raw: c.raw[:]}
	f, _ := mem.Copy(&c.Payload, &t.Payload, uint64(t.Len), false)
	if !f.OK() {
		c.Free()
	}
	return c, f
}

// Name says where the payload of a Carried train lies.
type Name struct {
	Memory, Off uint64 // the memory's number, and the offset in it
	// Lease is the number of the sending device's lease that the payload may be read under,
	// and At that lease's value. 0 stands for the Ticket.
	Lease uint32
	At    uint64
}

// Lease is a word whose value is fixed as long as payloads that a queue pair, or another
// process, has sent by reference may be read. It changes before their memory is given back
// to the application.
type Lease struct {
	own  atomic.Uint64
	word *atomic.Uint64 // of another process; nil: own is the word
	keep any            // keeps word mapped
}

// LeaseOf returns the lease of another process, whose word stays mapped as long as keep is
// reachable.
func LeaseOf(word *atomic.Uint64, keep any) *Lease { return &Lease{word: word, keep: keep} }

func (l *Lease) now() uint64 {
	if l.word != nil {
		return l.word.Load()
	}
	return l.own.Load()
}

// End ends the lease for all trains that it was attached to so far.
func (l *Lease) End() { l.own.Add(1) }

// Attach allows the receiver of a train to keep its payload by reference.
func (l *Lease) Attach(t *Train) { t.Lease, t.LeaseAt = l, l.now() }

// Leased reports whether a payload that is kept by reference may still be read. Its reader
// calls it before it reads, and StillLeased after: what was read counts only if both return true.
func (t *Train) Leased() bool { return t.Lease == nil || t.Lease.now() == t.LeaseAt }

// StillLeased is Leased for a reader that has read the payload. A processor that reorders loads
// could load the word before the payload. The addition keeps them apart: it comes behind the
// loads before it, and the atomic load behind the addition.
func (t *Train) StillLeased() bool {
	if t.Lease == nil {
		return true
	}
	var fence atomic.Uint32
	fence.Add(1)
	return t.Leased()
}

// KeepStaged is Keep for a train whose payload an engine will move: by reference where the
// train has a Lease and its payload lies in registered memory, else in staging bytes, which
// Free gives back. It returns how many bytes were copied.
func (t *Train) KeepStaged() (*Train, int, mem.Fault) {
	c := new(Train)
	*c = *t
	c.raw[0], c.room = nil, nil
	if t.Len == 0 {
		c.Payload = mem.List{}
		return c, 0, mem.Fault{}
	}
	if t.byReference() {
		c.refer(t)
		t.Kept = true
		return c, 0, mem.Fault{}
	}
	c.Lease = nil
	c.raw[0] = mem.Staging(t.Len)
	c.Payload = mem.List{Raw: c.raw[:]}
	if f := mem.CopyToStaging(&c.Payload, &t.Payload); !f.OK() {
		mem.GiveStaging(c.raw[0])
		return nil, 0, f
	}
	return c, t.Len, mem.Fault{}
}

// byReference reports whether KeepStaged leaves the payload where it lies.
func (t *Train) byReference() bool { return t.Lease != nil && t.Payload.Table != nil }

// Copies returns how many bytes KeepStaged would copy.
func (t *Train) Copies() int {
	if t.byReference() {
		return 0
	}
	return t.Len
}

// refer makes the payload that of o, by reference. t is a copy of o.
func (t *Train) refer(o *Train) {
	t.Payload.SGEs = t.copySGEs(o.Payload.SGEs)
	t.Payload.Memo = nil
}

// Holds returns how many bytes Keep has taken for the payload.
func (t *Train) Holds() int { return cap(t.raw[0]) }

// Free gives back the staging bytes of Keep and KeepStaged. Nothing uses the train any more.
func (t *Train) Free() {
	if b := t.raw[0]; b != nil {
		t.raw[0] = nil
		mem.GiveStaging(b)
	}
}

// SetRaw makes the payload b, which must not change until the train has left.
func (t *Train) SetRaw(b []byte) {
	t.raw[0] = b
	t.Len = len(b)
	t.Payload = mem.List{Raw: t.raw[:]}
}

// Moved returns how many bytes the receiver has moved for the train, for callers that bound
// their work. It is at least least, which stands for the work that any train takes.
func (t *Train) Moved(least int) int {
	if t.Kept {
		return least
	}
	return max(t.Len, least)
}

// IsAnswer reports whether a train answers requests of the peer.
func (t *Train) IsAnswer() bool {
	switch t.Kind {
	case wire.KindAck, wire.KindGaps, wire.KindReadResponse, wire.KindAtomicAck:
		return true
	}
	return false
}

// TrimFront drops the first k packets, all of them full, of a train of more than k.
func (t *Train) TrimFront(k int) {
	t.PSN = t.PSN.Add(k)
	t.N -= k
	t.Start = false
	t.Len -= k * t.MTU
	t.Payload.Off += uint64(k) * uint64(t.MTU)
}

// TrimLast drops the last packet of a train of at least two.
func (t *Train) TrimLast() {
	t.N--
	t.End = false
	t.Extra, t.Solicited = wire.NoExtra, false
	t.Len = t.N * t.MTU
}
