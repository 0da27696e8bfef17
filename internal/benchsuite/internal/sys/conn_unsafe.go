package sys

import (
	"errors"
	"io"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The two calls of a busy-polling TCP loop, in their cheapest form: as raw system calls.
// To notify the runtime would cost as much again as an empty receive.
//
// This is sound because neither call can block (MSG_DONTWAIT), and because the
// pointer is converted in the call's own argument list, which keeps the slice
// alive and in place until it returns.

// ErrAgain means that nothing has arrived yet, or that nothing more can be sent yet.
var ErrAgain = errors.New("try again")

// Recv receives what has arrived. At the end of the stream it returns io.EOF.
func (c *Conn) Recv(b []byte) (int, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(c.fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
	switch {
	case errno == unix.EAGAIN || errno == unix.EINTR:
		return 0, ErrAgain
	case errno != 0:
		return 0, errno
	case n == 0 && len(b) > 0:
		return 0, io.EOF
	}
	return int(n), nil
}

// Send sends as much as fits into the socket's buffer.
func (c *Conn) Send(b []byte) (int, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(c.fd),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	switch {
	case errno == unix.EAGAIN || errno == unix.EINTR:
		return 0, ErrAgain
	case errno != 0:
		return 0, errno
	}
	return int(n), nil
}
