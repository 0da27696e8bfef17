package sys

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// waitTime waits and says how long that took.
func waitTime(p *Poller, d time.Duration) time.Duration {
	start := time.Now()
	p.Wait(d)
	return time.Since(start)
}

// Both ways to wait: with a place to run Go to spare, and without.
func TestPoller(t *testing.T) {
	for _, procs := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d at a time", procs), func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
			testPoller(t)
		})
	}
}

func testPoller(t *testing.T) {
	tx, rx := openPair(t, "127.77.3.1", UDPOptions{RcvBuf: 1 << 20, SndBuf: 1 << 20})
	p, err := NewPoller([]*UDPSocket{rx})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	const long = 5 * time.Second

	if d := waitTime(p, 0); d > long/2 {
		t.Errorf("a wait of nothing took %v", d)
	}
	// A signal may end a wait early; hardly ten times.
	short, ok := 20*time.Millisecond, false
	for range 10 {
		d := waitTime(p, short)
		ok = ok || d >= short && d < long/2
	}
	if !ok {
		t.Error("no wait lasted until its timeout")
	}

	p.Wake() // kept
	p.Wake()
	if d := waitTime(p, long); d > long/2 {
		t.Errorf("a wake before the wait was lost: %v", d)
	}

	// A wake during the wait, often enough to meet every interleaving.
	for i := range 200 {
		var called atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(time.Duration(i%20) * 10 * time.Microsecond)
			called.Store(true)
			p.Wake()
		})
		for !called.Load() { // again after an early return
			if d := waitTime(p, long); d > long/2 {
				t.Fatalf("a wake during the wait was lost: %v", d)
			}
		}
		wg.Wait()
	}
	// Whatever is left over of those wakes is used up by a few waits.
	ok = false
	for range 10 {
		ok = ok || waitTime(p, short) >= short
	}
	if !ok {
		t.Error("wakes never end")
	}

	to := MakeSockaddr(rx.Local())
	b := NewSendBatch(1, 1)
	b.Add([]byte("x"))
	b.End(&to, 0, 0, DefaultHopLimit)
	if _, err := tx.Send(b, 0); err != nil {
		t.Fatal(err)
	}
	if d := waitTime(p, long); d > long/2 {
		t.Errorf("data did not end the wait: %v", d)
	}
}

func TestPollerWakeAfterClose(t *testing.T) {
	p, err := NewPoller(nil)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				p.Wake()
			}
		})
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if err := p.Close(); err != nil {
		t.Errorf("again: %v", err)
	}
}

// A socket that is added later ends a wait too, and events still fall silent.
func TestPollerAdd(t *testing.T) {
	tx, rx := openPair(t, "127.77.3.2", UDPOptions{RcvBuf: 1 << 20, SndBuf: 1 << 20})
	event, err := NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	p, err := NewPoller(nil, event)
	if err != nil {
		t.Fatal(err)
	}
	defer event.Close()
	defer p.Close()
	const long, short = 5 * time.Second, 20 * time.Millisecond
	p.Add([]*UDPSocket{rx})
	p.Wait(0) // the one that Add ends
	event.Signal()
	if d := waitTime(p, long); d > long/2 {
		t.Errorf("an event did not end the wait: %v", d)
	}
	ok := false
	for range 10 {
		ok = ok || waitTime(p, short) >= short
	}
	if !ok {
		t.Error("an event never falls silent")
	}
	to := MakeSockaddr(rx.Local())
	b := NewSendBatch(1, 1)
	b.Add([]byte("x"))
	b.End(&to, 0, 0, DefaultHopLimit)
	if _, err := tx.Send(b, 0); err != nil {
		t.Fatal(err)
	}
	if d := waitTime(p, long); d > long/2 {
		t.Errorf("data did not end the wait: %v", d)
	}
}

// TestPollerClosed: descriptors that the program has closed are reported once, and then do
// not keep Wait from sleeping.
func TestPollerClosed(t *testing.T) {
	const none = 1 << 30 // no descriptor has this number
	event, err := NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer event.Close()
	p, err := NewPoller(nil, event)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	p.watch(none)
	p.fds[1].Fd = none + 1 // the event's
	// A signal may end a wait early; hardly ten times.
	lasts := func(d, want time.Duration) (ok bool) {
		for range 10 {
			ok = ok || waitTime(p, d) >= want
		}
		return ok
	}
	const short = 20 * time.Millisecond
	p.Wait(-1) // returns at once: both are reported
	if !lasts(short, short) {
		t.Error("no wait lasted until its timeout: Wait still looks at what is closed")
	}
	p.Wake() // no thread waits: it ends the next Wait
	p.Wait(-1)

	p.fds[0].Fd = none // the poller's own event: no Wake can end a Wait
	p.Wait(-1)
	if !lasts(-1, deafWait) {
		t.Error("no wait lasted: Wait still looks at what is closed")
	}
}
