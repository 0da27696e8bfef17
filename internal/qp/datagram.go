package qp

// UD: one packet a message, no state per peer, nothing acknowledged.

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

func (q *QP) pullDatagram(t *train.Train, w *wqe, now Time) int {
	cur := q.req.cur
	var b []byte
	if w.staged {
		var ok bool
		if b, ok = q.loadRequest(0, now); !ok {
			return 0
		}
	}
	t.N, t.Start, t.End = 1, true, true
	t.Flow, t.DestQP = q.sq.flows[q.sq.slot(cur)], w.qpn
	t.DETH = wire.DETH{QKey: w.qkey, SrcQP: q.Number}
	if w.qkey&WellKnownQKey != 0 { // IBA 10.2.5
		t.DETH.QKey = q.attr.QKey
	}
	t.Imm = w.imm
	t.Solicited = w.flags&ib.SendSolicited != 0
	if b != nil {
		t.SetRaw(b)
	} else {
		q.setPayload(t, cur, 0, int(w.len))
	}
	t.Cookie = uint64(cur) + 1
	return 1
}

// receiveDatagram takes a message, with the routing header in front
// (IBA 9.8.3.2; annex A17: 40 bytes, whatever the IP version).
func (q *QP) receiveDatagram(t *train.Train) mem.Fault {
	r := &q.resp
	if t.Kind != wire.KindSend || t.N != 1 || !t.Start || !t.End || t.Len > q.mtu {
		q.Counters.add(CntDropMalformed, t.N)
		return mem.Fault{}
	}
	if t.DETH.QKey != q.attr.QKey {
		q.Counters.add(CntDropQKey, 1)
		return mem.Fault{}
	}
	if !r.have && !q.Recv.Take(&r.taken) {
		q.Counters.add(CntDropNoReceive, 1)
		return mem.Fault{}
	}
	r.have, r.off = true, 0
	if uint64(t.Len)+ib.GRHLength > r.taken.Len {
		return q.refuseDatagram(ib.WCLocLenErr, vendorTooLong)
	}
	r.grh = wire.AppendGRH(r.grh[:0], t.From, t.To, t.TClass, t.HopLimit, datagramLen(t))
	r.raw[0] = r.grh
	r.from = mem.List{Raw: r.raw[:]}
	var m *Move
	f, _ := mem.Copy(q.receiveList(0), &r.from, ib.GRHLength, false)
	if f.OK() {
		var side mem.Side
		if f, side = mem.Copy(q.receiveList(ib.GRHLength), &t.Payload, uint64(t.Len), true); !f.OK() && side == mem.Src {
			return f // the receive stays for the next message
		}
	}
	if f.Staged() {
		if m, f = q.takeDatagram(t); m == nil {
			return f
		}
	}
	if !f.OK() {
		return q.datagramFault(f)
	}
	wc := ib.WC{ID: r.taken.ID, Op: ib.WCRecv, ByteLen: uint32(t.Len) + ib.GRHLength, SrcQP: t.DETH.SrcQP, Flags: ib.WCGRH, SL: ib.WCIPv6}
	if t.From.Unmap().Is4() {
		wc.SL = ib.WCIPv4
	}
	if t.Extra == wire.WithImm {
		wc.Imm = t.Imm
		wc.Flags |= ib.WCWithImm
	}
	q.completeBehind(m, &wc, t.Solicited)
	return mem.Fault{}
}

// takeDatagram makes a move of a message, with the routing header in front, whose receive
// lies where the CPU does not address it. It returns nil if there is no room, and the message
// is lost.
func (q *QP) takeDatagram(t *train.Train) (*Move, mem.Fault) {
	whole := *t
	b := make([]byte, len(q.resp.grh)+t.Len)
	copy(b, q.resp.grh)
	if f, _ := mem.Copy(&mem.List{Raw: [][]byte{b[len(q.resp.grh):]}}, &t.Payload, uint64(t.Len), false); !f.OK() {
		return nil, f
	}
	whole.SetRaw(b)
	m, f := q.stage(moveRequest, &whole, q.receiveList(0), true)
	if m == nil {
		q.Counters.add(CntDropFault, 1)
		return nil, f
	}
	m.cq = q.RecvCQ
	q.resp.moves = append(q.resp.moves, m)
	return m, mem.Fault{}
}

// datagramFault: the memory of the receive cannot be accessed. If it only has to
// be fetched first, the message is lost, and the next one takes the receive.
func (q *QP) datagramFault(f mem.Fault) mem.Fault {
	if f.Kind == mem.FaultPending {
		return q.notPresent(nil, f, q.resp.taken.SGEs)
	}
	return q.refuseDatagram(ib.WCLocProtErr, vendorFault(f))
}

// refuseDatagram: the receive cannot hold the message; it completes with an
// error and the queue pair with it (IBA 9.9.3, class A).
func (q *QP) refuseDatagram(status ib.WCStatus, vendor uint16) mem.Fault {
	q.resp.have = false
	q.complete(&ib.WC{ID: q.resp.taken.ID, Status: status, Op: ib.WCRecv, VendorErr: vendor}, false)
	q.enterError()
	return mem.Fault{}
}

// datagramLen is the UDP payload of the packet that carried a datagram.
func datagramLen(t *train.Train) int {
	n := wire.BTHLen + wire.HasDETH.Len() + t.Len + int(wire.PadFor(t.Len)) + wire.ICRCLen
	if t.Extra == wire.WithImm {
		n += wire.HasImm.Len()
	}
	return n
}
