package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net/netip"
	"testing"
)

// referenceICRC follows the words of the rule: lay out the whole packet, put
// ones where it says so, and take the CRC.
func referenceICRC(src, dst netip.AddrPort, id uint16, udpPayload []byte) []byte {
	b := bytes.Repeat([]byte{0xff}, 8)
	n := len(udpPayload)
	if src.Addr().Is4() {
		b = AppendIPv4(b, src.Addr(), dst.Addr(), 0xff, 0xff, id, n)
		b[8+10], b[8+11] = 0xff, 0xff
	} else {
		b = AppendIPv6(b, src.Addr(), dst.Addr(), 0xff, 0xff, 0xfffff, n)
	}
	b = AppendUDP4(b, src.Port(), dst.Port(), n)
	b[len(b)-2], b[len(b)-1] = 0xff, 0xff
	bth := len(b)
	b = append(b, udpPayload[:n-ICRCLen]...)
	b[bth+4] = 0xff
	return binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(b))
}

var flows = []struct{ src, dst netip.AddrPort }{
	{netip.MustParseAddrPort("10.0.0.1:49636"), netip.MustParseAddrPort("10.0.0.2:4791")},
	{netip.MustParseAddrPort("127.77.0.1:65535"), netip.MustParseAddrPort("127.77.0.2:4791")},
	{netip.MustParseAddrPort("[::1]:49152"), netip.MustParseAddrPort("[::1]:4791")},
	{netip.MustParseAddrPort("[fe80::1]:0"), netip.MustParseAddrPort("[2001:db8::ffff]:4791")},
}

func TestICRCReference(t *testing.T) {
	r, seed := seeded(t)
	for _, f := range flows {
		p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
		for _, n := range []int{16, 20, 28, 60, 64, 68, 80, 1040, 4112, MaxPacket} {
			for range 20 {
				b := make([]byte, n)
				for i := range b {
					b[i] = byte(r.Uint32())
				}
				id := uint16(r.Uint32())
				want := referenceICRC(f.src, f.dst, id, b)
				got := p.Start(id, n).Header(b[:n-ICRCLen]).Append(nil)
				if !bytes.Equal(got, want) {
					t.Fatalf("seed %d: %v → %v, %d bytes, id %#x: %x, want %x", seed, f.src, f.dst, n, id, got, want)
				}
				cut := BTHLen + r.IntN(n-ICRCLen-BTHLen+1)
				got = p.Start(id, n).Header(b[:BTHLen]).Add(b[BTHLen:cut]).Add(b[cut : n-ICRCLen]).Append(nil)
				if !bytes.Equal(got, want) {
					t.Fatalf("seed %d: in pieces %x, want %x", seed, got, want)
				}
			}
		}
	}
}

func TestPseudoMapped(t *testing.T) {
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	m := func(a netip.Addr) netip.Addr { return netip.AddrFrom16(a.As16()) }
	if NewPseudo(a, b, 1, 2) != NewPseudo(m(a), m(b), 1, 2) {
		t.Error("the mapped form of an IPv4 address gives another ICRC")
	}
	if NewPseudo(a, b, 1, 2) == NewPseudo(b, a, 1, 2) {
		t.Error("both directions have the same ICRC")
	}
}

// TestAddPad: padding counts as zero bytes.
func TestAddPad(t *testing.T) {
	for n := range uint8(4) {
		if got, want := CRC(77).AddPad(n), CRC(77).Add(make([]byte, n)); got != want {
			t.Errorf("padding of %d: %#x, want %#x", n, got, want)
		}
	}
}

// sealed returns a packet of n bytes with its ICRC.
func sealed(p *Pseudo, id uint16, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*i + 7*i)
	}
	p.Start(id, n).Header(b[:n-ICRCLen]).Put(b[n-ICRCLen:])
	return b
}

