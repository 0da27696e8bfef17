package link

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

func TestOpenRefuses(t *testing.T) {
	u := openUDP(t, UDPConfig{})
	own := u.Addrs()[0]
	for _, c := range []struct {
		addrs string
		errno syscall.Errno
		says  string
	}{
		{own.String(), syscall.EADDRINUSE, "choose another address"},
		{"198.51.100.7", syscall.EADDRNOTAVAIL, "198.51.100.7"},
		{"fe80::1", syscall.EINVAL, "link-local"},
		{"fe80::1%lo", syscall.EINVAL, "link-local"},
		{"0.0.0.0", syscall.EINVAL, "one interface"},
		{"224.0.0.1", syscall.EINVAL, "multicast"},
		{"127.77.0.9 127.77.0.9", syscall.EINVAL, "twice"},
		{"", syscall.EINVAL, "no local address"},
	} {
		var addrs []netip.Addr
		for _, a := range strings.Fields(c.addrs) {
			addrs = append(addrs, netip.MustParseAddr(a))
		}
		_, err := OpenUDP(&UDPConfig{Addrs: addrs})
		var op *ib.OpError
		if !errors.As(err, &op) || op.Errno != c.errno || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: %v, want %v that says %q", c.addrs, err, c.errno, c.says)
		}
	}
}

func TestPrepareRefuses(t *testing.T) {
	u := openUDP(t, UDPConfig{})
	own, peer := u.Addrs()[0], netip.MustParseAddr("127.0.0.1")
	for _, c := range []struct {
		src, dst netip.Addr
		errno    syscall.Errno
	}{
		{own, netip.IPv6Loopback(), syscall.EINVAL},
		{own, netip.Addr{}, syscall.EINVAL},
		{own, netip.MustParseAddr("ff02::1"), syscall.EINVAL},
		{own, netip.IPv4Unspecified(), syscall.EINVAL},
		{netip.MustParseAddr("127.0.0.2"), peer, syscall.EADDRNOTAVAIL},
	} {
		f := train.Flow{Src: c.src, Dst: c.dst}
		if err := u.Prepare(&f); !errors.Is(err, c.errno) || f.Link != nil {
			t.Errorf("from %v to %v: %v", c.src, c.dst, err)
		}
	}
	// A GID's form of an IPv4 address is the same address.
	f := train.Flow{Src: netip.AddrFrom16(own.As16()), Dst: netip.AddrFrom16(peer.As16())}
	if err := u.Prepare(&f); err != nil {
		t.Error(err)
	}
}

func TestPathMTU(t *testing.T) {
	for _, c := range []struct {
		net  int
		v6   bool
		want int
	}{
		{65536, false, 4096}, {9000, false, 4096}, {4200, false, 4096}, {4096, false, 2048},
		{1500, false, 1024}, {1500, true, 1024}, {1400, false, 1024}, {1280, true, 1024}, {1100, true, 512},
		{576, false, 256}, {300, false, 0},
	} {
		if got := PathMTU(c.net, c.v6); got != c.want {
			t.Errorf("PathMTU(%d, %v) = %d, want %d", c.net, c.v6, got, c.want)
		}
	}
}

func TestWindow(t *testing.T) {
	for _, c := range []struct{ buf, mtu, want int }{
		{8 << 20, 4096, 128}, {8 << 20, 1024, 512}, {8 << 20, 256, 2048},
		{2 * 212992, 4096, 23}, {212992, 4096, 11}, {1, 4096, 4}, {8 << 20, 0, 5447},
	} {
		u := &UDP{rcvBuf: c.buf}
		if got := u.Window(c.mtu); got != c.want {
			t.Errorf("buffer of %d: Window(%d) = %d, want %d", c.buf, c.mtu, got, c.want)
		}
	}
}

