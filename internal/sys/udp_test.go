package sys

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"
)

// openPair opens two sockets on one address.
func openPair(t testing.TB, addr string, o UDPOptions) (tx, rx *UDPSocket) {
	t.Helper()
	var s [2]*UDPSocket
	for i := range s {
		for {
			port := uint16(0xc000 + rand.N(0x4000))
			var err error
			s[i], err = OpenUDP(netip.AddrPortFrom(netip.MustParseAddr(addr), port), o)
			if err == nil {
				break
			}
			if !errors.Is(err, syscall.EADDRINUSE) {
				t.Fatalf("OpenUDP(%s): %v", addr, err)
			}
		}
		t.Cleanup(func() { s[i].Close() })
	}
	return s[0], s[1]
}

// recvAll receives until so many bytes have come.
func recvAll(t *testing.T, s *UDPSocket, b *RecvBatch, want int) []Datagram {
	t.Helper()
	var all []Datagram
	for end := time.Now().Add(5 * time.Second); want > 0; {
		n, err := s.Recv(b, b.Cap())
		if err != nil {
			t.Fatal(err)
		}
		for i := range n {
			var d Datagram
			b.Get(i, &d)
			d.Bytes = bytes.Clone(d.Bytes)
			all = append(all, d)
			want -= len(d.Bytes)
		}
		if time.Now().After(end) {
			t.Fatalf("%d bytes did not come", want)
		}
	}
	return all
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

func TestSendRecv(t *testing.T) {
	for _, addr := range []string{"127.77.3.1", "::1"} {
		for _, gro := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/gro=%v", addr, gro), func(t *testing.T) {
				tx, rx := openPair(t, addr, UDPOptions{RcvBuf: 4 << 20, SndBuf: 4 << 20, GRO: gro})
				if err := rx.RecvHeader(); err != nil {
					t.Fatal(err)
				}
				if !tx.GSO() || rx.GRO() != gro {
					t.Fatalf("gso %v, gro %v", tx.GSO(), rx.GRO())
				}
				to := MakeSockaddr(rx.Local())
				data := pattern(10_000)
				b := NewSendBatch(4, 16)

				// one datagram of three pieces
				b.Add(data[:1])
				b.Add(nil)
				b.Add(data[1:100])
				b.Add(data[100:1000])
				b.End(&to, 0, 0, DefaultHopLimit)
				// four segments, the last one short
				b.Add(data[:3500])
				b.End(&to, 1000, 0x68, 7)
				// nothing at all is a datagram too
				b.End(&to, 0, 0xff, 255)
				if m, p := b.Room(); m != 1 || p != 12 || b.Len() != 3 {
					t.Fatalf("room for %d messages, %d pieces; %d messages", m, p, b.Len())
				}
				for at := 0; at < b.Len(); {
					n, err := tx.Send(b, at)
					if err != nil {
						t.Fatal(err)
					}
					at += n
				}

				got := recvAll(t, rx, NewRecvBatch(8, 64<<10), 4500)
				checkHeader := func(d Datagram, tclass, hop uint8) {
					t.Helper()
					if d.From != tx.Local() || d.TClass != tclass || d.HopLimit != hop || d.Truncated {
						t.Errorf("from %v (is %v), class %#x (%#x), hop limit %d (%d), truncated %v",
							d.From, tx.Local(), d.TClass, tclass, d.HopLimit, hop, d.Truncated)
					}
				}
				if !bytes.Equal(got[0].Bytes, data[:1000]) || got[0].Segment != 0 {
					t.Errorf("first datagram: %d bytes, segment %d", len(got[0].Bytes), got[0].Segment)
				}
				checkHeader(got[0], 0, DefaultHopLimit)
				if gro {
					if !bytes.Equal(got[1].Bytes, data[:3500]) || got[1].Segment != 1000 {
						t.Errorf("segments: %d bytes, segment %d", len(got[1].Bytes), got[1].Segment)
					}
					checkHeader(got[1], 0x68, 7)
				} else {
					for i := range 4 {
						end := min(1000*(i+1), 3500)
						if !bytes.Equal(got[1+i].Bytes, data[1000*i:end]) {
							t.Errorf("segment %d: %d bytes", i, len(got[1+i].Bytes))
						}
						checkHeader(got[1+i], 0x68, 7)
					}
				}
			})
		}
	}
}

func TestTruncated(t *testing.T) {
	tx, rx := openPair(t, "127.77.3.1", UDPOptions{RcvBuf: 1 << 20, SndBuf: 1 << 20})
	to := MakeSockaddr(rx.Local())
	b := NewSendBatch(1, 1)
	b.Add(pattern(200))
	b.End(&to, 0, 0, DefaultHopLimit)
	if _, err := tx.Send(b, 0); err != nil {
		t.Fatal(err)
	}
	got := recvAll(t, rx, NewRecvBatch(1, 100), 100)
	if !got[0].Truncated || !bytes.Equal(got[0].Bytes, pattern(200)[:100]) {
		t.Errorf("truncated %v, %d bytes", got[0].Truncated, len(got[0].Bytes))
	}
}

