package link

import (
	"errors"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// From a train to packets, for every link and for captures:
//
//  1. start checks that the train's numbers agree, and sets the headers that all
//     its packets share;
//  2. header makes the header of one packet: its opcode by its place in the
//     message, its PSN, its flags;
//  3. appendPacket makes a packet with a private copy of its payload. The UDP
//     sender calls header alone where it sends the payload from where it lies
//     (udp_send.go).

// ErrTrain is returned for a train whose packets, length and headers contradict
// each other: an error in this process, never a peer's.
var ErrTrain = errors.New("link: malformed train")

// A packetizer makes the packets of one train at a time.
type packetizer struct {
	t *train.Train
	h wire.Header

	// used by appendPacket, kept here so that its calls do not allocate
	src, dst mem.List
	piece    [1][]byte
}

// start takes the train to packetize.
func (c *packetizer) start(t *train.Train) error {
	if !wellFormed(t) {
		return ErrTrain
	}
	c.t = t
	c.src = t.Payload
	// The fields that header does not set. One by one is faster than a literal.
	h := &c.h
	// Set means migrated, the state of a queue pair that does not use path
	// migration (IBA 17.2.8). Adapters set it, and some take a clear bit for a
	// request to migrate.
	h.MigReq = true
	h.PKey = wire.DefaultPKey
	h.DestQP = t.DestQP
	h.Hints = t.Hints
	h.BECN = t.Kind == wire.KindCNP // IBA A17.9.3
	// Append leaves out the headers that a packet's opcode does not have.
	h.DETH = t.DETH
	h.XRCSRQ = t.SRQ
	h.RETH = t.RETH
	h.Atomic = t.Atomic
	h.AETH = t.AETH
	h.Orig = t.Orig
	h.Imm = t.Imm
	return nil
}

// wellFormed reports whether the payload fills the packets as it must: all but
// the message's last hold exactly MTU bytes, a multiple of four, and the last
// at least one unless it is the only one.
func wellFormed(t *train.Train) bool {
	switch {
	case t.N < 1 || t.Len < 0 || t.Len > train.MaxBytes:
		return false
	case t.N == 1 && t.End:
		return t.Len <= wire.MaxPayload
	case t.MTU < 4 || t.MTU > wire.MaxPayload || t.MTU%4 != 0:
		return false
	case !t.End:
		return t.Len%t.MTU == 0 && t.Len/t.MTU == t.N
	default:
		return t.Len > 0 && (t.Len-1)/t.MTU == t.N-1
	}
}

// packetLen returns the length of packet i's payload.
func packetLen(t *train.Train, i int) int {
	if i == t.N-1 {
		return t.Len - i*t.MTU
	}
	return t.MTU
}

// header returns the header of packet i, valid until the next call, and the
// length of its payload.
func (c *packetizer) header(i int) (h *wire.Header, n int, err error) {
	t := c.t
	last := i == t.N-1
	starts, ends := t.Start && i == 0, t.End && last
	pos, extra := wire.Middle, wire.NoExtra
	switch {
	case starts && ends:
		pos, extra = wire.Only, t.Extra
	case starts:
		pos = wire.First
	case ends:
		pos, extra = wire.Last, t.Extra
	}
	op, ok := wire.Op(t.Transport, t.Kind, pos, extra)
	if !ok {
		return nil, 0, ErrTrain
	}
	n = packetLen(t, i)
	if n != 0 && !op.Info().Payload {
		return nil, 0, ErrTrain
	}
	h = &c.h
	h.Opcode = op
	h.PSN = t.PSN.Add(i)
	h.AckReq = t.AckReq && last
	h.Solicited = t.Solicited && ends
	h.Pad = wire.PadFor(n)
	return h, n, nil
}

// packetSize returns the length of a packet with its ICRC: a UDP payload.
func packetSize(h *wire.Header, n int) int { return h.Len() + n + int(h.Pad) + wire.ICRCLen }

// appendPacket appends packet i, with header h and a copy of its n bytes of
// payload, up to its padding; seal appends the ICRC. b must have room for
// wire.MaxPacket bytes.
func (c *packetizer) appendPacket(b []byte, h *wire.Header, i, n int) ([]byte, mem.Fault) {
	b = h.Append(b)
	if n == 0 {
		return b, mem.Fault{}
	}
	b = b[:len(b)+n]
	c.piece[0] = b[len(b)-n:]
	c.dst.Raw = c.piece[:]
	c.src.Off = c.t.Payload.Off + uint64(i)*uint64(c.t.MTU)
	fault, _ := mem.Copy(&c.dst, &c.src, uint64(n), false)
	return append(b, zeros[:h.Pad]...), fault
}

var zeros [3]byte

// seal appends the ICRC of the packet that begins at start and will have the
// given IPv4 identification.
func seal(b []byte, start int, ps *wire.Pseudo, id uint16) []byte {
	p := b[start:]
	return ps.Start(id, len(p)+wire.ICRCLen).Header(p).Append(b)
}

// sealTwice is seal for a FLUSH to Linux's own device: see [wire.CRC.Twice].
func sealTwice(b []byte, start int, ps *wire.Pseudo, id uint16) []byte {
	p := b[start:]
	return ps.Start(id, len(p)+wire.ICRCLen).Header(p).Twice(p).Append(b)
}
