//go:build verbena_backend

package sys

import (
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	_ "unsafe" // for go:linkname

	"golang.org/x/sys/unix"
)

// The runtime's variables for its epoll instance and for the eventfd that interrupts a
// wait. The linker refuses references to them from other packages: scripts/clib.sh, which
// sets this file's build tag, also switches that check off (-checklinkname=0).

//go:linkname epfd runtime.epfd
var epfd int32

//go:linkname netpollEventFd runtime.netpollEventFd
var netpollEventFd uintptr

// movePoller duplicates the poller's descriptors and has the runtime use the duplicates.
//
// This is sound: the runtime reads each variable once for each system call, and both
// numbers name the same open file, so it does not matter which of them a thread finds.
// The first descriptors stay open, because a thread may have read one and not used it
// yet. The eventfd is registered with the epoll instance as an open file, which the
// duplicate keeps open. If the variables do not name descriptors of the right kinds,
// movePoller changes nothing and returns an error: the runtime is another one.
func movePoller(above int) error {
	poll, event := int(atomic.LoadInt32(&epfd)), int(atomic.LoadUintptr(&netpollEventFd))
	if kind(poll) != "anon_inode:[eventpoll]" || kind(event) != "anon_inode:[eventfd]" {
		return fmt.Errorf("the runtime's poller is not where it was: %w", syscall.EOPNOTSUPP)
	}
	newPoll, err := unix.FcntlInt(uintptr(poll), unix.F_DUPFD_CLOEXEC, above)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	newEvent, err := unix.FcntlInt(uintptr(event), unix.F_DUPFD_CLOEXEC, above)
	if err != nil {
		_ = unix.Close(newPoll) // the other error says more
		return os.NewSyscallError("fcntl", err)
	}
	atomic.StoreInt32(&epfd, int32(newPoll))
	atomic.StoreUintptr(&netpollEventFd, uintptr(newEvent))
	return nil
}

// kind returns the kind of file behind a descriptor. It uses /proc/thread-self:
// /proc/self/fd is empty when the main thread has ended.
func kind(fd int) string {
	name, err := os.Readlink(fmt.Sprintf("/proc/thread-self/fd/%d", fd))
	if err != nil {
		return ""
	}
	return name
}
