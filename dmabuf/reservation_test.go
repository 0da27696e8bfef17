package dmabuf

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
)

// Asking for a class returns those before it, too.
func TestClasses(t *testing.T) {
	r := NewReservation()
	var fences []*Fence
	locked(r, func() {
		for usage := range numUsages {
			f := NewFence()
			r.Add(f, usage)
			fences = append(fences, f)
		}
	})
	for usage := range numUsages {
		if got := r.Fences(usage); !slices.Equal(got, fences[:usage+1]) {
			t.Errorf("%v: %d fences", usage, len(got))
		}
		if r.Signaled(usage) {
			t.Errorf("%v: signalled", usage)
		}
	}
	for usage := range numUsages {
		wantErr(t, usage.String(), r.Wait(ended(), usage), context.Canceled)
		fences[usage].Signal(errors.New("failed")) // which is not the waiter's business
		check(t, r.Wait(ended(), usage))
		if !r.Signaled(usage) {
			t.Errorf("%v: not signalled", usage)
		}
	}
	if UsageFor(false) != Write || UsageFor(true) != Read {
		t.Error("readers wait for writers, writers for all")
	}
	for usage, name := range map[Usage]string{Kernel: "KERNEL", Write: "WRITE", Read: "READ", Bookkeep: "BOOKKEEP", 7: "Usage(7)"} {
		if usage.String() != name {
			t.Errorf("%v should be %s", usage, name)
		}
	}
}

// A fence may be raised, and is never degraded.
func TestRaised(t *testing.T) {
	for from := range numUsages {
		for to := range numUsages {
			r, f := NewReservation(), NewFence()
			locked(r, func() {
				r.Add(f, from)
				r.Add(f, to)
			})
			for usage := range numUsages {
				want := 0
				if usage >= min(from, to) {
					want = 1
				}
				if got := len(r.Fences(usage)); got != want {
					t.Errorf("%v, then %v: %d fences of %v", from, to, got, usage)
				}
			}
		}
	}
	r := NewReservation()
	locked(r, func() {
		wantPanic(t, "no such class", "Usage(4)", func() { r.Add(NewFence(), numUsages) })
		wantPanic(t, "no fence", "fence", func() { r.Add(nil, Read) })
	})
}

// Signalled fences go, so that a reservation does not grow with time; the others stay, with their
// classes and in order.
func TestPrune(t *testing.T) {
	rng := random(t)
	r := NewReservation()
	var want []reserved
	locked(r, func() {
		for range 5000 {
			if len(want) > 0 && rng.IntN(3) == 0 {
				e := &want[rng.IntN(len(want))]
				usage := Usage(rng.IntN(int(numUsages)))
				r.Add(e.fence, usage)
				e.usage = min(e.usage, usage)
			} else {
				e := reserved{NewFence(), Usage(rng.IntN(int(numUsages)))}
				r.Add(e.fence, e.usage)
				want = append(want, e)
			}
			if len(want) > 20 || len(want) > 0 && rng.IntN(10) == 0 {
				i := rng.IntN(len(want))
				want[i].fence.Signal(nil)
				want = slices.Delete(want, i, i+1)
			}
			if len(r.fences) > 100 || len(r.at) != len(r.fences) {
				t.Fatalf("%d fences, %d of them to be found; %d are pending", len(r.fences), len(r.at), len(want))
			}
			if rng.IntN(20) == 0 {
				usage := Usage(rng.IntN(int(numUsages)))
				var pending []*Fence
				for _, e := range want {
					if e.usage <= usage {
						pending = append(pending, e.fence)
					}
				}
				if got := r.Fences(usage); !slices.Equal(got, pending) {
					t.Fatalf("%d fences of %v, should be %d", len(got), usage, len(pending))
				}
			}
		}
	})
}

// Wait waits for what is there when it is called, and not for what comes later.
func TestWait(t *testing.T) {
	r := NewReservation()
	first, second := NewFence(), NewFence()
	locked(r, func() { r.Add(first, Write) })
	done := make(chan error)
	go func() { done <- r.Wait(context.Background(), Read) }()
	for first.waiting() == false {
		runtime.Gosched()
	}
	locked(r, func() { r.Add(second, Write) })
	first.Signal(nil)
	check(t, <-done)
	if r.Signaled(Read) {
		t.Error("the second fence is not there")
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { done <- r.Wait(ctx, Read) }()
	for !second.waiting() {
		runtime.Gosched()
	}
	cancel()
	wantErr(t, "a wait whose context ends", <-done, context.Canceled)
}

// waiting reports whether Done was called.
func (f *Fence) waiting() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.done != nil
}

// The lock has one holder. Waiting for it ends with the context.
func TestLock(t *testing.T) {
	r := NewReservation()
	n := 0
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			for range 200 {
				switch i % 3 {
				case 0:
					r.Lock()
				case 1:
					for !r.TryLock() {
						runtime.Gosched()
					}
				default:
					if err := r.LockContext(context.Background()); err != nil {
						t.Error(err)
						return
					}
				}
				n++
				r.Unlock()
			}
		})
	}
	wg.Wait()
	if n != 1200 {
		t.Errorf("the lock was held %d times", n)
	}
	check(t, r.LockContext(ended())) // it is free, so nothing is waited for
	ctx, cancel := context.WithCancel(context.Background())
	errs := make(chan error)
	go func() { errs <- r.LockContext(ctx) }()
	cancel()
	wantErr(t, "LockContext", <-errs, context.Canceled)
	if r.TryLock() {
		t.Error("locked twice")
	}
	r.Unlock()
	if !r.TryLock() {
		t.Error("the lock is not free")
	}
	r.Unlock()
}

// Ten thousand pending fences cost no goroutine, and adding them does not take long.
func TestManyFences(t *testing.T) {
	const many = 10_000
	before := runtime.NumGoroutine()
	r := NewReservation()
	fences := make([]*Fence, many)
	var called int
	locked(r, func() {
		for i := range fences {
			fences[i] = NewFence()
			fences[i].OnSignal(func(error) { called++ })
			r.Add(fences[i], Usage(i%int(numUsages)))
		}
	})
	if n := runtime.NumGoroutine(); n > before {
		t.Errorf("%d goroutines, %d before", n, before)
	}
	if n := len(r.Fences(Bookkeep)); n != many {
		t.Errorf("%d fences", n)
	}
	for _, f := range fences {
		f.Signal(nil)
	}
	check(t, r.Wait(ended(), Bookkeep))
	if called != many || len(r.fences) != 0 {
		t.Errorf("%d functions were called, %d fences are left", called, len(r.fences))
	}
}