// TestCheckEveryLength solves for the id at every length that a packet can have.
func TestCheckEveryLength(t *testing.T) {
	r, seed := seeded(t)
	f := flows[0]
	p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
	for n := BTHLen + ICRCLen; n <= MaxPacket; n += 4 {
		id, expect := uint16(r.Uint32()), uint16(r.Uint32())
		b := sealed(&p, id, n)
		if got, ok := p.Check(b, expect); !ok || got != id {
			t.Fatalf("seed %d: %d bytes, id %#x, expecting %#x: %#x, %v", seed, n, id, expect, got, ok)
		}
	}
}

// TestCheckEveryID solves for every id.
func TestCheckEveryID(t *testing.T) {
	f := flows[1]
	p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
	for id := range 1 << 16 {
		b := sealed(&p, uint16(id), 20)
		if got, ok := p.Check(b, 3); !ok || got != uint16(id) {
			t.Fatalf("id %#x: %#x, %v", id, got, ok)
		}
	}
}

func TestCheckRefuses(t *testing.T) {
	for _, f := range flows {
		p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
		v6 := f.src.Addr().Is6()
		for n := range BTHLen + ICRCLen {
			if _, ok := p.Check(make([]byte, n), 0); ok {
				t.Errorf("%d bytes accepted", n)
			}
		}
		for _, n := range []int{17, 4139, MaxPacket + 4, 65000} {
			// exact is exact at any length; solving is for real packets
			b := sealed(&p, 7, n)
			if _, ok := p.Check(b, 7); !ok {
				t.Errorf("%d bytes: refused with the right id", n)
			}
			if _, ok := p.Check(b, 8); ok != v6 {
				t.Errorf("%d bytes: %v with another id", n, ok)
			}
		}
		if v6 {
			b := sealed(&p, 1, 64)
			if id, ok := p.Check(b, 2); !ok || id != 2 {
				t.Errorf("IPv6: id %d, %v", id, ok)
			}
		}
	}
}

// TestCheckBoundary damages the ICRC so that the difference, carried back to the
// id, is one bit: inside the id it is another id, outside it is damage, and over
// IPv6 it always is.
func TestCheckBoundary(t *testing.T) {
	for _, f := range flows {
		p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
		for _, n := range []int{16, 20, 1040, MaxPacket} {
			for bit := range 32 {
				const id = 0x5aa5
				b := sealed(&p, id, n)
				icrc := b[n-ICRCLen:]
				d := forward(1<<bit, idToEnd+n-ICRCLen)
				binary.LittleEndian.PutUint32(icrc, binary.LittleEndian.Uint32(icrc)^d)
				got, ok := p.Check(b, id)
				if f.src.Addr().Is6() || bit >= 16 {
					if ok {
						t.Errorf("%v, %d bytes, bit %d: accepted as id %#x", f.src, n, bit, got)
					}
					continue
				}
				// bits 0 to 7 are those of the byte that comes first, the upper one
				if want := uint16(id ^ 1<<(bit^8)); !ok || got != want {
					t.Errorf("%v, %d bytes, bit %d: id %#x, %v, want %#x", f.src, n, bit, got, ok, want)
				}
			}
		}
	}
}

// TestCheckHidesNoShortBurst proves what Check promises: damage of one bit, or
// of two or three in a row, never looks like another id, wherever it is.
//
// What damage looks like depends on its distance from the id alone, so the
// longest packet stands for all.
func TestCheckHidesNoShortBurst(t *testing.T) {
	f := flows[0]
	p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
	b := sealed(&p, 0x1234, MaxPacket)
	flip := func(at int, bits uint32) {
		for i := range 3 {
			if k := at + i; bits>>i&1 != 0 {
				b[k/8] ^= 1 << (k % 8) // the order in which the CRC takes them
			}
		}
	}
	for _, burst := range []uint32{1, 3, 5, 7} {
		for at := range 8*MaxPacket - 2 {
			if at/8 == maskedAt || (at+2)/8 == maskedAt {
				continue // not covered
			}
			flip(at, burst)
			if id, ok := p.Check(b, 0x1234); ok {
				t.Fatalf("damage %03b at bit %d passes as id %#x", burst, at, id)
			}
			flip(at, burst)
		}
	}
	if _, ok := p.Check(b, 0); !ok {
		t.Fatal("the packet itself is refused")
	}
}

