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
				if p, err := socks[i].FindPlace(0, rand.Uint64()); err != nil || p != uint32(i) {
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

// A process that is killed amid a Take leaves a file on the shelf twice. The others are found all
// the same, in whatever order they lie.
func TestShelfFileTwice(t *testing.T) {
	shelf, random := newShelf(t), pinSeed(t)
	var inodes []uint64
	for i := range 4 {
		fd, err := NewMemfd("shelved", 4096)
		must(t, err)
		inode, err := Inode(fd)
		must(t, err)
		inodes = append(inodes, inode)
		must(t, shelf.Put(fd))
		if i == 0 {
			must(t, shelf.Put(fd))
		}
		must(t, CloseFD(fd))
	}
	for range 200 {
		want := inodes[random.IntN(len(inodes))]
		fd, err := shelf.Take(want)
		must(t, err)
		if fd < 0 {
			t.Fatal("a file that is on the shelf is not found")
		}
		if got, err := Inode(fd); err != nil || got != want {
			t.Fatal("it is another file", err)
		}
		must(t, CloseFD(fd))
	}
	if fd, err := shelf.Take(1 << 60); fd >= 0 || err != nil {
		t.Errorf("a file that is not there: %d, %v", fd, err)
	}
}

// What is for queue pair 1 goes to the socket that all processes read, if it asks for a connection,
// and otherwise to the place in the receiver's communication id.
func TestSteeringManagement(t *testing.T) {
	at := netip.MustParseAddrPort("127.77.4.9:49443")
	shelf := newShelf(t)
	const n = 5
	var socks [n]*UDPSocket
	for i := range socks {
		socks[i], _ = held(t, at, shelf)
		defer socks[i].Close()
	}
	tx, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(tx)
	for _, c := range []struct {
		name          string
		qpn           uint32
		attr          uint16
		first, second uint32
		length        int
		want          int
	}{
		{"REQ", 1, 0x10, 3 << 24, 2 << 24, 280, CommonPlace},
		{"SIDR_REQ", 1, 0x17, 3 << 24, 2 << 24, 280, CommonPlace},
		{"SIDR_REP", 1, 0x18, 3<<24 | 77, 2 << 24, 280, 3},
		{"REP", 1, 0x13, 3 << 24, 2<<24 | 99, 280, 2},
		{"DREQ", 1, 0x15, 3 << 24, 4 << 24, 280, 4},
		{"too short for an attribute", 1, 0x13, 3 << 24, 2 << 24, 30, CommonPlace},
		{"too short for an id", 1, 0x13, 3 << 24, 2 << 24, 50, CommonPlace},
		{"passed on", ManagementNumber(4), 0x10, 3 << 24, 2 << 24, 280, 4},
		{"another queue pair", PlaceNumber(2, 5), 0x10, 3 << 24, 4 << 24, 280, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := make([]byte, 280)
			binary.BigEndian.PutUint32(b[4:], 0xab000000|c.qpn)
			binary.BigEndian.PutUint16(b[36:], c.attr)
			binary.BigEndian.PutUint32(b[44:], c.first)
			binary.BigEndian.PutUint32(b[48:], c.second)
			if err := unix.Sendto(tx, b[:c.length], 0, sockaddr(at)); err != nil {
				t.Fatal(err)
			}
			for i, s := range socks {
				m, _, err := unix.Recvfrom(s.fd, b, unix.MSG_DONTWAIT)
				if got := err == nil && m == c.length; got != (i == c.want) {
					t.Errorf("socket %d: %v, %d bytes; want it at %d", i, err, m, c.want)
				}
			}
		})
	}
	if IsManagement(0) || IsManagement(2) || !IsManagement(1) || !IsManagement(ManagementNumber(200)) || Place(ManagementNumber(200)) != 200 {
		t.Error("numbers of queue pair 1")
	}
}

// A socket's place is found though packets are lost.
func TestFindPlaceLossy(t *testing.T) {
	at := netip.MustParseAddrPort("127.77.4.10:49444")
	shelf := newShelf(t)
	const random, tenth = 0xfffff000 + 56, 1 << 32 / 10 // SKF_AD_OFF + SKF_AD_RANDOM
	lossy := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: random},
		{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, K: tenth, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 16},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	for i := range 40 {
		s, _ := held(t, at, shelf)
		defer s.Close()
		prog := unix.SockFprog{Len: uint16(len(lossy)), Filter: &lossy[0]}
		if err := unix.SetsockoptSockFprog(s.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
			t.Fatal(err)
		}
		if p, err := s.FindPlace(0, rand.Uint64()); err != nil || p != uint32(i) {
			t.Fatalf("socket %d has place %d, %v", i, p, err)
		}
	}
}
