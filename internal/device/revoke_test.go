package device

// Memory is taken away, and objects are closed, while peers use them. When the call returns
// the memory does not change any more, and a request that still needs it fails.

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
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
	e.t.Errorf("no request has failed; in state %v, counted %v", e.state(), countsOf(e.dev))
	return ib.WC{}
}

// revocation is a way to take away a key that a peer uses.
type revocation struct {
	name string
	// lend makes a key to the first n bytes of the end's memory. It returns where the key
	// begins, and what takes it away.
	lend func(b *end, n int) (key uint32, addr uint64, revoke func())
}

// ofWindow returns what revokes a window, in one of several ways.
func ofWindow(typ ib.MWType, revoke func(b *end, w provider.MW)) func(b *end, n int) (uint32, uint64, func()) {
	return func(b *end, n int) (uint32, uint64, func()) {
		b.allowWindows()
		w := b.window(typ)
		return b.bind(w, 0, n, ib.AccessRemote), b.mr.Addr(), func() { revoke(b, w) }
	}
}

// ofIndirectKey returns what revokes an indirect key that shows every other KiB of the memory.
func ofIndirectKey(revoke func(b *end, k provider.MKey)) func(b *end, n int) (uint32, uint64, func()) {
	return func(b *end, n int) (uint32, uint64, func()) {
		k := b.mkey(1)
		b.configure(&ib.MKeyConfig{MKey: k.Key(), Repeat: uint64(n) >> 10, Interleaved: []ib.Stride{{Addr: b.mr.Addr(), Bytes: 1 << 10, Skip: 1 << 10, LKey: b.mr.LKey()}}})
		return k.Key(), 0, func() { revoke(b, k) }
	}
}

func (e *end) localInvalidate(key uint32) {
	e.t.Helper()
	e.post(ib.SendWR{ID: 5, Op: ib.OpLocalInv, InvalidateKey: key})
	e.status(ib.WCSuccess)
}

var revocations = []revocation{
	{"region closed", func(b *end, _ int) (uint32, uint64, func()) {
		return b.mr.RKey(), b.mr.Addr(), func() { closeAll(b.t, b.mr) }
	}},
	{"region registered elsewhere", func(b *end, _ int) (uint32, uint64, func()) {
		return b.mr.RKey(), b.mr.Addr(), func() {
			other := make([]byte, len(b.buf))
			must0(b.t, b.mr.Rereg(provider.MRChange{Buf: other}))
			b.t.Cleanup(func() {
				if k := firstDifference(other, make([]byte, len(other))); k >= 0 {
					b.t.Errorf("byte %d of the new memory was changed by the old key", k)
				}
			})
		}
	}},
	{"window invalidated", ofWindow(ib.MWType2, func(b *end, w provider.MW) { b.localInvalidate(w.RKey()) })},
	{"window bound elsewhere", ofWindow(ib.MWType1, func(b *end, w provider.MW) { b.bind(w, len(b.buf)-64, 64, ib.AccessRemote) })},
	{"window closed", ofWindow(ib.MWType2, func(b *end, w provider.MW) { closeAll(b.t, w) })},
	{"indirect key invalidated", ofIndirectKey(func(b *end, k provider.MKey) { b.localInvalidate(k.Key()) })},
	{"indirect key closed", ofIndirectKey(func(b *end, k provider.MKey) { closeAll(b.t, k) })},
}

// neverAgain makes an end send nothing again: there is no loss, and a machine that is busy
// with other things does not make a difference. So a request that is refused gets the NAK.
func neverAgain(e *end) { e.timeout = 0 }

// revokedUnderLoad posts a request at a again and again, takes away the memory at b that the
// request uses, and waits until the request fails. From the moment that revoke has returned
// the memory must stay as it is.
func revokedUnderLoad(t *testing.T, a, b *end, wr ib.SendWR, memory []byte, revoke func(), want ib.WCStatus) {
	t.Helper()
	copy(a.buf, noise) // two requests that follow each other have different bytes
	defer func() {
		if t.Failed() {
			t.Logf("the target in state %v, counted %v", b.state(), countsOf(b.dev))
		}
	}()
	ended := make(chan ib.WC, 1)
	go func() { ended <- a.keepPosting(wr, 2) }()
	eventually(t, "some requests are done", func() bool { return countsOf(b.dev)["tx_packets"] > 0 })
	revoke()
	for i := range memory { // the memory is the owner's again: other bytes than the peer's
		memory[i] ^= 0xff
	}
	after := bytes.Clone(memory)
	if wc := <-ended; wc.Status != want {
		t.Errorf("the peer's request ends with %v (vendor %#x), want %v", wc.Status, wc.VendorErr, want)
	}
	if k := firstDifference(memory, after); k >= 0 {
		t.Errorf("byte %d changed after the memory was taken away", k)
	}
}

