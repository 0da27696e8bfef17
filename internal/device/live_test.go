package device

// Memory that the CPU uses while the device does: pages that are rewritten all
// the time, targets that never poll, and programs that watch memory instead of
// a completion queue.

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// scribble changes memory without any synchronization, as programs do with pages
// that peers read: the race is the point.
//
//go:norace
func scribble(b []byte, stop *atomic.Bool) {
	for i := byte(0); !stop.Load(); i++ {
		for k := 0; k < len(b); k += 7 {
			b[k] += i | 1
		}
		runtime.Gosched()
	}
}

// A page that the CPU rewrites all the time can be read over a network: each
// answer is checksummed in the very bytes that are sent, so none is taken for
// damaged, nothing is sent again and no retries are used up. A WRITE from such a
// page is the program's mistake; it arrives all the same.
func TestLivePages(t *testing.T) {
	for _, c := range []struct {
		op   ib.Opcode
		size int
	}{{ib.OpRDMARead, 100}, {ib.OpRDMARead, 64 << 10}, {ib.OpRDMAWrite, 64 << 10}} {
		t.Run(fmt.Sprintf("%v/%d", c.op, c.size), func(t *testing.T) {
			a, b := pair(t, linkUDP, ib.RC, c.size)
			page := a.buf
			if c.op == ib.OpRDMARead {
				page = b.buf
			}
			var stop atomic.Bool
			var wg sync.WaitGroup
			wg.Go(func() { scribble(page, &stop) })
			defer wg.Wait()
			defer stop.Store(true)
			for range lastingOps(5, 100) {
				const together = 8
				for range together {
					a.post(ib.SendWR{Op: c.op, SGL: a.sge(0, c.size), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
				}
				for range together {
					a.ok()
				}
			}
			ca, cb := countsOf(a.dev), countsOf(b.dev)
			damaged := ca["drop_bad_icrc"] + cb["drop_bad_icrc"]
			t.Logf("%d packets damaged, %d sent again", damaged, ca["retransmitted_packets"])
			if c.op == ib.OpRDMARead && damaged > 0 {
				t.Errorf("%d packets were damaged", damaged)
			}
		})
	}
}

// A target that has set its queues up and never calls the device again serves
// its peer all the same.
func TestPassiveTarget(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			const words = 128 << 10 // behind what is read and written
			a, b := pair(t, mode, ib.RC, words+8)
			eventually(t, "the target's background goroutine sleeps", func() bool { return b.dev.first.sleepUntil.Load() != 0 })
			for i := range 20 {
				size := 1 << (i % 18)
				fill(a.buf[:size], byte(i))
				a.post(a.write(b, 0, size))
				a.ok()
				if k := firstDifference(b.buf[:size], a.buf[:size]); k >= 0 {
					t.Fatalf("WRITE of %d bytes: wrong from byte %d on", size, k)
				}
				clear(a.buf[:size])
				a.post(a.read(b, 0, size))
				a.ok()
				if k := firstDifference(a.buf[:size], b.buf[:size]); k >= 0 {
					t.Fatalf("READ of %d bytes: wrong from byte %d on", size, k)
				}
				a.post(ib.SendWR{Op: ib.OpAtomicFetchAdd, SGL: a.sge(0, 8), RemoteAddr: b.mr.Addr() + words, RKey: b.mr.RKey(), CompareAdd: 1})
				a.ok()
				if got := wordOf(a.buf); got != uint64(i) {
					t.Fatalf("fetch-and-add found %d, want %d", got, i)
				}
			}
		})
	}
}

// An initiator that posts and then goes away, without polling, is served too:
// what one call does not send leaves without it, and at once.
func TestPassiveInitiator(t *testing.T) {
	const size = 5 * txQuantum / 2 // more than one call sends
	send := func(t *testing.T, mode string) {
		a, b := pair(t, mode, ib.RC, size)
		fill(a.buf, 3)
		start := time.Now()
		a.post(a.write(b, 0, size))
		eventually(t, "the completion waits", func() bool { return a.cq.(*CQ).Len() > 0 })
		if k := firstDifference(a.buf, b.buf); k >= 0 {
			t.Errorf("wrong from byte %d on", k)
		}
		if took := time.Since(start); mode == linkLoop && took > time.Millisecond {
			t.Errorf("it took %v of virtual time, as if a goroutine had slept", took)
		}
	}
	t.Run(linkUDP, func(t *testing.T) { send(t, linkUDP) })
	bubble(t, linkLoop, func(t *testing.T) { send(t, linkLoop) })
}

// A receiver that spins on the last word of its buffer, and never asks the
// device, sees the whole message when it sees the word: the last 8 bytes are
// stored last.
func TestSpinOnMemory(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		for _, size := range []int{8, 4096, 192 << 10} {
			t.Run(fmt.Sprintf("%s/%d", mode, size), func(t *testing.T) {
				words := spinWords(size)
				x, y := openDevice(t, provider.Config{Link: mode}), openDevice(t, provider.Config{Link: mode})
				a, b := connected(t, x, y, ib.RC, size, nil)
				mr := must[provider.MR](t)(b.pd.RegMR(words.bytes(), allRemote))
				t.Cleanup(func() { closeAll(t, mr) })
				var wg sync.WaitGroup
				var seen atomic.Uint64
				rounds := uint64(lastingOps(30, 400))
				if mode == linkLoop { // one copy takes it all, and long enough to be caught in it
					rounds *= 2
				}
				stop := make(chan struct{})
				wg.Go(func() {
					spins := 0
					for n := uint64(1); n <= rounds; n++ {
						for words.last() != n {
							if spins++; spins%1000 != 0 {
								continue
							}
							select {
							case <-stop:
								return
							default:
								runtime.Gosched()
							}
						}
						if k := words.differsFrom(n); k >= 0 {
							t.Errorf("message %d: its end is there, word %d is not", n, k)
							return
						}
						seen.Store(n)
					}
				})
				for n := uint64(1); n <= rounds && !t.Failed(); n++ {
					spinFill(a.buf, n)
					a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, size), RemoteAddr: mr.Addr(), RKey: mr.RKey()})
					a.ok()
					eventuallySpin(t, func() bool { return seen.Load() == n })
				}
				close(stop)
				wg.Wait()
			})
		}
	}
}

// eventuallySpin waits for another goroutine, without sleeping.
func eventuallySpin(t testing.TB, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok() && !t.Failed(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("the end of the message was never seen")
		}
	}
}
