package sys

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// futexWait is FUTEX_WAIT | FUTEX_PRIVATE_FLAG of linux/futex.h.
const futexWait = 0 | 128

// Touch makes a page present that a word lies in, as reading it would, and reports
// whether there is such a page.
//
// The kernel reads it, as one does that waits for it to change, but not for long. A
// page fault of the program's own, on a page that storage takes long to bring, would
// keep the Go runtime from stopping the world meanwhile, and with it all goroutines:
// for ever, if the storage waits for one of those. (FUTEX_WAKE_OP could do the same for
// writing, but holds on to the address space over the fault.)
//
// It is sound because the kernel checks the address, and writes nothing there.
func Touch(addr uintptr) bool {
	for {
		var now unix.Timespec
		_, _, errno := unix.Syscall6(unix.SYS_FUTEX, addr, futexWait, 0, uintptr(unsafe.Pointer(&now)), 0, 0)
		if errno != unix.EINTR {
			return errno == 0 || errno == unix.EAGAIN || errno == unix.ETIMEDOUT
		}
	}
}
