package queue

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
)

func recvWR(id uint64, lens ...uint32) ib.RecvWR {
	wr := ib.RecvWR{ID: id}
	for i, n := range lens {
		wr.SGL = append(wr.SGL, ib.SGE{Addr: id<<8 + uint64(i), Length: n, LKey: uint32(id)})
	}
	return wr
}

// TestRecvModel: posting, taking, resizing and clearing at random, against a
// plain list.
func TestRecvModel(t *testing.T) {
	for seed := range uint64(50) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 4))
			size, maxSGE := rng.IntN(8), 1+rng.IntN(4)
			r := NewRecv(size, maxSGE)
			var model []ib.RecvWR
			var taken Taken
			id := uint64(0)
			for step := range 2000 {
				switch k := rng.IntN(20); {
				case k < 8:
					var wrs []ib.RecvWR
					for range rng.IntN(4) {
						lens := make([]uint32, rng.IntN(maxSGE+1))
						for i := range lens {
							lens[i] = rng.Uint32()
						}
						wrs = append(wrs, recvWR(id, lens...))
						id++
					}
					n := r.Post(wrs)
					if n != min(len(wrs), size-len(model)) {
						t.Fatalf("step %d: %d of %d posted to %d of %d", step, n, len(wrs), len(model), size)
					}
					for _, wr := range wrs[:n] {
						model = append(model, ib.RecvWR{ID: wr.ID, SGL: slices.Clone(wr.SGL)})
						clear(wr.SGL) // the caller may use its lists again
					}
				case k < 17:
					ok := r.Take(&taken)
					if ok != (len(model) > 0) {
						t.Fatalf("step %d: taken %v of %d", step, ok, len(model))
					}
					if !ok {
						continue
					}
					want := model[0]
					model = model[1:]
					sum := uint64(0)
					for _, e := range want.SGL {
						sum += uint64(e.Length)
					}
					if taken.ID != want.ID || taken.Len != sum || !slices.Equal(taken.SGEs, want.SGL) {
						t.Fatalf("step %d: took %+v, not %+v", step, taken, want)
					}
				case k < 19:
					to := rng.IntN(9)
					ok := r.Resize(to)
					if ok != (to >= len(model)) {
						t.Fatalf("step %d: resize to %d with %d: %v", step, to, len(model), ok)
					}
					if ok {
						size = to
					}
				default:
					r.Clear()
					model = nil
				}
				if r.Len() != len(model) || r.Size() != size || r.MaxSGE() != maxSGE {
					t.Fatalf("step %d: %d of %d, %d pieces; the model has %d of %d", step, r.Len(), r.Size(), r.MaxSGE(), len(model), size)
				}
			}
		})
	}
}

// TestRecvLimit: the event comes when fewer receives are left than the limit,
// once for each time that the limit is set (IBA 10.2.9.3, 11.2.3.3).
func TestRecvLimit(t *testing.T) {
	r := NewRecv(8, 1)
	events := 0
	r.OnLimit = func() {
		events++
		_ = r.Size() // no lock is held
	}
	var taken Taken
	post := func(n int) {
		for range n {
			r.Post([]ib.RecvWR{recvWR(1, 1)})
		}
	}
	take := func(want int) {
		t.Helper()
		if !r.Take(&taken) {
			t.Fatal("none is left")
		}
		if events != want {
			t.Errorf("%d events with %d receives left, not %d", events, r.Len(), want)
		}
	}
	post(5)
	take(0)
	r.SetLimit(3)
	if r.Limit() != 3 {
		t.Errorf("the limit is %d", r.Limit())
	}
	take(0) // 3 are left: not fewer
	take(1)
	if r.Limit() != 0 {
		t.Errorf("the limit is still armed, %d", r.Limit())
	}
	take(1)
	post(3)
	r.SetLimit(8) // undercut already: the event comes with the next receive that is taken
	if events != 1 {
		t.Errorf("%d events at once", events)
	}
	if r.Resize(7) {
		t.Error("the queue became smaller than the limit")
	}
	take(2)
	r.SetLimit(2)
	r.SetLimit(0) // disarmed
	take(2)
	take(2)
	take(2)
	if r.Take(&taken) || events != 2 {
		t.Errorf("%d events, %d receives", events, r.Len())
	}
	r.OnLimit = nil // no function to call
	r.SetLimit(1)
	post(1)
	r.Take(&taken)
	if r.Limit() != 0 {
		t.Error("the limit is still armed")
	}
}

// TestRecvConcurrent: several queue pairs take from one queue; each receive goes
// to one of them, in order.
func TestRecvConcurrent(t *testing.T) {
	const n = 1000
	r := NewRecv(64, 2)
	var events, got atomic.Int64
	r.OnLimit = func() { events.Add(1) }
	r.SetLimit(10)
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := uint64(0); i < n; {
			i += uint64(r.Post([]ib.RecvWR{recvWR(i, 5, uint32(i))}))
		}
	})
	seen := make([]atomic.Bool, n)
	for range 2 {
		wg.Go(func() {
			var taken Taken
			last := -1
			for got.Load() < n {
				if !r.Take(&taken) {
					runtime.Gosched()
					continue
				}
				got.Add(1)
				if int(taken.ID) <= last || seen[taken.ID].Swap(true) || taken.Len != 5+taken.ID {
					t.Errorf("took %+v after %d", taken, last)
				}
				last = int(taken.ID)
			}
		})
	}
	wg.Wait()
	if events.Load() != 1 {
		t.Errorf("%d limit events", events.Load())
	}
}
