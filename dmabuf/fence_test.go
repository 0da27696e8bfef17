package dmabuf

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

// A fence is signalled once, and keeps its first signal.
func TestFence(t *testing.T) {
	failed := errors.New("failed")
	for _, want := range []error{nil, failed} {
		var f Fence
		if f.Signaled() || f.Err() != nil {
			t.Fatal("the zero value is not pending")
		}
		wantErr(t, "Wait", f.Wait(ended()), context.Canceled)
		done := f.Done()
		select {
		case <-done:
			t.Fatal("done")
		default:
		}
		if !f.Signal(want) || f.Signal(errors.New("another")) {
			t.Error("not the first signal counts")
		}
		<-done
		<-f.Done()
		if !f.Signaled() || f.Err() != want || f.Wait(ended()) != want {
			t.Errorf("%v, should be %v", f.Err(), want)
		}
	}
	f := NewFence()
	waited := make(chan error)
	go func() { waited <- f.Wait(context.Background()) }()
	for !f.waiting() {
		runtime.Gosched()
	}
	f.Signal(failed)
	wantErr(t, "a wait that was under way", <-waited, failed)
	f = NewFence()
	f.Signal(nil)
	<-f.Done() // first asked for when it is signalled
}

// The functions of OnSignal run in order, before Signal returns, unless they are cancelled.
func TestOnSignal(t *testing.T) {
	f, failed := NewFence(), errors.New("failed")
	var called []int
	var cancels []func() bool
	for i := range 40 {
		cancels = append(cancels, f.OnSignal(func(err error) {
			if err != failed || !f.Signaled() {
				t.Errorf("%v", err)
			}
			called = append(called, i)
		}))
	}
	var want []int
	for i, cancel := range cancels {
		if i%3 != 0 {
			want = append(want, i)
		} else if !cancel() || cancel() {
			t.Error("cancel has not kept the function from being called, or twice")
		}
	}
	f.Signal(failed)
	if !slices.Equal(called, want) {
		t.Errorf("called: %v", called)
	}
	for _, cancel := range cancels {
		if cancel() {
			t.Error("cancelled after the signal")
		}
	}
	at := 0
	if f.OnSignal(func(err error) { at++; wantErr(t, "OnSignal", err, failed) })() || at != 1 {
		t.Error("a fence that is signalled does not call at once")
	}
	f.Signal(nil)
	if len(called) != len(want) || at != 1 {
		t.Error("the second signal calls again")
	}
}

// A function may use its own fence, and add to a reservation's others.
func TestOnSignalUsesFence(t *testing.T) {
	f, next := NewFence(), NewFence()
	f.OnSignal(func(error) {
		f.Signal(nil)
		f.OnSignal(func(error) { next.Signal(f.Err()) })
	})
	f.Signal(nil)
	check(t, next.Wait(ended()))
}

// Signals and cancels meet: each function is called or cancelled, never both.
func TestCancelTogether(t *testing.T) {
	for range 500 {
		f := NewFence()
		var called, cancelled, first atomic.Int32
		var wg sync.WaitGroup
		const n = 4
		for range n {
			cancel := f.OnSignal(func(error) { called.Add(1) })
			wg.Go(func() {
				if cancel() {
					cancelled.Add(1)
				}
			})
		}
		for range 2 {
			wg.Go(func() {
				if f.Signal(nil) {
					first.Add(1)
				}
			})
		}
		wg.Wait()
		if called.Load()+cancelled.Load() != n || first.Load() != 1 {
			t.Fatalf("%d called, %d cancelled, of %d; %d first signals", called.Load(), cancelled.Load(), n, first.Load())
		}
	}
}
