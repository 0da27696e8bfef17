package device

// Asynchronous events, and shared receive queues, which raise two of them.

import (
	"bytes"
	"fmt"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// sharing replaces the queue pair of an end, which is not connected yet, by one
// that receives from a shared queue.
func (e *end) sharing(srq provider.SRQ) {
	e.t.Helper()
	closeAll(e.t, e.qp)
	e.qp = must[provider.QP](e.t)(e.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: e.cq, RecvCQ: e.cq, SRQ: srq,
		Cap: ib.QPCap{MaxSendWR: 16, MaxSendSGE: 1}}))
}

// shared makes n connections from device x to device y, where they receive from
// one shared queue and complete to one completion queue.
func shared(t testing.TB, mode string, n int, cfg provider.SRQConfig) (srq provider.SRQ, from, to []*end) {
	t.Helper()
	x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
	var first *end
	for range n {
		a, b := newEnd(t, x, ib.RC, 64<<10), newEnd(t, y, ib.RC, 64<<10)
		if first == nil {
			first = b
			srq = must[provider.SRQ](t)(b.pd.CreateSRQ(cfg))
			pd, cq, mr := b.pd, b.cq, b.mr
			t.Cleanup(func() { closeAll(t, srq, mr, cq, pd) })
		} else {
			closeAll(t, b.qp, b.mr, b.cq, b.pd)
			b.pd, b.cq, b.mr, b.buf = first.pd, first.cq, first.mr, first.buf
		}
		b.sharing(srq)
		t.Cleanup(func() { closeAll(t, b.qp) })
		t.Cleanup(a.close)
		a.connect(b)
		b.connect(a)
		from, to = append(from, a), append(to, b)
	}
	return srq, from, to
}

func (e *end) postShared(srq provider.SRQ, id uint64, off, n int) {
	e.t.Helper()
	if _, err := srq.PostRecv([]ib.RecvWR{{ID: id, SGL: e.sge(off, n)}}); err != nil {
		e.t.Fatal(err)
	}
}

// Messages of all connections take receives of the shared queue in the order in
// which they were posted; each completion names its queue pair.
func TestSRQ(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			const conns, deep = 3, 6
			srq, from, to := shared(t, mode, conns, provider.SRQConfig{MaxWR: deep, MaxSGE: 1})
			next, arrived := uint64(0), uint64(0)
			for range deep {
				to[0].postShared(srq, next, int(next%deep)*4096, 4096)
				next++
			}
			_, err := srq.PostRecv([]ib.RecvWR{{}})
			wantErrno(t, "one more than fits", err, syscall.ENOMEM)
			_, err = to[0].qp.PostRecv([]ib.RecvWR{{}})
			wantErrno(t, "receive for the queue pair itself", err, syscall.EINVAL)
			for i := range 30 {
				a := from[i%conns]
				size := 1 + i*67%4096
				fill(a.buf[:size], byte(i))
				a.post(ib.SendWR{Op: ib.OpSendImm, SGL: a.sge(0, size), Imm: uint32(i)})
				a.ok()
				wc := to[0].ok()
				if wc.ID != arrived || wc.QPN != to[i%conns].qp.Number() || int(wc.ByteLen) != size || wc.Imm != uint32(i) {
					t.Fatalf("message %d: %+v", i, wc)
				}
				if got := to[0].buf[wc.ID%deep*4096:][:size]; !bytes.Equal(got, a.buf[:size]) {
					t.Fatalf("message %d: wrong from byte %d on", i, firstDifference(got, a.buf[:size]))
				}
				arrived++
				to[0].postShared(srq, next, int(next%deep)*4096, 4096)
				next++
			}
		})
	}
}

