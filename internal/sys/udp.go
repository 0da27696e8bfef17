package sys

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// UDPSocket is a UDP socket bound to one address, unconnected and never
// blocking.
//
// It must be unconnected, because the RoCE checksum covers the IPv4 identification. With
// path MTU discovery on, an unconnected socket sends packets with identification 0
// (counted up by one for each segment of a segmented send); a connected one counts from a
// random number.
type UDPSocket struct {
	fd    int
	local netip.AddrPort
	gso   bool
	gro   bool
	rcv   int // bytes of the receive buffer, see RcvBuf
	joins int // index of the interface that it has joined a group on, or 0

	earlier uint32 // datagrams that the kernel had dropped when this process got the socket
}

// Detach returns the socket's descriptor, which is the caller's from now on.
func (s *UDPSocket) Detach() int {
	fd := s.fd
	s.fd = -1
	return fd
}

// UDPOptions are what OpenUDP asks the kernel for.
type UDPOptions struct {
	RcvBuf int // bytes; the kernel grants at most net.core.rmem_max
	SndBuf int // bytes; the kernel grants at most net.core.wmem_max
	// TClass is the traffic class of what is sent, unless a message has another.
	TClass uint8
	// WantTClass asks for the traffic class of what arrives.
	WantTClass bool
	// GRO asks for several datagrams of one size from one sender to arrive as one.
	GRO bool
	// Groups, if not 0, is the index of the interface by which multicast is sent.
	// GroupHops is the hop limit of multicast unless a message has another: 0 keeps it
	// on this host.
	Groups    int
	GroupHops int
	// Held, if set, makes sockets share the port, and the kernel choose one by the place in
	// a queue pair number (Place). It is called before the socket is bound, to have the
	// socket kept open by a Shelf.
	Held func(fd int) error

	join int // if not 0, the local address is a group, to be joined on this interface
}

// DefaultHopLimit is the hop limit, or time to live, of what a socket sends
// unless a message has another.
const DefaultHopLimit = 64

// OpenUDP opens a socket and binds it. It fails with EADDRINUSE if another socket has
// the address and port, and with EADDRNOTAVAIL if the address is not one of this host.
func OpenUDP(local netip.AddrPort, o UDPOptions) (*UDPSocket, error) {
	o.join = 0
	return openUDP(local, o)
}

func openUDP(local netip.AddrPort, o UDPOptions) (*UDPSocket, error) {
	s := &UDPSocket{local: local}
	fd, err := unix.Socket(s.family(), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
	if err != nil {
		return nil, err
	}
	s.fd = fd
	if err := s.setup(o); err != nil {
		_ = unix.Close(fd) // the first error says more
		return nil, err
	}
	return s, nil
}

func (s *UDPSocket) setup(o UDPOptions) error {
	var must []option
	if s.local.Addr().Is4() {
		must = []option{
			{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO},
			{unix.IPPROTO_IP, unix.IP_TTL, DefaultHopLimit},
		}
	} else {
		must = []option{
			{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1},
			{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO},
			{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, DefaultHopLimit},
			// Linux's own RoCE driver sends no UDP checksum over IPv6
			// either; without this option the kernel drops its packets.
			{unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_RX, 1},
		}
	}
	must = append(must,
		// The kernel accepts any size and grants at most its limit.
		option{unix.SOL_SOCKET, unix.SO_RCVBUF, o.RcvBuf},
		option{unix.SOL_SOCKET, unix.SO_SNDBUF, o.SndBuf})
	must = append(must, s.groupOptions(&o)...)
	if o.TClass != 0 {
		must = append(must, s.classOption(unix.IP_TOS, unix.IPV6_TCLASS, int(o.TClass)))
	}
	if o.WantTClass {
		must = append(must, s.classOption(unix.IP_RECVTOS, unix.IPV6_RECVTCLASS, 1))
	}
	for _, m := range must {
		if err := m.set(s.fd); err != nil {
			return err
		}
	}
	if err := s.sendGroups(&o); err != nil {
		return err
	}
	// A privileged process may exceed the limits; for others these calls fail.
	_ = option{unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, o.RcvBuf}.set(s.fd)
	_ = option{unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, o.SndBuf}.set(s.fd)
	if o.GRO {
		_ = option{unix.IPPROTO_UDP, unix.UDP_GRO, 1}.set(s.fd) // without it datagrams come one by one
	}
	s.offloads()

	if o.join != 0 {
		s.joins = o.join
		return s.joinGroup(o.join)
	}
	if o.Held == nil {
		return unix.Bind(s.fd, sockaddr(s.local))
	}
	if err := (option{unix.SOL_SOCKET, unix.SO_REUSEPORT, 1}).set(s.fd); err != nil {
		return err
	}
	if err := o.Held(s.fd); err != nil {
		return err
	}
	if err := unix.Bind(s.fd, sockaddr(s.local)); err != nil {
		return err
	}
	return s.steer()
}

// offloads finds out what the kernel does for the socket, and the size of its buffer.
func (s *UDPSocket) offloads() {
	s.rcv, _ = unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	_, err := unix.GetsockoptInt(s.fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT)
	s.gso = err == nil
	gro, err := unix.GetsockoptInt(s.fd, unix.IPPROTO_UDP, unix.UDP_GRO)
	s.gro = err == nil && gro != 0
}

func (s *UDPSocket) family() int {
	if s.local.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

type option struct{ level, name, value int }

func (o option) set(fd int) error { return unix.SetsockoptInt(fd, o.level, o.name, o.value) }

// classOption returns an option of the socket's IP version.
func (s *UDPSocket) classOption(v4, v6, value int) option {
	if s.local.Addr().Is4() {
		return option{unix.IPPROTO_IP, v4, value}
	}
	return option{unix.IPPROTO_IPV6, v6, value}
}

// RecvHeader asks for the traffic class and the hop limit of what arrives from
// now on. That costs the kernel about a tenth of a microsecond a datagram.
func (s *UDPSocket) RecvHeader() error {
	if err := s.classOption(unix.IP_RECVTOS, unix.IPV6_RECVTCLASS, 1).set(s.fd); err != nil {
		return err
	}
	return s.classOption(unix.IP_RECVTTL, unix.IPV6_RECVHOPLIMIT, 1).set(s.fd)
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// Local returns the address that the socket is bound to.
func (s *UDPSocket) Local() netip.AddrPort { return s.local }

// GSO reports whether a send can carry several datagrams of one size.
func (s *UDPSocket) GSO() bool { return s.gso }

// GRO reports whether several datagrams may arrive as one.
func (s *UDPSocket) GRO() bool { return s.gro }

// RcvBuf returns the size of the receive buffer as the kernel counts it: with the memory
// that the kernel needs around every datagram, about as much again.
func (s *UDPSocket) RcvBuf() int { return s.rcv }

// Close closes the socket. No goroutine may be using it.
func (s *UDPSocket) Close() error { return unix.Close(s.fd) }
