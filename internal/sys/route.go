package sys

import (
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// SourceTo returns the address from which the kernel would send to a destination. Nothing is sent. A
// connection of package net would say it, too, with twice the system calls: it is made ready to be read.
func SourceTo(to netip.AddrPort) (netip.Addr, error) {
	family := unix.AF_INET6
	if to.Addr().Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return netip.Addr{}, os.NewSyscallError("socket", err)
	}
	defer func() {
		_ = unix.Close(fd) // nothing was written
	}()
	at := sockaddr(to)
	if six, ok := at.(*unix.SockaddrInet6); ok && to.Addr().Zone() != "" {
		i, err := net.InterfaceByName(to.Addr().Zone())
		if err != nil {
			return netip.Addr{}, err
		}
		six.ZoneId = uint32(i.Index)
	}
	if err := unix.Connect(fd, at); err != nil {
		return netip.Addr{}, os.NewSyscallError("connect", err)
	}
	own, err := unix.Getsockname(fd)
	if err != nil {
		return netip.Addr{}, os.NewSyscallError("getsockname", err)
	}
	switch a := own.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(a.Addr), nil
	case *unix.SockaddrInet6:
		from := netip.AddrFrom16(a.Addr)
		if a.ZoneId != 0 {
			if i, err := net.InterfaceByIndex(int(a.ZoneId)); err == nil {
				from = from.WithZone(i.Name)
			}
		}
		return from, nil
	}
	return netip.Addr{}, unix.EAFNOSUPPORT
}
