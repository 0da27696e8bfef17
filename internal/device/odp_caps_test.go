package device

// The device supports on-demand memory exactly as ODPCaps reports: a walk over all bits of
// all transports.

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// capOps are the operations behind the bits, as requests.
var capOps = []struct {
	bit ib.ODPTransportCaps
	ops []ib.Opcode // none: it is about receives
}{
	{ib.ODPSend, []ib.Opcode{ib.OpSend, ib.OpSendImm}},
	{ib.ODPRecv, nil},
	{ib.ODPWrite, []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMAWriteImm}},
	{ib.ODPRead, []ib.Opcode{ib.OpRDMARead}},
	{ib.ODPAtomic, []ib.Opcode{ib.OpAtomicCmpSwap, ib.OpAtomicFetchAdd}},
	{ib.ODPSRQRecv, nil},
	{ib.ODPFlush, []ib.Opcode{ib.OpFlush}},
	{ib.ODPAtomicWrite, []ib.Opcode{ib.OpAtomicWrite}},
}

func TestODPCaps(t *testing.T) {
	const all = ib.ODPSend | ib.ODPRecv | ib.ODPWrite | ib.ODPRead | ib.ODPAtomic | ib.ODPSRQRecv | ib.ODPFlush | ib.ODPAtomicWrite
	d := openDevice(t, provider.Config{Link: linkLoop})
	caps := d.ODPCaps()
	if !caps.Supported || !caps.Implicit || caps.Notifier == "" || caps.Scan == "" || caps.Mappings == "" {
		t.Errorf("%+v", caps)
	}
	for _, c := range []struct {
		typ       ib.QPType
		got, want ib.ODPTransportCaps
	}{
		{ib.RC, caps.RC, all}, {ib.XRCSend, caps.XRC, all},
		{ib.UC, caps.UC, ib.ODPSend | ib.ODPRecv | ib.ODPWrite},
		{ib.UD, caps.UD, ib.ODPSend | ib.ODPRecv | ib.ODPSRQRecv},
	} {
		if c.got != c.want {
			t.Errorf("%v: %#x, want %#x", c.typ, c.got, c.want)
		}
		if c.got&^all != 0 {
			t.Errorf("%v: unknown bits %#x", c.typ, c.got&^all)
		}
		for _, op := range capOps {
			t.Run(fmt.Sprintf("%v/%#x", c.typ, op.bit), func(t *testing.T) {
				if c.got&op.bit == 0 {
					testCapRefused(t, d, c.typ, op.bit, op.ops)
				} else if c.typ != ib.XRCSend {
					testCapWorks(t, d, c.typ, op.bit, op.ops)
				}
			})
		}
	}
}

// testCapRefused: a bit that is not set is an operation that cannot be asked for.
func testCapRefused(t *testing.T, d *Device, typ ib.QPType, bit ib.ODPTransportCaps, ops []ib.Opcode) {
	if bit == ib.ODPSRQRecv {
		pd := must[provider.PD](t)(d.AllocPD())
		cq := must[provider.CQ](t)(d.CreateCQ(16, nil))
		srq := must[provider.SRQ](t)(pd.CreateSRQ(provider.SRQConfig{MaxWR: 4, MaxSGE: 1}))
		defer closeAll(t, srq, cq, pd)
		_, err := pd.CreateQP(provider.QPConfig{Type: typ, SendCQ: cq, RecvCQ: cq, SRQ: srq, Cap: ib.QPCap{MaxSendWR: 1, MaxSendSGE: 1}})
		wantErrno(t, "a shared receive queue", err, syscall.EINVAL)
		return
	}
	if len(ops) == 0 {
		t.Fatal("receives are not refused")
	}
	a, b := newEnd(t, d, typ, 64), newEnd(t, d, typ, 64)
	t.Cleanup(a.close)
	t.Cleanup(b.close)
	m := newODPEnd(a, false)
	defer closeAll(t, m.odp)
	wr := ib.SendWR{SGL: m.at(0, 8), RemoteAddr: uint64(m.addr) + 64, RKey: m.odp.RKey()}
	reach(a, b, &wr)
	for _, wr.Op = range ops {
		n, err := a.qp.PostSend([]ib.SendWR{wr})
		if n != 0 {
			t.Fatalf("%v was posted", wr.Op)
		}
		wantErrno(t, wr.Op.String(), err, syscall.EINVAL)
	}
}

// testCapWorks: a bit that is set is an operation that works, with on-demand memory
// on both sides that was never touched.
func testCapWorks(t *testing.T, d *Device, typ ib.QPType, bit ib.ODPTransportCaps, ops []ib.Opcode) {
	a, b := newEnd(t, d, typ, 64), newEnd(t, d, typ, 64)
	t.Cleanup(a.close)
	var srq provider.SRQ
	t.Cleanup(func() {
		closeAll(t, b.qp)
		if srq != nil {
			closeAll(t, srq)
		}
		closeAll(t, b.mr, b.cq, b.pd)
	})
	x, y := newODPEnd(a, false), newODPEnd(b, false)
	defer closeAll(t, x.odp, y.odp)
	if bit == ib.ODPSRQRecv {
		closeAll(t, b.qp)
		srq = must[provider.SRQ](t)(b.pd.CreateSRQ(provider.SRQConfig{MaxWR: 4, MaxSGE: 1}))
		b.qp = must[provider.QP](t)(b.pd.CreateQP(provider.QPConfig{Type: typ, SendCQ: b.cq, RecvCQ: b.cq, SRQ: srq, Cap: ib.QPCap{MaxSendWR: 1, MaxSendSGE: 1}}))
		if _, err := srq.PostRecv([]ib.RecvWR{{ID: 9, SGL: y.at(0, 4096)}}); err != nil {
			t.Fatal(err)
		}
	}
	wr := ib.SendWR{SGL: x.at(0, 8), RemoteAddr: uint64(y.addr) + 4096, RKey: y.odp.RKey()}
	reach(a, b, &wr)
	if len(ops) == 0 {
		ops = []ib.Opcode{ib.OpSend}
	}
	for _, wr.Op = range ops {
		receives := wr.Op == ib.OpSend || wr.Op == ib.OpSendImm || wr.Op == ib.OpRDMAWriteImm
		if receives && bit != ib.ODPSRQRecv {
			b.recv(ib.RecvWR{ID: 9, SGL: y.at(8192, 4096)})
		}
		req := wr
		if wr.Op == ib.OpFlush {
			req.SGL, req.RemoteLength, req.FlushType, req.FlushLevel = nil, 64, ib.FlushGlobal, ib.FlushRange
		}
		a.post(req)
		a.ok()
		if receives {
			b.ok()
		}
	}
	if bit != ib.ODPFlush && y.odp.PagingStats().PageFaults == 0 {
		t.Errorf("the peer's memory was not brought in: %+v", y.odp.PagingStats())
	}
}
