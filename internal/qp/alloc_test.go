package qp

import (
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/train"
)

// TestAllocs: from the posting of a request to its completion nothing allocates,
// whatever the operation and the transport.
func TestAllocs(t *testing.T) {
	for _, typ := range []ib.QPType{ib.RC, ib.UC, ib.UD, ib.XRCSend} {
		s := usual()
		s.typ = typ
		peer := s
		if typ == ib.XRCSend {
			peer.typ = ib.XRCRecv
		}
		w := newPair(t, s, peer)
		a, b := w.a, w.b
		src, dst := a.regions["mem"], b.register("flushable", 4096, testPD, allRights|ib.AccessFlushGlobal)
		ah := ib.NewAH(ib.AHAttr{}, &Address{PD: testPD, Flow: a.flow(b)}, nil)
		list, eight, room := []ib.SGE{src.at(0, 200)}, []ib.SGE{src.at(0, 8)}, []ib.SGE{dst.at(0, 4096)}
		long := []ib.SGE{src.at(0, 500), src.at(1000, 1000)}
		if typ == ib.UD {
			long = list
		}
		for _, c := range []struct {
			op   ib.Opcode
			wr   ib.SendWR
			recv bool
		}{
			{ib.OpSend, ib.SendWR{SGL: list}, true},
			{ib.OpSend, ib.SendWR{SGL: long}, true},
			{ib.OpSend, ib.SendWR{Inline: make([]byte, 60)}, true},
			{ib.OpSendImm, ib.SendWR{SGL: list, Imm: 3}, true},
			{ib.OpRDMAWrite, ib.SendWR{SGL: long}, false},
			{ib.OpRDMAWriteImm, ib.SendWR{SGL: list}, true},
			{ib.OpRDMARead, ib.SendWR{SGL: long}, false},
			{ib.OpAtomicFetchAdd, ib.SendWR{SGL: eight, CompareAdd: 1}, false},
			{ib.OpAtomicCmpSwap, ib.SendWR{SGL: eight}, false},
			{ib.OpAtomicWrite, ib.SendWR{SGL: eight}, false},
			{ib.OpAtomicWrite, ib.SendWR{Inline: make([]byte, 8)}, false},
			{ib.OpFlush, ib.SendWR{RemoteLength: 100, FlushType: ib.FlushGlobal, FlushLevel: ib.FlushRange}, false},
		} {
			if opTable[c.op].types&(1<<typ) == 0 {
				continue
			}
			c.wr.Op, c.wr.Flags, c.wr.AH, c.wr.RemoteQPN, c.wr.RemoteQKey = c.op, ib.SendSignaled, ah, b.q.Number, s.qkey
			c.wr.RKey, c.wr.RemoteAddr, c.wr.RemoteSRQN = dst.Key(), dst.IOVA(), testSRQ
			wrs, recvs := []ib.SendWR{c.wr}, []ib.RecvWR{{SGL: room}}
			var out, in train.Train
			var wcs [4]ib.WC
			cycle := func() {
				if c.recv {
					b.recv.Post(recvs)
				}
				if _, err := a.q.PostSend(wrs); err != nil {
					t.Fatal(err)
				}
				for a.q.Pull(&out, w.now) {
					out.From, out.To = a.addr, b.addr
					if f := b.q.Receive(&out, w.now); !f.OK() {
						t.Fatal(f)
					}
					a.q.Sent(&out, w.now)
				}
				for b.q.Pull(&in, w.now) {
					in.From, in.To = b.addr, a.addr
					if f := a.q.Receive(&in, w.now); !f.OK() {
						t.Fatal(f)
					}
				}
				if a.sendCQ.Poll(wcs[:]) != 1 || wcs[0].Status != ib.WCSuccess {
					t.Fatalf("%v %v: %+v", typ, c.op, wcs[0])
				}
				if n := b.recvCQ.Poll(wcs[:]); c.recv != (n == 1) || n == 1 && wcs[0].Status != ib.WCSuccess {
					t.Fatalf("%v %v: %d receives, %+v", typ, c.op, n, wcs[0])
				}
				w.now++
			}
			if n := testing.AllocsPerRun(100, cycle); n != 0 {
				t.Errorf("%v %v of %d pieces allocates %v times", typ, c.op, len(c.wr.SGL), n)
			}
		}
	}
}

// TestRetransmissionAllocs: losing packets does not allocate either.
func TestRetransmissionAllocs(t *testing.T) {
	w := newPair(t, usual(), usual())
	a, b := w.a, w.b
	wrs := []ib.SendWR{{Op: ib.OpRDMAWrite, Flags: ib.SendSignaled, SGL: []ib.SGE{a.regions["mem"].at(0, 600)},
		RKey: b.regions["mem"].Key(), RemoteAddr: b.regions["mem"].IOVA()}}
	var t1 train.Train
	var wcs [4]ib.WC
	if n := testing.AllocsPerRun(100, func() {
		if _, err := a.q.PostSend(wrs); err != nil {
			t.Fatal(err)
		}
		for a.q.Pull(&t1, w.now) { // all of it is lost
		}
		w.now = a.q.Deadline()
		a.q.Tick(w.now)
		for a.q.Pull(&t1, w.now) {
			t1.From, t1.To = a.addr, b.addr
			b.q.Receive(&t1, w.now)
		}
		for b.q.Pull(&t1, w.now) {
			t1.From, t1.To = b.addr, a.addr
			a.q.Receive(&t1, w.now)
		}
		if a.sendCQ.Poll(wcs[:]) != 1 || wcs[0].Status != ib.WCSuccess {
			t.Fatalf("%+v", wcs[0])
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
