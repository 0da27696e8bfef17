package sys

import (
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Multicast. A socket that is bound to a group's address joins the group on one
// interface. Any number of sockets, of any processes, may do so, and each gets a copy
// of what is sent to the group. The kernel leaves the group when the last of them is
// closed. So no list of members is needed, and nothing is left when a process dies.

// OpenGroup opens a socket that receives what arrives for a multicast group on an
// interface, and nothing else.
func OpenGroup(group netip.AddrPort, ifindex int, o UDPOptions) (*UDPSocket, error) {
	if !group.Addr().IsMulticast() || ifindex <= 0 {
		return nil, unix.EINVAL
	}
	o.join = ifindex
	return openUDP(group, o)
}

// InterfaceIndex returns the index of the network interface that has a local
// address.
func InterfaceIndex(a netip.Addr) (int, error) {
	name, _, err := Interface(a)
	if err != nil {
		return 0, err
	}
	i, err := net.InterfaceByName(name)
	if err != nil {
		return 0, fmt.Errorf("interface %s: %w", name, unix.EADDRNOTAVAIL) // it has just gone
	}
	return i.Index, nil
}

const ipv6MulticastAll = 29 // IPV6_MULTICAST_ALL, since Linux 4.20

// groupOptions returns the options for multicast that are set before a socket is
// bound.
func (s *UDPSocket) groupOptions(o *UDPOptions) (opts []option) {
	v4 := s.local.Addr().Is4()
	if o.join != 0 {
		opts = append(opts, option{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1})
		// Otherwise the socket would also receive what arrives on other interfaces,
		// for members there.
		if v4 {
			opts = append(opts, option{unix.IPPROTO_IP, unix.IP_MULTICAST_ALL, 0})
		} else {
			opts = append(opts, option{unix.IPPROTO_IPV6, ipv6MulticastAll, 0})
		}
	}
	if o.Groups != 0 {
		if v4 {
			opts = append(opts, option{unix.IPPROTO_IP, unix.IP_MULTICAST_TTL, o.GroupHops})
		} else {
			opts = append(opts, option{unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, o.GroupHops},
				option{unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, o.Groups})
		}
	}
	return opts
}

// sendGroups sets the option for sending to groups that is not a number.
func (s *UDPSocket) sendGroups(o *UDPOptions) error {
	if o.Groups == 0 || !s.local.Addr().Is4() {
		return nil
	}
	return unix.SetsockoptIPMreqn(s.fd, unix.IPPROTO_IP, unix.IP_MULTICAST_IF, &unix.IPMreqn{Ifindex: int32(o.Groups)})
}

// joinGroup binds the socket to the group and joins it.
func (s *UDPSocket) joinGroup(ifindex int) error {
	group := s.local.Addr()
	if group.Is4() {
		if err := unix.Bind(s.fd, sockaddr(s.local)); err != nil {
			return err
		}
		return unix.SetsockoptIPMreqn(s.fd, unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP,
			&unix.IPMreqn{Multiaddr: group.As4(), Ifindex: int32(ifindex)})
	}
	// A group of link-local scope needs the interface as its zone.
	at := &unix.SockaddrInet6{Port: int(s.local.Port()), ZoneId: uint32(ifindex), Addr: group.As16()}
	if err := unix.Bind(s.fd, at); err != nil {
		return err
	}
	return unix.SetsockoptIPv6Mreq(s.fd, unix.IPPROTO_IPV6, unix.IPV6_ADD_MEMBERSHIP,
		&unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(ifindex)})
}

// LeaveGroup ends the membership. Closing the socket does so too, but only once no
// thread waits on the socket any more.
func (s *UDPSocket) LeaveGroup() error {
	group := s.local.Addr()
	if group.Is4() {
		return unix.SetsockoptIPMreqn(s.fd, unix.IPPROTO_IP, unix.IP_DROP_MEMBERSHIP,
			&unix.IPMreqn{Multiaddr: group.As4(), Ifindex: int32(s.joins)})
	}
	return unix.SetsockoptIPv6Mreq(s.fd, unix.IPPROTO_IPV6, unix.IPV6_DROP_MEMBERSHIP,
		&unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(s.joins)})
}
