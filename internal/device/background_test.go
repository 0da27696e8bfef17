package device

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// A program that arms a completion queue ends the sleep of a background goroutine that leaves the sockets to pollers, whether it
// does so before or after the goroutine falls asleep. Otherwise the sleep takes its time.
func TestArmEndsWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shard{dev: &Device{base: time.Now()}, armed: make(chan struct{}, 1)}
		w := watcher{interval: watchInterval}
		sleep := func(arms uint32, meanwhile func()) time.Duration {
			w.interval, w.woke = maxWatch, 0
			began, ended := time.Now(), make(chan time.Duration)
			go func() {
				w.sleep(s, time.Hour, arms)
				ended <- time.Since(began)
			}()
			synctest.Wait()
			if meanwhile != nil {
				meanwhile()
			}
			return <-ended
		}
		if d := sleep(0, nil); d != maxWatch {
			t.Errorf("a sleep of %v took %v", maxWatch, d)
		}
		if d := sleep(0, s.programSleeps); d != 0 {
			t.Errorf("a sleep went on for %v after a queue had been armed", d)
		}
		if d := sleep(0, nil); d != 0 {
			t.Errorf("a sleep that began after a queue had been armed took %v", d)
		}
		if d := sleep(1, nil); d != maxWatch {
			t.Errorf("a sleep that began when it was known that a queue had been armed took %v", d)
		}
	})
}

// Arming a completion queue reaches the background goroutine of the shard that the queue polls: it receives again.
func TestArmReachesShard(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkUDP})
	ch, err := d.CreateChannel()
	must0(t, err)
	cq, err := d.CreateCQ(4, ch)
	must0(t, err)
	t.Cleanup(func() { must0(t, cq.Close()); must0(t, ch.Close()) })
	s := d.first
	var wcs [1]ib.WC
	eventually(t, "the background goroutine leaves the sockets to the poller", func() bool {
		for i := range 1000 {
			if i%100 == 0 {
				s.receiver.Wake() // in vain, as for a packet that the poller gets
			}
			_, err := cq.Poll(wcs[:])
			must0(t, err)
		}
		return s.watching.Load()
	})
	before := s.arms.Load()
	must0(t, cq.RequestNotify(false))
	if got := s.arms.Load(); got != before+1 {
		t.Fatalf("the shard was told %d times that a queue was armed", got-before)
	}
	eventually(t, "the background goroutine blocks until something comes", func() bool { return s.sleepUntil.Load() > 0 && !s.watching.Load() })
}

// Attempts that are in vain become rare, and one that succeeds makes all of them be made again.
func TestBackoff(t *testing.T) {
	var b backoff
	made := 0
	attempt := func(succeeds bool) func() bool {
		return func() bool { made++; return succeeds }
	}
	for range 1000 {
		if b.try(attempt(false)) {
			t.Fatal("an attempt in vain succeeded")
		}
	}
	// After 1, 3, 7, 15 that are left out, one in 32 is made.
	if made < 1000/32 || made > 1000/32+5 {
		t.Errorf("%d of 1000 attempts were made", made)
	}
	for n := 0; !b.try(attempt(true)); n++ {
		if n > mostLeftOut {
			t.Fatal("no attempt is made any more")
		}
	}
	made = 0
	for range 10 {
		b.try(attempt(true))
	}
	if made != 10 {
		t.Errorf("%d of 10 attempts were made after one that had succeeded", made)
	}
}