// A message that the kernel refuses does not hide those before it.
func TestSendError(t *testing.T) {
	tx, rx := openPair(t, "127.77.3.1", UDPOptions{RcvBuf: 1 << 20, SndBuf: 1 << 20})
	to := MakeSockaddr(rx.Local())
	b := NewSendBatch(2, 2)
	b.Add(pattern(10))
	b.End(&to, 0, 0, DefaultHopLimit)
	b.Add(pattern(65_508))
	b.End(&to, 0, 0, DefaultHopLimit)
	n, err := tx.Send(b, 0)
	if n != 1 || err != nil {
		t.Errorf("first: %d, %v", n, err)
	}
	n, err = tx.Send(b, 1)
	if n != 0 || !errors.Is(err, syscall.EMSGSIZE) {
		t.Errorf("second: %d, %v", n, err)
	}
	if n, err = tx.Send(b, 2); n != 0 || err != nil {
		t.Errorf("none: %d, %v", n, err)
	}
	recvAll(t, rx, NewRecvBatch(1, 100), 10)
}

// One datagram by itself, and one that the kernel refuses.
func TestSendTo(t *testing.T) {
	for _, addr := range []string{"127.77.3.1", "::1"} {
		tx, rx := openPair(t, addr, UDPOptions{RcvBuf: 1 << 20, SndBuf: 1 << 20})
		to := MakeSockaddr(rx.Local())
		if err := tx.SendTo(pattern(200), &to); err != nil {
			t.Fatal(err)
		}
		got := recvAll(t, rx, NewRecvBatch(1, 1000), 200)
		if len(got) != 1 || got[0].From != tx.Local() || !bytes.Equal(got[0].Bytes, pattern(200)) {
			t.Errorf("%s: %+v", addr, got)
		}
		if err := tx.SendTo(pattern(65_536), &to); !errors.Is(err, syscall.EMSGSIZE) {
			t.Errorf("%s, a long one: %v", addr, err)
		}
	}
}

func TestOpenErrors(t *testing.T) {
	_, rx := openPair(t, "127.77.3.1", UDPOptions{})
	if _, err := OpenUDP(rx.Local(), UDPOptions{}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("twice: %v", err)
	}
	if _, err := OpenUDP(netip.MustParseAddrPort("198.51.100.1:4791"), UDPOptions{}); !errors.Is(err, syscall.EADDRNOTAVAIL) {
		t.Errorf("not ours: %v", err)
	}
}

func TestOverflows(t *testing.T) {
	tx, rx := openPair(t, "127.77.3.1", UDPOptions{RcvBuf: 1, SndBuf: 1 << 20})
	to := MakeSockaddr(rx.Local())
	b := NewSendBatch(1, 1)
	b.Add(pattern(1000))
	b.End(&to, 0, 0, DefaultHopLimit)
	const sent = 100
	for range sent {
		if _, err := tx.Send(b, 0); err != nil {
			t.Fatal(err)
		}
	}
	lost, err := rx.Overflows()
	if err != nil {
		t.Fatal(err)
	}
	kept := 0
	for in := NewRecvBatch(1, 2000); ; kept++ {
		if n, _ := rx.Recv(in, 1); n == 0 {
			break
		}
	}
	if int(lost)+kept != sent || lost == 0 || kept == 0 {
		t.Errorf("%d lost, %d kept of %d", lost, kept, sent)
	}
}

func TestPieces(t *testing.T) {
	to := MakeSockaddr(netip.MustParseAddrPort("127.0.0.1:1"))
	b := NewSendBatch(2, 8)
	b.Add([]byte("ab"))
	b.End(&to, 0, 0, DefaultHopLimit)
	b.Add([]byte("c"))
	keep := b.Pieces()
	b.Add([]byte("x"))
	b.Add([]byte("y"))
	b.Truncate(keep)
	b.Add([]byte("d"))
	if b.OpenPieces() != 2 {
		t.Errorf("%d pieces", b.OpenPieces())
	}
	b.End(&to, 0, 0, DefaultHopLimit)
	var s strings.Builder
	for i := range b.Len() {
		b.EachPiece(i, func(p []byte) { s.Write(p) })
		s.WriteByte('.')
	}
	if s.String() != "ab.cd." {
		t.Errorf("pieces: %s", s.String())
	}
}

func TestNoAllocs(t *testing.T) {
	tx, rx := openPair(t, "127.77.3.1", UDPOptions{RcvBuf: 1 << 20, SndBuf: 1 << 20, GRO: true})
	if err := rx.RecvHeader(); err != nil {
		t.Fatal(err)
	}
	to := MakeSockaddr(rx.Local())
	out, in := NewSendBatch(2, 4), NewRecvBatch(2, 64<<10)
	data := pattern(2000)
	var d Datagram
	n := testing.AllocsPerRun(100, func() {
		out.Reset()
		out.Add(data)
		out.End(&to, 1000, 1, 1)
		if _, err := tx.Send(out, 0); err != nil {
			t.Fatal(err)
		}
		for {
			if n, _ := rx.Recv(in, 2); n > 0 {
				in.Get(0, &d)
				break
			}
		}
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestInterface(t *testing.T) {
	for _, a := range []string{"127.0.0.1", "127.77.250.3", "::1"} {
		name, mtu, err := Interface(netip.MustParseAddr(a))
		if err != nil || name != "lo" || mtu < 1500 {
			t.Errorf("Interface(%s): %s, %d, %v", a, name, mtu, err)
		}
	}
	if _, _, err := Interface(netip.MustParseAddr("198.51.100.1")); !errors.Is(err, syscall.EADDRNOTAVAIL) {
		t.Errorf("not ours: %v", err)
	}
}
