package gpu

import (
	"fmt"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// Kinds of errors. errors.Is finds them in what calls return, and beside them the errno in
// parentheses.
var (
	ErrFreed       = &kind{"the memory is freed", syscall.EINVAL}                     // (EINVAL)
	ErrForeign     = &kind{"no memory of a GPU", syscall.EFAULT}                      // an address that no GPU has (EFAULT)
	ErrOutOfMemory = &kind{"out of GPU memory", syscall.ENOMEM}                       // (ENOMEM)
	ErrClosed      = &kind{"the device or the stream is closed", syscall.ENODEV}      // (ENODEV)
	ErrDead        = &kind{"the process of the memory has ended", syscall.ESRCH}      // an IPC handle (ESRCH)
	ErrRange       = &kind{"not inside the memory", syscall.EFAULT}                   // (EFAULT)
	ErrDeadlock    = &kind{"a wait that cannot end", syscall.EDEADLK}                 // (EDEADLK)
	ErrPinned      = &kind{"the memory is held where it is", syscall.EBUSY}           // (EBUSY)
	ErrBAR         = &kind{"the memory does not fit into the BAR", syscall.ENOMEM}    // (ENOMEM)
	ErrHandle      = &kind{"no handle of GPU memory, or it is freed", syscall.EINVAL} // (EINVAL)
)

// kind is a kind of errors.
type kind struct {
	text  string
	errno syscall.Errno
}

func (k *kind) Error() string { return k.text }

// Error is an error of a kind.
type Error struct {
	Op     ib.OpError // the call, and the errno
	Kind   error
	Detail string
}

func fail(op string, k *kind, format string, args ...any) *Error {
	return &Error{ib.OpError{Op: op, Errno: k.errno, Detail: k.text}, k, fmt.Sprintf(format, args...)}
}

func (e *Error) Error() string {
	if e.Detail == "" {
		return e.Op.Op + ": " + e.Kind.Error()
	}
	return e.Op.Op + ": " + e.Detail + ": " + e.Kind.Error()
}

// Unwrap returns the kind and the errno.
func (e *Error) Unwrap() []error { return []error{e.Kind, &e.Op} }
