package link

// Records: how trains and packets are laid out in a ring. A train's record has its
// fields, then its payload. A field that is not packed here would be lost on the way;
// TestRecordTrain fills all of them.

import (
	"encoding/binary"
	"net/netip"

	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// Types of records.
const (
	recTrain   = iota + 1 // a train: its fields, its payload
	recPackets            // the fields of Packets, their bytes
	recRef                // a train with payload by reference: its fields, where the payload lies, its last bytes
	recControl            // a control message, see control.go
	recForget             // a segment of the sender that is gone, see segment.go
	recPair               // a number for two addresses, see short.go
	recShort              // a train: some of its fields, its payload, see short.go
	recGrant              // a grant to the sender's memory, see grant.go
	recShare              // memory of the sender that the receiver can open, see opened.go
	recOpened             // memory of the receiver that the sender has opened
	recNamed              // a train: its fields, and where in opened memory its payload lies
)

// trainBytes is the length of a train's fields.
const trainBytes = 2*17 + 10 + 5*8 + 13*4

// Bits of the flags.
const (
	flagStart = 1 << iota
	flagEnd
	flagAckReq
	flagSolicited
)

var le = binary.LittleEndian

// packer writes the fields of a record one after the other; unpacker reads them.
type packer struct{ b []byte }

func (p *packer) u8(v uint8)   { p.b[0] = v; p.b = p.b[1:] }
func (p *packer) u32(v uint32) { le.PutUint32(p.b, v); p.b = p.b[4:] }
func (p *packer) u64(v uint64) { le.PutUint64(p.b, v); p.b = p.b[8:] }
func (p *packer) addr(a netip.Addr) {
	var four uint8
	if a.Is4() {
		four = 1
	}
	p.u8(four)
	b := a.As16()
	p.b = p.b[copy(p.b, b[:]):]
}

type unpacker struct{ b []byte }

func (p *unpacker) u8() (v uint8)   { v = p.b[0]; p.b = p.b[1:]; return v }
func (p *unpacker) u32() (v uint32) { v = le.Uint32(p.b); p.b = p.b[4:]; return v }
func (p *unpacker) u64() (v uint64) { v = le.Uint64(p.b); p.b = p.b[8:]; return v }
func (p *unpacker) addr() netip.Addr {
	four := p.u8() == 1
	a := netip.AddrFrom16([16]byte(p.b[:16]))
	p.b = p.b[16:]
	if four {
		a = a.Unmap()
	}
	return a
}

// packTrain writes the fields of a train that leaves by a flow into b, which is
// trainBytes long.
func packTrain(b []byte, t *train.Train, src, dst netip.Addr) {
	p := packer{b[:trainBytes]}
	var flags uint8
	for i, set := range [...]bool{t.Start, t.End, t.AckReq, t.Solicited} {
		if set {
			flags |= 1 << i
		}
	}
	p.addr(src)
	p.addr(dst)
	p.u8(t.Flow.TClass)
	p.u8(t.Flow.HopLimit)
	p.u8(uint8(t.Transport))
	p.u8(uint8(t.Kind))
	p.u8(uint8(t.Extra))
	p.u8(flags)
	p.u8(t.RETH.Flush.Placement)
	p.u8(t.RETH.Flush.Selectivity)
	p.u8(uint8(t.AETH.Syndrome))
	p.u8(0)
	p.u32(t.DestQP)
	p.u32(t.SRQ)
	p.u32(uint32(t.PSN))
	p.u32(uint32(t.N))
	p.u32(uint32(t.MTU))
	p.u64(t.RETH.VA)
	p.u32(t.RETH.RKey)
	p.u32(t.RETH.Len)
	p.u64(t.Atomic.VA)
	p.u32(t.Atomic.RKey)
	p.u64(t.Atomic.SwapAdd)
	p.u64(t.Atomic.Compare)
	p.u32(t.AETH.MSN)
	p.u64(t.Orig)
	p.u32(t.Imm)
	p.u32(t.DETH.QKey)
	p.u32(t.DETH.SrcQP)
	p.u32(uint32(t.Len))
}

// unpackTrain reads the fields of a train from b. It reports false if b is too short, or if
// the numbers of packets and bytes contradict each other or the payload exceeds most bytes.
func unpackTrain(b []byte, t *train.Train, most int) bool {
	if len(b) < trainBytes {
		return false
	}
	var own [trainBytes]byte // the peer may change its copy at any time
	copy(own[:], b)
	p := unpacker{own[:]}
	t.Reset()
	t.From, t.To = p.addr(), p.addr()
	t.TClass, t.HopLimit = p.u8(), p.u8()
	t.Transport, t.Kind, t.Extra = wire.Transport(p.u8()), wire.Kind(p.u8()), wire.Extra(p.u8())
	flags := p.u8()
	t.Start, t.End = flags&flagStart != 0, flags&flagEnd != 0
	t.AckReq, t.Solicited = flags&flagAckReq != 0, flags&flagSolicited != 0
	t.RETH.Flush.Placement, t.RETH.Flush.Selectivity = p.u8(), p.u8()
	t.AETH.Syndrome = wire.Syndrome(p.u8())
	p.u8()
	t.DestQP, t.SRQ, t.PSN = p.u32()&0xffffff, p.u32()&0xffffff, wire.MakePSN(p.u32())
	t.N, t.MTU = int(p.u32()), int(p.u32())
	t.RETH.VA, t.RETH.RKey, t.RETH.Len = p.u64(), p.u32(), p.u32()
	t.Atomic.VA, t.Atomic.RKey, t.Atomic.SwapAdd, t.Atomic.Compare = p.u64(), p.u32(), p.u64(), p.u64()
	t.AETH.MSN = p.u32()
	t.Orig, t.Imm = p.u64(), p.u32()
	t.DETH.QKey, t.DETH.SrcQP = p.u32(), p.u32()
	t.Len = int(p.u32())
	return sensible(t, most)
}

// sensible reports whether packets could have made up a train: all of them are full, but
// for the message's last, and their payload does not exceed most bytes.
func sensible(t *train.Train, most int) bool {
	if t.N == 1 {
		return t.Len <= wire.MaxPayload && t.MTU <= wire.MaxPayload
	}
	if t.N < 1 || t.N > most/minRun || t.MTU < minRun || t.MTU > wire.MaxPayload || t.Len > most {
		return false
	}
	if t.End {
		return t.Len > (t.N-1)*t.MTU && t.Len <= t.N*t.MTU
	}
	return t.Len == t.N*t.MTU
}

// packetsBytes is the length of the fields of Packets.
const packetsBytes = 2*17 + 2 + 3*4

func packPackets(b []byte, q *Packets) {
	p := packer{b[:packetsBytes]}
	p.addr(q.From.Addr())
	p.addr(q.To)
	p.u8(q.TClass)
	p.u8(q.HopLimit)
	p.u32(uint32(q.From.Port()))
	p.u32(uint32(q.ID))
	p.u32(uint32(q.Segment))
}

func unpackPackets(b []byte, q *Packets) bool {
	if len(b) < packetsBytes {
		return false
	}
	var own [packetsBytes]byte
	copy(own[:], b)
	p := unpacker{own[:]}
	from := p.addr()
	q.To = p.addr()
	q.TClass, q.HopLimit = p.u8(), p.u8()
	q.From = netip.AddrPortFrom(from, uint16(p.u32()))
	q.ID, q.Segment = uint16(p.u32()), int(p.u32())
	q.Bytes = b[packetsBytes:]
	return q.Segment > 0 && q.Segment <= datagramSize && len(q.Bytes) > 0
}
