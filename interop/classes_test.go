package interop

// Traffic class and hop limit, from an address vector to the packets on the wire, as a
// listening process sees them, and to the header in front of a datagram.

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// classes are the traffic classes and hop limits of each side's packets. The upper six bits
// of a class are the DSCP, the lower two ECN; some are "ECN capable".
var classes = map[string]struct{ rc, rcHops, ud, udHops uint8 }{
	"initiator": {0x4a, 17, 0x68, 33},
	"target":    {0x20, 9, 0xb8, 200},
}

// ofRC returns the class of the packets of an RC connection: routers may mark them, unless the program
// has set the two bits for that itself.
func ofRC(class uint8) uint8 {
	const ecn, ect0 = 3, 2
	if class&ecn == 0 {
		class |= ect0
	}
	return class
}

// checkHeader checks the header in front of a datagram of the initiator.
func (c *cast) checkHeader(h []byte) {
	class, hops := h[21], h[28] // of an IPv4 header, behind 20 unused bytes
	if h[0]>>4 == 6 {
		class, hops = uint8(binary.BigEndian.Uint16(h)>>4), h[7]
	}
	if want := classes["initiator"]; class != want.ud || hops != want.udHops {
		c.fail("a datagram's header has class %#x and %d hops, want %#x and %d: %x", class, hops, want.ud, want.udHops, h)
	}
}

// sniff is the main program of a process that counts the packets that come in at an
// interface, until its standard input is closed.
func (p *player) sniff() error {
	const all = 0x0300 // ETH_P_ALL, in network order
	fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, all)
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Close(fd) }()
	i, err := net.InterfaceByName(p.script.Mine)
	if err != nil {
		return err
	}
	if err := syscall.Bind(fd, &syscall.SockaddrLinklayer{Protocol: all, Ifindex: i.Index}); err != nil {
		return err
	}
	if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &syscall.Timeval{Usec: 50_000}); err != nil {
		return err
	}
	p.write(envelope{To: "test", Body: json.RawMessage(`"listening"`)})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for p.in.Scan() {
		}
	}()
	p.result.Seen = map[string]int{}
	b := make([]byte, 1<<17)
	for {
		n, from, err := syscall.Recvfrom(fd, b, 0)
		switch {
		case errors.Is(err, syscall.EAGAIN):
			select {
			case <-ended:
				return nil
			default:
				continue
			}
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			return err
		}
		if l, ok := from.(*syscall.SockaddrLinklayer); ok && l.Pkttype == syscall.PACKET_OUTGOING {
			continue
		}
		if s, ok := describe(b[:n]); ok {
			p.result.Seen[s]++
		}
	}
}

// describe returns the sender, transport, traffic class and hop limit of a RoCE packet; false
// if it is none.
func describe(b []byte) (string, bool) {
	var src netip.Addr
	var class, hops uint8
	switch {
	case len(b) > 40 && b[0]>>4 == 4 && b[9] == syscall.IPPROTO_UDP:
		src, class, hops, b = netip.AddrFrom4([4]byte(b[12:16])), b[1], b[8], b[int(b[0]&15)*4:]
	case len(b) > 60 && b[0]>>4 == 6 && b[6] == syscall.IPPROTO_UDP:
		src, class, hops, b = netip.AddrFrom16([16]byte(b[8:24])), uint8(binary.BigEndian.Uint16(b)>>4), b[7], b[40:]
	default:
		return "", false
	}
	if len(b) < 20 || binary.BigEndian.Uint16(b[2:]) != 4791 || sys.IsProbe(b[8:]) { // a process that opens the address looks for its place
		return "", false
	}
	return fmt.Sprintf("%v %s class %#x hops %d", src, []string{"RC", "UC", "RD", "UD", "?", "XRC", "?", "?"}[b[8]>>5], class, hops), true
}

func TestTrafficClass(t *testing.T) {
	n := newNetwork(t, 1500)
	for name, addrs := range map[string][2]string{"IPv4": n.v4, "IPv6": n.v6} {
		t.Run(name, func(t *testing.T) {
			at := n.places(addrs)
			// One at each end: it sees the packets that come in there.
			var listeners []*resident
			for i := range 2 {
				l := newListener(t, place{n.ns[i], fmt.Sprintf("d%d", i)})
				listeners = append(listeners, l)
			}
			for _, r := range perform(t, script{Scenario: "operations", Classes: true}, at[0], at[1], nil) {
				wantSound(t, r)
			}
			time.Sleep(100 * time.Millisecond) // the last packets
			for i, l := range listeners {
				_ = l.stdin.Close()
				l.read(t)
				role := []string{"target", "initiator"}[i] // it sends to this end
				c := classes[role]
				from := addrs[1-i]
				want := map[string]bool{
					fmt.Sprintf("%s RC class %#x hops %d", from, ofRC(c.rc), c.rcHops): true,
				}
				if role == "initiator" {
					want[fmt.Sprintf("%s UC class %#x hops %d", from, c.rc, c.rcHops)] = true
					want[fmt.Sprintf("%s UD class %#x hops %d", from, c.ud, c.udHops)] = true
				}
				for s := range l.result.Seen {
					if !want[s] {
						t.Errorf("a packet of the %s: %s", role, s)
					}
				}
				for s := range want {
					if l.result.Seen[s] == 0 {
						t.Errorf("no packet of the %s: %s; but %v", role, s, l.result.Seen)
					}
				}
				t.Logf("%s: %v", role, l.result.Seen)
			}
		})
	}
}

// newListener starts a process that listens to an interface, whose name is the
// place's address.
func newListener(t *testing.T, at place) *resident {
	t.Helper()
	l := &resident{actor: start(t.Context(), t, "sniffer", script{}, at)}
	t.Cleanup(func() { _ = l.stdin.Close(); _ = l.cmd.Wait() })
	l.lines = newLines(l.stdout)
	if !l.lines.Scan() {
		t.Fatalf("nobody listens: %s", l.stderr)
	}
	return l
}
