package device

// XRC on the links that there are: several initiators, several queues, closing
// under load.

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// xrcLinks are the links that carry XRC.
var xrcLinks = []string{linkLoop, linkUDP}

// inbox is a shared receive queue with all that it needs: in a protection domain
// and on a completion queue of its own.
type inbox struct {
	t   testing.TB
	pd  provider.PD
	cq  provider.CQ
	srq provider.SRQ
	buf []byte
	mr  provider.MR
}

const inboxSlot = 4096

func newInbox(t testing.TB, d *Device, x provider.XRCD, slots int) *inbox {
	t.Helper()
	return newInboxOn(t, d, x, slots, nil)
}

// newInboxOn makes one with memory of an engine, if that is not nil.
func newInboxOn(t testing.TB, d *Device, x provider.XRCD, slots int, g *enginetest.Engine) *inbox {
	t.Helper()
	const access = allRemote | ib.AccessFlushGlobal
	b := &inbox{t: t}
	b.pd = must[provider.PD](t)(d.AllocPD())
	b.cq = must[provider.CQ](t)(d.CreateCQ(1024, nil))
	b.srq = must[provider.SRQ](t)(b.pd.CreateSRQ(provider.SRQConfig{MaxWR: slots, MaxSGE: 1, XRCD: x, CQ: b.cq}))
	if size := (slots + 1) * inboxSlot; g == nil {
		b.buf = make([]byte, size)
		b.mr = must[provider.MR](t)(b.pd.RegMR(b.buf, access))
	} else {
		m := g.Alloc(uint64(size))
		t.Cleanup(m.Free)
		b.buf = m.Bytes
		b.mr = must[provider.MR](t)(b.pd.(*PD).RegBacking(m, 0x7000_0000, access))
	}
	for i := range slots {
		b.post(i)
	}
	return b
}

// post posts the receive of a slot. The last slot of the memory has none: peers
// use it by RDMA.
func (b *inbox) post(slot int) {
	b.t.Helper()
	n, err := b.srq.PostRecv([]ib.RecvWR{{ID: uint64(slot), SGL: []ib.SGE{{Addr: b.mr.Addr() + uint64(slot*inboxSlot), Length: inboxSlot, LKey: b.mr.LKey()}}}})
	if n != 1 || err != nil {
		b.t.Fatal(err)
	}
}

func (b *inbox) close() { closeAll(b.t, b.srq, b.cq, b.mr, b.pd) }

func (b *inbox) wait() ib.WC {
	b.t.Helper()
	wcs := make([]ib.WC, 1)
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Microsecond) {
		if n := must[int](b.t)(b.cq.Poll(wcs)); n == 1 {
			return wcs[0]
		}
	}
	b.t.Fatal("no completion")
	return ib.WC{}
}

// initiatorTo makes an initiator on a device, with memory of its own, and a target
// for it.
func initiatorTo(t testing.TB, d, to *Device, x provider.XRCD) (a *end, target provider.QP) {
	t.Helper()
	a = newEnd(t, d, ib.RC, 64<<10)
	closeAll(t, a.qp)
	a.qp = must[provider.QP](t)(a.pd.CreateQP(provider.QPConfig{Type: ib.XRCSend, SendCQ: a.cq,
		Cap: ib.QPCap{MaxSendWR: 128, MaxSendSGE: 4, MaxInlineData: 128}}))
	b := &end{t: t, dev: to, qp: must[provider.QP](t)(x.CreateQP()), psn: 0x777, mtu: a.mtu, timeout: a.timeout, rd: a.rd}
	a.connectXRC(b)
	b.connectXRC(a)
	return a, b.qp
}

func (e *end) connectXRC(o *end) {
	e.t.Helper()
	e.modify(ib.QPAttr{State: ib.QPInit, Port: 1, Access: ib.AccessRemote | ib.AccessFlush}, ib.QPMaskPort|ib.QPMaskPKeyIndex|ib.QPMaskAccess)
	rtr := ib.QPMaskAV | ib.QPMaskPathMTU | ib.QPMaskDestQPN | ib.QPMaskRQPSN
	rts := ib.QPMaskSQPSN | ib.QPMaskTimeout
	if e.qp.Type() == ib.XRCRecv {
		rtr |= ib.QPMaskMaxDestRDAtomic | ib.QPMaskMinRNRTimer
	} else {
		rts |= ib.QPMaskRetryCnt | ib.QPMaskRNRRetry | ib.QPMaskMaxRDAtomic
	}
	e.modify(ib.QPAttr{State: ib.QPRTR, AV: ib.AHAttr{DGID: ib.GIDFromAddr(o.dev.addrs[0])}, PathMTU: e.mtu, DestQPN: o.qp.Number(),
		RQPSN: o.psn, MaxDestRDAtomic: o.rd, MinRNRTimer: 5}, rtr)
	e.modify(ib.QPAttr{State: ib.QPRTS, SQPSN: e.psn, Timeout: e.timeout, RetryCnt: e.retries, RNRRetry: e.rnrRetries, MaxRDAtomic: e.rd}, rts)
}