// simple makes a train of n bytes in one region.
func simple(f *train.Flow, table *mem.Table, key uint32, n int) *train.Train {
	t := &train.Train{Flow: f, Transport: wire.RC, Kind: wire.KindWrite, Start: true, End: true, MTU: 1024}
	t.N = packets(n, t.MTU)
	t.SetRange(table, actor, 0, key, iova, n)
	return t
}

// Malformed trains are refused, and those before them are sent.
func TestMalformedTrains(t *testing.T) {
	udp, to := openUDP(t, UDPConfig{}), openUDP(t, UDPConfig{})
	a, b := newPair(FaultyConfig{})
	defer a.Close()
	defer b.Close()
	table, key := region(t, make([]byte, 1<<20), 1<<20)
	for _, pair := range [][2]Link{{udp, to}, {a, b}} {
		f := flow(t, pair[0], pair[1].Addrs()[0], train.Flow{})
		other := &train.Flow{Src: f.Src, Dst: f.Dst}
		for i, spoil := range []func(t *train.Train){
			func(t *train.Train) { t.N = 0 },
			func(t *train.Train) { t.N = 4 },
			func(t *train.Train) { t.N = 2 },
			func(t *train.Train) { t.Len = -1 },
			func(t *train.Train) { t.Len, t.N, t.MTU = train.MaxBytes+4096, 65, 4096 },
			func(t *train.Train) { t.MTU = 0 },
			func(t *train.Train) { t.MTU = 8192 },
			func(t *train.Train) { t.MTU = 1022 },
			func(t *train.Train) { t.End = false },
			func(t *train.Train) { t.N, t.Len = 1, 5000 },
			func(t *train.Train) { t.Kind = wire.KindAck },
			func(t *train.Train) { t.N, t.Len, t.Kind = 1, 10, wire.KindAck },
			func(t *train.Train) { t.Kind = 0 },
			func(t *train.Train) { t.Transport = wire.UD },
			func(t *train.Train) { t.Extra = wire.WithInv },
			func(t *train.Train) { t.Flow = nil },
			func(t *train.Train) { t.Flow = other },
		} {
			good, bad := simple(f, table, key, 3000), simple(f, table, key, 3000)
			spoil(bad)
			n, err := pair[0].Send([]*train.Train{good, bad, good})
			if n != 1 || !errors.Is(err, ErrTrain) {
				t.Errorf("%T, case %d: %d trains sent, %v", pair[0], i, n, err)
			}
			var rec recorder
			pollUntil(t, pair[1], &rec, 3)
			// The Extra of a WRITE is refused at its last packet.
			for pair[1].Poll(&rec, 1) > 0 {
			}
			if got := merge(t, rec.got); rec.dropped() > 0 || got[0].Len != 3000 || len(got) > 2 {
				t.Errorf("%T, case %d: %d trains came, %d dropped", pair[0], i, len(got), rec.dropped())
			}
		}
	}
}

// A train whose memory cannot be read stops a Send, after those before it.
func TestPayloadFault(t *testing.T) {
	for _, size := range []int{100, 50_000} {
		for _, bounce := range []bool{false, true} {
			from, to := openUDP(t, UDPConfig{}), openUDP(t, UDPConfig{})
			f := flow(t, from, to.Addrs()[0], train.Flow{})
			table, key := region(t, make([]byte, 1<<20), 1<<20)
			good, bad := simple(f, table, key, size), simple(f, table, key, size)
			bad.SetRange(table, actor, 0, key+1<<8, iova, size)
			bad.Bounce = bounce
			n, err := from.Send([]*train.Train{good, good, bad, good})
			var pe *PayloadError
			if n != 2 || !errors.As(err, &pe) || pe.Fault.Kind != mem.FaultKey {
				t.Errorf("%d bytes, bounce %v: sent %d, %v", size, bounce, n, err)
			}
			var rec recorder
			pollUntil(t, to, &rec, 2*good.N)
			if rec.dropped() > 0 || rec.packets() != 2*good.N {
				t.Errorf("%d bytes, bounce %v: %d packets came", size, bounce, rec.packets())
			}
			// The sections of the good ones are closed: dereg does not hang.
			table.Lookup(key).Close()
		}
	}
}

