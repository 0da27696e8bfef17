package device

import (
	"os"
	"testing"
	"time"
)

// AwaitExit returns when the process ends, also if it has ended before, and the poller of the runtime
// has reported that already. The end of a pipe's writer is reported as that of a process is.
func TestAwaitExit(t *testing.T) {
	for _, before := range []bool{true, false} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		end := func() {
			if err := w.Close(); err != nil {
				t.Error(err)
			}
		}
		if before {
			end()
			time.Sleep(20 * time.Millisecond) // in which the poller reports it
		}
		done := make(chan error, 1)
		go func() { done <- AwaitExit(r) }()
		if !before {
			select {
			case err := <-done:
				t.Fatalf("it does not wait: %v", err)
			case <-time.After(20 * time.Millisecond):
			}
			end()
		}
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(time.Minute):
			t.Fatalf("it waits for a process that has ended (before: %t)", before)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}
