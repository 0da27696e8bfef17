package device

// Queues are resized while messages flow at full rate: none is lost or doubled, and
// none changes its place.

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

func TestResizeUnderLoad(t *testing.T) {
	seed := testSeed(t)
	for _, l := range []string{linkLoop, linkUDP} {
		t.Run(l, func(t *testing.T) {
			const deep, slot = 64, 256
			x, y := openDevice(t, provider.Config{Link: l}), openDevice(t, provider.Config{Link: l})
			a, b := newEnd(t, x, ib.RC, deep*slot), newEnd(t, y, ib.RC, 2*deep*slot)
			srq := must[provider.SRQ](t)(b.pd.CreateSRQ(provider.SRQConfig{MaxWR: 2 * deep, MaxSGE: 1}))
			b.sharing(srq)
			t.Cleanup(a.close)
			t.Cleanup(func() { closeAll(t, b.qp, srq); b.close() })
			a.rnrRetries, b.rnrRetries = 7, 7
			a.connect(b)
			b.connect(a)
			for i := range deep {
				b.postShared(srq, uint64(i), i*slot, slot)
			}

			var stop atomic.Bool
			var wg sync.WaitGroup
			var resizes atomic.Int64 // of a completion queue and of the shared receive queue
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(seed, 2))
				for !stop.Load() {
					// Never smaller than what may wait: that would be an overflow,
					// and the application's mistake.
					q := []provider.CQ{a.cq, b.cq}[rng.IntN(2)]
					if err := q.Resize(3*deep + rng.IntN(4000)); err != nil {
						t.Errorf("resize_cq: %v", err)
					}
					if err := srq.Modify(deep+rng.IntN(4*deep), -1); err != nil {
						t.Errorf("modify_srq: %v", err)
					}
					resizes.Add(1)
					stormPause(rng, 50)
				}
			})
			defer wg.Wait()
			defer stop.Store(true)

			var sent, done, heard uint32
			wcs := make([]ib.WC, 16)
			take := func() {
				n := must[int](t)(b.cq.Poll(wcs))
				for _, wc := range wcs[:n] {
					if wc.Status != ib.WCSuccess || wc.Imm != heard {
						t.Fatalf("message %d: %+v (%v)", heard, wc, wc.Err())
					}
					if got, err := number(b.buf[wc.ID*slot:][:wc.ByteLen]); err != nil || got != heard {
						t.Fatalf("message %d: %d, %v", heard, got, err)
					}
					heard++
					b.postShared(srq, wc.ID, int(wc.ID)*slot, slot)
				}
				n = must[int](t)(a.cq.Poll(wcs))
				for _, wc := range wcs[:n] {
					if wc.Status != ib.WCSuccess || wc.ID != uint64(done) {
						t.Fatalf("request %d: %+v (%v)", done, wc, wc.Err())
					}
					done++
				}
			}
			post := func() {
				at := int(sent%deep) * slot
				size := 8 * (1 + int(sent%(slot/8)))
				letter(a.buf[at:][:size], sent)
				a.post(ib.SendWR{ID: uint64(sent), Op: ib.OpSendImm, Imm: sent, SGL: a.sge(at, size)})
				sent++
			}
			for deadline := time.Now().Add(time.Minute); int(sent) < lastingOps(1000, 20_000) || resizes.Load() < 20; {
				for sent-done < deep/2 {
					post()
				}
				if take(); time.Now().After(deadline) {
					t.Fatalf("%d messages, %d resizes", sent, resizes.Load())
				}
			}
			stop.Store(true)
			wg.Wait()
			post() // if an earlier message came twice, this one would not be the next
			eventually(t, "all messages are completed and heard", func() bool { take(); return done == sent && heard == sent })
		})
	}
}