// mapped is memory that can be unmapped.
func mapped(t *testing.T, n int) []byte {
	t.Helper()
	b, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Memory that is not accessible any more, from some byte on, is a stale payload: the
// checksum faults on it.
func TestStalePayload(t *testing.T) {
	for _, intact := range []int{0, 8192} {
		from, to := openUDP(t, UDPConfig{}), openUDP(t, UDPConfig{})
		f := flow(t, from, to.Addrs()[0], train.Flow{})
		table, key := region(t, make([]byte, 1<<20), 1<<20)
		gone := mapped(t, 64<<10)
		staleTable, staleKey := region(t, gone, len(gone))
		good, bad := simple(f, table, key, 20_000), simple(f, staleTable, staleKey, 20_000)
		if err := syscall.Mprotect(gone[intact:], syscall.PROT_NONE); err != nil {
			t.Fatal(err)
		}
		n, err := from.Send([]*train.Train{good, bad, good})
		var pe *PayloadError
		if n != 1 || !errors.As(err, &pe) || pe.Fault.Kind != mem.FaultStale || pe.Fault.Key != staleKey {
			t.Errorf("sent %d, %v", n, err)
		}
		var rec recorder
		want := good.N + intact/bad.MTU
		pollUntil(t, to, &rec, want)
		for to.Poll(&rec, 10) > 0 {
		}
		if rec.dropped() > 0 || rec.packets() != want {
			t.Errorf("%d packets came, want %d; %d dropped", rec.packets(), want, rec.dropped())
		}
		// The link works on.
		if n, err := from.Send([]*train.Train{good}); n != 1 || err != nil {
			t.Errorf("afterwards: %d, %v", n, err)
		}
		syscall.Munmap(gone)
	}
}

// Memory that was unmapped between checksum and send makes the kernel fault:
// the trains that share a send with it still go out.
func TestKernelFault(t *testing.T) {
	from, to := openUDP(t, UDPConfig{}), openUDP(t, UDPConfig{})
	f := flow(t, from, to.Addrs()[0], train.Flow{})
	table, key := region(t, make([]byte, 1<<20), 1<<20)
	gone := mapped(t, 64<<10)
	staleTable, staleKey := region(t, gone, len(gone))
	// A send of its own, then middle packets, which share one.
	ts := []*train.Train{
		simple(f, table, key, 1000),
		simple(f, table, key, 3072), simple(f, table, key, 3072),
		simple(f, staleTable, staleKey, 3072), simple(f, table, key, 3072),
	}
	for _, t := range ts[1:] {
		t.Start, t.End = false, false
	}
	s, err := from.acquire()
	if err != nil {
		t.Fatal(err)
	}
	defer from.release(s) // Close waits for it
	s.begin(f.Link.(*udpFlow).sock)
	for s.at.train < len(ts) {
		if err := s.train(ts[s.at.train]); err != nil {
			t.Fatal(err)
		}
	}
	if s.batch.Len() != 1 || s.open.n != 12 {
		t.Fatalf("%d messages, %d packets in the open one", s.batch.Len(), s.open.n)
	}
	if err := syscall.Munmap(gone); err != nil {
		t.Fatal(err)
	}
	n, err := s.send(ts)
	var pe *PayloadError
	if n != 3 || !errors.As(err, &pe) || pe.Fault.Kind != mem.FaultStale {
		t.Errorf("sent %d, %v", n, err)
	}
	var rec recorder
	pollUntil(t, to, &rec, 7)
	for to.Poll(&rec, 10) > 0 { // nothing was sent twice
	}
	if rec.dropped() > 0 || rec.packets() != 7 {
		t.Errorf("%d packets came, %d dropped", rec.packets(), rec.dropped())
	}
	if s := from.Stats(); s.TxLost != 0 {
		t.Errorf("%d lost", s.TxLost)
	}
}

// A train can be taken up again in its middle.
func TestResume(t *testing.T) {
	from, to := openUDP(t, UDPConfig{}), openUDP(t, UDPConfig{})
	rng, _ := newRand(t)
	m := newMaker(t, rng, 1<<20, flow(t, from, to.Addrs()[0], train.Flow{}))
	for _, bounce := range []bool{false, true} {
		o := m.train(train.Train{Transport: wire.RC, Kind: wire.KindWrite}, 20_001, 1024, true, true)
		o.Bounce = bounce
		s, err := from.acquire()
		if err != nil {
			t.Fatal(err)
		}
		s.begin(o.Flow.Link.(*udpFlow).sock)
		s.at.packet = 7
		n, err := s.send([]*train.Train{o.Train})
		from.release(s)
		if n != 1 || err != nil {
			t.Fatal(n, err)
		}
		var rec recorder
		pollUntil(t, to, &rec, 20-7)
		got := merge(t, rec.got)
		if len(got) != 1 || got[0].N != 20-7 || got[0].Start || got[0].PSN != o.PSN.Add(7) ||
			!bytes.Equal(got[0].payload, o.payload[7*1024:]) {
			t.Errorf("bounce %v: %d trains, %d packets", bounce, len(got), got[0].N)
		}
	}
}

// Close waits for every Send under way, with the first sender or another, and no Send
// succeeds after it.
func TestCloseWaits(t *testing.T) {
	u := openUDP(t, UDPConfig{})
	acquire := func() *sender {
		s, err := u.acquire()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first, second := acquire(), acquire()
	if !first.first || second.first {
		t.Fatal("the first sender is not taken first, or twice")
	}
	done := make(chan error)
	go func() { done <- u.Close() }()
	for _, s := range []*sender{second, first} {
		select {
		case <-done:
			t.Fatal("closed under a sender")
		case <-time.After(50 * time.Millisecond):
			u.release(s)
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := u.acquire(); !errors.Is(err, ErrClosed) {
		t.Errorf("a sender of a closed link: %v", err)
	}
}

// Close among goroutines that send all the time waits for each of them, ends, and leaves
// no sender behind.
func TestCloseAmongSenders(t *testing.T) {
	for range 200 {
		u := openUDP(t, UDPConfig{})
		var inside, rounds atomic.Int32
		var senders sync.WaitGroup
		for range 2 {
			senders.Go(func() {
				for {
					s, err := u.acquire()
					if err != nil {
						return
					}
					inside.Add(1)
					rounds.Add(1)
					inside.Add(-1)
					u.release(s)
				}
			})
		}
		for rounds.Load() < 10 {
			runtime.Gosched()
		}
		if err := u.Close(); err != nil {
			t.Fatal(err)
		}
		if n := inside.Load(); n != 0 || u.first.Load() != nil {
			t.Fatalf("%d at work in a closed link, the first sender is %v", n, u.first.Load())
		}
		senders.Wait()
	}
}

// The cached checksum prefixes are those of the sender and the address.
func TestPeerCache(t *testing.T) {
	rng, _ := newRand(t)
	var r UDPReceiver
	for range 20_000 {
		from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(4))}), uint16(0xc000+rng.IntN(4)*64))
		to := netip.AddrFrom4([4]byte{10, 0, 1, byte(rng.IntN(2))})
		if got, want := *r.peer(from, to), wire.NewPseudo(from.Addr(), to, from.Port(), wire.RoCEPort); got != want {
			t.Fatalf("from %v to %v: %v, want %v", from, to, got, want)
		}
	}
}

