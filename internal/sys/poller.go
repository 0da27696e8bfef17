package sys

import "time"

// StartPoller has the runtime start its network poller now, and moves the poller's
// descriptors to the number above, or higher ones.
//
// The engine of the C library calls it while it is loaded. The runtime starts the poller
// with the first timer or socket, and ends the process if there is no descriptor for it
// then, or if the program has closed it since. Programs close descriptors that they do
// not know, in a loop from 3 to 1023 or to their limit: moved above these, the poller
// goes on.
func StartPoller(above int) error {
	time.AfterFunc(time.Hour, func() {}).Stop() // timers need the poller
	return movePoller(above)
}
