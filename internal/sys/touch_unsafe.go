package sys

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// From the kernel's linux/futex.h: two operations, both private to this process.
const (
	futexCmpRequeue = 4 | 128
	futexWakeOp     = 5 | 128
	// futexOrNothing is an argument of futexWakeOp that changes no word: it stores the
	// word's old value or-ed with 0, and then compares the old value with -2048.
	futexOrNothing = 2<<28 | 2048
)

// Touch makes the page of a word present, as reading or writing the word would, and
// reports whether there is such a page.
//
// It uses a futex operation, so that the kernel takes the page fault, in a system call. If
// the program took it, on a page that storage takes long to bring, the Go runtime could
// not stop the world meanwhile, and all goroutines would wait: for ever, if the storage
// waits for one of them.
//
// With write, the kernel locks the address space during the fault, so that no thread can
// map anything meanwhile. If the page may have to be fetched, touch it without write
// first.
//
// It is sound because the kernel checks the address. It writes the value that the word
// has, in one atomic operation. No thread is woken: none waits for the word on the stack.
// (A thread that waits for the touched word is woken only if write is set and the word is
// -2048. Futexes allow such wakeups.)
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
