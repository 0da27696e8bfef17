package device

// Memory that the CPU does not address: queue pairs that end, and memory that is taken away,
// while bytes are on their way.

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// A queue pair that fails while messages wait for an engine completes each of their receives
// once, flushed, and gives none back before the engine has left its memory.
func TestStagedReceivesFlushed(t *testing.T) {
	onAllLinks(t, func(t *testing.T, mode string) {
		g := stoppedEngine()
		a, b := stagedPair(t, mode, ib.RC, g, "b")
		for i := range 8 {
			b.recv(ib.RecvWR{ID: uint64(i), SGL: b.sge(i*4096, 4096)})
		}
		for i := range 5 {
			a.post(ib.SendWR{ID: uint64(i), Op: ib.OpSend, SGL: a.sge(i*4096, 1000)})
		}
		eventually(t, "all have come", func() bool { return b.counted()[qp.CntRxPackets] >= 5 })
		waitBegun(t, g, 1)
		b.modify(ib.QPAttr{State: ib.QPErr}, 0)
		b.noCompletion("an engine is at its receive")
		g.Release()
		for i := range 8 {
			if wc := b.status(ib.WCWRFlushErr); wc.ID != uint64(i) {
				t.Errorf("receive %d, want %d", wc.ID, i)
			}
		}
		b.noCompletion("all are flushed")
	})
}

// A queue pair that is reset or closed leaves memory alone when the call has returned. The
// call does not wait for memory that is suspended: nothing is moved there any more.
func TestStagedEndsBehindBytes(t *testing.T) {
	ends := map[string]func(e *end){
		"reset": func(e *end) { e.modify(ib.QPAttr{State: ib.QPReset}, 0) },
		"close": func(e *end) { closeAll(e.t, e.qp) },
	}
	check := func(t *testing.T, g *enginetest.Engine, b *end, how string) {
		waitBegun(t, g, 1)
		done := make(chan struct{})
		go func() {
			defer close(done)
			ends[how](b)
		}()
		stillWaits(t, done) // an engine is at its memory
		g.Release()
		<-done
	}
	onAllLinks(t, func(t *testing.T, mode string) {
		for how := range ends {
			t.Run(how, func(t *testing.T) {
				g := stoppedEngine()
				a, b := stagedPair(t, mode, ib.RC, g, "b")
				for i := range 20 {
					a.post(a.write(b, i*4096, 4096))
				}
				check(t, g, b, how)
			})
		}
	})
	t.Run("suspended", func(t *testing.T) {
		g := stoppedEngine()
		a, b := stagedPair(t, linkLoop, ib.RC, g, "a") // what is loaded goes to the host's memory
		a.post(a.write(b, 0, 4096))
		waitBegun(t, g, 1)
		r := b.mr.(*MR).region
		if !r.Suspend() {
			t.Fatal("not suspended")
		}
		defer r.Resume()
		check(t, g, b, "reset")
	})
}

// A UC queue pair loses the message whose memory is gone, and none of those that wait behind it.
func TestStagedUCGoesOn(t *testing.T) {
	onAllLinks(t, func(t *testing.T, mode string) {
		g := stoppedEngine()
		a, b := stagedPair(t, mode, ib.UC, g, "b")
		mr := b.anotherRegion(g, 4096, allRemote)
		b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 4096)})
		b.recv(ib.RecvWR{ID: 2, SGL: b.sge(4096, 4096)})
		a.post(a.write(b, 8192, 64)) // the engine is at this
		waitBegun(t, g, 1)
		a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, 512), RemoteAddr: mr.Addr(), RKey: mr.RKey()})
		a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 512)})
		a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 4096)})
		for range 4 {
			a.ok()
		}
		eventually(t, "all have come", func() bool { return b.counted()[qp.CntRxPackets] >= 7 })
		mr.(*MR).region.Revoke()
		g.Release()
		for id := range uint64(2) {
			if wc := b.ok(); wc.ID != id+1 {
				t.Errorf("%+v", wc)
			}
		}
		if s := b.state(); s != ib.QPRTS {
			t.Error(s)
		}
	})
}