func onXRCLinks(t *testing.T, test func(t *testing.T, x, y *Device, domain provider.XRCD)) {
	for _, l := range xrcLinks {
		t.Run(l, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: l}), openDevice(t, provider.Config{Link: l})
			domain := must[provider.XRCD](t)(y.OpenXRCD(provider.XRCDConfig{Create: true}))
			t.Cleanup(func() { closeAll(t, domain) })
			test(t, x, y, domain)
		})
	}
}

// Several initiators send to several queues at random. Every message arrives
// once, where it was sent to, in the order in which its initiator sent it, and
// names its target; READs, WRITEs and atomics reach the memory of the queue's
// domain. (internal/qp, scripts A14, has all operations.)
func TestXRCTraffic(t *testing.T) { xrcTraffic(t, nil) }

// The same in memory that the CPU does not address.
func TestXRCStaged(t *testing.T) { xrcTraffic(t, enginetest.New(slowEngine)) }

func xrcTraffic(t *testing.T, g *enginetest.Engine) {
	onXRCLinks(t, func(t *testing.T, x, y *Device, domain provider.XRCD) {
		initiator := func() (*end, provider.QP) {
			a, target := initiatorTo(t, x, y, domain)
			if g != nil {
				a.onEngine(g)
			}
			return a, target
		}
		const initiators, queues, messages, slots = 4, 3, 120, 16
		seed := testSeed(t)
		boxes := make([]*inbox, queues)
		for i := range boxes {
			boxes[i] = newInboxOn(t, y, domain, slots, g)
			defer boxes[i].close()
		}
		var expected [queues]atomic.Int64
		var adds [queues]atomic.Uint64
		targets := map[uint32]int{}
		var wg, readers sync.WaitGroup
		var sending atomic.Bool
		sending.Store(true)
		for i := range initiators {
			a, target := initiator()
			targets[target.Number()] = i
			defer func() { closeAll(t, a.qp, target, a.mr, a.cq, a.pd) }()
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			wg.Go(func() {
				for k := range messages {
					q := rng.IntN(queues)
					box := boxes[q]
					shared := box.mr.Addr() + slots*inboxSlot
					n := 16 + rng.IntN(inboxSlot-16)
					binary.NativeEndian.PutUint64(a.buf, uint64(i))
					binary.NativeEndian.PutUint64(a.buf[8:], uint64(k))
					wr := ib.SendWR{RemoteSRQN: box.srq.Number(), RKey: box.mr.RKey(), SGL: a.sge(0, n), Imm: uint32(k)}
					switch rng.IntN(6) {
					case 0, 1:
						wr.Op = ib.OpSendImm
						expected[q].Add(1)
					case 5: // takes a receive, and writes nothing there
						wr.Op, wr.RemoteAddr, wr.SGL = ib.OpRDMAWriteImm, shared+64+uint64(8*i), a.sge(0, 8)
						expected[q].Add(1)
					case 2: // to a place of its own
						wr.Op, wr.RemoteAddr, wr.SGL = ib.OpRDMAWrite, shared+64+uint64(8*i), a.sge(0, 8)
					case 3:
						wr.Op, wr.RemoteAddr, wr.SGL = ib.OpRDMARead, shared+64+uint64(8*i), a.sge(32<<10, 8)
					case 4:
						wr.Op, wr.RemoteAddr, wr.SGL, wr.CompareAdd = ib.OpAtomicFetchAdd, shared, a.sge(32<<10, 8), uint64(k)
						adds[q].Add(uint64(k))
					}
					a.post(wr)
					if wc := a.wait(); wc.Status != ib.WCSuccess {
						t.Errorf("initiator %d, message %d: %v (vendor %#x)", i, k, wc.Status, wc.VendorErr)
						return
					}
				}
			})
		}
		for q, box := range boxes {
			readers.Go(func() {
				last := [initiators]int{}
				got := int64(0)
				wcs := make([]ib.WC, 4)
				for sending.Load() || got < expected[q].Load() {
					n, err := box.cq.Poll(wcs)
					if err != nil {
						t.Error(err)
						return
					}
					for _, wc := range wcs[:n] {
						i, known := targets[wc.QPN]
						m := box.buf[wc.ID*inboxSlot:]
						from, number := binary.NativeEndian.Uint64(m), binary.NativeEndian.Uint64(m[8:])
						if wc.Op == ib.WCRecvRDMAWithImm {
							from, number = uint64(i), uint64(wc.Imm)
						}
						if wc.Status != ib.WCSuccess || !known || from != uint64(i) || number != uint64(wc.Imm) || int(number) < last[i] {
							t.Errorf("queue %d: %+v holds message %d of %d, after %d", q, wc, number, from, last[i])
							return
						}
						last[i] = int(number)
						got++
						box.post(int(wc.ID))
					}
					if n == 0 {
						time.Sleep(10 * time.Microsecond)
					}
				}
				if got != expected[q].Load() {
					t.Errorf("queue %d got %d messages of %d", q, got, expected[q].Load())
				}
			})
		}
		wg.Wait()
		sending.Store(false)
		readers.Wait()
		a, target := initiator()
		defer func() { closeAll(t, a.qp, target, a.mr, a.cq, a.pd) }()
		for q, box := range boxes {
			a.post(ib.SendWR{Op: ib.OpRDMARead, RemoteSRQN: box.srq.Number(), RKey: box.mr.RKey(), SGL: a.sge(0, 8), RemoteAddr: box.mr.Addr() + slots*inboxSlot})
			a.ok()
			if got := binary.NativeEndian.Uint64(a.buf); got != adds[q].Load() {
				t.Errorf("queue %d: the atomics left %d, not %d", q, got, adds[q].Load())
			}
		}
	})
}

