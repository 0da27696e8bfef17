package sys

import (
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Events beside a socket in one poller: each ends a wait, and is silent after.
func TestPollerEvents(t *testing.T) {
	tx, rx := openPair(t, "127.77.3.1", UDPOptions{RcvBuf: 1 << 20, SndBuf: 1 << 20})
	var events [2]*Event
	for i := range events {
		e, err := NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		events[i] = e
	}
	p, err := NewPoller([]*UDPSocket{rx}, events[:]...)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	const short, long = 10 * time.Millisecond, 5 * time.Second
	silent := func() {
		t.Helper()
		for range 10 { // a signal may end a wait early; hardly ten times
			if waitTime(p, short) >= short {
				return
			}
		}
		t.Fatal("waits end at once")
	}
	silent()
	for range 3 {
		for _, e := range events {
			e.Signal()
			e.Signal()
			if d := waitTime(p, long); d > long/2 {
				t.Fatalf("a signal before the wait was lost: %v", d)
			}
			silent()
			var wg sync.WaitGroup
			wg.Go(func() {
				time.Sleep(short)
				e.Signal()
			})
			if d := waitTime(p, long); d > long/2 {
				t.Fatalf("a signal during the wait was lost: %v", d)
			}
			wg.Wait()
			e.Drain()
			silent()
		}
	}
	// Sockets and Wake still do their part.
	p.Wake()
	if d := waitTime(p, long); d > long/2 {
		t.Errorf("a wake was lost: %v", d)
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

// An event whose counter is full is still signalled, and Signal does not wait.
func TestEventFull(t *testing.T) {
	e, err := NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	most := [8]byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	if _, err := unix.Write(e.FD(), most[:]); err != nil {
		t.Fatal(err)
	}
	e.Signal()
	e.Drain()
	e.Drain()
	again, err := OpenEvent(e.FD())
	if err != nil || again.FD() != e.FD() {
		t.Error(err)
	}
}
