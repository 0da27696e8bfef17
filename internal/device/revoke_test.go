package device

// Closing things that are in use: queue pairs and regions under load. When a
// region is closed the memory does not change any more; a peer that wants more
// of it learns that.

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// hurry makes a peer that does not answer fail soon, but not one that a busy
// machine lets wait: T is 34 ms, and there are three retries.
func hurry(e *end) { e.timeout, e.retries = 13, 3 }

// keepPosting posts a request again and again, several at a time, until one
// fails, and returns that one's completion; a general error stands for a queue
// that was closed. Every other time the local memory is that behind the list, if
// there is so much.
func (e *end) keepPosting(wr ib.SendWR, deep int) ib.WC {
	e.t.Helper()
	wr.Flags |= ib.SendSignaled
	first := wr.SGL[0].Addr
	other := first + uint64(wr.SGL[0].Length)
	if other+uint64(wr.SGL[0].Length) > e.mr.Addr()+e.mr.Length() {
		other = first
	}
	var wc [1]ib.WC
	out := 0
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); {
		for ; out < deep; out++ {
			first, other = other, first
			wr.SGL[0].Addr = first
			if _, err := e.qp.PostSend([]ib.SendWR{wr}); err != nil {
				return ib.WC{Status: ib.WCGeneralErr}
			}
		}
		n, err := e.cq.Poll(wc[:])
		switch {
		case err != nil:
			return ib.WC{Status: ib.WCGeneralErr}
		case n == 0:
			runtime.Gosched()
		case wc[0].Status != ib.WCSuccess:
			return wc[0]
		default:
			out--
		}
	}
	e.t.Error("requests still succeed")
	return ib.WC{}
}

// The target closes the region that its peer writes, reads, adds to or sends
// into. From then on the memory stays as it is, and the peer gets the error.
func TestRegionClosedUnderLoad(t *testing.T) {
	const size = 256 << 10
	for _, mode := range []string{linkLoop, linkUDP} {
		for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead, ib.OpAtomicFetchAdd, ib.OpSend} {
			t.Run(fmt.Sprintf("%s/%v", mode, op), func(t *testing.T) {
				for range lastingOps(2, 6) {
					a, b := pair(t, mode, ib.RC, 2*size)
					copy(a.buf, noise) // the two halves differ
					wr := ib.SendWR{Op: op, SGL: a.sge(0, size), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey(), CompareAdd: 1}
					want := ib.WCRemAccessErr
					switch op {
					case ib.OpAtomicFetchAdd:
						wr.SGL = a.sge(0, 8)
					case ib.OpSend:
						want = ib.WCRemOpErr
					}
					var stop atomic.Bool
					var wg sync.WaitGroup
					defer wg.Wait()
					defer stop.Store(true)
					wg.Go(func() {
						// On a busy machine packets are sent again. A NAK of the
						// repetition may come for what has been answered since, and
						// counts for nothing; then retries end it.
						again := func() bool { return countsOf(a.dev)["retransmitted_packets"] > 0 }
						if wc := a.keepPosting(wr, 2); wc.Status != want && !(wc.Status == ib.WCRetryExcErr && again()) {
							t.Errorf("the peer sees %v (vendor %#x), want %v", wc.Status, wc.VendorErr, want)
						}
					})
					if op == ib.OpSend {
						wg.Go(func() { b.keepReceiving(&stop, size) })
					}
					eventually(t, "some requests are done", func() bool { return countsOf(b.dev)["tx_packets"] > 0 })
					closeAll(t, b.mr)
					// The end first: a writer that is not done yet has not come there.
					end := [8]byte(b.buf[size-8:])
					after := bytes.Clone(b.buf)
					time.Sleep(5 * time.Millisecond)
					if k := firstDifference(b.buf, after); k >= 0 || end != [8]byte(b.buf[size-8:]) {
						t.Errorf("byte %d changed after Close had returned", k)
					}
					eventually(t, "the target's queue pair fails", func() bool { return b.state() == ib.QPErr })
					stop.Store(true)
					wg.Wait()
				}
			})
		}
	}
}

// keepReceiving keeps receives posted.
func (e *end) keepReceiving(stop *atomic.Bool, size int) {
	var wcs [16]ib.WC
	for !stop.Load() {
		e.qp.PostRecv([]ib.RecvWR{{SGL: e.sge(0, size)}}) // full is fine
		if _, err := e.cq.Poll(wcs[:]); err != nil {
			e.t.Error(err)
			return
		}
		runtime.Gosched()
	}
}