// A request to a queue that is not there, not for XRC, or of another domain is
// refused as invalid.
func TestXRCWrongQueue(t *testing.T) {
	onXRCLinks(t, func(t *testing.T, x, y *Device, domain provider.XRCD) {
		other := must[provider.XRCD](t)(y.OpenXRCD(provider.XRCDConfig{Create: true}))
		elsewhere := newInbox(t, y, other, 1)
		gone := newInbox(t, y, domain, 1)
		pd := must[provider.PD](t)(y.AllocPD())
		plain := must[provider.SRQ](t)(pd.CreateSRQ(provider.SRQConfig{MaxWR: 1, MaxSGE: 1}))
		number := gone.srq.Number()
		gone.close()
		defer func() {
			elsewhere.close()
			closeAll(t, plain, pd, other)
		}()
		for name, n := range map[string]uint32{"none": number, "other domain": elsewhere.srq.Number(), "plain": plain.Number(), "zero": 0} {
			a, target := initiatorTo(t, x, y, domain)
			a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 8), RemoteSRQN: n})
			if wc := a.wait(); wc.Status != ib.WCRemInvReqErr {
				t.Errorf("%s: %v", name, wc.Status)
			}
			wantEvent(t, y, ib.AsyncEvent{Type: ib.EventQPReqErr, QPN: target.Number()})
			closeAll(t, a.qp, target, a.mr, a.cq, a.pd)
		}
	})
}

// A queue or a target is closed while an initiator sends to it, and the program receives.
func TestXRCClosing(t *testing.T) {
	onXRCLinks(t, func(t *testing.T, x, y *Device, domain provider.XRCD) {
		for _, row := range []struct {
			name string
			end  func(box *inbox, a *end, target provider.QP)
			want ib.WCStatus
		}{
			{"queue", func(box *inbox, _ *end, _ provider.QP) { closeAll(t, box.srq) }, ib.WCRemInvReqErr},
			{"target", func(_ *inbox, a *end, target provider.QP) {
				a.timeoutSoon() // perhaps that alone ends it: it is the same error
				closeAll(t, target)
			}, ib.WCRetryExcErr},
		} {
			t.Run(row.name, func(t *testing.T) {
				box := newInbox(t, y, domain, 64)
				defer box.close()
				a, target := initiatorTo(t, x, y, domain)
				defer closeAll(t, a.qp, target, a.mr, a.cq, a.pd)
				var done atomic.Int64
				var wg sync.WaitGroup
				wg.Go(func() {
					wr := ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 3000), RemoteSRQN: box.srq.Number()}
					for a.post(wr); !t.Failed(); a.post(wr) {
						wc := a.wait()
						if wc.Status == row.want {
							return
						}
						if wc.Status != ib.WCSuccess {
							t.Errorf("%v, want %v", wc.Status, row.want)
						}
						done.Add(1)
					}
				})
				receive := func() {
					var wcs [16]ib.WC
					for _, wc := range wcs[:must[int](t)(box.cq.Poll(wcs[:]))] {
						box.post(int(wc.ID))
					}
				}
				eventually(t, "messages come", func() bool {
					receive()
					return done.Load() >= 20
				})
				row.end(box, a, target)
				wg.Wait()
			})
		}
	})
}

