package device

// Grants (grant.go) that end, by either side: nothing is stored afterwards.

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// hammer has a write to b by grant until a request fails, which meanwhile causes, and checks
// how that request ended. What a writes changes all the time.
func hammer(t *testing.T, a, b *end, size int, meanwhile func(), want ...ib.WCStatus) {
	t.Helper()
	copy(a.buf, noise) // the two halves differ
	before := a.byGrant()
	var wg sync.WaitGroup
	wg.Go(func() {
		wc := a.keepPosting(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, size), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()}, 3)
		// On a busy machine packets are sent again, and the answer to the first may come for
		// what has been given up.
		again := wc.Status == ib.WCRetryExcErr && a.counted()[qp.CntRetransmits] > 0
		if !slices.Contains(want, wc.Status) && !again {
			t.Errorf("the sender sees %v (vendor %#x), want %v", wc.Status, wc.VendorErr, want)
		}
	})
	defer wg.Wait()
	eventually(t, "WRITEs go by a grant", func() bool { return a.byGrant() > before+10 })
	meanwhile()
}

// stays checks that memory does not change any more.
func stays(t *testing.T, buf []byte, what string) {
	t.Helper()
	// The end first: a writer that is not done yet has not come there.
	end := [8]byte(buf[len(buf)-8:])
	after := bytes.Clone(buf)
	time.Sleep(3 * time.Millisecond)
	if k := firstDifference(buf, after); k >= 0 || end != [8]byte(buf[len(buf)-8:]) {
		t.Errorf("byte %d changed after %s", k, what)
	}
}

// grantSizes are of WRITEs that are done in an instant, and that take some time.
var grantSizes = []int{8, 250 << 10}

// When a call that takes a right away returns, nothing is stored in the memory any more, and
// the sender gets the same error as for a request by the ring.
func TestGrantRevoked(t *testing.T) {
	for _, tt := range []struct {
		name string
		end  func(t *testing.T, a, b *end)
		want []ib.WCStatus
	}{
		{"close", func(t *testing.T, _, b *end) { closeAll(t, b.mr) }, []ib.WCStatus{ib.WCRemAccessErr}},
		{"rereg", func(t *testing.T, _, b *end) {
			access := ib.AccessLocalWrite | ib.AccessRemoteRead
			must0(t, b.mr.Rereg(provider.MRChange{Access: &access, KeepKeys: true}))
		}, []ib.WCStatus{ib.WCRemAccessErr}},
		{"rereg elsewhere", func(t *testing.T, _, b *end) {
			must0(t, b.mr.Rereg(provider.MRChange{Buf: make([]byte, 4096)}))
		}, []ib.WCStatus{ib.WCRemAccessErr}},
		{"rights of the queue pair", func(_ *testing.T, _, b *end) {
			b.modify(ib.QPAttr{State: ib.QPRTS, Access: ib.AccessRemoteRead}, ib.QPMaskAccess)
		}, []ib.WCStatus{ib.WCRemInvReqErr}},
		{"error", func(_ *testing.T, _, b *end) { b.modify(ib.QPAttr{State: ib.QPErr}, 0) }, []ib.WCStatus{ib.WCRetryExcErr}},
		{"reset", func(_ *testing.T, _, b *end) { b.modify(ib.QPAttr{State: ib.QPReset}, 0) }, []ib.WCStatus{ib.WCRetryExcErr}},
		{"queue pair closed", func(t *testing.T, _, b *end) { closeAll(t, b.qp) }, []ib.WCStatus{ib.WCRetryExcErr}},
		{"device closed", func(t *testing.T, _, b *end) {
			closeAll(t, b.qp, b.mr, b.cq, b.pd, b.dev)
		}, []ib.WCStatus{ib.WCRetryExcErr}},
		{"sender's error", func(_ *testing.T, a, _ *end) { a.modify(ib.QPAttr{State: ib.QPErr}, 0) }, []ib.WCStatus{ib.WCWRFlushErr}},
	} {
		for _, size := range grantSizes {
			t.Run(fmt.Sprintf("%s/%d", tt.name, size), func(t *testing.T) {
				for range lastingOps(3, 12) {
					a, b := byRings(t, ib.RC, 2*size)
					hurryNow(a, b)
					b.shareMemory(2 * size)
					hammer(t, a, b, size, func() {
						tt.end(t, a, b)
						stays(t, b.buf, "the end of "+tt.name)
					}, tt.want...)
				}
			})
		}
	}
}

