package device

// Inline receive between devices.

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Inline data is as the environment has it, and as a queue pair's configuration has it.
func TestScatterMode(t *testing.T) {
	for _, c := range []struct {
		own, other string
		want       bool
	}{
		{"", "", true}, {"1", "", true}, {"0", "", false}, {"", "0", false}, {"", "1", true}, {"1", "0", true}, {"0", "1", false},
	} {
		t.Setenv("VERBENA_SCATTER_TO_CQE", c.own)
		t.Setenv("MLX5_SCATTER_TO_CQE", c.other)
		e := newEnd(t, openDevice(t, provider.Config{Link: linkLoop}), ib.RC, 64)
		if got := e.qp.(*QP).core.Scatter; got != c.want {
			t.Errorf("%q and %q: %v, want %v", c.own, c.other, got, c.want)
		}
		off := must[provider.QP](t)(e.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: e.cq, RecvCQ: e.cq, NoScatterToCQE: true}))
		if got := off.(*QP).core.Scatter; got {
			t.Errorf("switched off: %v", got)
		}
		closeAll(t, off)
		e.close()
	}
}

// Everything of every short length arrives as ever, on every link, for every type of
// queue pair, with and without.
func TestInlineReceive(t *testing.T) {
	for _, mode := range allLinks {
		for _, typ := range []ib.QPType{ib.RC, ib.UC} {
			for _, env := range []string{"0", "1"} {
				t.Run(fmt.Sprintf("%s/%v/%s", mode, typ, env), func(t *testing.T) {
					t.Setenv("VERBENA_SCATTER_TO_CQE", env)
					a, b := connected(t, openFor(t, mode), openFor(t, mode), typ, 4096, nil)
					dm, dmr := b.deviceMemory(64)
					fill(a.buf, 3)
					added := uint64(0)
					for _, n := range []int{1, 7, 8, 20, 21, 63, 64, 65, 80} {
						b.recv(ib.RecvWR{ID: 1, SGL: b.sge(100, 80)})
						b.recv(ib.RecvWR{ID: 2, SGL: []ib.SGE{b.sge(300, 20)[0], b.sge(400, 80)[0]}})
						a.post(ib.SendWR{Op: ib.OpSendImm, SGL: a.sge(n, n), Imm: uint32(n)})
						a.ok()
						a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(2*n, n)})
						a.ok()
						if wc := b.ok(); wc.ID != 1 || int(wc.ByteLen) != n || wc.Imm != uint32(n) || !bytes.Equal(b.buf[100:100+n], a.buf[n:2*n]) {
							t.Fatalf("%d bytes: %+v", n, wc)
						}
						k := min(n, 20)
						if wc := b.ok(); wc.ID != 2 || int(wc.ByteLen) != n || !bytes.Equal(b.buf[300:300+k], a.buf[2*n:2*n+k]) ||
							!bytes.Equal(b.buf[400:400+n-k], a.buf[2*n+k:3*n]) {
							t.Fatalf("%d bytes in two pieces: %+v", n, wc)
						}
						if typ == ib.UC {
							continue
						}
						a.post(ib.SendWR{Op: ib.OpRDMARead, SGL: a.sge(3000, n), RemoteAddr: b.mr.Addr() + 100, RKey: b.mr.RKey()})
						if wc := a.ok(); int(wc.ByteLen) != n || !bytes.Equal(a.buf[3000:3000+n], b.buf[100:100+n]) {
							t.Fatalf("READ of %d bytes: %+v", n, wc)
						}
						a.post(ib.SendWR{Op: ib.OpAtomicFetchAdd, SGL: a.sge(3100, 8), RemoteAddr: b.mr.Addr() + 2048 - b.mr.Addr()%8, RKey: b.mr.RKey(), CompareAdd: 3})
						if a.ok(); binary.NativeEndian.Uint64(a.buf[3100:]) != added {
							t.Fatal("an atomic returned something else")
						}
						added += 3
					}
					// Not into device memory.
					b.recv(ib.RecvWR{ID: 3, SGL: []ib.SGE{{Length: 64, LKey: dmr.LKey()}}})
					counted := countsOf(b.dev)["inline_receives"]
					a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 64)})
					a.ok()
					b.ok()
					if !bytes.Equal(fromDM(t, dm, 0, 64), a.buf[:64]) || countsOf(b.dev)["inline_receives"] != counted {
						t.Error("device memory")
					}
					if (counted > 0) != (env == "1") {
						t.Errorf("%d inline receives", counted)
					}
				})
			}
		}
	}
}