// timeoutSoon makes a queue pair whose peer is gone give up quickly.
func (e *end) timeoutSoon() {
	e.t.Helper()
	e.ackTimeout(8, 1)
}

// ackTimeout changes the acknowledgement timeout and the retries of an end that is connected.
func (e *end) ackTimeout(timeout, retries uint8) {
	e.t.Helper()
	for _, s := range []struct {
		a    ib.QPAttr
		mask ib.QPAttrMask
	}{
		{ib.QPAttr{State: ib.QPSQD}, 0},
		{ib.QPAttr{State: ib.QPSQD, Timeout: timeout, RetryCnt: retries}, ib.QPMaskTimeout | ib.QPMaskRetryCnt},
		{ib.QPAttr{State: ib.QPRTS}, 0},
	} {
		if err := e.qp.Modify(&s.a, s.mask|ib.QPMaskState); err != nil {
			e.t.Error(fmt.Errorf("to %v: %w", s.a.State, err))
		}
	}
}

// A domain ends with the last that has it open.
func TestXRCDomains(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	before := descriptors(t)
	file := must[*os.File](t)(os.Create(filepath.Join(t.TempDir(), "domain")))
	open := func(create bool) (provider.XRCD, error) {
		return d.OpenXRCD(provider.XRCDConfig{File: file, Create: create})
	}
	a := must[provider.XRCD](t)(open(true))
	b := must[provider.XRCD](t)(open(false))
	if a.(*XRCD).domain != b.(*XRCD).domain {
		t.Error("one file names two domains")
	}
	closeAll(t, a)
	c := must[provider.XRCD](t)(open(false))
	closeAll(t, b, c)
	_, err := open(false)
	wantErrno(t, "a domain that has ended", err, syscall.EAGAIN)
	_ = file.Close()
	if n := descriptors(t); n > before {
		t.Errorf("%d descriptors, before %d", n, before)
	}
}

// A target that was opened again is one queue pair: what is changed by one handle is seen by
// the other, and it serves its peer until both are closed. A domain cannot be closed while a
// handle that was opened with it is open.
func TestXRCOpenQP(t *testing.T) {
	x, y := openDevice(t, provider.Config{}), openDevice(t, provider.Config{})
	file := must[*os.File](t)(os.Create(filepath.Join(t.TempDir(), "domain")))
	defer file.Close()
	first := must[provider.XRCD](t)(y.OpenXRCD(provider.XRCDConfig{File: file, Create: true}))
	second := must[provider.XRCD](t)(y.OpenXRCD(provider.XRCDConfig{File: file}))
	stranger := must[provider.XRCD](t)(y.OpenXRCD(provider.XRCDConfig{Create: true}))
	box := newInbox(t, y, second, 4)
	a, made := initiatorTo(t, x, y, first)
	opened := must[provider.QP](t)(second.OpenQP(made.Number()))

	_, err := stranger.OpenQP(made.Number())
	wantErrno(t, "a target of another domain", err, syscall.EINVAL)
	_, err = second.OpenQP(a.qp.Number())
	wantErrno(t, "no target", err, syscall.EINVAL)
	wantErrno(t, "a domain in use", second.Close(), syscall.EBUSY)
	closeAll(t, made, made, first) // the second time does nothing
	if s := must[ib.QPAttr](t)(opened.Query()).State; s != ib.QPRTS {
		t.Errorf("it is in state %v", s)
	}
	_, err = made.Query()
	wantErrno(t, "what was closed", err, syscall.EINVAL)
	wantErrno(t, "what was closed", made.Modify(&ib.QPAttr{State: ib.QPErr}, ib.QPMaskState), syscall.EINVAL)

	a.post(ib.SendWR{Op: ib.OpSend, Inline: []byte("to both"), RemoteSRQN: box.srq.Number()})
	a.ok()
	if wc := box.wait(); wc.ByteLen != 7 || wc.QPN != opened.Number() {
		t.Errorf("%+v", wc)
	}
	closeAll(t, opened)
	_, err = second.OpenQP(opened.Number())
	wantErrno(t, "a target that is gone", err, syscall.EINVAL)
	box.close()
	closeAll(t, second, stranger, a.qp, a.mr, a.cq, a.pd)
}