// fdOf finds the descriptor of a socket by the address it is bound to.
func fdOf(t *testing.T, a netip.AddrPort) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		sa, err := syscall.Getsockname(fd)
		if in, ok := sa.(*syscall.SockaddrInet4); err == nil && ok &&
			netip.AddrPortFrom(netip.AddrFrom4(in.Addr), uint16(in.Port)) == a {
			return fd
		}
	}
	t.Fatalf("no socket on %v", a)
	return -1
}

// A kernel that refuses segmentation, as it does here for a socket without UDP checksums,
// makes the link turn GSO off, and no packet is lost.
func TestSegmentationRefused(t *testing.T) {
	from, to := openUDP(t, UDPConfig{}), openUDP(t, UDPConfig{})
	rng, _ := newRand(t)
	f := flow(t, from, to.Addrs()[0], train.Flow{})
	if got := strings.Join(from.Offloads(), " "); got != "gso gro" {
		t.Fatalf("offloads %q", got)
	}
	fd := fdOf(t, netip.AddrPortFrom(f.Src, f.SrcPort))
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_NO_CHECK, 1); err != nil {
		t.Fatal(err)
	}
	m := newMaker(t, rng, 1<<20, f)
	var out []outgoing
	for range 20 {
		out = append(out, m.any(kindsOfTrains()))
	}
	out = append(out, m.train(train.Train{Transport: wire.RC, Kind: wire.KindSend}, 50_000, 1024, true, true))
	exchange(t, from, to, out)
	if got := strings.Join(from.Offloads(), " "); got != "gro" {
		t.Errorf("offloads afterwards: %q", got)
	}
	if s := from.Stats(); s.TxLost != 0 || s.TxPackets == 0 {
		t.Errorf("stats %+v", s)
	}
}

