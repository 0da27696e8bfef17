package device

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// end is one side of a connection, with everything it needs.
type end struct {
	t   testing.TB
	dev *Device
	pd  provider.PD
	cq  provider.CQ
	qp  provider.QP
	buf []byte
	mr  provider.MR
	psn uint32
	mtu ib.MTU

	// what connect sets; newEnd has the defaults, with a timeout that is long
	// enough for machines that are busy with other things
	timeout, retries, rnrRetries, rd uint8

	pause func() // between two empty polls; nil spins

	channel provider.Channel // of the completion queue; usually nil
}

const allRemote = ib.AccessLocalWrite | ib.AccessRemote

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func newEnd(t testing.TB, dev *Device, typ ib.QPType, size int) *end {
	t.Helper()
	e := &end{t: t, dev: dev, buf: make([]byte, size), psn: 0xfffff0, mtu: ib.MTU1024,
		timeout: 17, retries: 7, rnrRetries: 7, rd: 4}
	e.pd = must[provider.PD](t)(dev.AllocPD())
	e.cq = must[provider.CQ](t)(dev.CreateCQ(1024, nil))
	e.mr = must[provider.MR](t)(e.pd.RegMR(e.buf, allRemote))
	e.qp = must[provider.QP](t)(e.pd.CreateQP(provider.QPConfig{Type: typ, SendCQ: e.cq, RecvCQ: e.cq,
		Cap: ib.QPCap{MaxSendWR: 128, MaxRecvWR: 128, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInlineData: 128}}))
	return e
}

func (e *end) close() {
	closeAll(e.t, e.qp, e.mr, e.cq, e.pd)
	if e.channel != nil {
		closeAll(e.t, e.channel)
	}
}

func (e *end) modify(a ib.QPAttr, mask ib.QPAttrMask) {
	e.t.Helper()
	if err := e.qp.Modify(&a, mask|ib.QPMaskState); err != nil {
		e.t.Fatal(err)
	}
}

func (e *end) connect(o *end) {
	e.t.Helper()
	e.connectTo(o.dev.addrs[0], o.qp.Number(), o.psn, o.rd)
}

// connectTo connects to a queue pair by its address, number, first PSN and how
// many READs and atomics it will have outstanding.
func (e *end) connectTo(addr netip.Addr, qpn, psn uint32, rd uint8) {
	e.t.Helper()
	e.modify(ib.QPAttr{State: ib.QPInit, Port: 1, Access: ib.AccessRemote | ib.AccessFlush}, ib.QPMaskPort|ib.QPMaskPKeyIndex|ib.QPMaskAccess)
	rc := e.qp.Type() == ib.RC
	rtr := ib.QPMaskAV | ib.QPMaskPathMTU | ib.QPMaskDestQPN | ib.QPMaskRQPSN
	rts := ib.QPMaskSQPSN
	if rc {
		rtr |= ib.QPMaskMaxDestRDAtomic | ib.QPMaskMinRNRTimer
		rts |= ib.QPMaskTimeout | ib.QPMaskRetryCnt | ib.QPMaskRNRRetry | ib.QPMaskMaxRDAtomic
	}
	e.modify(ib.QPAttr{State: ib.QPRTR, AV: ib.AHAttr{DGID: ib.GIDFromAddr(addr)}, PathMTU: e.mtu, DestQPN: qpn,
		RQPSN: psn, MaxDestRDAtomic: rd, MinRNRTimer: 12}, rtr)
	e.modify(ib.QPAttr{State: ib.QPRTS, SQPSN: e.psn, Timeout: e.timeout, RetryCnt: e.retries, RNRRetry: e.rnrRetries, MaxRDAtomic: e.rd}, rts)
}

func (e *end) wait() ib.WC {
	e.t.Helper()
	var wc [1]ib.WC
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		n, err := e.cq.Poll(wc[:])
		if err != nil {
			e.t.Fatal(err)
		}
		if n == 1 {
			return wc[0]
		}
		if e.pause != nil {
			e.pause()
		}
	}
	e.t.Fatal("no completion")
	return ib.WC{}
}

func (e *end) ok() ib.WC {
	e.t.Helper()
	wc := e.wait()
	if err := wc.Err(); err != nil {
		e.t.Fatalf("%v (vendor %#x)", err, wc.VendorErr)
	}
	return wc
}

