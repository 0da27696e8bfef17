package link

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

var (
	peerA = netip.MustParseAddrPort("10.0.0.1:50000")
	peerB = netip.MustParseAddrPort("10.0.0.2:50000")
	local = netip.MustParseAddr("10.0.0.9")
)

// Packets that belong together become one train, and no others.
func TestCoupling(t *testing.T) {
	const (
		first, middle, last, lastImm, only = 0x00, 0x01, 0x02, 0x03, 0x04 // RC SEND
		wFirst, wMiddle, wLast             = 0x06, 0x07, 0x08             // RC WRITE
		ucMiddle                           = 0x21
		rFirst, rMiddle, rLast             = 0x0d, 0x0e, 0x0f // READ response
	)
	type p struct {
		op   wire.Opcode
		psn  int
		n    int // payload
		qp   uint32
		from netip.AddrPort
	}
	for _, c := range []struct {
		name string
		in   []p
		want string // packets/bytes/MTU of each train, ^ if it starts and $ if it ends a message
	}{
		{"one", []p{{op: only, n: 8}}, "^1/8/8$"},
		{"empty", []p{{op: only}}, "^1/0/0$"},
		{"whole", []p{{op: first, n: 256}, {op: middle, psn: 1, n: 256}, {op: last, psn: 2, n: 100}}, "^3/612/256$"},
		{"full last", []p{{op: first, n: 256}, {op: last, psn: 1, n: 256}}, "^2/512/256$"},
		{"with immediate", []p{{op: first, n: 256}, {op: lastImm, psn: 1, n: 1}}, "^2/257/256$"},
		{"two messages", []p{{op: first, n: 256}, {op: last, psn: 1, n: 1}, {op: first, psn: 2, n: 256}, {op: last, psn: 3, n: 1}},
			"^2/257/256$ ^2/257/256$"},
		{"onlys", []p{{op: only, n: 8}, {op: only, psn: 1, n: 8}}, "^1/8/8$ ^1/8/8$"},
		{"PSNs wrap", []p{{op: first, psn: -2, n: 256}, {op: middle, psn: -1, n: 256}, {op: last, psn: 0, n: 4}}, "^3/516/256$"},
		{"a gap", []p{{op: first, n: 256}, {op: middle, psn: 2, n: 256}}, "^1/256/256 1/256/256"},
		{"twice the same", []p{{op: middle, n: 256}, {op: middle, n: 256}}, "1/256/256 1/256/256"},
		{"backwards", []p{{op: middle, psn: 5, n: 256}, {op: middle, psn: 4, n: 256}}, "1/256/256 1/256/256"},
		{"no start", []p{{op: middle, n: 256}, {op: middle, psn: 1, n: 256}, {op: last, psn: 2, n: 9}}, "3/521/256$"},
		{"no end", []p{{op: first, n: 256}, {op: middle, psn: 1, n: 256}}, "^2/512/256"},
		{"start in the middle", []p{{op: first, n: 256}, {op: first, psn: 1, n: 256}}, "^1/256/256 ^1/256/256"},
		{"another queue pair", []p{{op: first, n: 256}, {op: middle, psn: 1, n: 256, qp: 1}}, "^1/256/256 1/256/256"},
		{"another sender", []p{{op: first, n: 256}, {op: middle, psn: 1, n: 256, from: peerB}}, "^1/256/256 1/256/256"},
		{"another kind", []p{{op: first, n: 256}, {op: wMiddle, psn: 1, n: 256}}, "^1/256/256 1/256/256"},
		{"another transport", []p{{op: first, n: 256}, {op: ucMiddle, psn: 1, n: 256}}, "^1/256/256 1/256/256"},
		{"a smaller middle", []p{{op: first, n: 256}, {op: middle, psn: 1, n: 128}}, "^1/256/256 1/128/128"},
		{"a larger middle", []p{{op: first, n: 256}, {op: middle, psn: 1, n: 512}}, "^1/256/256 1/512/512"},
		{"a larger last", []p{{op: first, n: 256}, {op: last, psn: 1, n: 260}}, "^1/256/256 1/260/260$"},
		{"an empty last", []p{{op: first, n: 256}, {op: last, psn: 1}}, "^1/256/256 1/0/0$"},
		{"an empty first", []p{{op: first}, {op: middle, psn: 1}, {op: last, psn: 2}}, "^1/0/0 1/0/0 1/0/0$"},
		{"a write", []p{{op: wFirst, n: 1024}, {op: wMiddle, psn: 1, n: 1024}, {op: wLast, psn: 2, n: 3}}, "^3/2051/1024$"},
		{"a read", []p{{op: rFirst, n: 1024}, {op: rMiddle, psn: 1, n: 1024}, {op: rLast, psn: 2, n: 3}}, "^3/2051/1024$"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var cp reassembler
			var rec recorder
			for _, p := range c.in {
				if !p.from.IsValid() {
					p.from = peerA
				}
				ps := wire.NewPseudo(p.from.Addr(), local, p.from.Port(), wire.RoCEPort)
				h := wire.Header{Opcode: p.op, PKey: wire.DefaultPKey, DestQP: p.qp, Pad: wire.PadFor(p.n),
					PSN: wire.MakePSN(0).Add(p.psn)}
				b := append(h.Append(nil), make([]byte, p.n+int(h.Pad))...)
				a := arrival{from: p.from, to: local, b: seal(b, 0, &ps, 0)}
				if !cp.packet(&rec, &ps, &a) {
					t.Fatal("bad checksum")
				}
			}
			cp.flush(&rec)
			cp.flush(&rec)
			var got []string
			for i := range rec.got {
				g := &rec.got[i]
				s := fmt.Sprintf("%d/%d/%d", g.N, g.Len, g.MTU)
				if g.Start {
					s = "^" + s
				}
				if g.End {
					s += "$"
				}
				got = append(got, s)
			}
			if s := strings.Join(got, " "); s != c.want || rec.dropped() != 0 {
				t.Errorf("got %s, want %s; dropped %v", s, c.want, rec.drops)
			}
		})
	}
}