// A packet that the kernel refuses is lost, which is not an error.
func TestLoss(t *testing.T) {
	from := openUDP(t, UDPConfig{})
	f := flow(t, from, netip.MustParseAddr("255.255.255.255"), train.Flow{}) // EACCES, and stays here
	table, key := region(t, make([]byte, 1<<20), 1<<20)
	ts := []*train.Train{simple(f, table, key, 100), simple(f, table, key, 10_000), simple(f, table, key, 100)}
	if n, err := from.Send(ts); n != 3 || err != nil {
		t.Errorf("sent %d, %v", n, err)
	}
	if s := from.Stats(); s.TxLost != 12 || s.TxPackets != 0 || s.TxErrno != syscall.EACCES {
		t.Errorf("stats %+v", s)
	}
}

// A link with two addresses tells them apart.
func TestTwoAddresses(t *testing.T) {
	one, two := openUDP(t, UDPConfig{}), openUDP(t, UDPConfig{})
	addrs := append(one.Addrs(), two.Addrs()...)
	one.Close()
	two.Close()
	to, from := openUDP(t, UDPConfig{Addrs: addrs}), openUDP(t, UDPConfig{})
	var rec recorder
	for i, a := range addrs {
		o := &train.Train{Flow: flow(t, from, a, train.Flow{}), Transport: wire.RC, Kind: wire.KindSend,
			Start: true, End: true, N: 1, MTU: 1024, DestQP: uint32(i)}
		if n, err := from.Send([]*train.Train{o, o, o}); n != 3 || err != nil {
			t.Fatal(n, err)
		}
	}
	pollUntil(t, to, &rec, 6)
	for i := range rec.got {
		if g := &rec.got[i]; g.To != addrs[g.DestQP] || g.From != from.Addrs()[0] {
			t.Errorf("to %v from %v: arrived at %v", addrs[g.DestQP], g.From, g.To)
		}
	}
	// And it sends from both.
	for _, a := range addrs {
		f := &train.Flow{Src: a, Dst: from.Addrs()[0]}
		if err := to.Prepare(f); err != nil {
			t.Fatal(err)
		}
		o := &train.Train{Flow: f, Transport: wire.RC, Kind: wire.KindSend, Start: true, End: true, N: 1}
		if _, err := to.Send([]*train.Train{o}); err != nil {
			t.Fatal(err)
		}
		var rec recorder
		pollUntil(t, from, &rec, 1)
		if len(rec.got) != 1 || rec.got[0].From != a {
			t.Errorf("sent from %v, got %d", a, len(rec.got))
		}
	}
}

