package sys

import "time"

// StartPoller has the runtime start its network poller now, and moves the poller's
// descriptors to numbers of at least above.
//
// The backend of the C library calls it while it is loaded. The runtime starts the poller
// with the first timer or socket, and ends the process if there is no descriptor for it
// then, or if the program has closed it since. Some programs close all descriptors from 3
// to 1023, or to their limit. The poller survives that if its descriptors are above.
func StartPoller(above int) error {
	time.AfterFunc(time.Hour, func() {}).Stop() // timers need the poller
	return movePoller(above)
}
