package device

// The end of a grant (grant.go): nothing is stored by it afterwards, and only the call that
// ends it waits for the peer.

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// grantScene is three connections to one device. The sender of the first, from a to b, stands
// still amid a WRITE by grant. The third, from e to f, may invalidate b's region.
type grantScene struct {
	t                *testing.T
	a, b, c, d, e, f *end
}

// grantsShut reports whether all grants that an end has given are taken away.
func (e *end) grantsShut() bool {
	q := e.qp.(*QP)
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, g := range q.grants {
		if g.Open() {
			return false
		}
	}
	return true
}

// Calls that end a grant, or the queue pair that uses it, while the peer is amid a copy: the
// call returns when the bytes are there, and delays neither its queue pair nor others. The
// WRITE is not counted if its grant was taken away: it comes again by the ring, and ends as it
// would have without a grant.
func TestGrantEnds(t *testing.T) {
	const text = "last bytes"
	access, readOnly := allRemote, ib.AccessLocalWrite|ib.AccessRemoteRead
	rereg := func(s *grantScene, c provider.MRChange) { must0(s.t, s.b.mr.Rereg(c)) }
	for _, row := range []struct {
		name   string
		end    func(s *grantScene)
		status ib.WCStatus // of the WRITE
		lost   bool        // the peer gets no answer any more
		sender bool        // the sender's own call: it takes no grant away
		rings  bool        // the call needs what comes by rings
		again  func(s *grantScene)
	}{
		{name: "region closed", end: func(s *grantScene) { closeAll(s.t, s.b.mr) }, status: ib.WCRemAccessErr},
		{name: "region with fewer rights", end: func(s *grantScene) {
			rereg(s, provider.MRChange{Access: &readOnly, KeepKeys: true})
		}, status: ib.WCRemAccessErr},
		{name: "region elsewhere", end: func(s *grantScene) {
			rereg(s, provider.MRChange{Buf: make([]byte, 4096)})
		}, status: ib.WCRemAccessErr},
		{name: "region with the same rights", end: func(s *grantScene) {
			rereg(s, provider.MRChange{Access: &access, KeepKeys: true})
		}, again: func(s *grantScene) { s.a.warm(s.b) }},
		{name: "region invalidated by a message", end: func(s *grantScene) {
			s.f.recv(ib.RecvWR{})
			s.e.post(ib.SendWR{Op: ib.OpSendInv, InvalidateKey: s.b.mr.RKey()})
			if wc := s.f.ok(); wc.InvalidatedKey != s.b.mr.RKey() {
				s.t.Errorf("%+v", wc)
			}
		}, status: ib.WCRemAccessErr, rings: true},
		{name: "queue pair with fewer rights", end: func(s *grantScene) {
			s.b.modify(ib.QPAttr{State: ib.QPRTS, Access: ib.AccessRemoteRead}, ib.QPMaskAccess)
		}, status: ib.WCRemInvReqErr},
		{name: "queue pair with the same rights", end: func(s *grantScene) {
			s.b.modify(ib.QPAttr{State: ib.QPRTS, Access: ib.AccessRemote}, ib.QPMaskAccess)
		}, again: func(s *grantScene) { s.a.warm(s.b) }},
		{name: "queue pair in the error state", end: func(s *grantScene) {
			s.b.modify(ib.QPAttr{State: ib.QPErr}, 0)
		}, status: ib.WCRetryExcErr, lost: true},
		{name: "queue pair reset", end: func(s *grantScene) {
			s.b.modify(ib.QPAttr{State: ib.QPReset}, 0)
		}, status: ib.WCRetryExcErr, lost: true, again: func(s *grantScene) { // both begin anew, whatever went by grant before
			a, b := s.a, s.b
			a.modify(ib.QPAttr{State: ib.QPReset}, 0)
			a.psn, b.psn = (a.psn+1000)&0xffffff, (b.psn+77)&0xffffff
			a.connect(b)
			b.connect(a)
			a.warm(b)
			b.warm(a)
			a.recv(ib.RecvWR{})
			b.post(ib.SendWR{Op: ib.OpSend})
			a.ok()
			b.ok()
		}},
		{name: "queue pair closed", end: func(s *grantScene) { closeAll(s.t, s.b.qp) }, status: ib.WCRetryExcErr, lost: true},
		{name: "device closed", rings: true, end: func(s *grantScene) {
			closeAll(s.t, s.b.qp, s.d.qp, s.f.qp)
			for _, e := range []*end{s.b, s.d, s.f} {
				closeAll(s.t, e.mr, e.cq, e.pd)
			}
			closeAll(s.t, s.b.dev)
		}, status: ib.WCRetryExcErr, lost: true},
		{name: "sender in the error state", sender: true, end: func(s *grantScene) {
			s.a.modify(ib.QPAttr{State: ib.QPErr}, 0)
		}},
		{name: "sender closed", sender: true, end: func(s *grantScene) { closeAll(s.t, s.a.qp) }},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := newGrantScene(t)
			a, b := s.a, s.b
			if row.lost {
				a.timeoutSoon()
			}
			stuck, r, wr := a.stuckWrite(b, text)
			letGo := sync.OnceFunc(func() { close(stuck.end) })
			t.Cleanup(func() {
				letGo()
				closeAll(t, r)
			})
			was := must[ib.QPAttr](t)(b.qp.Query())
			posted, ended := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(posted)
				a.post(wr)
			}()
			<-stuck.begun
			go func() {
				defer close(ended)
				row.end(s)
				if got := string(b.buf[:len(text)]); got != text {
					t.Errorf("%q is there: the call has not waited for the peer", got)
				}
			}()
			if !row.sender {
				eventually(t, "the grant is taken away", b.grantsShut)
			}
			must[ib.QPAttr](t)(b.qp.Query())
			goesOn(t, s.c, s.d)
			stillWaits(t, ended)
			if !row.rings { // what comes by rings stays there until the call has returned
				b.dev.first.rx.Lock()
			}
			letGo()
			<-posted
			<-ended
			if !row.rings {
				b.dev.first.rx.Unlock()
			}
			if row.name == "sender closed" {
				return // its completions are gone with it
			}
			a.status(row.status)
			if row.status == ib.WCSuccess {
				if now := must[ib.QPAttr](t)(b.qp.Query()); (now.RQPSN-was.RQPSN)&0xffffff != 1 {
					t.Errorf("rq_psn is %#x, it was %#x", now.RQPSN, was.RQPSN)
				}
			}
			if row.again != nil {
				row.again(s)
			}
		})
	}
}

