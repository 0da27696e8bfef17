package link

// Short records: a SEND or WRITE of one packet, or an acknowledgement, of a reliable
// connection, with only the fields that it uses. A WRITE of 8 bytes then takes one cache
// line of the ring instead of three, and each line is a trip from one core to another.
//
// Instead of the addresses the record has a number for the pair of them, which the sender
// has announced in a recPair record before.

import (
	"net/netip"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

const (
	shortBytes = 16                // kind, flags, pair, syndrome; queue pair and class, PSN and hops, MSN or immediate data
	shortWrite = shortBytes + 12   // of a WRITE: also address and key
	maxPairs   = 16                // of a channel, in each direction
	shortRun   = 512               // bytes of payload after which records are committed without more
	pairBytes  = 1 + 2*17          // the number, and both addresses
	extraShift = 4                 // where train.Train.Extra begins in the byte of flags
	flagsMask  = 1<<extraShift - 1 // the flags in it
)

// pair is the addresses that trains come from and go to.
type pair struct{ src, dst netip.Addr }

// isShort reports whether a short record can hold a train.
func isShort(t *train.Train) bool {
	if t.Transport != wire.RC || t.N != 1 || !t.Start || !t.End || t.Carried {
		return false
	}
	switch t.Kind {
	case wire.KindWrite:
		return int(t.RETH.Len) == t.Len
	case wire.KindSend:
		return true
	case wire.KindAck:
		return t.Len == 0
	}
	return false
}

func shortLen(t *train.Train) int {
	if t.Kind == wire.KindWrite {
		return shortWrite + t.Len
	}
	return shortBytes + t.Len
}

// pairOf returns the number of a pair on a channel, and announces it to the peer if it is
// new. It is not ok if all numbers are taken or the ring is full. The caller has called
// Begin.
func (k *tag) pairOf(c *shm.Channel, src, dst netip.Addr) (n int, ok bool) {
	p := pair{src, dst}
	for i := range k.sent {
		if k.out[i] == p {
			return i, true
		}
	}
	if k.sent == maxPairs {
		return 0, false
	}
	b, ok := c.Reserve(recPair, pairBytes)
	if !ok {
		return 0, false
	}
	q := packer{b}
	q.u8(uint8(k.sent))
	q.addr(src)
	q.addr(dst)
	c.Commit()
	k.out[k.sent] = p
	k.sent++
	return k.sent - 1, true
}

// takePair notes a pair that the peer has announced. It reports false if the record is
// malformed.
func (k *tag) takePair(b []byte) bool {
	if len(b) != pairBytes || int(b[0]) >= maxPairs {
		return false
	}
	q := unpacker{b}
	n := int(q.u8())
	if n >= maxPairs {
		return false
	}
	k.in[n] = pair{q.addr(), q.addr()}
	return true
}

// sendShorts sends trains as short records, up to the first that is not short or goes to
// another queue pair, and returns how many it sent. The peer sees them all at once: an
// answer and the request behind it are one trip between cores. It returns 0 if the first
// has to go by sendTrain, which also handles a missing channel, a full ring and a payload
// that cannot be read.
func (s *Shared) sendShorts(f *localFlow, ts []*train.Train) int {
	if !isShort(ts[0]) || s.cfg.UDP.Tap != nil { // sendTrain shows trains to the tap
		return 0
	}
	process, ok := f.dev.Find(ts[0].DestQP)
	if !ok || f.dev.ByPackets(process) {
		return 0
	}
	c := f.dev.channels[process].Load()
	if c == nil || !c.Begin() {
		return 0
	}
	defer c.End()
	pair, ok := c.Tag().(*tag).pairOf(c, f.src, f.dst)
	n := 0
	for bytes := 0; ok && n < len(ts) && bytes < shortRun; n++ {
		t := ts[n]
		if t.Flow != ts[0].Flow || t.DestQP != ts[0].DestQP || !isShort(t) {
			break
		}
		var b []byte
		if b, ok = c.Reserve(recShort, shortLen(t)); !ok {
			break
		}
		if fault := packPayload(packShort(b, t, pair), t); !fault.OK() {
			return 0 // nothing is committed: sent one by one, the trains before this one leave
		}
		bytes += t.Len
	}
	c.Commit()
	return n
}

// packPayload copies a train's payload to b, which is as long.
func packPayload(b []byte, t *train.Train) mem.Fault {
	if t.Len == 0 {
		return mem.Fault{}
	}
	if p := &t.Payload; len(p.Raw) == 1 && len(p.SGEs) == 0 && p.Ref == nil && p.Off == 0 && len(p.Raw[0]) >= t.Len {
		copy(b[:t.Len], p.Raw[0]) // inline data
		return mem.Fault{}
	}
	g := scratches.Get().(*scratch)
	fault := g.copyOut(b, &t.Payload, 0, t.Len)
	scratches.Put(g)
	return fault
}

// packShort writes the fields of a short record to b, and returns the part of b for the
// payload.
func packShort(b []byte, t *train.Train, pair int) []byte {
	_ = b[shortBytes-1]
	flags := uint8(t.Extra) << extraShift
	if t.AckReq {
		flags |= flagAckReq
	}
	if t.Solicited {
		flags |= flagSolicited
	}
	b[0], b[1], b[2], b[3] = uint8(t.Kind), flags, uint8(pair), uint8(t.AETH.Syndrome)
	le.PutUint32(b[4:], t.DestQP&0xffffff|uint32(t.Flow.TClass)<<24)
	le.PutUint32(b[8:], uint32(t.PSN)|uint32(t.Flow.HopLimit)<<24)
	if t.Kind == wire.KindAck {
		le.PutUint32(b[12:], t.AETH.MSN)
		return b[shortBytes:]
	}
	le.PutUint32(b[12:], t.Imm)
	if t.Kind != wire.KindWrite {
		return b[shortBytes:]
	}
	le.PutUint64(b[16:], t.RETH.VA)
	le.PutUint32(b[24:], t.RETH.RKey)
	return b[shortWrite:]
}

// unpackShort reads the fields of a short record into t, and returns its payload. It is not
// ok if the record is malformed.
func (k *tag) unpackShort(b []byte, t *train.Train) (payload []byte, ok bool) {
	var own [shortWrite]byte // the peer may change its copy at any time
	n := copy(own[:], b)
	if n < shortBytes || int(own[2]) >= maxPairs {
		return nil, false
	}
	t.Reset()
	from := &k.in[own[2]]
	t.From, t.To = from.src, from.dst
	t.TClass, t.HopLimit = own[7], own[11]
	t.Transport, t.Kind, t.Extra = wire.RC, wire.Kind(own[0]), wire.Extra(own[1]>>extraShift)
	flags := own[1] & flagsMask
	t.Start, t.End, t.N = true, true, 1
	t.AckReq, t.Solicited = flags&flagAckReq != 0, flags&flagSolicited != 0
	t.DestQP, t.PSN = le.Uint32(own[4:])&0xffffff, wire.MakePSN(le.Uint32(own[8:]))
	b = b[shortBytes:]
	switch t.Kind {
	case wire.KindAck:
		t.AETH = wire.AETH{Syndrome: wire.Syndrome(own[3]), MSN: le.Uint32(own[12:])}
		return nil, len(b) == 0 && t.From.IsValid()
	case wire.KindWrite:
		if n < shortWrite {
			return nil, false
		}
		b = b[shortWrite-shortBytes:]
		t.RETH.VA, t.RETH.RKey, t.RETH.Len = le.Uint64(own[16:]), le.Uint32(own[24:]), uint32(len(b))
	case wire.KindSend:
	default:
		return nil, false
	}
	t.Imm, t.Len, t.MTU = le.Uint32(own[12:]), len(b), len(b)
	return b, t.Len <= wire.MaxPayload && t.From.IsValid() && t.Extra <= wire.WithInv
}