// Queue pairs fail, are reset and closed, memory is revoked, suspended and deregistered, and
// engines fail, at random moments while messages of every kind are under way: each receive
// and each request completes once at most, all of them unless the queue pair is reset or
// closed, and nothing stays behind. The pause only makes the moment random.
func TestStagedEndsAtRandom(t *testing.T) {
	seed := testSeed(t)
	for i := range lastingOps(12, 300) {
		mode := allLinks[i%len(allLinks)]
		t.Run(fmt.Sprintf("%d/%s", i, mode), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			const n = 40
			g := enginetest.New(slowEngine)
			a, b := stagedPair(t, mode, ib.RC, g, []string{"a", "b", "ab"}[rng.IntN(3)])
			a.timeoutSoon()
			for id := range uint64(n) {
				b.recv(ib.RecvWR{ID: 1000 + id, SGL: b.sge(int(id)*8192, 8192)})
			}
			how := rng.IntN(6)
			at := time.Duration(rng.IntN(600)) * time.Microsecond
			ended := make(chan struct{})
			victim := []*end{a, b}[rng.IntN(2)]
			go func() {
				defer close(ended)
				time.Sleep(at)
				switch how {
				case 0:
					victim.modify(ib.QPAttr{State: ib.QPErr}, 0)
				case 1:
					victim.modify(ib.QPAttr{State: ib.QPReset}, 0)
				case 2:
					closeAll(t, victim.qp)
				case 3:
					victim.mr.(*MR).region.Revoke()
				case 4:
					if m, ok := victim.mr.(*MR).region.Backing().(*enginetest.Memory); ok {
						m.Fail(mem.FaultStorage)
					} else {
						victim.mr.(*MR).region.Revoke()
					}
				case 5:
					if r := victim.mr.(*MR).region; r.Suspend() {
						victim.modify(ib.QPAttr{State: ib.QPErr}, 0)
						r.Resume()
					}
				}
			}()
			posted := 0
			for id := range n {
				wr := a.write(b, id*8192, 8*(1+rng.IntN(1024)))
				wr.ID, wr.Flags = uint64(id), ib.SendSignaled
				switch rng.IntN(5) {
				case 0:
					wr.Op, wr.RemoteAddr, wr.RKey = ib.OpSend, 0, 0
				case 1:
					wr.Op = ib.OpRDMAWriteImm
				case 2:
					wr.Op = ib.OpRDMARead
				case 3:
					wr.Op, wr.SGL = ib.OpAtomicFetchAdd, a.sge(id*8192, 8)
				}
				if _, err := a.qp.PostSend([]ib.SendWR{wr}); err != nil {
					break // it was reset or closed
				}
				posted++
			}
			<-ended
			seen := map[uint64]bool{}
			sent, received := 0, 0
			poll := func(e *end) {
				var wcs [8]ib.WC
				k := must[int](t)(e.cq.Poll(wcs[:]))
				for _, wc := range wcs[:k] {
					if seen[wc.ID] {
						t.Errorf("%d has completed twice", wc.ID)
					}
					seen[wc.ID] = true
					if wc.ID >= 1000 {
						received++
					} else {
						sent++
					}
				}
			}
			gone := how == 1 || how == 2 // the victim's completions are gone with it
			if !gone || victim != a {
				eventually(t, "all requests complete", func() bool {
					poll(a)
					poll(b)
					return sent == posted
				})
			}
			if !gone || victim != b {
				b.modify(ib.QPAttr{State: ib.QPErr}, 0)
				eventually(t, "all receives complete", func() bool {
					poll(b)
					return received == n
				})
			}
		})
	}
}

// A sender that is reset while an engine reads its memory has the memory back: the message
// does not count, and its receive waits for another one.
func TestStagedSourceTakenBack(t *testing.T) {
	for _, reaches := range []bool{false, true} {
		t.Run(fmt.Sprintf("reaches %v", reaches), func(t *testing.T) {
			g := enginetest.New(enginetest.Config{Reaches: reaches})
			g.Hold()
			a, b := stagedPair(t, linkLoop, ib.RC, g, "b")
			b.recv(ib.RecvWR{ID: 5, SGL: b.sge(0, 4096)})
			a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 4096)})
			waitBegun(t, g, 1)
			a.modify(ib.QPAttr{State: ib.QPReset}, 0)
			paint(a.buf[:4096], 2)
			g.Release()
			q := b.qp.(*QP)
			eventually(t, "no engine is at it", func() bool {
				q.mu.Lock()
				defer q.mu.Unlock()
				return !q.mover
			})
			b.modify(ib.QPAttr{State: ib.QPErr}, 0)
			if wc := b.status(ib.WCWRFlushErr); wc.ID != 5 {
				t.Errorf("%+v", wc)
			}
		})
	}
}