// TestCheckRandomDamage: of random damage, no more than about one in 65,536 is
// taken for another id.
func TestCheckRandomDamage(t *testing.T) {
	r, seed := seeded(t)
	f := flows[0]
	p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
	const tries = 1 << 20
	hidden := 0
	b := sealed(&p, 0, 64)
	for range tries {
		binary.LittleEndian.PutUint64(b[40:], r.Uint64())
		if _, ok := p.Check(b, 0); ok {
			hidden++
		}
	}
	if hidden > 60 { // 16 expected; 60 is 11 standard deviations
		t.Errorf("seed %d: %d of %d damaged packets accepted, expected about %d", seed, hidden, tries, tries>>16)
	}
}

func TestMaskedByte(t *testing.T) {
	f := flows[0]
	p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
	b := sealed(&p, 0, 32)
	for v := range 256 { // a switch may mark congestion on the way
		b[maskedAt] = byte(v)
		if id, ok := p.Check(b, 0); !ok || id != 0 {
			t.Errorf("fifth byte %#02x: id %d, %v", v, id, ok)
		}
	}
}

func TestForwardBackward(t *testing.T) {
	for _, a := range []uint32{0, 1, 1 << 31, 0xdeadbeef, 0xffffffff} {
		for _, n := range []int{0, 1, 4, 24, 4160} {
			if got := backward(forward(a, n), n); got != a {
				t.Errorf("%#x by %d and back: %#x", a, n, got)
			}
			if got, want := mulmod(a, forward(1<<31, n)), forward(a, n); got != want {
				t.Errorf("%#x times x^%d: %#x, want %#x", a, 8*n, got, want)
			}
		}
	}
}

func TestICRCAllocs(t *testing.T) {
	for _, f := range flows {
		p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
		b := sealed(&p, 5, 1040)
		var bad bool
		if n := testing.AllocsPerRun(100, func() {
			q := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
			q.Start(5, 1040).Header(b[:12]).Add(b[12:1036]).AddPad(0).Put(b[1036:])
			_, exact := q.Check(b, 5)
			_, solved := q.Check(b, 6)
			bad = bad || !exact || !solved
		}); n != 0 || bad {
			t.Errorf("%v: %v allocations, wrong %v", f.src, n, bad)
		}
	}
}

// FuzzICRC: the solver finds the id that it was given, and refuses any damage of
// one bit.
func FuzzICRC(f *testing.F) {
	for i := range 8 {
		_, b := sample(Opcode(i), 50*i)
		f.Add(b, uint16(i*7919), uint16(i), uint32(i*97), uint8(i))
	}
	for _, p := range golden(f)[:20] {
		f.Add(p.payload, p.id, uint16(0), uint32(100), uint8(0))
	}
	f.Fuzz(func(t *testing.T, b []byte, id, expect uint16, bit uint32, which uint8) {
		b = b[:min(len(b), MaxPacket)&^3]
		if len(b) < BTHLen+ICRCLen {
			return
		}
		b = bytes.Clone(b)
		fl := flows[int(which)%len(flows)]
		p := NewPseudo(fl.src.Addr(), fl.dst.Addr(), fl.src.Port(), fl.dst.Port())
		n := len(b) - ICRCLen
		p.Start(id, len(b)).Header(b[:n]).Put(b[n:])
		if want := referenceICRC(fl.src, fl.dst, id, b); !bytes.Equal(b[n:], want) {
			t.Fatalf("ICRC %x, want %x", b[n:], want)
		}
		want := id
		if fl.src.Addr().Is6() {
			want = expect
		}
		if got, ok := p.Check(b, expect); !ok || got != want {
			t.Fatalf("id %#x expecting %#x: %#x, %v", id, expect, got, ok)
		}
		at := int(bit % uint32(8*len(b)))
		b[at/8] ^= 1 << (at % 8)
		got, ok := p.Check(b, expect)
		if masked := at/8 == maskedAt; ok != masked || ok && got != want {
			t.Fatalf("bit %d of %d flipped: %#x, %v", at, 8*len(b), got, ok)
		}
	})
}

