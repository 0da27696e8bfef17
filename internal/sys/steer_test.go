package sys

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPlace(t *testing.T) {
	for range 10_000 {
		place, low := rand.N(uint32(NumPlaces)), rand.N(uint32(1)<<lowBits)
		n := PlaceNumber(place, low)
		if n>>24 != 0 || Place(n) != place || n&(1<<lowBits-1) != low {
			t.Fatalf("place %d, low bits %#x: number %#x, place %d", place, low, n, Place(n))
		}
	}
}

// held opens a socket of a shared port, and lays it on the shelf.
func held(t *testing.T, at netip.AddrPort, shelf *Shelf) (s *UDPSocket, inode uint64) {
	t.Helper()
	s, err := OpenUDP(at, UDPOptions{RcvBuf: 1 << 20, SndBuf: 1, Held: func(fd int) error {
		inode, _ = Inode(fd)
		return shelf.Put(fd)
	}})
	if err != nil {
		t.Fatal(err)
	}
	return s, inode
}

func newShelf(t *testing.T) *Shelf {
	t.Helper()
	s, err := NewShelf(fmt.Sprintf("@verbena/shelf/test-%x", rand.Uint64()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// The kernel brings each packet to the socket whose place its queue pair has, also when sockets
// have been closed that lie on the shelf, in any order, and when they are taken from there.
func TestSteering(t *testing.T) {
	for _, addr := range []string{"127.77.4.1", "::1"} {
		t.Run(addr, func(t *testing.T) {
			at := netip.AddrPortFrom(netip.MustParseAddr(addr), 0xc123)
			shelf := newShelf(t)
			const n = 12
			var socks [n]*UDPSocket
			var inodes [n]uint64
			for i := range socks {
				socks[i], inodes[i] = held(t, at, shelf)
				if p, err := socks[i].FindPlace(rand.Uint64()); err != nil || p != uint32(i) {
					t.Fatalf("socket %d has place %d, %v", i, p, err)
				}
			}
			tx, err := OpenUDP(netip.AddrPortFrom(at.Addr(), 0xc124), UDPOptions{RcvBuf: 1, SndBuf: 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Close()
			try := func() {
				t.Helper()
				for range 200 {
					i := rand.N(n)
					var b [probeBytes]byte
					token := rand.Uint64()
					b[0] = probeOpcode
					binary.BigEndian.PutUint32(b[4:], 0xab000000|PlaceNumber(uint32(i), rand.Uint32()))
					binary.LittleEndian.PutUint64(b[12:], token)
					if err := unix.Sendto(tx.fd, b[:], 0, sockaddr(at)); err != nil {
						t.Fatal(err)
					}
					if socks[i] == nil {
						continue
					}
					if at, ok := socks[i].drainUntil(token); !ok || at != uint32(i) {
						t.Fatalf("a packet for place %d went elsewhere", i)
					}
				}
			}
			try()
			for _, i := range []int{0, 5, n - 1, 3} {
				if err := socks[i].Close(); err != nil {
					t.Fatal(err)
				}
				socks[i] = nil
			}
			try()
			for i, s := range socks {
				if s != nil {
					continue
				}
				fd, err := shelf.Take(inodes[i])
				if err != nil || fd < 0 {
					t.Fatalf("socket %d: descriptor %d, %v", i, fd, err)
				}
				if socks[i], err = AdoptUDP(fd, at); err != nil {
					t.Fatal(err)
				}
			}
			try()
			if fd, err := shelf.Take(1); fd >= 0 || err != nil {
				t.Errorf("a file that is not there: %d, %v", fd, err)
			}
			for i, s := range socks {
				if err := s.Close(); err != nil {
					t.Errorf("socket %d: %v", i, err)
				}
			}
			if _, err := OpenUDP(at, UDPOptions{}); err != syscall.EADDRINUSE {
				t.Errorf("the port is free while sockets are on the shelf: %v", err)
			}
			_ = shelf.Close()
			s, err := OpenUDP(at, UDPOptions{})
			if err != nil {
				t.Fatalf("the port is not free when the shelf is gone: %v", err)
			}
			_ = s.Close()
		})
	}
}

// A descriptor that is no socket, or one of another address, is not adopted.
func TestAdoptRefuses(t *testing.T) {
	at := netip.MustParseAddrPort("127.77.4.2:49321")
	fd := memfd(t, 0, 0)
	if _, err := AdoptUDP(fd, at); err == nil {
		t.Error("a file was adopted")
	}
	s, err := OpenUDP(at, UDPOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := AdoptUDP(s.fd, netip.MustParseAddrPort("127.77.4.3:49321")); err == nil {
		t.Error("a socket of another address was adopted")
	}
}

// Every file on the shelf can be found, however many there are, and stays there.
func TestShelfFull(t *testing.T) {
	shelf := newShelf(t)
	inodes := map[uint64]bool{}
	for range NumPlaces {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := shelf.Put(s); err != nil {
			t.Fatalf("after %d: %v", len(inodes), err)
		}
		inode, _ := Inode(s)
		inodes[inode] = true
		_ = unix.Close(s)
	}
	for range 2 {
		for inode := range inodes {
			fd, err := shelf.Take(inode)
			if err != nil || fd < 0 {
				t.Fatalf("descriptor %d, %v", fd, err)
			}
			_ = unix.Close(fd)
		}
	}
}
