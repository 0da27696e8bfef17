package qp

// How scripts show what happens: one line for each train, completion, event and
// change of state.

import (
	"fmt"
	"strings"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

var kindNames = [wire.NumKinds]string{
	wire.KindSend: "SEND", wire.KindWrite: "WRITE", wire.KindReadRequest: "READ", wire.KindReadResponse: "READ-RESPONSE",
	wire.KindAck: "ACK", wire.KindAtomicAck: "ATOMIC-ACK", wire.KindCmpSwap: "CMP-SWAP", wire.KindFetchAdd: "FETCH-ADD",
	wire.KindAtomicWrite: "ATOMIC-WRITE", wire.KindFlush: "FLUSH",
	wire.KindCNP: "CNP", wire.KindGaps: "GAPS",
}

var nakNames = map[wire.Syndrome]string{
	wire.NakPSNSequence: "PSN sequence error", wire.NakInvalidReq: "invalid request",
	wire.NakRemoteAccess: "remote access error", wire.NakRemoteOpError: "remote operational error",
	wire.NakInvalidRD: "invalid RD request",
}

// posName says which packets of its message a train holds.
func posName(t *train.Train) string {
	if t.N == 1 {
		return [...]string{"middle", "first", "last", "only"}[b2i(t.Start)+2*b2i(t.End)]
	}
	return [...]string{"middles", "first..", "..last", "all"}[b2i(t.Start)+2*b2i(t.End)]
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// describe returns a train as a line; to is the end it travels to.
func describe(to *end, t *train.Train) string {
	var b strings.Builder
	name := kindNames[t.Kind]
	if t.Kind == wire.KindAck {
		switch s := t.AETH.Syndrome; {
		case s.IsAck():
		case s.IsRNR():
			name = fmt.Sprintf("RNR-NAK timer=%d", s.Value())
		case nakNames[s] != "":
			name = "NAK (" + nakNames[s] + ")"
		default:
			name = fmt.Sprintf("syndrome %#02x", uint8(s))
		}
	}
	fmt.Fprintf(&b, "%s>%s %s", to.peer.name, to.name, name)
	_, long := wire.Op(wire.RC, t.Kind, wire.First, wire.NoExtra)
	single := !long && t.Kind != wire.KindCNP && t.Kind != wire.KindGaps
	if !single || t.N != 1 || !t.Start || !t.End {
		b.WriteString(" " + posName(t))
	}
	fmt.Fprintf(&b, " psn=%06x", uint32(t.PSN))
	if t.N != 1 {
		fmt.Fprintf(&b, " n=%d", t.N)
	}
	if !single || t.Len != 0 {
		fmt.Fprintf(&b, " len=%d", t.Len)
	}
	switch {
	case t.Kind == wire.KindFlush:
		b.WriteString(" to=" + [...]string{"nothing", "all", "storage", "all+storage"}[t.RETH.Flush.Placement&3])
		if t.RETH.Flush.Placement > 3 || t.RETH.Flush.Selectivity > 1 {
			fmt.Fprintf(&b, " feth=%d/%d", t.RETH.Flush.Placement, t.RETH.Flush.Selectivity)
		}
		if t.RETH.Flush.Selectivity == wire.SelectRegion {
			fmt.Fprintf(&b, " region=%s", to.keyName(t.RETH.RKey))
			break
		}
		fallthrough
	case t.Kind == wire.KindReadRequest || t.Kind == wire.KindAtomicWrite || t.Kind == wire.KindWrite && t.Start:
		fmt.Fprintf(&b, " reth=%s:%d", to.place(t.RETH.RKey, t.RETH.VA), t.RETH.Len)
	case t.Kind == wire.KindFetchAdd:
		fmt.Fprintf(&b, " at=%s add=%d", to.place(t.Atomic.RKey, t.Atomic.VA), t.Atomic.SwapAdd)
	case t.Kind == wire.KindCmpSwap:
		fmt.Fprintf(&b, " at=%s compare=%d swap=%d", to.place(t.Atomic.RKey, t.Atomic.VA), t.Atomic.Compare, t.Atomic.SwapAdd)
	case t.Kind == wire.KindAtomicAck:
		fmt.Fprintf(&b, " orig=%d", t.Orig)
	}
	if t.Kind == wire.KindGaps && t.Payload.Raw != nil {
		b.WriteString(describeGaps(t.Payload.Raw[0]))
	}
	if t.Kind == wire.KindAck || t.Kind == wire.KindGaps || t.Kind == wire.KindAtomicAck || t.Kind == wire.KindReadResponse && (t.Start || t.End) {
		fmt.Fprintf(&b, " msn=%d", t.AETH.MSN)
	}
	if t.Kind == wire.KindReadResponse && (t.Start || t.End) && !t.AETH.Syndrome.IsAck() {
		fmt.Fprintf(&b, " syndrome=%#02x", uint8(t.AETH.Syndrome))
	}
	if t.Transport == wire.XRC && t.SRQ != 0 {
		fmt.Fprintf(&b, " srq=%#x", t.SRQ)
	}
	if t.Transport == wire.UD {
		fmt.Fprintf(&b, " qkey=%#x from=%#x to=%#x", t.DETH.QKey, t.DETH.SrcQP, t.DestQP)
	}
	switch t.Extra {
	case wire.WithImm:
		fmt.Fprintf(&b, " imm=%d", t.Imm)
	case wire.WithInv:
		fmt.Fprintf(&b, " inv=%s", to.keyName(t.Imm))
	}
	for _, f := range []struct {
		on   bool
		name string
	}{{t.AckReq, "ackreq"}, {t.Solicited, "solicited"}, {t.Bounce && t.Kind != wire.KindReadResponse, "again"},
		{t.Hints&wire.HintAlone != 0, "alone"}, {t.Hints&wire.HintFirst != 0, "first"}, {t.Hints&wire.HintProbe != 0, "probe"}} {
		if f.on {
			b.WriteString(" " + f.name)
		}
	}
	return b.String()
}

// describeGaps returns the pairs of a report.
func describeGaps(g wire.Gaps) (s string) {
	if !g.Check() {
		return fmt.Sprintf(" malformed=%x", []byte(g))
	}
	s = " behind="
	for i := range g.Pairs() {
		come, missing := g.Pair(i)
		s += fmt.Sprintf("+%d-%d", come, missing)
	}
	return s
}

// keyName is the name of the region with a key.
func (e *end) keyName(key uint32) string {
	for name, r := range e.regions {
		if r.Key() == key {
			return name
		}
	}
	return fmt.Sprintf("key:%#x", key)
}

// place is an address in a region, as name+offset.
func (e *end) place(key uint32, va uint64) string {
	name := e.keyName(key)
	r := e.regions[name]
	if r == nil {
		return fmt.Sprintf("%s@%#x", name, va)
	}
	if va < r.IOVA() {
		return fmt.Sprintf("%s-%d", name, r.IOVA()-va)
	}
	return fmt.Sprintf("%s+%d", name, va-r.IOVA())
}

// describeWC returns a completion as a line.
func describeWC(e *end, cq string, wc *ib.WC) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s: id=%d", e.name, cq, wc.ID)
	if wc.Status != ib.WCSuccess {
		fmt.Fprintf(&b, " %v", wc.Status)
		if wc.VendorErr != 0 {
			fmt.Fprintf(&b, " (vendor %#x)", wc.VendorErr)
		}
		return b.String()
	}
	fmt.Fprintf(&b, " %v success", wc.Op)
	switch wc.Op {
	case ib.WCRecv, ib.WCRecvRDMAWithImm, ib.WCRDMARead, ib.WCCompSwap, ib.WCFetchAdd:
		fmt.Fprintf(&b, " len=%d", wc.ByteLen)
	}
	if wc.Flags&ib.WCWithImm != 0 {
		fmt.Fprintf(&b, " imm=%d", wc.Imm)
	}
	if wc.Flags&ib.WCWithInv != 0 {
		fmt.Fprintf(&b, " invalidated=%s", e.keyName(wc.InvalidatedKey))
	}
	if wc.Flags&ib.WCGRH != 0 {
		fmt.Fprintf(&b, " grh from=%#x", wc.SrcQP)
	}
	if wc.QPN != e.q.Number {
		fmt.Fprintf(&b, " qpn=%#x", wc.QPN)
	}
	return b.String()
}

// describeQP returns where a queue pair stands.
func describeQP(e *end) string {
	q := e.q
	s := fmt.Sprintf("%s %v", e.name, q.State())
	if q.reliable && q.half != target {
		r := &q.req
		s += fmt.Sprintf(" una=%06x nxt=%06x max=%06x window=%d", r.una, r.nxt, r.max, r.congestion.allowance(MaxMsgSize))
		if e.credits != nil {
			s += fmt.Sprintf(" credits=%d/%d", r.heldCredits, e.credits.pool.limit.Load()-e.credits.pool.used.Load())
		}
		if q.StalledOnCredits() {
			s += " stalled"
		}
	}
	return s + fmt.Sprintf(" expects=%06x msn=%d sends=%d receives=%d on-wire=%d",
		q.resp.epsn, q.resp.msn, q.sq.tail-q.sq.head, e.recv.Len(), len(e.wire))
}
