package sys

// Steering: several sockets of one user share a port (SO_REUSEPORT), and a program that the
// kernel runs for each packet chooses one of them by the packet's destination queue pair.
//
// The kernel numbers the sockets of a port in the order in which they were bound, from 0 on:
// that is a socket's place. A queue pair number has a place in it (Place), so the program needs
// no table and never changes. When a socket is closed the kernel gives its place to the last
// socket, so nobody may close one: a Shelf keeps them open.
//
// Queue pair 1, for management, belongs to all processes of a device. What is addressed to a
// communication id goes to the place that is in the id's upper 8 bits. Requests for a connection
// carry none: all processes read the socket with the first place, and any of them takes the request.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// NumPlaces is how many sockets of a port can be told apart.
	NumPlaces = 1 << placeBits
	placeBits = 8
	lowBits   = 24 - placeBits
	// steerFactor spreads the low bits of a number over the place's bits.
	steerFactor = 0x9e3779b1

	// CommonPlace is the place of the socket that all processes of a device read.
	CommonPlace = 0
	// managementQP is the queue pair for management.
	managementQP = 1
)

// Place returns the place of the socket that packets to a queue pair go to.
func Place(qpn uint32) uint32 {
	return (qpn>>lowBits ^ qpn&(1<<lowBits-1)*steerFactor>>(32-placeBits)) & (NumPlaces - 1)
}

// PlaceNumber returns the queue pair number that has a place, and the low bits given.
func PlaceNumber(place, low uint32) uint32 {
	low &= 1<<lowBits - 1
	return (Place(low)^place&(NumPlaces-1))<<lowBits | low
}

// Offsets in packets to queue pair 1, behind the UDP header: transport header, datagram header, and
// of the management datagram its attribute and the two words behind its header.
const (
	madAt      = 12 + 8
	madAttrAt  = madAt + 16
	madFirstAt = madAt + 24
)

// Attributes of the connection manager's datagrams that are steered in a way of their own.
const (
	attrREQ     = 0x10
	attrSIDRREQ = 0x17
	attrSIDRREP = 0x18
)

// steering is Place in the language of packet filters, and what is special about queue pair 1.
// Offset 0 is the first byte behind the UDP header, so the destination queue pair is in the last
// three of the four bytes at 4. A load behind the packet's end ends the program with place 0.
var steering = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 4},
	{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 1<<24 - 1},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: managementQP, Jt: 9},
	{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 1<<lowBits - 1},
	{Code: unix.BPF_ALU | unix.BPF_MUL | unix.BPF_K, K: steerFactor},
	{Code: unix.BPF_ALU | unix.BPF_RSH | unix.BPF_K, K: 32 - placeBits},
	{Code: unix.BPF_MISC | unix.BPF_TAX},
	{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 4},
	{Code: unix.BPF_ALU | unix.BPF_RSH | unix.BPF_K, K: lowBits},
	{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: NumPlaces - 1},
	{Code: unix.BPF_ALU | unix.BPF_XOR | unix.BPF_X},
	{Code: unix.BPF_RET | unix.BPF_A},
	// Queue pair 1: the place is in the receiver's communication id, which is the second word of
	// the datagram, or the first one of a SIDR_REP.
	{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: madAttrAt},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: attrREQ, Jt: 7},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: attrSIDRREQ, Jt: 6},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: attrSIDRREP, Jt: 2},
	{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: madFirstAt + 4},
	{Code: unix.BPF_JMP | unix.BPF_JA, K: 1},
	{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: madFirstAt},
	{Code: unix.BPF_ALU | unix.BPF_RSH | unix.BPF_K, K: 32 - placeBits},
	{Code: unix.BPF_RET | unix.BPF_A},
	{Code: unix.BPF_RET | unix.BPF_K, K: CommonPlace},
}

// ManagementNumber returns a number for queue pair 1 of the process that has a place: packets to it
// go there, whatever they carry.
func ManagementNumber(place uint32) uint32 { return PlaceNumber(place, managementQP) }

// IsManagement reports whether a queue pair number is 1, or one of ManagementNumber. No other queue
// pair has such a number.
func IsManagement(qpn uint32) bool { return qpn&(1<<lowBits-1) == managementQP }

// steer makes the kernel choose among the sockets of the socket's port.
func (s *UDPSocket) steer() error {
	prog := unix.SockFprog{Len: uint16(len(steering)), Filter: &steering[0]}
	return unix.SetsockoptSockFprog(s.fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &prog)
}

// probeBytes is the length of a probe: a transport header, with an opcode that nobody has, and
// a token.
const probeBytes = 12 + 8

// ErrNoProbe means that packets from this host to its own address do not arrive.
var ErrNoProbe = errors.New("a packet to the host's own address does not arrive")

