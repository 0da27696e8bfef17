package device

// The wire format of the control messages between processes about the targets of a shared
// XRC domain: see xrc_share.go, which also explains T and S.

import (
	"encoding/binary"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// Kinds of control messages.
const (
	ctlHandoff = iota + 1 // T to S, with a train
	ctlMore               // T to S, with a train; of hand-off 0: a repetition
	ctlRecall             // T to S: make an offer, or have the peer send again what is missing
	ctlEnd                // T to S: forget the proxy
	ctlOffer              // S to T: take the target back
)

// controlMessage is a message between T and S.
type controlMessage struct {
	kind    uint8
	qpn     uint32
	handoff uint32
	count   uint32 // offer: trains of this hand-off that S has got
	stand   qp.Handoff
	lost    bool         // offer: trains were lost, also if the count is right
	failed  ib.EventType // offer: the event of a proxy that has failed; or 0

	// Hand-off: what the proxy is made with.
	domain host.Domain
	attr   ib.QPAttr // Access, PathMTU, DestQPN, MinRNRTimer, MaxDestRDAtomic, AV
}

const (
	shortControl = 1 + 4 + 4 + 4 + 4 + 4 + 4 + 1 + 1
	longControl  = shortControl + 16 + 4 + 1 + 4 + 1 + 1 + 16 + 4 + 3
)

func (w *controlMessage) append(b []byte) []byte {
	le := binary.LittleEndian
	var flags uint8
	for i, set := range [...]bool{w.stand.AnyRead, w.stand.Owes, w.lost, w.stand.NakSent} {
		if set {
			flags |= 1 << i
		}
	}
	b = append(b, w.kind)
	b = le.AppendUint32(b, w.qpn)
	b = le.AppendUint32(b, w.handoff)
	b = le.AppendUint32(b, w.count)
	b = le.AppendUint32(b, uint32(w.stand.Expected))
	b = le.AppendUint32(b, w.stand.Messages)
	b = le.AppendUint32(b, uint32(w.stand.ReadEnd))
	b = append(b, flags, uint8(w.failed))
	if w.kind != ctlHandoff {
		return b
	}
	a := &w.attr
	b = le.AppendUint64(b, w.domain[0])
	b = le.AppendUint64(b, w.domain[1])
	b = le.AppendUint32(b, uint32(a.Access))
	b = append(b, uint8(a.PathMTU))
	b = le.AppendUint32(b, a.DestQPN)
	b = append(b, a.MinRNRTimer, a.MaxDestRDAtomic)
	b = append(b, a.AV.DGID[:]...)
	b = le.AppendUint32(b, a.AV.FlowLabel)
	return append(b, uint8(a.AV.SGIDIndex), a.AV.TrafficClass, a.AV.HopLimit)
}

// parse reads a control message, and reports whether its length fits its kind. The values are
// checked where they are used.
func (w *controlMessage) parse(b []byte) bool {
	le := binary.LittleEndian
	if len(b) != shortControl && len(b) != longControl || b[0] == ctlHandoff != (len(b) == longControl) {
		return false
	}
	flags := b[25]
	*w = controlMessage{kind: b[0], qpn: le.Uint32(b[1:]) & 0xffffff, handoff: le.Uint32(b[5:]), count: le.Uint32(b[9:]), lost: flags&4 != 0,
		stand: qp.Handoff{Expected: wire.MakePSN(le.Uint32(b[13:])), Messages: le.Uint32(b[17:]), ReadEnd: wire.MakePSN(le.Uint32(b[21:])),
			AnyRead: flags&1 != 0, Owes: flags&2 != 0, NakSent: flags&8 != 0}, failed: ib.EventType(b[26])}
	if w.kind != ctlHandoff {
		return true
	}
	b = b[shortControl:]
	a := &w.attr
	w.domain = host.Domain{le.Uint64(b), le.Uint64(b[8:])}
	a.Access, a.PathMTU, a.DestQPN = ib.Access(le.Uint32(b[16:])), ib.MTU(b[20]), le.Uint32(b[21:])
	a.MinRNRTimer, a.MaxDestRDAtomic = b[25], b[26]
	copy(a.AV.DGID[:], b[27:])
	a.AV.FlowLabel, a.AV.SGIDIndex, a.AV.TrafficClass, a.AV.HopLimit = le.Uint32(b[43:]), int(b[47]), b[48], b[49]
	return true
}
