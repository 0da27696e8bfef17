package link

import (
	"errors"
	"net/netip"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// From packets to trains, for every link:
//
//  1. packet checks the ICRC and the headers of what came, in this order: a
//     damaged packet is counted as damaged, whatever the damage looks like;
//  2. follows tells whether the packet continues the train at hand; if not, the
//     train is delivered and the packet begins the next one;
//  3. flush delivers what is left, before the bytes are overwritten.

// minRun is the least payload of a packet that trains are coupled of, the
// smallest path MTU. It bounds the number of pieces; a peer with smaller packets
// gets them delivered in shorter trains.
const minRun = 256

// arrival is a UDP payload as it came.
type arrival struct {
	from     netip.AddrPort
	to       netip.Addr
	tclass   uint8
	hopLimit uint8
	id       uint16 // the IPv4 identification to expect, and then the one found
	b        []byte
}

// A reassembler makes trains of packets.
type reassembler struct {
	t      train.Train // at hand, if t.N is not 0
	h      wire.Header
	pieces [train.MaxBytes / minRun][]byte
	used   int // of pieces
}

// packet takes one packet. Its bytes must stay until the next flush. It reports
// whether the ICRC was right, and sets a.id.
func (c *reassembler) packet(sink Sink, ps *wire.Pseudo, a *arrival) bool {
	switch n := len(a.b); {
	case n < wire.BTHLen+wire.ICRCLen:
		sink.Drop(DropShort)
		return false
	case n > wire.MaxPacket:
		sink.Drop(DropTruncated)
		return false
	}
	id, ok := ps.Check(a.b, a.id)
	if !ok {
		sink.Drop(DropICRC)
		return false
	}
	a.id = id
	payload, err := c.h.Parse(a.b)
	if err != nil {
		sink.Drop(reasonOf(err))
		return true
	}
	info := c.h.Opcode.Info()
	switch {
	case info.Transport == wire.CNP:
		sink.Drop(DropOpcode)
		return true
	case c.h.PKey&0x7fff != wire.DefaultPKey&0x7fff:
		// The default partition's limited members may talk to us, who are a
		// full one (IBA 10.9.3).
		sink.Drop(DropPKey)
		return true
	}

	if !c.follows(info, a, len(payload)) {
		c.flush(sink)
		c.begin(info, a)
	}
	c.grow(info, payload)
	return true
}

func reasonOf(err error) Reason {
	switch {
	case errors.Is(err, wire.ErrShort):
		return DropShort
	case errors.Is(err, wire.ErrVersion):
		return DropVersion
	case errors.Is(err, wire.ErrOpcode):
		return DropOpcode
	case errors.Is(err, wire.ErrLong):
		return DropTruncated
	}
	return DropOther
}

// follows reports whether the packet just parsed, with n bytes of payload, is
// the next one of the message at hand and leaves the train one with a single
// payload size.
func (c *reassembler) follows(info *wire.OpInfo, a *arrival, n int) bool {
	t := &c.t
	if t.N == 0 || t.End || t.MTU == 0 || info.Pos.Starts() ||
		info.Kind != t.Kind || info.Transport != t.Transport ||
		c.h.DestQP != t.DestQP || c.h.XRCSRQ != t.SRQ || c.h.PSN != t.PSN.Add(t.N) ||
		a.from.Addr() != t.From || a.to != t.To {
		return false
	}
	if info.Pos.Ends() {
		if n == 0 || n > t.MTU {
			return false
		}
	} else if n != t.MTU {
		return false
	}
	return n <= train.MaxBytes-t.Len && c.used < len(c.pieces)
}

// begin makes the packet just parsed the first of a train.
func (c *reassembler) begin(info *wire.OpInfo, a *arrival) {
	t := &c.t
	t.Reset()
	t.From, t.To = a.from.Addr(), a.to
	t.TClass, t.HopLimit = a.tclass, a.hopLimit
	t.Transport, t.Kind = info.Transport, info.Kind
	t.Start = info.Pos.Starts()
	t.DestQP, t.SRQ, t.PSN = c.h.DestQP, c.h.XRCSRQ, c.h.PSN
	t.RETH, t.Atomic, t.DETH, t.Orig = c.h.RETH, c.h.Atomic, c.h.DETH, c.h.Orig
	c.used = 0
}

// grow appends the packet just parsed.
func (c *reassembler) grow(info *wire.OpInfo, payload []byte) {
	t := &c.t
	if t.N == 0 {
		t.MTU = len(payload)
	}
	t.N++
	t.Len += len(payload)
	if len(payload) != 0 {
		c.pieces[c.used] = payload
		c.used++
	}
	t.AckReq = t.AckReq || c.h.AckReq
	if info.Headers&wire.HasAETH != 0 {
		t.AETH = c.h.AETH // of a READ response, the last word counts
	}
	if info.Pos.Ends() {
		t.End, t.Extra, t.Imm, t.Solicited = true, info.Extra, c.h.Imm, c.h.Solicited
	}
}

// flush delivers the train at hand, if there is one.
func (c *reassembler) flush(sink Sink) {
	if c.t.N == 0 {
		return
	}
	c.t.Payload = mem.List{Raw: c.pieces[:c.used]}
	sink.Deliver(&c.t)
	c.t.N = 0
}