// A region that a peer has a grant to, and does not use just now, is invalidated by the message
// of another peer: the first one writes nothing any more.
func TestGrantInvalidatedBetweenWrites(t *testing.T) {
	s := newGrantScene(t)
	s.f.recv(ib.RecvWR{})
	s.e.post(ib.SendWR{Op: ib.OpSendInv, InvalidateKey: s.b.mr.RKey()})
	s.f.ok()
	if !s.b.grantsShut() {
		t.Error("the grant is not taken away")
	}
	before := look(s.b.buf, 0)
	s.a.buf[0] = before + 1
	s.a.post(s.a.write(s.b, 0, 1))
	s.a.status(ib.WCRemAccessErr)
	if now := look(s.b.buf, 0); now != before {
		t.Errorf("the byte is %d, it was %d", now, before)
	}
}

// newGrantScene makes the connections. The WRITE is the caller's.
func newGrantScene(t *testing.T) *grantScene {
	t.Helper()
	s := &grantScene{t: t}
	s.a, s.b = byGrants(t, 4096)
	closeAll(t, s.b.mr)
	s.b.mr = must[provider.MR](t)(s.b.pd.RegMR(s.b.buf, allRemote|ib.AccessRemoteInvalidate))
	s.a.warm(s.b)
	other := openDevice(t, provider.Config{Link: linkLocal}) // a's device may wait for a
	other.loopback = false
	s.c, s.d = connected(t, other, s.b.dev, ib.RC, 4096, nil)
	s.e, s.f = connected(t, other, s.b.dev, ib.RC, 4096, nil)
	s.f.inDomainOf(s.b, s.e)
	return s
}

// Rights are taken away again and again, each time while the peer writes, and can only write
// by grant: afterwards the memory does not change.
func TestGrantRevokedOften(t *testing.T) {
	const size = 64 << 10
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
	for round := range lastingOps(60, 800) {
		before := a.byGrant()
		eventually(t, "WRITEs go by a grant", func() bool { return a.byGrant() > before })
		b.dev.first.rx.Lock() // what comes by the ring stays there
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
		b.dev.first.rx.Unlock()
		if t.Failed() {
			return
		}
	}
}

// A grant that is asked for at the very moment at which grants are taken away is refused:
// while a call takes those of the queue pair away, and when the region is not open, because
// the call that closed it may have looked for grants already.
func TestGrantRefusedMeanwhile(t *testing.T) {
	t.Run("queue pair", func(t *testing.T) {
		a, b := byGrants(t, 4096)
		q := b.qp.(*QP)
		q.barGrants()
		for range 100 { // several of them are offered for a grant
			a.post(a.write(b, 0, 8))
			a.ok()
		}
		if n := b.grantsOpen(); n != 0 {
			t.Errorf("%d grants were given meanwhile", n)
		}
		q.mu.Lock()
		q.unbarLocked()
		q.mu.Unlock()
		a.warm(b)
	})
	t.Run("region", func(t *testing.T) {
		_, b := byGrants(t, 4096)
		region := b.mr.(*MR).region
		before := grantsOf(b.dev)
		closeAll(t, b.mr)
		if b.dev.grants.add(&grant{region: region}) {
			t.Error("a grant to a region that is closed")
		}
		if n := b.grantsOpen(); n != 0 || grantsOf(b.dev) != before-1 {
			t.Errorf("%d grants, %d are known by their region", n, grantsOf(b.dev))
		}
	})
}
