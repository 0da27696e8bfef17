// Package train defines the unit that travels between queue pairs and links: a
// run of consecutive packets of one message, with one set of headers, a range
// of PSNs and a payload by reference.
//
// A single packet is a train of one. The loop link carries trains as they are;
// the udp link cuts them into packets and couples received packets into trains
// again. Queue pairs never see packets, links never see queue pairs.
package train

import (
	"net/netip"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// MaxBytes is the most payload that one train carries: the quantum of copying.
// It bounds how long a queue pair's lock and a region's read section are held.
const MaxBytes = 256 << 10

// MaxCarried is the most payload of a train that is carried: nobody copies it under a lock.
const MaxCarried = 1 << 20

// LeastCarried is from which length on messages, and parts of them that lie together, are
// carried in large numbers: each is a move of its own, of which the receiver takes so many.
const LeastCarried = 64 << 10

// MaxSGE is the longest scatter/gather list of a request.
const MaxSGE = 32

// MaxInline is the most inline data of a request.
const MaxInline = 512

// Train is a run of consecutive packets of one message.
type Train struct {
	Flow *Flow      // outgoing: the way to the peer
	From netip.Addr // incoming: who sent it
	To   netip.Addr // incoming: at which of our addresses it arrived

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
	// MTU is the payload of every packet but the message's last. In a train
	// that came and is a message's last packet alone, nobody knows: it is Len.
	MTU int

	AckReq    bool // outgoing: on the last packet; incoming: on any
	Solicited bool // on the packet that ends the message

	// Headers, valid as Kind, Transport, Start and End say. The READ response's
	// AETH stands on its message's first and last packet.
	RETH   wire.RETH
	Atomic wire.AtomicETH
	AETH   wire.AETH
	Orig   uint64 // atomic acknowledge: the value before
	Imm    uint32 // immediate data, or the key to invalidate
	DETH   wire.DETH

	Len     int      // payload bytes of the whole train, without padding
	Payload mem.List // outgoing: what to send; incoming: what came

	// Bounce asks the link to copy the payload before checksumming it, because
	// the CPU may write it meanwhile and that is legal or has happened before:
	// READ responses and retransmissions.
	Bounce bool
	// Lent tells that the payload is good only until the train has been taken.
	Lent bool
	// Carried tells that the payload, which the CPU does not address, stays where it is: who
	// takes the train in another process has opened that memory (mem.Sharing).
	Carried bool
	Name    Name
	// Kept tells that who took it has kept its payload by reference: no byte was moved yet.
	Kept bool
	// Again tells that it was sent before, or something that it is a part of.
	Again bool
	// Late tells that a datagram has waited for a busy link as long as it may.
	Expired bool

	// Lease is set where the payload, by reference, may be kept by who takes the train: it
	// is good as long as Leased says so.
	Lease   *Lease
	LeaseAt uint64

	// Cookie is the sending queue pair's own; it comes back in Sent.
	Cookie uint64
	// Ticket is the sending device's: see link.Shared.
	Ticket uint64

	// What Payload of an outgoing train is made of: a train outlives the queue slot it was
	// made from.
	sge  [1]ib.SGE
	raw  [1][]byte
	memo mem.Memo
	room *room // for more than that; nil until it is needed, and used again
}

// room is what a train has for payload that is not one piece.
type room struct {
	sges   [MaxSGE]ib.SGE
	inline [MaxInline]byte
}

// more returns the train's room.
func (t *Train) more() *room {
	if t.room == nil {
		t.room = new(room)
	}
	return t.room
}

// copySGEs copies a list, which is at most MaxSGE long.
func (t *Train) copySGEs(sges []ib.SGE) []ib.SGE {
	if len(sges) <= len(t.sge) {
		return t.sge[:copy(t.sge[:], sges)]
	}
	to := &t.more().sges
	return to[:copy(to[:], sges)]
}

// Flow is the way from one of our addresses to a peer's: made once for each
// connection or address handle, immutable, shared.
type Flow struct {
	Src, Dst netip.Addr
	SrcPort  uint16 // a hint: 0xC000 and up, for equal-cost paths
	TClass   uint8
	HopLimit uint8
	Label    uint32

	// Link is the link's own preparation (socket address, checksum prefix).
	Link any
}

// SetSGEs makes the payload n bytes of a list, from off on, copying those SGEs
// that they lie in.
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

// Reset clears everything but the storage, which needs no clearing.
func (t *Train) Reset() {
	t.Flow, t.From, t.To = nil, netip.Addr{}, netip.Addr{}
	t.TClass, t.HopLimit = 0, 0
	t.Transport, t.Kind, t.Extra, t.Start, t.End = 0, 0, 0, false, false
	t.DestQP, t.SRQ, t.PSN, t.N, t.MTU = 0, 0, 0, 0, 0
	t.AckReq, t.Solicited = false, false
	t.RETH, t.Atomic, t.AETH, t.Orig, t.Imm, t.DETH = wire.RETH{}, wire.AtomicETH{}, wire.AETH{}, 0, 0, wire.DETH{}
	t.Len, t.Bounce, t.Again, t.Expired, t.Lent, t.Carried, t.Kept, t.Cookie = 0, false, false, false, false, false, false, 0
	t.Lease, t.LeaseAt, t.Name = nil, 0, Name{}
	t.Payload = mem.List{} // by itself: among others it would be made elsewhere and copied
}

// Keep returns a train like this one that came, with a payload of its own: it outlives
// what the link has lent. A fault says why the payload could not be read.
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
	c.raw[0] = make([]byte, t.Len)
	c.Payload = mem.List{Raw: c.raw[:]}
	f, _ := mem.Copy(&c.Payload, &t.Payload, uint64(t.Len), false)
	return c, f
}

