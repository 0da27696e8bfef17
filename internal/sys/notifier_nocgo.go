//go:build !cgo

package sys

// Without cgo there is no thread that could read a userfaultfd: a goroutine must
// not (see notifier_unsafe.go). OpenNotifier returns an error and starts nothing.

import "golang.org/x/sys/unix"

const haveCgo = false

func startThread(_, _ int, _ *ring) error { return unix.ENOTSUP }

func stopThread() {}
