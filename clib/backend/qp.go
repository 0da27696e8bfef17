package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/provider"
)

type queuePair struct {
	inContext
	provider.QP
	sender         *device.QP // QP itself; nil for an XRC target, which sends nothing
	cookie         C.uint64_t
	sendCQ, recvCQ *completionQueue // nil: none
}

var qps = table[queuePair]{kind: C.VBE_QP}

//export vbe_create_qp
func vbe_create_qp(h C.uint64_t, n *C.struct_vbe_qp_new) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	q := &queuePair{inContext: inContext{c}, cookie: n.cookie, sendCQ: cqs.get(uint64(n.send_cq)), recvCQ: cqs.get(uint64(n.recv_cq))}
	var err error
	if q.QP, err = q.make(n); err != nil {
		return failed(err)
	}
	q.sender, _ = q.QP.(*device.QP)
	a, err := q.Query()
	if err != nil {
		_ = q.QP.Close() // the first error says more
		return failed(err)
	}
	n.cap, n.number = capTo(&a.Cap), C.uint32_t(q.Number())
	c.shared.qps.add(q.Number(), q)
	return newHandle(&qps, c, q)
}

// make creates a queue pair, or opens an XRC target.
func (q *queuePair) make(n *C.struct_vbe_qp_new) (provider.QP, error) {
	typ := qpTypes[n._type]
	if typ == ib.XRCRecv {
		x := xrcds.get(uint64(n.xrcd))
		switch {
		case x == nil:
			return nil, errStale
		case n.number != 0:
			return x.OpenQP(uint32(n.number))
		}
		return x.CreateQP()
	}
	pd := pds.get(uint64(n.pd))
	if pd == nil {
		return nil, errStale
	}
	cfg := provider.QPConfig{Type: typ, Cap: capFrom(&n.cap), SignalAll: n.signal_all != 0, AckFirst: true, NoScatterToCQE: n.no_scatter != 0}
	if q.sendCQ != nil {
		cfg.SendCQ = q.sendCQ.CQ
	}
	if q.recvCQ != nil {
		cfg.RecvCQ = q.recvCQ.CQ
	}
	if n.srq != 0 {
		s := srqs.get(uint64(n.srq))
		if s == nil {
			return nil, errStale
		}
		cfg.SRQ = s.SRQ
		cfg.Cap.MaxRecvWR, cfg.Cap.MaxRecvSGE = 0, 0 // the man page: ignored with an SRQ
	}
	return pd.CreateQP(cfg)
}

func (q *queuePair) close() error {
	// First: once the queue pair is closed, another may get its number.
	q.ctx.shared.qps.remove(q.Number(), q)
	return q.QP.Close()
}

//export vbe_modify_qp
func vbe_modify_qp(h C.uint64_t, a *C.struct_vbe_qp_attr, mask C.uint32_t) C.int64_t {
	q := qps.get(uint64(h))
	if q == nil {
		return failed(errStale)
	}
	m, err := attrMask(mask)
	if err != nil {
		return failed(err)
	}
	attr := attrFrom(a)
	return result(q.Modify(&attr, m))
}

//export vbe_query_qp
func vbe_query_qp(h C.uint64_t, to *C.struct_vbe_qp_attr) C.int64_t {
	q := qps.get(uint64(h))
	if q == nil {
		return failed(errStale)
	}
	a, err := q.Query()
	if err != nil {
		return failed(err)
	}
	*to = attrTo(&a)
	return 0
}

//export vbe_mcast
func vbe_mcast(h C.uint64_t, gid *C.uint8_t, attach C.uint32_t) C.int64_t {
	q := qps.get(uint64(h))
	if q == nil {
		return failed(errStale)
	}
	var g ib.GID
	for i, b := range view(gid, len(g)) {
		g[i] = uint8(b)
	}
	if attach != 0 {
		return result(q.AttachMcast(g))
	}
	return result(q.DetachMcast(g))
}

type sharedQueue struct {
	inContext
	provider.SRQ
	cookie C.uint64_t
}

var srqs = table[sharedQueue]{kind: C.VBE_SRQ}

//export vbe_create_srq
func vbe_create_srq(h C.uint64_t, n *C.struct_vbe_srq_new) C.int64_t {
	c, pd := contexts.get(uint64(h)), pds.get(uint64(n.pd))
	if c == nil || pd == nil {
		return failed(errStale)
	}
	if n.max_wr > maxCap || n.max_sge > maxCap || n.limit > maxCap {
		return failed(ib.Errorf("create_srq", syscall.EINVAL, "max_wr %d, max_sge %d, limit %d", n.max_wr, n.max_sge, n.limit))
	}
	cfg := provider.SRQConfig{MaxWR: int(n.max_wr), MaxSGE: int(n.max_sge), Limit: int(n.limit)}
	if n.xrcd != 0 {
		x, cq := xrcds.get(uint64(n.xrcd)), cqs.get(uint64(n.cq))
		if x == nil || cq == nil {
			return failed(errStale)
		}
		cfg.XRCD, cfg.CQ = x.XRCD, cq.CQ
	}
	srq, err := pd.CreateSRQ(cfg)
	if err != nil {
		return failed(err)
	}
	q := &sharedQueue{inContext{c}, srq, n.cookie}
	n.number = C.uint32_t(srq.Number())
	c.shared.srqs.add(srq.Number(), q)
	return newHandle(&srqs, c, q)
}

func (q *sharedQueue) close() error {
	if err := q.SRQ.Close(); err != nil {
		return err
	}
	q.ctx.shared.srqs.remove(q.Number(), q)
	return nil
}

//export vbe_modify_srq
func vbe_modify_srq(h C.uint64_t, maxWR, limit C.int64_t) C.int64_t {
	q := srqs.get(uint64(h))
	if q == nil {
		return failed(errStale)
	}
	return result(q.Modify(int(maxWR), int(limit)))
}

//export vbe_query_srq
func vbe_query_srq(h C.uint64_t, maxWR, maxSGE, limit *C.uint32_t) C.int64_t {
	q := srqs.get(uint64(h))
	if q == nil {
		return failed(errStale)
	}
	wr, sge, lim, err := q.Query()
	*maxWR, *maxSGE, *limit = C.uint32_t(wr), C.uint32_t(sge), C.uint32_t(lim)
	return result(err)
}
