package sys

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"
)

// Interface returns the network interface that has a local address, and its
// MTU. The loopback interface has all addresses of the loopback network, as for the
// kernel.
func Interface(addr netip.Addr) (name string, mtu int, err error) {
	ifs, err := net.Interfaces()
	if err != nil {
		return "", 0, err
	}
	for _, i := range ifs {
		addrs, err := i.Addrs() // none, if the interface went away
		if err != nil {
			return "", 0, err // such as EMFILE
		}
		for _, a := range addrs {
			n, ok := a.(*net.IPNet)
			if !ok {
				continue
			}
			own, ok := netip.AddrFromSlice(n.IP)
			if !ok {
				continue
			}
			if own.Unmap() == addr.Unmap().WithZone("") ||
				i.Flags&net.FlagLoopback != 0 && n.Contains(addr.AsSlice()) {
				return i.Name, i.MTU, nil
			}
		}
	}
	return "", 0, fmt.Errorf("no network interface has the address %v: %w", addr, syscall.EADDRNOTAVAIL)
}