// Rights are taken away again and again, each time while the peer writes, and can only write
// by grant: afterwards the memory does not change.
func TestGrantRevokedOften(t *testing.T) {
	const size = 250 << 10
	a, b := byGrants(t, 2*size)
	for _, e := range []*end{a, b} { // the two halves differ everywhere
		for i := range e.buf {
			e.buf[i] = byte(i / size)
		}
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	wg.Go(func() {
		for i := 0; !stop.Load(); i++ {
			a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(i%2*size, size), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
			a.ok()
		}
	})
	access := allRemote
	for round := range lastingOps(100, 800) {
		before := a.byGrant()
		eventually(t, "WRITEs go by a grant", func() bool { return a.byGrant() > before })
		b.dev.rx.Lock() // what comes by the ring stays there
		what := "Modify"
		if round%2 == 0 {
			b.modify(ib.QPAttr{State: ib.QPRTS, Access: ib.AccessRemote}, ib.QPMaskAccess)
		} else {
			what = "Rereg"
			if err := b.mr.Rereg(provider.MRChange{Access: &access, KeepKeys: true}); err != nil {
				t.Error(err)
			}
		}
		first, last := look(b.buf, 0), look(b.buf, size-1)
		for range 100 {
			if look(b.buf, size-1) != last || look(b.buf, 0) != first {
				t.Errorf("round %d: the memory changed after %s", round, what)
				break
			}
			runtime.Gosched()
		}
		b.dev.rx.Unlock()
		if t.Failed() {
			return
		}
	}
}

// Queue pairs that are reset and connected again begin anew, whatever went by grant before.
func TestGrantReconnected(t *testing.T) {
	a, b := byGrants(t, 4096)
	for range 5 {
		for i, e := range []*end{a, b} {
			o := []*end{b, a}[i]
			for range 10 {
				e.post(e.write(o, 0, 8))
				e.ok()
			}
		}
		a.modify(ib.QPAttr{State: ib.QPReset}, 0)
		b.modify(ib.QPAttr{State: ib.QPReset}, 0)
		a.psn, b.psn = (a.psn+1000)&0xffffff, (b.psn+77)&0xffffff
		a.connect(b)
		b.connect(a)
		a.warm(b)
		b.warm(a)
		a.recv(ib.RecvWR{})
		b.post(ib.SendWR{Op: ib.OpSend})
		a.ok()
		b.ok()
	}
}

// A queue pair that is closed while it writes by grant writes nothing any more.
func TestGrantSenderClosed(t *testing.T) {
	for _, size := range grantSizes {
		a, b := byGrants(t, 2*size)
		copy(a.buf, noise)
		var wg sync.WaitGroup
		wg.Go(func() {
			var wcs [16]ib.WC
			for i := 0; ; i++ {
				wr := ib.SendWR{Op: ib.OpRDMAWrite, Flags: ib.SendSignaled, SGL: a.sge(i%2*size, size), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()}
				if _, err := a.qp.PostSend([]ib.SendWR{wr}); isErrno(err, syscall.EINVAL) {
					return
				}
				if _, err := a.cq.Poll(wcs[:]); err != nil {
					t.Error(err)
				}
			}
		})
		before := a.byGrant()
		eventually(t, "WRITEs go by a grant", func() bool { return a.byGrant() > before+10 })
		closeAll(t, a.qp)
		stays(t, b.buf, "the sender's Close")
		wg.Wait()
	}
}

// hurryNow makes a peer that does not answer fail soon, where the ends are connected.
func hurryNow(ends ...*end) {
	for _, e := range ends {
		e.modify(ib.QPAttr{State: ib.QPSQD}, 0)
		e.modify(ib.QPAttr{State: ib.QPSQD, Timeout: 13, RetryCnt: 3}, ib.QPMaskTimeout|ib.QPMaskRetryCnt)
		e.modify(ib.QPAttr{State: ib.QPRTS}, 0)
	}
}

// A peer invalidates a region by a message, and another one writes to it meanwhile: when
// the message is there, no peer writes any more.
func TestGrantInvalidated(t *testing.T) {
	const size = 64 << 10
	for range lastingOps(5, 30) {
		a, b := byRings(t, ib.RC, 2*size)
		b.shareMemory(2 * size)
		closeAll(t, b.mr)
		b.mr = must[provider.MR](t)(b.pd.RegMR(b.buf, allRemote|ib.AccessRemoteInvalidate))
		c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
		// The other queue pair is in the same domain, so that it may invalidate.
		closeAll(t, d.qp)
		d.qp = must[provider.QP](t)(b.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: d.cq, RecvCQ: d.cq,
			Cap: ib.QPCap{MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1}}))
		c.modify(ib.QPAttr{State: ib.QPReset}, 0)
		c.connect(d)
		d.connect(c)
		hammer(t, a, b, size, func() {
			d.recv(ib.RecvWR{})
			c.post(ib.SendWR{Op: ib.OpSendInv, InvalidateKey: b.mr.RKey()})
			if wc := d.ok(); wc.InvalidatedKey != b.mr.RKey() {
				t.Errorf("%+v", wc)
			}
			stays(t, b.buf, "the invalidation")
		}, ib.WCRemAccessErr)
		c.ok()
		closeAll(t, d.qp)
	}
}

// After its grant was taken away, a region whose rights stay is written to by the ring, and
// soon by a new grant.
func TestGrantAgain(t *testing.T) {
	a, b := byGrants(t, 4096)
	access := allRemote
	for range 20 {
		must0(t, b.mr.Rereg(provider.MRChange{Access: &access, KeepKeys: true}))
		if n := b.grantsOpen(); n != 0 {
			t.Fatalf("%d grants are open", n)
		}
		a.warm(b)
	}
	if n := b.grantsOpen(); n != 1 || grantsOf(b.dev) != 1 {
		t.Errorf("%d grants are open, %d are known by their region", n, grantsOf(b.dev))
	}
}

// The sender keeps its peer's grants when it is modified, as long as it stays connected.
func TestGrantModifiedSender(t *testing.T) {
	a, b := byGrants(t, 4096)
	for _, s := range []ib.QPState{ib.QPRTS, ib.QPSQD, ib.QPRTS} {
		a.modify(ib.QPAttr{State: s}, 0)
	}
	before := a.byGrant()
	a.post(a.write(b, 0, 8))
	a.ok()
	if a.byGrant() != before+1 {
		t.Error("the grant is not used any more")
	}
	// While the queue drains nothing is begun.
	a.modify(ib.QPAttr{State: ib.QPSQD}, 0)
	a.buf[0]++
	a.post(a.write(b, 0, 8))
	if a.cq.(*CQ).Len() != 0 || b.buf[0] == a.buf[0] {
		t.Error("a request was done while the queue drained")
	}
	a.modify(ib.QPAttr{State: ib.QPRTS}, 0)
	a.ok()
	if b.buf[0] != a.buf[0] {
		t.Error("the request was not done")
	}
}
