package sys

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// NetChanges reports that network interfaces or addresses of this network namespace have come, gone
// or changed. What has changed it does not say: a reader lists them anew.
type NetChanges struct {
	file *os.File
	raw  syscall.RawConn
}

// WatchNet begins to watch: Wait reports every change from now on.
func WatchNet() (*NetChanges, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	n := &NetChanges{file: os.NewFile(uintptr(fd), "netlink")}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR})
	if err == nil {
		n.raw, err = n.file.SyscallConn()
	}
	if err != nil {
		_ = n.file.Close() // the first error says more
		return nil, fmt.Errorf("netlink: %w", err)
	}
	return n, nil
}

// Wait blocks until something has changed. Changes that come together are reported once. The error is
// os.ErrClosed after Close; another error means that nothing will be reported any more. One goroutine
// at a time may call it.
func (n *NetChanges) Wait() (err error) {
	changed := false
	if n.raw.Read(func(fd uintptr) bool {
		var b [1]byte // a message may be cut off: its contents do not matter
		for {
			_, _, e := unix.Recvfrom(int(fd), b[:], unix.MSG_DONTWAIT)
			switch e {
			case nil, unix.ENOBUFS: // ENOBUFS: messages were lost, so something has changed
				changed = true
			case unix.EINTR:
			case unix.EAGAIN:
				return changed
			default:
				err = fmt.Errorf("netlink: %w", e)
				return true
			}
		}
	}) != nil {
		return os.ErrClosed // there is no other reason: nothing sets a deadline
	}
	return err
}

// Close ends Wait. It is idempotent.
func (n *NetChanges) Close() error {
	_ = n.file.Close() // fails if it is closed already
	return nil
}