// Hand-made datagrams, each with one thing wrong.
func TestDrops(t *testing.T) {
	u := openUDP(t, UDPConfig{})
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	src := c.LocalAddr().(*net.UDPAddr).AddrPort()
	dst := netip.AddrPortFrom(u.Addrs()[0], wire.RoCEPort)
	ps := wire.NewPseudo(src.Addr(), dst.Addr(), src.Port(), dst.Port())
	good := wire.Header{Opcode: 0x04, PKey: wire.DefaultPKey, DestQP: 5} // SEND Only
	for _, tc := range []struct {
		name   string
		change func(h *wire.Header) (payload int)
		edit   func(b []byte) []byte // after the checksum
		want   int                   // Reason, or -1: delivered
	}{
		{name: "good", want: -1},
		{name: "limited member", change: func(h *wire.Header) int { h.PKey = 0x7fff; return 8 }, want: -1},
		{name: "empty", edit: func([]byte) []byte { return nil }, want: int(DropShort)},
		{name: "15 bytes", edit: func(b []byte) []byte { return b[:15] }, want: int(DropShort)},
		{name: "damaged", edit: func(b []byte) []byte { b[13] ^= 4; return b }, want: int(DropICRC)},
		{name: "cut short", edit: func(b []byte) []byte { return b[:len(b)-4] }, want: int(DropICRC)},
		{name: "too long", change: func(h *wire.Header) int { return 5000 }, want: int(DropTruncated)},
		{name: "a little too long", change: func(h *wire.Header) int { return 4100 }, want: int(DropTruncated)},
		{name: "version", change: func(h *wire.Header) int { h.Version = 1; return 8 }, want: int(DropVersion)},
		{name: "opcode", change: func(h *wire.Header) int { h.Opcode = 0x1f; return 8 }, want: int(DropOpcode)},
		{name: "reliable datagram", change: func(h *wire.Header) int { h.Opcode = 0x44; return 8 }, want: int(DropOpcode)},
		{name: "no room for headers", change: func(h *wire.Header) int { h.Opcode = 0x84; return 0 }, want: int(DropOpcode)},
		{name: "partition", change: func(h *wire.Header) int { h.PKey = 0x8001; return 8 }, want: int(DropPKey)},
		{name: "padding", change: func(h *wire.Header) int { h.Pad = 2; return 0 }, want: int(DropOther)},
		{name: "payload of an ACK", change: func(h *wire.Header) int { h.Opcode = 0x11; return 8 }, want: int(DropOther)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h, n := good, 8
			if tc.change != nil {
				n = tc.change(&h)
			}
			b := h.Append(nil)
			b = append(b, make([]byte, n)...)
			b = seal(b, 0, &ps, 0)
			if tc.edit != nil {
				b = tc.edit(b)
			}
			if _, err := c.WriteToUDPAddrPort(b, dst); err != nil {
				t.Fatal(err)
			}
			var rec recorder
			pollUntil(t, u, &rec, 1)
			if tc.want < 0 {
				if len(rec.got) != 1 || rec.dropped() != 0 {
					t.Errorf("dropped: %v", rec.drops)
				}
			} else if rec.drops[tc.want] != 1 || rec.dropped() != 1 || len(rec.got) != 0 {
				t.Errorf("dropped %v, delivered %d; want reason %d", rec.drops, len(rec.got), tc.want)
			}
		})
	}
}

// The budget bounds what one Poll does, roughly.
func TestBudget(t *testing.T) {
	from, to := openUDP(t, UDPConfig{}), openUDP(t, UDPConfig{})
	f := flow(t, from, to.Addrs()[0], train.Flow{})
	o := &train.Train{Flow: f, Transport: wire.RC, Kind: wire.KindSend, Start: true, End: true, N: 1}
	const n = 200
	for range n {
		mustSend(t, from, []*train.Train{o})
	}
	var rec recorder
	for got := 0; got < n; {
		k := to.Poll(&rec, 10)
		if k > defaultRecvBuffers {
			t.Fatalf("one poll took %d", k)
		}
		got += k
	}
	if k := to.Poll(&rec, 0); k != 0 {
		t.Errorf("%d packets for no budget", k)
	}
}