func (e *end) sge(off, n int) []ib.SGE {
	return []ib.SGE{{Addr: e.mr.Addr() + uint64(off), Length: uint32(n), LKey: e.mr.LKey()}}
}

func (e *end) post(wr ib.SendWR) {
	e.t.Helper()
	wr.Flags |= ib.SendSignaled
	if _, err := e.qp.PostSend([]ib.SendWR{wr}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *end) recv(wr ib.RecvWR) {
	e.t.Helper()
	if _, err := e.qp.PostRecv([]ib.RecvWR{wr}); err != nil {
		e.t.Fatal(err)
	}
}

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i*7) + seed + byte(i>>8)
	}
}

func pair(t testing.TB, mode string, typ ib.QPType, size int) (a, b *end) {
	t.Helper()
	return pairMTU(t, mode, typ, size, ib.MTU1024)
}

func pairMTU(t testing.TB, mode string, typ ib.QPType, size int, mtu ib.MTU) (a, b *end) {
	t.Helper()
	a = newEnd(t, openDevice(t, provider.Config{Link: mode}), typ, size)
	b = newEnd(t, openDevice(t, provider.Config{Link: mode}), typ, size)
	t.Cleanup(a.close)
	t.Cleanup(b.close)
	a.mtu, b.mtu = mtu, mtu
	a.connect(b)
	b.connect(a)
	return a, b
}

func TestOperations(t *testing.T) {
	for _, mode := range []string{"loop", "udp"} {
		for _, size := range []int{0, 1, 8, 1023, 1024, 1025, 65536, 3<<20 + 5} {
			t.Run(fmt.Sprint(mode, size), func(t *testing.T) {
				a, b := pair(t, mode, ib.RC, 4<<20)
				fill(a.buf, 1)
				b.recv(ib.RecvWR{ID: 7, SGL: b.sge(0, size)})
				a.post(ib.SendWR{ID: 1, Op: ib.OpSend, SGL: a.sge(0, size)})
				a.ok()
				if wc := b.ok(); wc.ID != 7 || wc.Op != ib.WCRecv || int(wc.ByteLen) != size || !bytes.Equal(a.buf[:size], b.buf[:size]) {
					t.Fatalf("send: %+v", wc)
				}
				fill(a.buf, 2)
				a.post(ib.SendWR{ID: 2, Op: ib.OpRDMAWrite, SGL: a.sge(0, size), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
				a.ok()
				if !bytes.Equal(a.buf[:size], b.buf[:size]) {
					t.Fatal("write")
				}
				fill(b.buf, 3)
				a.post(ib.SendWR{ID: 3, Op: ib.OpRDMARead, SGL: a.sge(0, size), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
				if wc := a.ok(); int(wc.ByteLen) != size || !bytes.Equal(a.buf[:size], b.buf[:size]) {
					t.Fatalf("read: %+v", wc)
				}
				b.recv(ib.RecvWR{ID: 8})
				a.post(ib.SendWR{ID: 4, Op: ib.OpRDMAWriteImm, SGL: a.sge(0, size), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey(), Imm: 0x1234})
				a.ok()
				if wc := b.ok(); wc.ID != 8 || wc.Op != ib.WCRecvRDMAWithImm || wc.Imm != 0x1234 || int(wc.ByteLen) != size {
					t.Fatalf("write imm: %+v", wc)
				}
			})
		}
	}
}

// TestCaptureFull: a capture that cannot be written does not delay traffic; the packets that
// are not in it are counted, and Close reports them, and closes the device all the same.
func TestCaptureFull(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkUDP, PCAP: "/dev/full"})
	a, b := connected(t, d, d, ib.RC, 4096, nil)
	for range 20 {
		a.post(a.write(b, 0, 4096))
		a.ok()
	}
	if n := countsOf(d)["capture_lost_packets"]; n < 20 {
		t.Errorf("%d packets counted as lost, of more than 20", n)
	}
	closeAll(t, a.qp, b.qp, a.mr, b.mr, a.cq, b.cq, a.pd, b.pd)
	if err := d.Close(); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "packets are missing from /dev/full") {
		t.Errorf("Close says %v, want %v", err, syscall.ENOSPC)
	}
	d = openDevice(t, provider.Config{Link: linkUDP, Addrs: d.addrs}) // its address is free
	if _, ok := countsOf(d)["capture_lost_packets"]; ok {
		t.Error("a device without a capture counts its packets")
	}
}