func BenchmarkICRC(b *testing.B) {
	for _, f := range flows[1:3] {
		for _, c := range []struct {
			name string
			n    int
		}{{"ACK", 20}, {"256B", 272}, {"1KiB", 1040}, {"4KiB", 4112}} {
			name := fmt.Sprintf("%s/%s", map[bool]string{true: "IPv4", false: "IPv6"}[f.src.Addr().Is4()], c.name)
			p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
			buf := sealed(&p, 9, c.n)
			b.Run(name+"/make", func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(c.n))
				for b.Loop() {
					p.Start(9, c.n).Header(buf[:c.n-ICRCLen]).Put(buf[c.n-ICRCLen:])
				}
			})
			b.Run(name+"/make-in-2", func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(c.n))
				for b.Loop() {
					p.Start(9, c.n).Header(buf[:BTHLen]).Add(buf[BTHLen : c.n-ICRCLen]).Put(buf[c.n-ICRCLen:])
				}
			})
			for _, expect := range []uint16{9, 10} {
				b.Run(name+map[uint16]string{9: "/check", 10: "/check-other-id"}[expect], func(b *testing.B) {
					b.ReportAllocs()
					b.SetBytes(int64(c.n))
					for b.Loop() {
						if _, ok := p.Check(buf, expect); !ok {
							b.Fatal("refused")
						}
					}
				})
			}
		}
	}
}

func BenchmarkNewPseudo(b *testing.B) {
	for _, f := range flows[1:3] {
		b.Run(f.src.String(), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
			}
		})
	}
}

// TestCheckTwice: a FLUSH is taken with Linux's ICRC too, whatever its id; other
// packets are not, nor a FLUSH that was damaged. Over IPv4, where 16 bits check,
// chance may make a few exceptions.
func TestCheckTwice(t *testing.T) {
	const tries, chance = 200, 3
	r, seed := seeded(t)
	for _, f := range flows {
		p := NewPseudo(f.src.Addr(), f.dst.Addr(), f.src.Port(), f.dst.Port())
		wrong := 0
		want := func(b []byte, expect, id uint16, sound bool) {
			if got, ok := p.Check(b, expect); ok != sound || ok && got != id {
				wrong++
			}
		}
		for range tries {
			b := make([]byte, BTHLen+4+16+ICRCLen)
			for i := range b {
				b[i] = byte(r.Uint32())
			}
			n := len(b) - ICRCLen
			id := uint16(r.Uint32())
			for _, opcode := range []byte{0x1c, 0x0a} {
				b[0] = opcode
				p.Start(id, len(b)).Header(b[:n]).Twice(b[:n]).Put(b[n:])
				flush := opcode == 0x1c
				want(b, id, id, flush)
				if !p.v6 {
					want(b, id+12345, id, flush)
				}
				b[n]++
				want(b, id, id, false)
			}
		}
		if wrong > chance || p.v6 && wrong > 0 {
			t.Errorf("seed %d: %v → %v: %d checks went wrong", seed, f.src, f.dst, wrong)
		}
	}
}

// TestTables: both ways to compute a CRC give the same.
func TestTables(t *testing.T) {
	r, seed := seeded(t)
	b := make([]byte, 1000)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	for n := range 300 {
		at, crc := r.IntN(len(b)-n), r.Uint32()
		if got, want := updateTables(crc, b[at:at+n]), crc32.Update(crc, crc32.IEEETable, b[at:at+n]); got != want {
			t.Fatalf("seed %d: %d bytes: %#x, want %#x", seed, n, got, want)
		}
	}
	t.Logf("tables are used: %v", useTables)
}

// Put stores the finished ICRC in the first four bytes of b.
func (c CRC) Put(b []byte) { c.Append(b[:0]) }