// The limit event comes once, when fewer receives than the limit are left, and
// the limit is then off; it can be armed again. Resizing keeps the receives.
func TestSRQLimit(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			srq, from, to := shared(t, mode, 1, provider.SRQConfig{MaxWR: 8, MaxSGE: 1, Limit: 6})
			a, b, dev := from[0], to[0], to[0].dev
			for i := range 8 {
				b.postShared(srq, uint64(i), 0, 8)
			}
			send := func() { a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 8)}); a.ok(); b.ok() }
			wantLimit := func(want int) {
				t.Helper()
				if _, _, limit, err := srq.Query(); limit != want || err != nil {
					t.Errorf("the limit is %d, want %d (%v)", limit, want, err)
				}
			}
			send()
			send() // 6 are left: not fewer than 6
			noEvent(t, dev)
			wantLimit(6)
			send()
			wantEvent(t, dev, ib.AsyncEvent{Type: ib.EventSRQLimitReached, SRQ: srq.Number()})
			wantLimit(0)
			send()
			noEvent(t, dev)

			must0(t, srq.Modify(-1, 4)) // 4 are left
			noEvent(t, dev)
			send()
			wantEvent(t, dev, ib.AsyncEvent{Type: ib.EventSRQLimitReached, SRQ: srq.Number()})

			wantErrno(t, "a limit above the size", srq.Modify(-1, 9), syscall.EINVAL)
			wantErrno(t, "a size below what waits", srq.Modify(2, -1), syscall.EINVAL)
			wantErrno(t, "no size", srq.Modify(0, -1), syscall.EINVAL)
			must0(t, srq.Modify(3, -1))
			if size, sge, _, err := srq.Query(); size != 3 || sge != 1 || err != nil {
				t.Errorf("size %d, %d SGEs, %v", size, sge, err)
			}
			must0(t, srq.Modify(100, 50))
			for range 3 {
				send() // the first one falls below 50
			}
			wantEvent(t, dev, ib.AsyncEvent{Type: ib.EventSRQLimitReached, SRQ: srq.Number()})
		})
	}
}

// A queue pair in the error state leaves the shared receives to the others, and
// raises an event when it has taken its last one.
func TestSRQLastWQE(t *testing.T) {
	srq, from, to := shared(t, linkLoop, 2, provider.SRQConfig{MaxWR: 8, MaxSGE: 1})
	for i := range 4 {
		to[0].postShared(srq, uint64(i), 0, 8)
	}
	to[0].modify(ib.QPAttr{State: ib.QPErr}, 0)
	wantEvent(t, to[0].dev, ib.AsyncEvent{Type: ib.EventQPLastWQEReached, QPN: to[0].qp.Number()})
	noEvent(t, to[0].dev)
	for i := range 4 {
		from[1].post(ib.SendWR{Op: ib.OpSend, SGL: from[1].sge(0, 8)})
		from[1].ok()
		if wc := to[1].ok(); wc.ID != uint64(i) || wc.QPN != to[1].qp.Number() {
			t.Errorf("%+v", wc)
		}
	}
}

// A packet that comes before the queue pair is in RTS raises "communication established",
// once.
func TestEventCommEst(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
			a, b := newEnd(t, x, ib.RC, 64), newEnd(t, y, ib.RC, 64)
			t.Cleanup(a.close)
			t.Cleanup(b.close)
			a.connect(b)
			b.modify(ib.QPAttr{State: ib.QPInit, Port: 1, Access: ib.AccessRemote}, ib.QPMaskPort|ib.QPMaskPKeyIndex|ib.QPMaskAccess)
			b.modify(ib.QPAttr{State: ib.QPRTR, AV: ib.AHAttr{DGID: x.GIDs()[0]}, PathMTU: b.mtu, DestQPN: a.qp.Number(),
				RQPSN: a.psn, MaxDestRDAtomic: 1, MinRNRTimer: 12}, ib.QPMaskAV|ib.QPMaskPathMTU|ib.QPMaskDestQPN|ib.QPMaskRQPSN|
				ib.QPMaskMaxDestRDAtomic|ib.QPMaskMinRNRTimer)
			noEvent(t, y)
			for range 3 {
				a.post(a.write(b, 0, 8))
				a.ok()
			}
			wantEvent(t, y, ib.AsyncEvent{Type: ib.EventCommEst, QPN: b.qp.Number()})
			noEvent(t, y)
			noEvent(t, x)
		})
	}
}

