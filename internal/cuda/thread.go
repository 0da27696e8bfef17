package cuda

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// thread is a thread that calls the driver for others, one call after the other.
type thread struct {
	drv     *Driver
	lingers bool        // it looks for more to do for a while before it sleeps
	stuck   atomic.Bool // try did not wait for the end of a call, which is not over yet

	mu   sync.RWMutex // guards jobs: who sends on it holds it
	jobs chan func()  // nil: the thread has not started, or has ended
	gone chan struct{}
}

func newThread(d *Driver) *thread { return &thread{drv: d} }

// enterThread makes the goroutine's thread one that calls the driver: it is the goroutine's own
// until it ends, no signal of the program's is handled there, and a graph that the program
// captures does not forbid its calls.
func (d *Driver) enterThread() {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	sys.BlockSignals()
	d.relax() // a driver without graphs refuses, and needs nothing
}

func (t *thread) start() {
	t.mu.Lock()
	defer t.mu.Unlock()
	jobs, gone := make(chan func(), 1), make(chan struct{})
	t.jobs, t.gone = jobs, gone
	go func() {
		defer close(gone)
		t.drv.enterThread()
		for {
			if t.lingers {
				t.await(jobs)
			}
			job, more := <-jobs
			if !more {
				return
			}
			job()
		}
	}()
}

// await looks for something to do for a while: to be woken takes longer than most calls.
func (t *thread) await(jobs <-chan func()) {
	for since := time.Now(); len(jobs) == 0 && time.Since(since) < linger; {
		for range 100 {
			if len(jobs) > 0 {
				return
			}
		}
	}
}

func (t *thread) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.jobs)
	<-t.gone
	t.jobs = nil
}

// do has the thread call a function, and waits for it. The function finds no context current,
// and leaves none.
func (t *thread) do(f func()) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	done := make(chan struct{})
	t.jobs <- func() {
		defer close(done)
		f()
	}
	<-done
}

// in has the thread call a function with a context current.
func (t *thread) in(ctx uintptr, f func() Result) (r Result) {
	t.do(func() {
		if r = t.drv.setCurrent(ctx); r != success {
			return
		}
		r = f()
		t.drv.setCurrent(0)
	})
	return r
}

// try has the thread call a function, and waits for it, but no longer than limit; it reports whether the
// function has returned. If it has not, try does not wait again before it has.
func (t *thread) try(limit time.Duration, f func()) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.stuck.Load() {
		return false
	}
	var over atomic.Bool
	done := make(chan struct{})
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case t.jobs <- func() {
		defer t.stuck.Store(false)
		f()
		over.Store(true)
		close(done)
	}:
	case <-late.C:
		return false
	}
	if t.lingers {
		for since := time.Now(); !over.Load() && time.Since(since) < linger; {
			for i := 0; i < 100 && !over.Load(); i++ {
			}
		}
		if over.Load() {
			return true
		}
	}
	select {
	case <-done:
		return true
	case <-late.C:
	}
	t.stuck.Store(true)
	if over.Load() { // it has returned meanwhile, and may have cleared stuck before
		t.stuck.Store(false)
	}
	return false
}