// The bytes are there when a completion event has led to a poll; the region that was
// closed before the poll fails it, and the queue pair.
func TestInlineReceiveWrittenBack(t *testing.T) {
	for _, mode := range allLinks {
		t.Run(mode, func(t *testing.T) {
			x, y := openFor(t, mode), openFor(t, mode)
			a, b := newEnd(t, x, ib.RC, 64), newEnd(t, y, ib.RC, 64)
			b.channel = must[provider.Channel](t)(y.CreateChannel())
			b.withQueue(16, b.channel)
			t.Cleanup(a.close)
			t.Cleanup(b.close)
			a.connect(b)
			b.connect(a)
			fill(a.buf, 9)
			other := make([]byte, 64)
			mr := must[provider.MR](t)(b.pd.RegMR(other, ib.AccessLocalWrite))
			b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 64)})
			b.recv(ib.RecvWR{ID: 2, SGL: []ib.SGE{{Addr: mr.Addr(), Length: 64, LKey: mr.LKey()}}})
			if err := b.cq.RequestNotify(false); err != nil {
				t.Fatal(err)
			}
			a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 64)})
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			cq, err := b.channel.Next(ctx)
			if err != nil {
				t.Fatal(err)
			}
			cq.Ack(1)
			if b.buf[5] == a.buf[5] {
				t.Error("the bytes are there before the poll")
			}
			if wc := b.ok(); wc.ID != 1 || !bytes.Equal(a.buf, b.buf) {
				t.Errorf("%+v, %x", wc, b.buf)
			}
			a.ok()
			a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 64)})
			a.ok()
			eventually(t, "the second message waits", func() bool { return b.cq.(*CQ).Len() == 1 })
			closeAll(t, mr)
			if wc := b.status(ib.WCLocProtErr); wc.ID != 2 || wc.VendorErr == 0 {
				t.Errorf("%+v", wc)
			}
			if b.state() != ib.QPErr || !bytes.Equal(other, make([]byte, 64)) {
				t.Errorf("%v, %x", b.state(), other)
			}
		})
	}
}

// BenchmarkInlineReceive is what inline receive costs, or saves: a SEND of 64 bytes
// to its receive's completion, and a READ, with and without.
func BenchmarkInlineReceive(b *testing.B) {
	for _, mode := range allLinks {
		for _, op := range []ib.Opcode{ib.OpSend, ib.OpRDMARead} {
			for _, env := range []string{"0", "1"} {
				b.Run(fmt.Sprintf("%s/%v/%s", mode, op, map[string]string{"0": "off", "1": "on"}[env]), func(b *testing.B) {
					b.Setenv("VERBENA_SCATTER_TO_CQE", env)
					x, y := connected(b, openFor(b, mode), openFor(b, mode), ib.RC, 64, nil)
					wrs := []ib.SendWR{{Op: op, Flags: ib.SendSignaled, SGL: x.sge(0, 64), RemoteAddr: y.mr.Addr(), RKey: y.mr.RKey()}}
					recvs := []ib.RecvWR{{SGL: y.sge(0, 64)}}
					var wc [1]ib.WC
					wait := func(e *end) {
						for n := 0; n == 0; {
							n, _ = e.cq.Poll(wc[:])
						}
					}
					for b.Loop() {
						if op == ib.OpSend {
							_, _ = y.qp.PostRecv(recvs)
						}
						_, _ = x.qp.PostSend(wrs)
						if op == ib.OpSend {
							wait(y)
						}
						wait(x)
					}
				})
			}
		}
	}
}

// reconnect makes a pair anew of two ends.
func reconnect(a, b *end) {
	for _, e := range []*end{a, b} {
		e.modify(ib.QPAttr{State: ib.QPReset}, 0)
	}
	a.connect(b)
	b.connect(a)
}

// Inline data that waits when its queue pair is reset is never written back, and later fenced
// requests do not wait for it. Inline data that waits when the queue pair fails is written back
// when it is polled.
func TestInlineReceiveReset(t *testing.T) {
	for _, mode := range allLinks {
		t.Run(mode, func(t *testing.T) {
			a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.RC, 4096, nil)
			fill(b.buf, 5)
			result := func() {
				a.post(ib.SendWR{Op: ib.OpRDMARead, SGL: a.sge(0, 40), RemoteAddr: b.mr.Addr() + 100, RKey: b.mr.RKey()})
				eventually(t, "the result waits", func() bool { return a.cq.(*CQ).Len() == 1 })
			}
			result()
			reconnect(a, b)
			if n := a.cq.(*CQ).Len(); n != 0 {
				t.Fatalf("%d completions of before", n)
			}
			a.post(ib.SendWR{Op: ib.OpRDMAWrite, Flags: ib.SendFence, SGL: a.sge(0, 40), RemoteAddr: b.mr.Addr() + 2000, RKey: b.mr.RKey()})
			a.ok()
			if !bytes.Equal(b.buf[2000:2040], make([]byte, 40)) {
				t.Errorf("a result of before: %x", b.buf[2000:2040])
			}
			result()
			a.modify(ib.QPAttr{State: ib.QPErr}, 0)
			if a.ok(); !bytes.Equal(a.buf[:40], b.buf[100:140]) {
				t.Errorf("the result is lost: %x", a.buf[:40])
			}
		})
	}
}

// A request whose result waits as inline data while its region is closed fails with a
// protection error, and the fenced request behind it is flushed.
func TestInlineReceiveGone(t *testing.T) {
	for _, mode := range allLinks {
		t.Run(mode, func(t *testing.T) {
			a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.RC, 4096, nil)
			mr := must[provider.MR](t)(a.pd.RegMR(make([]byte, 64), ib.AccessLocalWrite))
			a.post(ib.SendWR{ID: 1, Op: ib.OpRDMARead, SGL: []ib.SGE{{Addr: mr.Addr(), Length: 8, LKey: mr.LKey()}}, RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
			eventually(t, "the result waits", func() bool { return a.cq.(*CQ).Len() == 1 })
			closeAll(t, mr)
			a.post(ib.SendWR{ID: 2, Op: ib.OpRDMAWrite, Flags: ib.SendFence, SGL: a.sge(0, 8), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
			if wc := a.status(ib.WCLocProtErr); wc.ID != 1 || wc.VendorErr == 0 {
				t.Errorf("%+v", wc)
			}
			if wc := a.status(ib.WCWRFlushErr); wc.ID != 2 || a.state() != ib.QPErr {
				t.Errorf("%+v, %v", wc, a.state())
			}
		})
	}
}