// Whatever gives a peer access is taken away while the peer uses it, as fast as it can, on
// every link: from then on the memory stays as it is, and the peer's request fails. Each way
// to take it away is tried with WRITEs, and each operation with a region that is closed; the
// other pairs are in the full matrix. (The suite in internal/mem/memtest tries them all on
// every kind of memory.)
func TestRevokedUnderLoad(t *testing.T) {
	const size = 256 << 10
	for _, mode := range allLinks {
		for i, r := range revocations {
			for k, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead, ib.OpAtomicFetchAdd, ib.OpSend} {
				if i > 0 && (k > 0 && !fullMatrix() || op == ib.OpSend) {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/%v", mode, r.name, op), func(t *testing.T) {
					a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.RC, 2*size, neverAgain)
					key, addr, revoke := r.lend(b, size)
					wr := ib.SendWR{Op: op, SGL: a.sge(0, size), RemoteAddr: addr, RKey: key, CompareAdd: 1}
					want := ib.WCRemAccessErr
					if op == ib.OpAtomicFetchAdd {
						wr.SGL = a.sge(0, 8)
					}
					if op == ib.OpSend {
						want = ib.WCRemOpErr
						var stop atomic.Bool
						var wg sync.WaitGroup
						wg.Go(func() { b.keepReceiving(&stop, size) })
						defer wg.Wait()
						defer stop.Store(true)
					}
					revokedUnderLoad(t, a, b, wr, b.buf, revoke, want)
					eventually(t, "the target's queue pair fails", func() bool { return b.state() == ib.QPErr })
				})
			}
		}
	}
}

// The initiator takes away the memory that it sends from or reads into: its request
// fails here, and a READ leaves the memory alone from then on.
func TestLocalMemoryRevokedUnderLoad(t *testing.T) {
	const size = 256 << 10
	for _, mode := range allLinks {
		for _, c := range []struct {
			name   string
			op     ib.Opcode
			revoke func(mr provider.MR) error
		}{
			{"closed", ib.OpRDMAWrite, provider.MR.Close}, {"closed", ib.OpRDMARead, provider.MR.Close},
			{"registered elsewhere", ib.OpRDMARead, func(mr provider.MR) error { return mr.Rereg(provider.MRChange{Buf: make([]byte, size)}) }},
		} {
			t.Run(fmt.Sprintf("%s/%s/%v", mode, c.name, c.op), func(t *testing.T) {
				a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.RC, size, neverAgain)
				wr := ib.SendWR{Op: c.op, SGL: a.sge(0, size), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()}
				revokedUnderLoad(t, a, b, wr, a.buf, func() { must0(t, c.revoke(a.mr)) }, ib.WCLocProtErr)
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
			eventually(t, "some requests are done", func() bool { return b.counted()[qp.CntTxPackets] > 0 })
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
				for i := range lastingOps(10, 120) {
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

// Several goroutines close everything at once, under load. Half of the connections have memory
// that comes and goes, and workers that fetch it.
func TestCloseStorm(t *testing.T) {
	seed := testSeed(t)
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			for round := range lastingOps(3, 15) {
				x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
				var ends []*end
				var wg sync.WaitGroup
				for i := range 4 {
					a, b := connected(t, x, y, ib.RC, 64<<10, func(e *end) {
						hurry(e)
						if i%2 == 0 {
							return
						}
						p := e.lazily()
						p.rng = rand.New(rand.NewPCG(seed, uint64(round)))
						p.evict = func() bool { return p.rng.IntN(16) == 0 }
						p.fetch = func() { time.Sleep(100 * time.Microsecond) } // storage takes its time; no verdict depends on how long
					})
					ends = append(ends, a, b)
					wg.Go(func() { a.keepPosting(a.write(b, 0, 64<<10), 4) })
					wg.Go(func() { b.keepPosting(b.read(a, 0, 64<<10), 4) })
				}
				eventually(t, "some requests are done", func() bool { return countsOf(x)["tx_packets"] > 8 && countsOf(y)["tx_packets"] > 8 })
				objects := []closer{x, y}
				for _, e := range ends {
					objects = append(objects, e.pd, e.cq, e.mr, e.qp)
				}
				for w := range 3 {
					wg.Go(func() { closeStorm(t, objects, w) })
				}
				wg.Wait()
				closeAll(t, objects...)
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