// FindPlace finds out the socket's place: it sends packets to its own address, for one place
// after the other, until one arrives. The kernel gives a packet for a place that no socket has to any
// of them, so the place is the smallest one whose packet arrives. A firewall may lose packets: so
// FindPlace repeats those for smaller places. It drops what else arrives meanwhile. token is any
// number that other processes do not use. The caller knows that the place is not below first: a
// packet for CommonPlace would wake all processes.
func (s *UDPSocket) FindPlace(first uint32, token uint64) (uint32, error) {
	tx, err := unix.Socket(s.family(), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Close(tx) }()
	var b [probeBytes]byte
	b[0] = probeOpcode
	binary.LittleEndian.PutUint64(b[12:], token)
	found := uint32(NumPlaces) // none yet
	for round := range probeRounds {
		for place := first; place < found; place++ {
			binary.BigEndian.PutUint32(b[4:], PlaceNumber(place, uint32(token)|2)) // not queue pair 1
			if err := unix.Sendto(tx, b[:], 0, sockaddr(s.local)); err != nil {
				return 0, fmt.Errorf("%w: %w", ErrNoProbe, err)
			}
			if at, ok := s.drainUntil(token); ok && at < found { // mostly, loopback delivers before sendto returns
				found = at
				break
			}
		}
		for look := 0; round == 0 && found == NumPlaces && look < probeLooks; look++ {
			time.Sleep(time.Millisecond)
			if at, ok := s.drainUntil(token); ok {
				found = at
			}
		}
	}
	if found == NumPlaces {
		return 0, ErrNoProbe
	}
	return found, nil
}

const (
	probeRounds = 8    // in which probes for smaller places than the one found are sent
	probeLooks  = 20   // a millisecond apart, for the first probe to arrive
	probeReads  = 4096 // packets that are dropped at once in search of a probe
)

// probeOpcode is an opcode of the transport header that no transport has.
const probeOpcode = 0xdf

// IsProbe reports whether a packet is one that FindPlace of another process has sent.
func IsProbe(b []byte) bool { return len(b) == probeBytes && b[0] == probeOpcode }

// drainUntil receives what is there, and returns the place of the first probe with a token that
// is among it.
func (s *UDPSocket) drainUntil(token uint64) (place uint32, ok bool) {
	b := make([]byte, probeBytes)
	for range probeReads {
		n, _, err := unix.Recvfrom(s.fd, b, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, false
		}
		if n == len(b) && IsProbe(b) && binary.LittleEndian.Uint64(b[12:]) == token {
			return Place(binary.BigEndian.Uint32(b[4:]) & 0xffffff), true
		}
	}
	return 0, false
}

// dropAll is a packet filter that has the kernel drop everything.
var dropAll = unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0}

// Quiet keeps a socket that no process reads from holding memory: the kernel drops what comes from
// now on, and Quiet what has come. AdoptUDP undoes it.
func Quiet(fd int) error {
	prog := unix.SockFprog{Len: 1, Filter: &dropAll}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
		return fmt.Errorf("SO_ATTACH_FILTER: %w", err)
	}
	var b [1]byte
	for range mostQueued {
		if _, _, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT|unix.MSG_TRUNC); err == unix.EAGAIN {
			break
		} // any other error is of an earlier packet, or EINTR
	}
	return nil
}

// mostQueued is more packets than fit into the buffer of a socket.
const mostQueued = 1 << 20

// AdoptUDP wraps a socket that another process has opened with UDPOptions.Held at an address. It
// drops what that process has not received, which is for queue pairs of that process. It takes the
// descriptor over, unless it fails.
func AdoptUDP(fd int, local netip.AddrPort) (*UDPSocket, error) {
	if err := checkBound(fd, local); err != nil {
		return nil, err
	}
	if err := Quiet(fd); err != nil {
		return nil, err
	}
	s, err := wrapUDP(fd, local)
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("the socket of another process: %w", err)
	}
	return s, nil
}

// ShareUDP wraps a socket that other processes read, too. It takes the descriptor over, unless it
// fails.
func ShareUDP(fd int, local netip.AddrPort) (*UDPSocket, error) {
	if err := checkBound(fd, local); err != nil {
		return nil, err
	}
	return wrapUDP(fd, local)
}

// checkBound returns an error unless a descriptor is a UDP socket that is bound to an address.
func checkBound(fd int, local netip.AddrPort) error {
	at, err := unix.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("the descriptor of a socket: %w", err)
	}
	var is netip.AddrPort
	switch a := at.(type) {
	case *unix.SockaddrInet4:
		is = netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		is = netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	if is != local {
		return fmt.Errorf("a socket at %v, not %v: %w", is, local, unix.EINVAL)
	}
	return nil
}

// wrapUDP wraps a bound socket. What the kernel has dropped there so far does not count.
func wrapUDP(fd int, local netip.AddrPort) (s *UDPSocket, err error) {
	s = &UDPSocket{fd: fd, local: local}
	s.offloads()
	s.earlier, err = s.Overflows()
	return s, err
}

// IsBound reports whether a descriptor is a UDP socket that is bound to a port.
func IsBound(fd int) bool {
	at, err := unix.Getsockname(fd)
	if err != nil {
		return false
	}
	switch a := at.(type) {
	case *unix.SockaddrInet4:
		return a.Port != 0
	case *unix.SockaddrInet6:
		return a.Port != 0
	}
	return false
}

// Inode returns the number of a descriptor's file, which no other open file of its kind has.
func Inode(fd int) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("fstat: %w", err)
	}
	return st.Ino, nil
}
