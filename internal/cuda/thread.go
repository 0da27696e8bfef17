package cuda

import (
	"runtime"
	"sync"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// thread is a thread that calls the driver for others, one call after the other.
type thread struct {
	drv *Driver

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
	jobs, gone := make(chan func()), make(chan struct{})
	t.jobs, t.gone = jobs, gone
	go func() {
		defer close(gone)
		t.drv.enterThread()
		for job := range jobs {
			job()
		}
	}()
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