// The initiator closes the region that it sends from or reads into: its request
// fails here, and a READ leaves the memory alone from then on.
func TestLocalRegionClosedUnderLoad(t *testing.T) {
	const size = 256 << 10
	for _, mode := range []string{linkLoop, linkUDP} {
		for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead} {
			t.Run(fmt.Sprintf("%s/%v", mode, op), func(t *testing.T) {
				a, b := pair(t, mode, ib.RC, size)
				fill(b.buf, 1)
				var wg sync.WaitGroup
				wg.Go(func() {
					wc := a.keepPosting(ib.SendWR{Op: op, SGL: a.sge(0, size), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()}, 2)
					if wc.Status != ib.WCLocProtErr {
						t.Errorf("%v (vendor %#x), want %v", wc.Status, wc.VendorErr, ib.WCLocProtErr)
					}
				})
				time.Sleep(10 * time.Millisecond)
				closeAll(t, a.mr)
				after := bytes.Clone(a.buf)
				wg.Wait()
				if k := firstDifference(a.buf, after); k >= 0 {
					t.Errorf("byte %d changed after Close had returned", k)
				}
			})
		}
	}
}

// A queue pair is closed while its peer sends to it: the peer's requests fail
// for want of an answer, and nothing else happens to either device.
func TestQPClosedUnderItsPeer(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
			a, b := connected(t, x, y, ib.RC, 64<<10, hurry)
			c, d := connected(t, x, y, ib.RC, 64<<10, nil)
			var wg sync.WaitGroup
			wg.Go(func() {
				if wc := a.keepPosting(a.write(b, 0, 64<<10), 4); wc.Status != ib.WCRetryExcErr {
					t.Errorf("%v, want %v", wc.Status, ib.WCRetryExcErr)
				}
			})
			time.Sleep(5 * time.Millisecond)
			closeAll(t, b.qp)
			after := bytes.Clone(b.buf)
			wg.Wait()
			if k := firstDifference(b.buf, after); k >= 0 {
				t.Errorf("byte %d changed after Close had returned", k)
			}
			if n := countsOf(y)["drop_no_qp"]; n == 0 {
				t.Error("no packet for the closed queue pair was counted")
			}
			fill(c.buf, 7)
			c.post(c.write(d, 0, 64<<10))
			c.ok()
			if k := firstDifference(c.buf, d.buf); k >= 0 {
				t.Errorf("the other connection is wrong from byte %d on", k)
			}
		})
	}
}

// A receiver that has its message and closes its queue pair at once owes the
// sender nothing: the message was acknowledged before it was delivered. A program
// that has seen the target's completion may rely on the initiator's.
func TestCloseAfterReceive(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		for _, op := range []ib.Opcode{ib.OpSend, ib.OpRDMAWriteImm} {
			t.Run(fmt.Sprintf("%s/%v", mode, op), func(t *testing.T) {
				x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
				for i := range lastingOps(20, 120) {
					a, b := newEnd(t, x, ib.RC, 64), newEnd(t, y, ib.RC, 64)
					hurry(a)
					a.connect(b)
					b.connect(a)
					b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 64)})
					a.post(ib.SendWR{Op: op, SGL: a.sge(0, 8), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
					b.ok()
					b.close()
					wc := a.wait()
					a.close()
					if wc.Status != ib.WCSuccess {
						t.Fatalf("message %d arrived, and its sender is told %v", i, wc.Status)
					}
				}
			})
		}
	}
}

// Everybody closes everything at once, under load, from several goroutines.
func TestCloseStorm(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			for range lastingOps(3, 15) {
				x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
				var ends []*end
				var wg sync.WaitGroup
				for range 4 {
					a, b := connected(t, x, y, ib.RC, 64<<10, hurry)
					ends = append(ends, a, b)
					wg.Go(func() { a.keepPosting(a.write(b, 0, 64<<10), 4) })
					wg.Go(func() { b.keepPosting(b.read(a, 0, 64<<10), 4) })
				}
				time.Sleep(3 * time.Millisecond)
				objects := []closer{x, y}
				for _, e := range ends {
					objects = append(objects, e.pd, e.cq, e.mr, e.qp)
				}
				for w := range 3 {
					wg.Go(func() { closeStorm(t, objects, w) })
				}
				wg.Wait()
				for _, o := range objects {
					if err := o.Close(); err != nil {
						t.Errorf("%T: %v", o, err)
					}
				}
			}
		})
	}
}

// closeStorm closes objects, in an order of its own, until all are closed.
func closeStorm(t *testing.T, objects []closer, order int) {
	open := len(objects)
	done := make([]bool, len(objects))
	for i := 0; open > 0; i++ {
		k := (i*7 + order*13) % len(objects)
		if done[k] {
			continue
		}
		switch err := objects[k].Close(); {
		case err == nil:
			done[k] = true
			open--
		case !isErrno(err, syscall.EBUSY):
			t.Errorf("%T: %v", objects[k], err)
			return
		}
		runtime.Gosched()
	}
}