// Name is where a payload lies that is carried.
type Name struct {
	Memory, Off uint64
	// Lease is which of the sending device's leases it is good for, and At what that is; 0 is
	// the Ticket.
	Lease uint32
	At    uint64
}

// Lease is for how long what a queue pair, or another process, sends by reference may be
// read: it ends before the memory is given back to the program.
type Lease struct {
	own  atomic.Uint64
	word *atomic.Uint64 // another process's; nil: own counts
	keep any            // what keeps the word where it is
}

// LeaseOf is a lease that ends when a word of another process's changes, which is there as
// long as keep is referred to.
func LeaseOf(word *atomic.Uint64, keep any) *Lease { return &Lease{word: word, keep: keep} }

func (l *Lease) now() uint64 {
	if l.word != nil {
		return l.word.Load()
	}
	return l.own.Load()
}

// End ends the lease of all trains that were made so far.
func (l *Lease) End() { l.own.Add(1) }

// Attach has a train's payload be kept by reference.
func (l *Lease) Attach(t *Train) { t.Lease, t.LeaseAt = l, l.now() }

// Leased reports whether a payload that is kept by reference may still be read. It is asked
// before and after.
func (t *Train) Leased() bool { return t.Lease == nil || t.Lease.now() == t.LeaseAt }

// KeepStaged is Keep for a train that an engine takes the payload of: by reference where
// the payload itself is out of the CPU's reach, else in staging bytes, which Free gives
// back. It returns how many bytes were copied.
func (t *Train) KeepStaged() (*Train, int, mem.Fault) {
	c := new(Train)
	*c = *t
	c.raw[0], c.room = nil, nil
	if t.Len == 0 {
		c.Payload = mem.List{}
		return c, 0, mem.Fault{}
	}
	if t.Lease != nil && t.Payload.Table != nil {
		c.refer(t)
		t.Kept = true
		return c, 0, mem.Fault{}
	}
	c.Lease = nil
	c.raw[0] = mem.Staging(t.Len)
	c.Payload = mem.List{Raw: c.raw[:]}
	f, _ := mem.Copy(&c.Payload, &t.Payload, uint64(t.Len), false)
	if !f.OK() {
		mem.GiveStaging(c.raw[0])
		return nil, 0, f
	}
	return c, t.Len, mem.Fault{}
}

// refer makes the payload that of another train, by reference.
func (t *Train) refer(o *Train) {
	t.Payload.SGEs = t.copySGEs(o.Payload.SGEs)
	t.Payload.Memo = nil
}

// Free gives back what KeepStaged has taken.
func (t *Train) Free() {
	if b := t.raw[0]; b != nil {
		t.raw[0] = nil
		mem.GiveStaging(b)
	}
}

// SetRaw makes the payload b, which stays as it is until the train has left.
func (t *Train) SetRaw(b []byte) {
	t.raw[0] = b
	t.Len = len(b)
	t.Payload = mem.List{Raw: t.raw[:]}
}

// Moved returns how many bytes were moved when the train was taken: those of its payload, or
// about what the rest of it takes as long as.
func (t *Train) Moved(least int) int {
	if t.Kept {
		return least
	}
	return max(t.Len, least)
}

// IsAnswer tells whether a train answers requests of the peer.
func (t *Train) IsAnswer() bool {
	switch t.Kind {
	case wire.KindAck, wire.KindReadResponse, wire.KindAtomicAck:
		return true
	}
	return false
}

// TrimFront drops the first k packets, which are full, of a train that has more.
func (t *Train) TrimFront(k int) {
	t.PSN = t.PSN.Add(k)
	t.N -= k
	t.Start = false
	t.Len -= k * t.MTU
	t.Payload.Off += uint64(k) * uint64(t.MTU)
}

// TrimLast drops the last packet of a train that has more.
func (t *Train) TrimLast() {
	t.N--
	t.End = false
	t.Extra, t.Solicited = wire.NoExtra, false
	t.Len = t.N * t.MTU
}
