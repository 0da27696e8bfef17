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
//  1. packet checks the ICRC and then the headers of a packet: a damaged packet is
//     counted as damaged, whatever its headers look like;
//  2. follows reports whether the packet continues the current train; if not, that
//     train is delivered and the packet begins the next one;
//  3. flush delivers the current train, before the link overwrites its bytes.

// minRun is the smallest path MTU. It bounds how many pieces a reassembled train
// needs; smaller packets are delivered in shorter trains.
const minRun = 256

// arrival is one packet as it came: a UDP payload and what its IP header held.
type arrival struct {
	from     netip.AddrPort
	to       netip.Addr
	tclass   uint8
	hopLimit uint8
	id       uint16 // the IPv4 identification to try first; packet sets it to the right one
	b        []byte
}

// A reassembler makes trains of packets.
type reassembler struct {
	t      train.Train // the current train; none if t.N is 0
	h      wire.Header
	pieces [train.MaxBytes / minRun][]byte
	used   int // of pieces
}

// packet takes one packet, whose bytes must stay until the next flush. It reports
// whether the ICRC was right; if so, it has set a.id.
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
	if c.h.PKey&0x7fff != wire.DefaultPKey&0x7fff {
		// This port is a full member of the default partition: full and limited
		// members may send to it (IBA 10.9.3).
		sink.Drop(DropPKey)
		return true
	}

	if !c.follows(info, a, len(payload)) {
		c.flush(sink)
		c.begin(info, a)
	}
	c.grow(info, payload)
	if a.tclass&wire.ECNMask == wire.ECNMark {
		c.t.Marked++
	}
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

// follows reports whether the packet just parsed, with n bytes of payload,
// continues the current train: it is the message's next packet, and all packets of
// the train but the message's last keep the same payload size.
func (c *reassembler) follows(info *wire.OpInfo, a *arrival, n int) bool {
	t := &c.t
	if t.N == 0 || t.End || t.MTU == 0 || info.Pos.Starts() ||
		info.Kind != t.Kind || info.Transport != t.Transport ||
		c.h.DestQP != t.DestQP || c.h.XRCSRQ != t.SRQ || c.h.Hints != t.Hints || c.h.PSN != t.PSN.Add(t.N) ||
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
	t.DestQP, t.SRQ, t.PSN, t.Hints = c.h.DestQP, c.h.XRCSRQ, c.h.PSN, c.h.Hints
	t.RETH, t.Atomic, t.DETH, t.Orig = c.h.RETH, c.h.Atomic, c.h.DETH, c.h.Orig
	c.used = 0
}

// grow appends the packet just parsed to the current train.
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
		t.AETH = c.h.AETH // a READ response has two, and its last packet's counts
	}
	if info.Pos.Ends() {
		t.End, t.Extra, t.Imm, t.Solicited = true, info.Extra, c.h.Imm, c.h.Solicited
	}
}

// flush delivers the current train, if there is one.
func (c *reassembler) flush(sink Sink) {
	if c.t.N == 0 {
		return
	}
	c.t.Payload = mem.List{Raw: c.pieces[:c.used]}
	sink.Deliver(&c.t)
	c.t.N = 0
}