// A request that the responder refuses ends both queue pairs and changes nothing. If it took no
// receive, the responder's program learns of it by an event, else by the receive's completion.
// The protocol has more reasons, with one of these four outcomes (internal/qp, scripts
// 11.6.2).
func TestRefused(t *testing.T) {
	for _, tt := range []struct {
		name     string
		request  func(a, b *end) ib.SendWR
		sent     ib.WCStatus
		event    ib.EventType // 0: none
		receive  func(b *end) []ib.SGE
		received ib.WCStatus
	}{
		{name: "access violation", request: func(_, b *end) ib.SendWR {
			return ib.SendWR{Op: ib.OpRDMAWrite, RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey() ^ 1}
		}, sent: ib.WCRemAccessErr, event: ib.EventQPAccessErr},
		{name: "invalid request", request: func(_, b *end) ib.SendWR {
			must0(b.t, b.qp.Modify(&ib.QPAttr{Access: ib.AccessRemoteRead}, ib.QPMaskAccess))
			return ib.SendWR{Op: ib.OpRDMAWrite, RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()}
		}, sent: ib.WCRemInvReqErr, event: ib.EventQPReqErr},
		{name: "receive too short", receive: func(b *end) []ib.SGE { return b.sge(0, 63) }, sent: ib.WCRemInvReqErr, received: ib.WCLocLenErr},
		{name: "receive past the end", receive: func(b *end) []ib.SGE { return b.sge(len(b.buf)-63, 64) }, sent: ib.WCRemOpErr, received: ib.WCLocProtErr},
	} {
		for _, mode := range allLinks {
			t.Run(fmt.Sprint(tt.name, "/", mode), func(t *testing.T) {
				a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.RC, 4096, nil)
				before := bytes.Clone(b.buf)
				fill(a.buf, 9)
				wr := ib.SendWR{Op: ib.OpSend}
				if tt.receive != nil {
					b.recv(ib.RecvWR{ID: 1, SGL: tt.receive(b)})
				} else {
					wr = tt.request(a, b)
				}
				b.recv(ib.RecvWR{ID: 2, SGL: b.sge(0, 64)})
				wr.SGL = a.sge(0, 64)
				a.post(wr)
				a.status(tt.sent)
				if tt.event != 0 {
					wantEvent(t, b.dev, ib.AsyncEvent{Type: tt.event, QPN: b.qp.Number()})
				} else if wc := b.status(tt.received); wc.ID != 1 {
					t.Errorf("%+v", wc)
				}
				if wc := b.status(ib.WCWRFlushErr); wc.ID != 2 {
					t.Errorf("%+v", wc)
				}
				noEvent(t, b.dev)
				noEvent(t, a.dev)
				if a.state() != ib.QPErr || b.state() != ib.QPErr {
					t.Errorf("the queue pairs are in %v and %v", a.state(), b.state())
				}
				if k := firstDifference(b.buf, before); k >= 0 {
					t.Errorf("byte %d was changed", k)
				}
			})
		}
	}
}

// A send queue that is being drained starts nothing new, finishes what is under
// way, and raises an event when it is done.
func TestEventSQDrained(t *testing.T) {
	a, b := pair(t, linkUDP, ib.RC, 1<<20)
	fill(a.buf, 2)
	a.post(a.write(b, 0, 1<<20))
	must0(t, a.qp.Modify(&ib.QPAttr{State: ib.QPSQD, SQDAsyncNotify: true}, ib.QPMaskState|ib.QPMaskSQDAsyncNotify))
	a.post(ib.SendWR{ID: 2, Op: ib.OpRDMAWrite, SGL: a.sge(0, 8), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
	a.ok()
	wantEvent(t, a.dev, ib.AsyncEvent{Type: ib.EventSQDrained, QPN: a.qp.Number()})
	if k := firstDifference(a.buf, b.buf); k >= 0 {
		t.Errorf("wrong from byte %d on", k)
	}
	if n, _ := a.cq.Poll(make([]ib.WC, 1)); n != 0 {
		t.Error("a request was started in SQD")
	}
	a.modify(ib.QPAttr{State: ib.QPRTS}, 0)
	if wc := a.ok(); wc.ID != 2 {
		t.Errorf("%+v", wc)
	}
}
