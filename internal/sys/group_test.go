package sys

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Every socket of a group gets a copy of what is sent to the group, and a poller wakes up
// for a socket from Add until Remove.
func TestGroup(t *testing.T) {
	group := netip.AddrPortFrom(netip.AddrFrom4([4]byte{239, 78, byte(os.Getpid() >> 8), byte(os.Getpid())}), 4791)
	from := netip.AddrFrom4([4]byte{127, 78, byte(os.Getpid() >> 8), byte(os.Getpid()%250 + 1)})
	index, err := InterfaceIndex(from)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenGroup(netip.AddrPortFrom(from, 4791), index, UDPOptions{}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a group at %v: %v", from, err)
	}
	var socks []*UDPSocket
	for range 2 {
		s, err := OpenGroup(group, index, UDPOptions{RcvBuf: 1 << 16, SndBuf: 1 << 16})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		socks = append(socks, s)
	}
	tx, err := OpenUDP(netip.AddrPortFrom(from, 0), UDPOptions{RcvBuf: 1, SndBuf: 1 << 16, Groups: index, GroupHops: 0})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Close()
	p, err := NewPoller(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	p.Add(socks)
	p.Wait(0) // Add has woken it

	to := MakeSockaddr(group)
	send := func() {
		b := NewSendBatch(1, 1)
		b.Add([]byte("all"))
		b.End(&to, 0, 0, 0)
		if n, err := tx.Send(b, 0); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	take := func(s *UDPSocket) {
		t.Helper()
		b := NewRecvBatch(1, 100)
		var d Datagram
		for deadline := time.Now().Add(5 * time.Second); ; {
			n, err := s.Recv(b, 1)
			if err != nil || time.Now().After(deadline) {
				t.Fatal("nothing came", err)
			}
			if n == 1 {
				break
			}
		}
		if b.Get(0, &d); string(d.Bytes) != "all" || d.From.Addr() != from {
			t.Errorf("%q from %v", d.Bytes, d.From)
		}
	}
	send()
	p.Wait(-1)
	for _, s := range socks {
		take(s)
	}
	p.Remove(socks[:1])
	p.Remove(socks[1:])
	p.Wait(0) // Remove has woken it
	send()
	done := make(chan struct{})
	go func() { defer close(done); p.Wait(-1) }()
	select {
	case <-done:
		t.Error("the poller still knows a socket")
	case <-time.After(20 * time.Millisecond):
	}
	p.Wake()
	<-done
	for _, s := range socks {
		take(s)
	}
}
