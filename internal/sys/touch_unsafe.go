package sys

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// From the kernel's linux/futex.h: two operations on words that only this process
// waits for.
const (
	futexCmpRequeue = 4 | 128
	futexWakeOp     = 5 | 128
	// futexOrNothing makes the second changes nothing: it stores the word or 0, and then
	// asks whether it was -2048.
	futexOrNothing = 2<<28 | 2048
)

// Touch makes a page present that a word lies in, as reading or writing it would, and
// reports whether there is such a page.
//
// The kernel does it, on behalf of somebody who wants others to be woken that wait for
// the word. A page fault of the program's own, on a page that storage takes long to
// bring, would keep the Go runtime from stopping the world meanwhile, and with it all
// goroutines: for ever, if the storage waits for one of those.
//
// Writing holds on to the address space over the fault, so that nobody can map anything
// meanwhile. If the page has to be fetched from somewhere, read it first.
//
// It is sound because the kernel checks the address. It writes nothing there that was
// not there before, in one atomic operation. Nobody is woken: nobody waits for the word
// on the stack. (Only a word of -2048 that is written, and that somebody waits for, wakes
// him for nothing, as may always happen.)
func Touch(addr uintptr, write bool) bool {
	for {
		var word uint32
		var errno unix.Errno
		if write {
			_, _, errno = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&word)), futexWakeOp, 0, 0, addr, futexOrNothing)
		} else {
			_, _, errno = unix.Syscall6(unix.SYS_FUTEX, addr, futexCmpRequeue, 0, 0, uintptr(unsafe.Pointer(&word)), 0)
		}
		if errno != unix.EINTR {
			return errno == 0 || !write && errno == unix.EAGAIN // it is not 0
		}
	}
}
