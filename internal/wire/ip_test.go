package wire

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"testing"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGRH(t *testing.T) {
	a4, b4 := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1")
	a6, b6 := netip.MustParseAddr("fe80::1"), netip.MustParseAddr("2001:db8::2")
	mapped := netip.AddrFrom16(a4.As16())
	want4 := unhex(t, "0000000000000000000000000000000000000000"+
		"45a0003c000040004011260f0a0000020a000001") // the other nine words add up to 0xd9f0
	want6 := unhex(t, "6a0000000028"+"1140"+
		"fe800000000000000000000000000001"+"20010db8000000000000000000000002")
	if b := AppendGRH(nil, a4, b4, 0xa0, 64, 32); !bytes.Equal(b, want4) {
		t.Errorf("IPv4:\n got %x\nwant %x", b, want4)
	}
	if b := AppendGRH(nil, mapped, b4, 0xa0, 64, 32); !bytes.Equal(b, want4) {
		t.Errorf("IPv4, mapped:\n got %x\nwant %x", b, want4)
	}
	if b := AppendGRH(nil, a6, b6, 0xa0, 64, 32); !bytes.Equal(b, want6) {
		t.Errorf("IPv6:\n got %x\nwant %x", b, want6)
	}
	buf := make([]byte, 3, 64)
	if b := AppendGRH6(buf, a6, b6, 0, 1, 0); len(b) != 3+GRHLen {
		t.Errorf("IPv6: %d bytes", len(b)-3)
	}
	if n := testing.AllocsPerRun(10, func() {
		AppendGRH(buf[:0], a4, b4, 0, 64, 32)
		AppendGRH(buf[:0], a6, b6, 0, 64, 32)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestChecksums holds the sums against their rule: a header or datagram with its
// checksum adds up to 0xffff, and UDP never sends 0.
func TestChecksums(t *testing.T) {
	r, seed := seeded(t)
	a6, b6 := netip.MustParseAddrPort("[fe80::1]:49152"), netip.MustParseAddrPort("[2001:db8::2]:4791")
	pseudo := a6.Addr().As16()
	dst := b6.Addr().As16()
	for n := range 300 {
		b := AppendIPv4(nil, netip.AddrFrom4([4]byte{10, byte(n), 3, 4}), netip.AddrFrom4([4]byte{127, 0, 0, 1}), byte(n), 64, uint16(r.Uint32()), n)
		if s := fold(sum16(0, b)); s != 0xffff {
			t.Fatalf("seed %d: IPv4 header adds up to %#x", seed, s)
		}
		payload := make([]byte, n)
		for i := range payload {
			payload[i] = byte(r.Uint32())
		}
		u := AppendUDP6(nil, a6, b6, payload)
		if len(u) != UDPLen+n || !bytes.Equal(u[UDPLen:], payload) {
			t.Fatal("datagram is not header and payload")
		}
		s := sum16(sum16(sum16(uint32(len(u))+protoUDP, pseudo[:]), dst[:]), u)
		if fold(s) != 0xffff || u[6]|u[7] == 0 {
			t.Fatalf("seed %d: %d bytes add up to %#x, checksum %x", seed, n, fold(s), u[6:8])
		}
	}
	// a payload that makes the checksum come out as zero
	u := AppendUDP6(nil, a6, b6, []byte{0, 0})
	c := be.Uint16(u[6:])
	u = AppendUDP6(nil, a6, b6, []byte{byte(c >> 8), byte(c)})
	if be.Uint16(u[6:]) != 0xffff {
		t.Errorf("a checksum of zero is sent as %x", u[6:8])
	}
}
