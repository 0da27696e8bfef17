package sys

import (
	"time"

	"golang.org/x/sys/unix"
)

// Sleep sleeps in the calling thread, for d or, if a signal comes, less. Where time.Sleep has nothing else to
// wait for it sleeps a whole millisecond at least.
func Sleep(d time.Duration) {
	nap := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&nap, nil) // the caller looks at the clock
}
