package sys

import (
	"unsafe" // and for go:linkname

	"golang.org/x/sys/unix"
)

// A goroutine in an ordinary system call keeps its place among GOMAXPROCS until
// the runtime's monitor notices that it blocks, which may be 20 ms later. If the
// other places are busy, as in a container with one core or beside a goroutine
// that polls, all other goroutines stand still for so long. entersyscallblock tells the
// runtime that a call will block, and the runtime gives the place away at once. The
// runtime keeps these two functions, and their signatures, for programs like this one
// (go.dev/issue/67401).

//go:linkname entersyscallblock runtime.entersyscallblock
func entersyscallblock()

//go:linkname exitsyscall runtime.exitsyscall
func exitsyscall()

// ppoll waits until at least one of the descriptors is ready. fds must not be empty. The
// arguments must not lie on the stack.
//
// This is sound: between the two calls nothing happens but the system call, no
// stack is grown and no Go memory written (nosplit, norace); the slice and the
// timeout are kept alive by the caller's arguments, and the runtime neither
// moves what lies on the heap nor shrinks the stack of a goroutine in a system
// call.
//
//go:nosplit
//go:norace
func ppoll(fds []unix.PollFd, timeout *unix.Timespec) unix.Errno {
	entersyscallblock()
	_, _, e := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(unsafe.SliceData(fds))), uintptr(len(fds)),
		uintptr(unsafe.Pointer(timeout)), 0, 0, 0)
	exitsyscall()
	return e
}