// The flags and extra headers of every packet of a train.
func TestPacketFlags(t *testing.T) {
	for _, start := range []bool{false, true} {
		for _, end := range []bool{false, true} {
			tr := &train.Train{Transport: wire.RC, Kind: wire.KindSend, Start: start, End: end, N: 3, MTU: 256,
				PSN: 0xffffff, AckReq: true, Solicited: true, Extra: wire.WithImm, Imm: 77}
			tr.SetInline(make([]byte, 512))
			tr.Len = 768
			var c packetizer
			if err := c.start(tr); err != nil {
				t.Fatal(err)
			}
			for i := range 3 {
				h, n, err := c.header(i)
				if err != nil || n != 256 {
					t.Fatal(n, err)
				}
				info, last := h.Opcode.Info(), i == 2
				if h.PSN != wire.MakePSN(0xffffff).Add(i) || h.AckReq != last || h.Solicited != (last && end) ||
					info.Pos.Starts() != (start && i == 0) || info.Pos.Ends() != (end && last) ||
					(info.Headers&wire.HasImm != 0) != (end && last) || !h.MigReq || h.PKey != wire.DefaultPKey {
					t.Errorf("start %v, end %v, packet %d: %v %+v", start, end, i, h.Opcode, *h)
				}
			}
		}
	}
}

// A train never grows beyond its limit, however long the message.
func TestCouplingLimit(t *testing.T) {
	for _, n := range []int{4096, 256, 4} {
		ps := wire.NewPseudo(peerA.Addr(), local, peerA.Port(), wire.RoCEPort)
		var cp reassembler
		var rec recorder
		const packets = 3000
		for i := range packets {
			h := wire.Header{Opcode: 0x01, PKey: wire.DefaultPKey, PSN: wire.MakePSN(uint32(i))}
			b := append(h.Append(nil), make([]byte, n)...)
			cp.packet(&rec, &ps, &arrival{from: peerA, to: local, b: seal(b, 0, &ps, 0)})
		}
		cp.flush(&rec)
		if rec.packets() != packets || rec.dropped() != 0 {
			t.Errorf("packets of %d bytes: %d", n, rec.packets())
		}
		for i := range rec.got {
			if g := &rec.got[i]; g.Len > train.MaxBytes {
				t.Errorf("a train of %d bytes", g.Len)
			}
		}
		if most := packets*n/train.MaxBytes + packets/1024 + 2; len(rec.got) > most {
			t.Errorf("packets of %d bytes: %d trains, want at most %d", n, len(rec.got), most)
		}
	}
}

