package device

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// A poll in vain makes progress for a target of another device of the process whose background
// goroutine does not run.
func TestHelp(t *testing.T) {
	a, b := connected(t, openDevice(t, provider.Config{Link: linkUDP}), openDevice(t, provider.Config{Link: linkUDP}), ib.RC, 4096, neverAgain)
	other := newEnd(t, openDevice(t, provider.Config{Link: linkUDP}), ib.RC, 64)
	t.Cleanup(other.close)
	// A background goroutine that watches pollers reads nothing while they poll often.
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	before := b.dev.first.polls.Load()
	wg.Go(func() {
		var wcs [1]ib.WC
		for !stop.Load() {
			other.cq.Poll(wcs[:])
			runtime.Gosched()
		}
	})
	eventually(t, "pollers of another device make progress for the target", func() bool {
		letter(a.buf, 1)
		a.post(a.write(b, 0, 4096))
		a.ok()
		return b.dev.first.polls.Load() > before+100
	})
}

// Devices are opened, used and closed while a poller of another device helps them.
func TestHelpWhileClosing(t *testing.T) {
	spinner := newEnd(t, openDevice(t, provider.Config{}), ib.RC, 64)
	t.Cleanup(spinner.close)
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	for range 2 {
		wg.Go(func() {
			var wcs [1]ib.WC
			for !stop.Load() {
				spinner.cq.Poll(wcs[:])
			}
		})
	}
	for i := range lastingOps(12, 500) {
		mode := []string{"", linkUDP, linkLocal}[i%3]
		addrs := [2]provider.Config{{Link: mode}, {Link: mode}}
		for k := range addrs {
			addrs[k].Addrs = append(addrs[k].Addrs, nextAddr())
		}
		x, err := Open("", &addrs[0])
		must0(t, err)
		y, err := Open("", &addrs[1])
		must0(t, err)
		a, b := newEnd(t, x, ib.RC, 4096), newEnd(t, y, ib.RC, 4096)
		a.connect(b)
		b.connect(a)
		a.post(a.write(b, 0, 4096))
		a.ok()
		a.close()
		b.close()
		closeAll(t, x, y)
	}
}

// Pollers yield only when as many spin as there are processors, and then less and less often;
// completions, arming and closing end the spinning.
func TestPatience(t *testing.T) {
	base := spinning.Load()
	procs := runtime.GOMAXPROCS(0)
	all := make([]patience, procs)
	vain := func(p *patience, n int) {
		for range n {
			p.foundNothing()
		}
	}
	for i := range all {
		p := &all[i]
		vain(p, leastPatience-1)
		if p.spins.Load() {
			t.Error("it counts too early")
		}
		vain(p, 1)
		if !p.spins.Load() || spinning.Load() != base+int32(i+1) {
			t.Errorf("%d spin, want %d more than %d", spinning.Load(), i+1, base)
		}
		if base == 0 && p.yielded.Load() != (i == procs-1) {
			t.Errorf("poller %d of %d: yielded %v", i+1, procs, p.yielded.Load())
		}
	}
	last := &all[procs-1]
	for until := uint32(leastPatience); until < mostPatience; {
		next := last.until.Load()
		if next != min(2*until, mostPatience) {
			t.Fatalf("after %d polls it waits for %d", until, next)
		}
		vain(last, int(next))
		until = next
	}
	last.foundSome()
	if last.until.Load() != 0 || last.spins.Load() {
		t.Errorf("a completion came just after it had yielded: %d, %v", last.until.Load(), last.spins.Load())
	}
	for i := range all {
		all[i].rest()
		all[i].rest()
	}
	if spinning.Load() != base {
		t.Errorf("%d spin, %d did before", spinning.Load(), base)
	}
}

// A program that polls a completion queue until it is closed does not count as one that spins
// afterwards.
func TestPatienceOfClosedQueue(t *testing.T) {
	base := spinning.Load()
	d := openDevice(t, provider.Config{})
	cq := must[provider.CQ](t)(d.CreateCQ(16, nil))
	var wcs [1]ib.WC
	for range leastPatience - 1 {
		must[int](t)(cq.Poll(wcs[:]))
	}
	closeAll(t, cq)
	for range leastPatience {
		if _, err := cq.Poll(wcs[:]); err == nil {
			t.Fatal("a closed queue is polled")
		}
	}
	if n := spinning.Load(); n != base {
		t.Errorf("%d spin, %d did before", n, base)
	}
}