func TestClose(t *testing.T) {
	for name, open := range links(t) {
		t.Run(name, func(t *testing.T) {
			from, to := open(t)
			f := flow(t, from, to.Addrs()[0], train.Flow{})
			table, key := region(t, make([]byte, 1<<20), 1<<20)
			var wg sync.WaitGroup
			var sends atomic.Int64
			for range 3 {
				wg.Go(func() {
					o := simple(f, table, key, 10_000)
					for {
						if _, err := from.Send([]*train.Train{o}); err != nil {
							if !errors.Is(err, net.ErrClosed) {
								t.Errorf("send: %v", err)
							}
							return
						}
						sends.Add(1)
					}
				})
			}
			var closed atomic.Bool
			wg.Go(func() {
				var rec recorder
				for !closed.Load() {
					from.Poll(&rec, 100)
				}
			})
			wg.Go(func() {
				for !closed.Load() {
					from.Wait(-1)
				}
			})
			for sends.Load() < 10 {
				time.Sleep(time.Millisecond)
			}
			closed.Store(true)
			if err := from.Close(); err != nil {
				t.Error(err)
			}
			wg.Wait()
			if err := from.Close(); err != nil {
				t.Errorf("again: %v", err)
			}
			from.Wake()
			from.Wait(-1)
			if n := from.Poll(new(recorder), 10); n != 0 {
				t.Errorf("%d packets after close", n)
			}
		})
	}
}

func TestWake(t *testing.T) {
	for name, open := range links(t) {
		t.Run(name, func(t *testing.T) {
			l, _ := open(t)
			const long = 10 * time.Second
			start := time.Now()
			l.Wake()
			l.Wait(long)
			for range 50 {
				var called atomic.Bool
				var wg sync.WaitGroup
				wg.Go(func() {
					called.Store(true)
					l.Wake()
				})
				for !called.Load() {
					l.Wait(long)
				}
				wg.Wait()
			}
			if d := time.Since(start); d > long/2 {
				t.Errorf("waited %v", d)
			}
		})
	}
}

// Sending and receiving allocate nothing.
func TestNoAllocs(t *testing.T) {
	from, to := openUDP(t, UDPConfig{}), openUDP(t, UDPConfig{})
	f := flow(t, from, to.Addrs()[0], train.Flow{TClass: 1})
	table, key := region(t, make([]byte, 1<<20), 4096)
	small := &train.Train{Flow: f, Transport: wire.UD, Kind: wire.KindSend, Start: true, End: true, N: 1}
	small.SetInline([]byte("12345678"))
	scattered, scatteredKey := region(t, make([]byte, 1<<20), 100)
	pieces := simple(f, scattered, scatteredKey, 60_000)
	big, private := simple(f, table, key, 60_000), simple(f, table, key, 60_000)
	private.Bounce = true
	for name, ts := range map[string][]*train.Train{
		"small": {small}, "many": {small, small, small, small}, "big": {big}, "private": {private},
		"pieces": {pieces}, "mixed": {small, big, private, pieces, small},
	} {
		var sink copySink
		sink.dst.Raw = [][]byte{make([]byte, 1<<20)}
		want := int64(0)
		n := testing.AllocsPerRun(100, func() {
			for _, t := range ts {
				want += int64(t.N)
			}
			if _, err := from.Send(ts); err != nil {
				t.Fatal(err)
			}
			for sink.packets.Load() < want {
				to.Poll(&sink, 256)
			}
		})
		if n != 0 || sink.drops != 0 {
			t.Errorf("%s: %v allocations, %d drops", name, n, sink.drops)
		}
	}
}
