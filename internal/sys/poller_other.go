//go:build !verbena_backend

package sys

// movePoller leaves the poller's descriptors where they are: a Go program does not close
// them.
func movePoller(int) error { return nil }
