package device

// A peer that goes away: the network between two devices breaks, in virtual time. Requests
// must fail when their retries are used up, neither earlier nor much later, and everything
// behind them must be flushed. (internal/qp, scripts 9.7.6.1.3 and 9.7.5.2.8, has the rules;
// these tests have the device's timers.)

import (
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// breakable is a network that delivers nothing while it is broken.
type breakable struct{ broken atomic.Bool }

func (n *breakable) filter(link.Hop, []byte) link.Verdict {
	if n.broken.Load() {
		return link.Discard
	}
	return link.Deliver
}

// The acknowledgement timeout T is 4.096 µs × 2^timeout, and a request fails
// after retry_cnt+1 of them without progress (IBA 9.7.6.1.3 lets a device take
// up to 4T for each).
func TestRetriesExhausted(t *testing.T) {
	for _, row := range []struct{ timeout, retries uint8 }{{8, 7}, {14, 0}, {17, 3}} {
		timeout, retries := row.timeout, row.retries
		bubble(t, fmt.Sprintf("timeout%d/retry%d", timeout, retries), func(t *testing.T) {
			var net breakable
			_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near, Filter: net.filter}, nil)
			a, b := connected(t, devs[0], devs[1], ib.RC, 4096, func(e *end) {
				e.timeout, e.retries, e.pause = timeout, retries, func() { time.Sleep(wire.AckTimeout(timeout) / 64) }
			})
			a.post(a.write(b, 0, 100))
			a.ok()
			for i := range 3 {
				a.recv(ib.RecvWR{ID: uint64(100 + i)})
			}
			net.broken.Store(true)
			start := time.Now()
			a.post(ib.SendWR{ID: 1, Op: ib.OpRDMAWrite, SGL: a.sge(0, 4000), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
			a.post(ib.SendWR{ID: 2, Op: ib.OpRDMARead, SGL: a.sge(0, 10), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
			a.post(ib.SendWR{ID: 3, Op: ib.OpSend})
			a.failsAt(start, wire.AckTimeout(timeout), int(retries))
			if wc := a.status(ib.WCRetryExcErr); wc.ID != 1 {
				t.Errorf("request %d failed, want 1", wc.ID)
			}
			for _, id := range []uint64{2, 3, 100, 101, 102} {
				if wc := a.status(ib.WCWRFlushErr); wc.ID != id {
					t.Errorf("request %d was flushed, want %d", wc.ID, id)
				}
			}
			if st := a.state(); st != ib.QPErr {
				t.Errorf("the queue pair is in %v", st)
			}
		})
	}
}

// failsAt waits for the first completion and checks when it came.
func (e *end) failsAt(start time.Time, unit time.Duration, retries int) {
	e.t.Helper()
	for e.cq.(*CQ).Len() == 0 {
		if time.Since(start) > time.Hour {
			e.t.Fatal("no completion")
		}
		e.pause()
	}
	least, most := unit*time.Duration(retries+1), unit*time.Duration(retries+2)+unit/8
	if took := time.Since(start); took < least || took > most {
		e.t.Errorf("failed after %v, want %v to %v", took, least, most)
	}
}

// All connections to a peer that goes away fail, also those that could not send
// anything because others had all the credits of the peer, and also when the program
// does not poll.
func TestRetriesExhaustedOnAllConnections(t *testing.T) {
	for _, polled := range []bool{false, true} {
		bubble(t, fmt.Sprintf("polled=%v", polled), func(t *testing.T) {
			var net breakable
			_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near, Filter: net.filter}, &provider.Config{Window: 8})
			const conns, each = 4 * peerWindows, 3
			var ends [conns]*end
			for i := range ends {
				a, b := connected(t, devs[0], devs[1], ib.RC, 64<<10, func(e *end) {
					e.timeout, e.retries, e.pause = 12, 2, virtualPause
				})
				a.post(a.write(b, 0, 64<<10))
				a.ok()
				ends[i] = a
			}
			net.broken.Store(true)
			start := time.Now()
			for _, a := range ends {
				for i := range each {
					wr := ib.SendWR{ID: uint64(i), Op: ib.OpRDMAWrite, SGL: a.sge(0, 64<<10), RemoteAddr: a.mr.Addr(), RKey: 1}
					a.post(wr)
				}
			}
			most := wire.AckTimeout(12) * 3 * conns * 2
			if !polled {
				time.Sleep(most)
			}
			for i, a := range ends {
				a.pause = func() {
					if time.Sleep(time.Millisecond); time.Since(start) > most+time.Second {
						t.Fatalf("connection %d of %d still waits after %v", i, conns, time.Since(start))
					}
				}
				a.status(ib.WCRetryExcErr)
				for range each - 1 {
					a.status(ib.WCWRFlushErr)
				}
			}
		})
	}
}

// A network that comes back in time: nothing is lost, nothing fails.
func TestNetworkComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var net breakable
		_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near, Filter: net.filter}, nil)
		a, b := connected(t, devs[0], devs[1], ib.RC, 64<<10, func(e *end) { e.timeout, e.retries, e.pause = 14, 7, virtualPause })
		fill(a.buf, 3)
		net.broken.Store(true)
		a.post(a.write(b, 0, len(a.buf)))
		time.Sleep(wire.AckTimeout(14)*7 - time.Millisecond)
		net.broken.Store(false)
		a.ok()
		if k := firstDifference(b.buf, a.buf); k >= 0 {
			t.Errorf("wrong from byte %d on", k)
		}
		// (The last repetition leaves after seven timeouts.) A break as long again does not add
		// up with the first one.
		net.broken.Store(true)
		a.post(a.read(b, 0, len(a.buf)))
		time.Sleep(wire.AckTimeout(14)*7 - time.Millisecond)
		net.broken.Store(false)
		a.ok()
	})
}

// A peer that answers RNR NAK for ever uses up rnr_retry, and 7 means for ever.
func TestReceiverNeverReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near}, nil)
		a, b := connected(t, devs[0], devs[1], ib.RC, 4096, func(e *end) { e.rnrRetries, e.pause = 3, virtualPause })
		start := time.Now()
		a.post(ib.SendWR{ID: 5, Op: ib.OpSend, SGL: a.sge(0, 8)})
		if wc := a.status(ib.WCRNRRetryExcErr); wc.ID != 5 {
			t.Errorf("%+v", wc)
		}
		// Timer code 12 is 0.64 ms (IBA table 45), waited for three times.
		if took := time.Since(start); took < 3*640*time.Microsecond || took > 4*640*time.Microsecond {
			t.Errorf("failed after %v", took)
		}
		if n := countsOf(b.dev)["rnr_naks_sent"]; n != 4 {
			t.Errorf("%d RNR NAKs, want 4", n)
		}

		c, d := connected(t, devs[0], devs[1], ib.RC, 4096, func(e *end) { e.rnrRetries, e.pause = 7, virtualPause })
		fill(c.buf, 1)
		c.post(ib.SendWR{Op: ib.OpSend, SGL: c.sge(0, 4096)})
		time.Sleep(2 * time.Second)
		d.recv(ib.RecvWR{ID: 9, SGL: d.sge(0, 4096)})
		c.ok()
		if wc := d.ok(); wc.ID != 9 || firstDifference(c.buf, d.buf) >= 0 {
			t.Errorf("%+v", wc)
		}
	})
}
