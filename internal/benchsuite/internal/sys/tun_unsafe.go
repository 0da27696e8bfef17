package sys

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OpenTUN makes a TUN interface in the network namespace that a file names, and returns the interface's other end: it
// reads and writes IP packets without any header in front of them. The interface is gone when the end is closed.
//
// This is sound because the structure that the pointer leads to is as long as the kernel's ifreq, and lives until the
// call returns.
func OpenTUN(namespace, name string) (*os.File, error) {
	if len(name) >= unix.IFNAMSIZ {
		return nil, fmt.Errorf("the interface name %q is too long", name)
	}
	type opened struct {
		f   *os.File
		err error
	}
	done := make(chan opened)
	go func() {
		// A thread that has changed its namespace ends with this goroutine, since that stays locked to it.
		runtime.LockOSThread()
		f, err := openTUN(namespace, name)
		done <- opened{f, err}
	}()
	o := <-done
	return o.f, o.err
}

func openTUN(namespace, name string) (*os.File, error) {
	ns, err := unix.Open(namespace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", namespace, err)
	}
	defer unix.Close(ns) //nolint:errcheck // it was only read
	if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("setns: %w", err)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	var q struct { // ifreq
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(q.name[:], name)
	q.flags = unix.IFF_TUN | unix.IFF_NO_PI
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNSETIFF, uintptr(unsafe.Pointer(&q))); errno != 0 {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("TUNSETIFF: %w", errno)
	}
	return os.NewFile(uintptr(fd), name), nil
}
