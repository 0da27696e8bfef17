package device

// end is what most tests of this package are made of.

import (
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

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
	tclass                           uint8

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
		timeout: 17, retries: 7, rnrRetries: 7, rd: 4, pause: runtime.Gosched}
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
	e.modify(ib.QPAttr{State: ib.QPRTR, AV: ib.AHAttr{DGID: ib.GIDFromAddr(addr), TrafficClass: e.tclass}, PathMTU: e.mtu, DestQPN: qpn,
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

// connected makes two ends on two devices and connects them.
func connected(t testing.TB, x, y *Device, typ ib.QPType, size int, tune func(e *end)) (a, b *end) {
	t.Helper()
	a, b = newEnd(t, x, typ, size), newEnd(t, y, typ, size)
	t.Cleanup(a.close)
	t.Cleanup(b.close)
	if tune != nil {
		tune(a)
		tune(b)
	}
	a.connect(b)
	b.connect(a)
	return a, b
}

// state returns the state of the end's queue pair.
func (e *end) state() ib.QPState {
	e.t.Helper()
	return must[ib.QPAttr](e.t)(e.qp.Query()).State
}

// write makes a WRITE of n bytes at the same offset on both sides.
func (e *end) write(o *end, off, n int) ib.SendWR {
	return ib.SendWR{Op: ib.OpRDMAWrite, SGL: e.sge(off, n), RemoteAddr: o.mr.Addr() + uint64(off), RKey: o.mr.RKey()}
}

// read makes a READ of n bytes at the same offset on both sides.
func (e *end) read(o *end, off, n int) ib.SendWR {
	wr := e.write(o, off, n)
	wr.Op = ib.OpRDMARead
	return wr
}

// status waits for a completion and checks how it ended.
func (e *end) status(want ib.WCStatus) ib.WC {
	e.t.Helper()
	wc := e.wait()
	if wc.Status != want {
		e.t.Fatalf("request %d: %v (vendor %#x), want %v", wc.ID, wc.Status, wc.VendorErr, want)
	}
	return wc
}

// looks is how often a test looks for what must not happen: so often that it would most
// probably be seen.
const looks = 1000

// noCompletion wants no completion to come.
func (e *end) noCompletion(why string) {
	e.t.Helper()
	var wc [1]ib.WC
	for range looks {
		if n := must[int](e.t)(e.cq.Poll(wc[:])); n != 0 {
			e.t.Fatalf("%s: request %d has completed, %v", why, wc[0].ID, wc[0].Status)
		}
		runtime.Gosched()
	}
}