// recorded reads the RoCE packets of a capture: source, destination, IPv4
// identification, UDP payload.
func recorded(t testing.TB, file string) (out []tapped) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	le, be := binary.LittleEndian, binary.BigEndian
	if le.Uint32(b) != 0xa1b2c3d4 || le.Uint32(b[20:]) != 1 {
		t.Fatalf("%s: not a capture of Ethernet frames", file)
	}
	for b = b[24:]; len(b) > 0; {
		n := le.Uint32(b[8:])
		frame := b[16 : 16+n]
		b = b[16+n:]
		if be.Uint16(frame[12:]) != 0x0800 || frame[14] != 0x45 || frame[14+9] != 17 {
			continue
		}
		ip, udp := frame[14:34], frame[34:42]
		if be.Uint16(udp[2:]) != wire.RoCEPort {
			continue
		}
		src, _ := netip.AddrFromSlice(ip[12:16])
		dst, _ := netip.AddrFromSlice(ip[16:20])
		out = append(out, tapped{
			src:    netip.AddrPortFrom(src, be.Uint16(udp)),
			dst:    netip.AddrPortFrom(dst, be.Uint16(udp[2:])),
			tclass: ip[1], hopLimit: ip[8], id: be.Uint16(ip[4:]),
			b: string(frame[42 : 34+be.Uint16(udp[4:])]),
		})
	}
	return out
}

// Packets that Linux sent are reassembled and packetized again, and must be the same
// bytes but for one bit: Linux's driver leaves MigReq clear, adapters and we set it.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("../wire/testdata/golden/*.pcap")
	if err != nil || len(files) < 8 {
		t.Fatalf("%d captures, %v", len(files), err)
	}
	total := 0
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			in := recorded(t, file)
			total += len(in)
			var cp reassembler
			var rec recorder
			for i, p := range in {
				ps := wire.NewPseudo(p.src.Addr(), p.dst.Addr(), p.src.Port(), p.dst.Port())
				a := arrival{from: p.src, to: p.dst.Addr(), tclass: p.tclass, hopLimit: p.hopLimit, b: []byte(p.b)}
				if !cp.packet(&rec, &ps, &a) || a.id != p.id {
					t.Fatalf("packet %d: identification %d, want %d", i, a.id, p.id)
				}
			}
			cp.flush(&rec)
			if rec.dropped() != 0 || rec.packets() != len(in) {
				t.Fatalf("%d of %d packets, dropped %v", rec.packets(), len(in), rec.drops)
			}

			at := 0
			for i := range rec.got {
				g := &rec.got[i]
				g.Payload = mem.List{Raw: [][]byte{g.payload}}
				var c packetizer
				if err := c.start(&g.Train); err != nil {
					t.Fatalf("%v: %s", err, describe(g))
				}
				for k := range g.N {
					p := in[at]
					at++
					ps := wire.NewPseudo(p.src.Addr(), p.dst.Addr(), p.src.Port(), p.dst.Port())
					h, n, err := c.header(k)
					if err != nil {
						t.Fatal(err)
					}
					b, fault := c.appendPacket(make([]byte, 0, wire.MaxPacket), h, k, n)
					if !fault.OK() {
						t.Fatal(fault)
					}
					const migReq = 0x40
					if p.b[1]&migReq != 0 || b[1]&migReq == 0 {
						t.Errorf("packet %d: MigReq is %#x there, %#x here", at-1, p.b[1]&migReq, b[1]&migReq)
					}
					b[1] &^= migReq
					if b = seal(b, 0, &ps, p.id); !bytes.Equal(b, []byte(p.b)) {
						t.Errorf("packet %d:\n Linux %x\n ours  %x", at-1, p.b, b)
					}
				}
			}
		})
	}
	if total != 193 {
		t.Errorf("%d packets, want 193", total)
	}
}

