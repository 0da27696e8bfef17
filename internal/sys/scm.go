package sys

// What unix sockets can do beyond carrying bytes: pass descriptors, and identify the
// process at the other end.

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// MaxPassedFDs is the most descriptors that one message carries here.
const MaxPassedFDs = 64

// Cred identifies the process that made the other end of a unix socket: that called
// connect(2), or listen(2).
type Cred struct {
	PID int // in this process's PID namespace; 0 if the process is not in it
	UID int // effective, at the time of that call
}

// PeerCred returns which process made the other end, as the kernel has recorded it.
func PeerCred(c *net.UnixConn) (Cred, error) {
	var u *unix.Ucred
	err := control(c, func(fd int) (err error) {
		u, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return err
	})
	if err != nil {
		return Cred{}, fmt.Errorf("SO_PEERCRED: %w", err)
	}
	return Cred{PID: int(u.Pid), UID: int(u.Uid)}, nil
}

// SendFDs sends a message with copies of descriptors, which stay the sender's.
func SendFDs(c *net.UnixConn, msg []byte, fds ...int) error {
	if len(fds) > MaxPassedFDs {
		return fmt.Errorf("%d descriptors in a message: %w", len(fds), unix.EINVAL)
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	return passing(func() error {
		_, _, err := c.WriteMsgUnix(msg, oob, nil)
		return err
	})
}

// RecvFDs receives a message into b and the descriptors that came with it,
// which belong to the caller and are closed on exec. A message that does not
// fit, or that brings anything else, is an error, and leaves nothing open.
func RecvFDs(c *net.UnixConn, b []byte) (n int, fds []int, err error) {
	oob := make([]byte, unix.CmsgSpace(4*MaxPassedFDs))
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return 0, nil, err
	}
	fds, err = passedFDs(oob[:oobn])
	if err == nil && flags&unix.MSG_CTRUNC != 0 && len(fds) < MaxPassedFDs { // there was room: descriptors have run out
		err = fmt.Errorf("descriptors cannot be received: %w", unix.EMFILE)
	}
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = fmt.Errorf("message cut short (flags %#x): %w", flags, unix.EMSGSIZE)
	}
	if err != nil {
		for _, fd := range fds {
			_ = unix.Close(fd) // the first error says more
		}
		return 0, nil, err
	}
	return n, fds, nil
}

// passedFDs returns all descriptors in control data, also beside an error.
func passedFDs(oob []byte) (fds []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	for i := range msgs {
		got, bad := unix.ParseUnixRights(&msgs[i])
		fds = append(fds, got...)
		if bad != nil {
			err = fmt.Errorf("control message other than descriptors: %w", bad)
		}
	}
	return fds, err
}

// RecvNow receives a message if one has arrived. If none has, the error is EAGAIN. At
// the end of the connection n is 0 and there is no error.
func RecvNow(c *net.UnixConn, b []byte) (n int, err error) {
	err = control(c, func(fd int) (err error) {
		for {
			n, _, err = unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
			if err != unix.EINTR {
				return err
			}
		}
	})
	return max(n, 0), err
}

// SendNow sends a message if there is room for it; otherwise the error is EAGAIN.
func SendNow(c *net.UnixConn, b []byte) error {
	return control(c, func(fd int) error {
		return unix.Sendto(fd, b, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil)
	})
}

// HungUp reports whether the other end of a connection, or this one, is closed.
func HungUp(c *net.UnixConn) bool {
	fds := []unix.PollFd{{Events: unix.POLLRDHUP}}
	return control(c, func(fd int) error {
		fds[0].Fd = int32(fd)
		for {
			if _, err := unix.Poll(fds, 0); err != unix.EINTR {
				return err
			}
		}
	}) != nil || fds[0].Revents != 0
}

// control calls f with the connection's descriptor, which stays open meanwhile.
func control(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) { inner = f(int(fd)) })
	return errors.Join(err, inner)
}

// DupConn returns another descriptor of a connection or listener.
func DupConn(c syscall.Conn) (dup int, err error) {
	err = control(c, func(fd int) (err error) {
		dup, err = DupFD(fd)
		return err
	})
	return dup, err
}
