package rconn

import (
	"errors"
	"io"
	"os"
	"testing"
	"time"
)

// Of a Read and a Write that wait at a time, one sleeps for the completions of both. The other one is woken, whichever of them
// that is, and goes on to sleep for both when the first one leaves.
func TestWaitTogether(t *testing.T) {
	for name, link := range links {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t, link, MinRing)
			read, wrote := make(chan error, 1), make(chan error, 1)
			var one [1]byte
			// The Read waits first, and sleeps for both. It leaves at its deadline.
			if err := a.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			go func() {
				_, err := a.Read(one[:])
				read <- err
			}()
			until(t, "a call sleeps", func() bool { return len(a.watching) == 1 })
			much := make([]byte, 8*MinRing)
			go func() {
				_, err := a.Write(much)
				wrote <- err
			}()
			if err := <-read; !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("Read: %v", err)
			}
			until(t, "the Write sleeps in its place", func() bool { return len(a.watching) == 1 })
			// Now the Write sleeps for both, and a Read is woken by it.
			if err := a.SetReadDeadline(time.Time{}); err != nil {
				t.Fatal(err)
			}
			go func() {
				_, err := a.Read(one[:])
				read <- err
			}()
			if _, err := b.Write([]byte{7}); err != nil {
				t.Fatal(err)
			}
			if err := <-read; err != nil || one[0] != 7 {
				t.Fatalf("Read: %d, %v", one[0], err)
			}
			if _, err := io.ReadFull(b, make([]byte, len(much))); err != nil {
				t.Fatal(err)
			}
			if err := <-wrote; err != nil {
				t.Fatal(err)
			}
		})
	}
}

func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// A call that has polled in vain sleeps at once the next times, and polls again later. One that has polled with success makes the
// next ones poll.
func TestPollsInVain(t *testing.T) {
	a, b := pair(t, links["packets"], 0)
	var one [1]byte
	exchange := func(pause time.Duration) {
		t.Helper()
		go func() {
			time.Sleep(pause)
			_, _ = b.Write([]byte{1}) // an error shows as a Read that fails
		}()
		if _, err := io.ReadFull(a, one[:]); err != nil {
			t.Fatal(err)
		}
	}
	for range 8 {
		exchange(5 * time.Millisecond)
	}
	a.reads.Lock()
	vain := a.readable.vain
	a.reads.Unlock()
	if vain < 3 { // 1, then 3 when the one after that was in vain, too
		t.Fatalf("after reads that waited for 5 ms each, %d are to sleep at once", vain)
	}
	// What is there already is found by a poll.
	for vain > 0 {
		if _, err := b.Write([]byte{1}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
		if _, err := io.ReadFull(a, one[:]); err != nil {
			t.Fatal(err)
		}
		a.reads.Lock()
		vain = a.readable.vain
		a.reads.Unlock()
	}
}