// checkSink checks that whatever is delivered is consistent.
type checkSink struct {
	t       *testing.T
	packets int
	drops   int
}

func (s *checkSink) Drop(r Reason) {
	if r >= NumReasons {
		s.t.Errorf("reason %d", r)
	}
	s.drops++
}

func (s *checkSink) Deliver(t *train.Train) {
	s.packets += t.N
	sum := 0
	for _, p := range t.Payload.Raw {
		sum += len(p)
	}
	if sum != t.Len || t.Len > train.MaxBytes || t.N < 1 || t.N > 1 && (t.MTU == 0 || packets(t.Len, t.MTU) != t.N) {
		s.t.Errorf("train of %d packets of %d bytes with %d bytes in %d pieces", t.N, t.MTU, t.Len, sum)
	}
	// What came can be sent on, unless a packet that ends nothing was odd.
	if t.End || t.MTU%4 == 0 && t.MTU > 0 {
		out := *t
		var c packetizer
		if err := c.start(&out); err != nil {
			s.t.Errorf("%v: packets %d, bytes %d, mtu %d", err, t.N, t.Len, t.MTU)
			return
		}
		for i := range t.N {
			if _, _, err := c.header(i); err != nil {
				s.t.Errorf("packet %d of %d: %v", i, t.N, err)
			}
		}
	}
}

// Datagrams of any content, split by any segment size. Two bytes of the input are
// the segment size, one how many datagrams to make of the rest, and one whether
// segments get a correct checksum, which no fuzzer would find.
func FuzzReassemble(f *testing.F) {
	files, _ := filepath.Glob("../wire/testdata/golden/*.pcap")
	for _, file := range files {
		var all []byte
		size := 0
		for i, p := range recorded(f, file) {
			if i == 0 {
				size = len(p.b)
			}
			if i < 12 {
				all = append(all, p.b...)
			}
		}
		f.Add(uint16(size), uint8(1), uint8(1), all)
		f.Add(uint16(size), uint8(3), uint8(0), all)
	}
	f.Add(uint16(0), uint8(0), uint8(0), []byte{})
	f.Add(uint16(16), uint8(0), uint8(1), bytes.Repeat([]byte{1, 0, 0xff, 0xff}, 64))
	f.Fuzz(func(t *testing.T, segment uint16, count, fix uint8, data []byte) {
		data = data[:min(len(data), datagramSize)]
		r := &UDPReceiver{u: &UDP{}}
		sink := &checkSink{t: t}
		ps := wire.NewPseudo(peerA.Addr(), local, peerA.Port(), wire.RoCEPort)
		taken := 0
		for n := int(count%4) + 1; n > 0; n-- {
			d := sys.Datagram{From: peerA, Segment: int(int16(segment)), Truncated: fix&0x80 != 0}
			d.Bytes = bytes.Clone(data[:len(data)/n])
			data = data[len(data)/n:]
			if fix&1 != 0 && d.Segment > wire.BTHLen+wire.ICRCLen {
				for b := d.Bytes; len(b) > wire.BTHLen+wire.ICRCLen; b = b[min(d.Segment, len(b)):] {
					s := b[:min(d.Segment, len(b))]
					seal(s[:len(s)-wire.ICRCLen], 0, &ps, 0)
				}
			}
			taken += r.datagram(sink, local, &d)
			if fix&2 != 0 {
				r.reassembler.flush(sink)
			}
		}
		r.reassembler.flush(sink)
		if sink.packets+sink.drops != taken {
			t.Errorf("%d packets in, %d delivered, %d dropped", taken, sink.packets, sink.drops)
		}
	})
}
