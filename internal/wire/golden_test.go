package wire

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/gopacket/gopacket/pcapgo"
)

// goldenPacket is a packet of another implementation: see testdata/golden and
// testdata/kernel.
type goldenPacket struct {
	name     string
	n        int // in the file, from 1
	ip       []byte
	src, dst netip.AddrPort
	id       uint16
	payload  []byte // of UDP
}

// golden reads the packets of all files, and fails the test if any is not
// RoCE v2 over IPv4 with DF set, or over IPv6.
func golden(t testing.TB) []goldenPacket {
	t.Helper()
	files, err := filepath.Glob("testdata/*/*.pcap")
	if err != nil {
		t.Fatal(err)
	}
	var all []goldenPacket
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		r, err := pcapgo.NewReader(f)
		if err != nil {
			t.Fatal(name, err)
		}
		for n := 1; ; n++ {
			b, _, err := r.ReadPacketData()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(name, err)
			}
			p := goldenPacket{name: filepath.Base(name), n: n}
			var src, dst netip.Addr
			var udp []byte
			switch eth := be.Uint16(b[12:]); {
			case eth == 0x0800 && b[14] == 0x45 && be.Uint16(b[20:]) == flagDF:
				p.ip, udp = b[14:14+IPv4Len], b[14+IPv4Len:]
				p.id = be.Uint16(p.ip[4:])
				src, dst = netip.AddrFrom4([4]byte(p.ip[12:])), netip.AddrFrom4([4]byte(p.ip[16:]))
			case eth == 0x86dd:
				p.ip, udp = b[14:14+IPv6Len], b[14+IPv6Len:]
				src, dst = netip.AddrFrom16([16]byte(p.ip[8:])), netip.AddrFrom16([16]byte(p.ip[24:]))
			default:
				t.Fatalf("%s %d: neither IPv6 nor IPv4 with DF and without options", name, n)
			}
			p.src = netip.AddrPortFrom(src, be.Uint16(udp))
			p.dst = netip.AddrPortFrom(dst, be.Uint16(udp[2:]))
			p.payload = udp[UDPLen:be.Uint16(udp[4:])]
			if p.dst.Port() != RoCEPort {
				t.Fatalf("%s %d: port %d", name, n, p.dst.Port())
			}
			all = append(all, p)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if want := 193 + 60 + 72 + 28 + 48; len(all) != want {
		t.Fatalf("%d golden packets, want %d", len(all), want)
	}
	return all
}

// TestGoldenHeaders: what Parse read, Append writes, byte for byte.
func TestGoldenHeaders(t *testing.T) {
	seen := map[Opcode]int{}
	for _, p := range golden(t) {
		var h Header
		payload, err := h.Parse(p.payload)
		if err != nil {
			t.Errorf("%s %d: %v", p.name, p.n, err)
			continue
		}
		b := h.Append(nil)
		if len(b) != h.Len() || !bytes.Equal(b, p.payload[:h.Len()]) {
			t.Errorf("%s %d: %v\nread  %x\nwrote %x", p.name, p.n, h.Opcode, p.payload[:h.Len()], b)
		}
		rest := len(p.payload) - h.Len() - ICRCLen
		if len(payload)+int(h.Pad) != rest || h.Pad != PadFor(len(payload)) {
			t.Errorf("%s %d: payload %d, pad %d of %d bytes", p.name, p.n, len(payload), h.Pad, rest)
		}
		seen[h.Opcode]++
	}
	// the kinds of packet that the recording is known to hold
	for _, o := range []Opcode{0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12, 0x13, 0x14,
		0x16, 0x17, 0x1c, 0x1d, 0x20, 0x21, 0x22, 0x23, 0x25, 0x26, 0x28, 0x29, 0x2a, 0x2b, 0x64, 0x65} {
		if seen[o] == 0 {
			t.Errorf("no %v among the golden packets", o)
		}
	}
}

// TestGoldenICRC: the ICRC is the recorded one, computed at one go or in
// pieces, and the id is found from any other one. That of a FLUSH is not as it
// should be: see CRC.Twice.
func TestGoldenICRC(t *testing.T) {
	r, seed := seeded(t)
	for _, p := range golden(t) {
		ps := NewPseudo(p.src.Addr(), p.dst.Addr(), p.src.Port(), p.dst.Port())
		n := len(p.payload) - ICRCLen
		want := p.payload[n:]

		end := func(c CRC) CRC { return c }
		if IsFlush(p.payload[:n]) {
			end = func(c CRC) CRC { return c.Twice(p.payload[:n]) }
		}
		if got := end(ps.Start(p.id, len(p.payload)).Header(p.payload[:n])).Append(nil); !bytes.Equal(got, want) {
			t.Errorf("%s %d: ICRC %x, recorded %x", p.name, p.n, got, want)
		}
		var h Header
		data, err := h.Parse(p.payload)
		if err != nil {
			t.Fatal(err)
		}
		cut := r.IntN(len(data) + 1)
		var got [ICRCLen]byte
		end(ps.Start(p.id, len(p.payload)).Header(h.Append(nil)).Add(data[:cut]).Add(data[cut:]).AddPad(h.Pad)).Put(got[:])
		if !bytes.Equal(got[:], want) {
			t.Errorf("%s %d: ICRC in pieces, cut at %d (seed %d) %x, recorded %x", p.name, p.n, cut, seed, got, want)
		}

		for _, expect := range []uint16{p.id, 0, 1, p.id - 1, p.id ^ 0x8000, 0xffff, uint16(r.Uint32())} {
			want := p.id
			if p.src.Addr().Is6() {
				want = expect // there is none to find
			}
			if id, ok := ps.Check(p.payload, expect); !ok || id != want {
				t.Errorf("%s %d: Check expecting %#x says %#x, %v; it is %#x", p.name, p.n, expect, id, ok, want)
			}
		}
		// another flow's packet is refused: what a translated address looks like
		other := NewPseudo(p.src.Addr(), p.dst.Addr(), p.src.Port()^1, p.dst.Port())
		if id, ok := other.Check(p.payload, p.id); ok {
			t.Errorf("%s %d: accepted with another source port, id %#x", p.name, p.n, id)
		}
	}
}

// TestGoldenIP rebuilds the recorded IP headers.
func TestGoldenIP(t *testing.T) {
	for _, p := range golden(t) {
		var b []byte
		if src, dst := p.src.Addr(), p.dst.Addr(); src.Is4() {
			b = AppendIPv4(nil, src, dst, p.ip[1], p.ip[8], p.id, len(p.payload))
		} else {
			tclass, label := uint8(be.Uint16(p.ip)>>4), be.Uint32(p.ip)
			b = AppendIPv6(nil, src, dst, tclass, p.ip[7], label, len(p.payload))
		}
		if !bytes.Equal(b, p.ip) {
			t.Errorf("%s %d: %x, recorded %x", p.name, p.n, b, p.ip)
		}
	}
}
