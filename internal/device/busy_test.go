package device

// Links that are busy (transmit.go), and the transmit token.

import (
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/train"
)

// busyLink is a link that is busy while busy is set. It does not report when that ends.
type busyLink struct {
	link.Link
	busy  *atomic.Bool
	tries *atomic.Int64 // to send, while it was busy
	stuck *atomic.Pointer[chan struct{}]
}

func (l busyLink) Send(ts []*train.Train) (int, error) {
	if c := l.stuck.Load(); c != nil {
		<-*c
	}
	if l.busy.Load() {
		l.tries.Add(1)
		return 0, link.ErrBusy
	}
	return l.Link.Send(ts)
}

// freeingLink is a busyLink that counts when it may be free: a link.Freer.
type freeingLink struct {
	busyLink
	frees *atomic.Uint64
}

func (l freeingLink) Frees() uint64 { return l.frees.Load() }

// onBusyLinks makes a connection whose first end has such a link.
func onBusyLinks(t *testing.T, typ ib.QPType, reports bool) (a, b *end, l freeingLink) {
	t.Helper()
	f := link.NewFabric(link.FaultyConfig{})
	var links [2]link.Link
	for i := range links {
		links[i] = f.Attach(netip.AddrFrom4([4]byte{10, 79, 0, byte(1 + i)}))
	}
	l = freeingLink{busyLink{links[0], new(atomic.Bool), new(atomic.Int64), new(atomic.Pointer[chan struct{}])}, new(atomic.Uint64)}
	if links[0] = l.busyLink; reports {
		links[0] = l
	}
	x, y := openOn("test", links[0], nil), openOn("test", links[1], nil)
	t.Cleanup(func() { closeAll(t, x, y) })
	a, b = connected(t, x, y, typ, 4096, func(e *end) { e.pause = virtualPause })
	return a, b, l
}

// Trains that a link is too busy for are sent when it is not any more, in order, and
// no goroutine spins meanwhile: whether the link reports when it is free or not.
func TestBusyLink(t *testing.T) {
	for _, reports := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			a, b, l := onBusyLinks(t, ib.RC, reports)
			l.busy.Store(true)
			for i := range 3 {
				b.recv(ib.RecvWR{ID: uint64(i), SGL: b.sge(i, 1)})
				a.buf[i] = byte(10 + i)
				a.post(ib.SendWR{ID: uint64(i), Op: ib.OpSend, SGL: a.sge(i, 1)})
			}
			time.Sleep(20 * time.Millisecond)
			synctest.Wait()
			n := l.tries.Load()
			if reports && n > 4 || !reports && (n < 10 || n > 40) {
				t.Errorf("reports %v: %d tries in 20 ms", reports, n)
			}
			l.busy.Store(false)
			if reports {
				l.frees.Add(1)
				a.dev.resume()
			}
			for i := range 3 {
				if wc := b.ok(); wc.ID != uint64(i) || b.buf[i] != byte(10+i) {
					t.Errorf("message %d: %+v, %d", i, wc, b.buf[i])
				}
				a.ok()
			}
		})
	}
}

// A queue pair that is closed, or reset, while its link is busy leaves nothing behind.
func TestBusyLinkClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _, l := onBusyLinks(t, ib.RC, false)
		l.busy.Store(true)
		a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 1)})
		a.modify(ib.QPAttr{State: ib.QPReset}, 0)
		time.Sleep(10 * time.Millisecond)
		n := l.tries.Load()
		time.Sleep(time.Second)
		if l.tries.Load() != n {
			t.Error("what was given up is sent again and again")
		}
		closeAll(t, a.qp)
	})
}

// A datagram waits for a busy link for a while, then it is lost, and its queue pair goes on.
func TestBusyLinkDatagram(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, b, l := onBusyLinks(t, ib.RC, false)
		a := newEnd(t, c.dev, ib.UD, 64)
		a.pause = virtualPause
		defer a.close()
		a.openDatagrams(7)
		ah := must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: b.dev.GIDs()[0]}))
		l.busy.Store(true)
		for range 2 {
			start := time.Now()
			a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 1), AH: ah, RemoteQPN: b.qp.Number(), RemoteQKey: 7})
			a.ok() // it was dropped, and completes like one that has left
			if d := time.Since(start); d < datagramPatience || d > 2*datagramPatience {
				t.Errorf("it has waited for %v, not %v", d, datagramPatience)
			}
		}
		closeAll(t, ah)
	})
}

// Close waits, asleep, for the token's holder, which hands the queue pair's last trains to a
// link; no later sender gets the token.
func TestCloseWaitsForToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _, l := onBusyLinks(t, ib.RC, false)
		stuck := make(chan struct{})
		l.stuck.Store(&stuck)
		go a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 1)})
		synctest.Wait() // the poster is inside Send
		closed := make(chan struct{})
		go func() { closeAll(t, a.qp); close(closed) }()
		synctest.Wait() // all goroutines sleep: none spins
		select {
		case <-closed:
			t.Error("Close has not waited")
		default:
		}
		q := a.qp.(*QP)
		a.dev.transmit(q, a.dev.now()) // does not wait for the token
		close(stuck)
		<-closed
		l.stuck.Store(nil)
		if q.claimToken() {
			t.Error("the token of a closed queue pair can still be had")
		}
	})
}
