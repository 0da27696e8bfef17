package wire

import (
	"bytes"
	"errors"
	"testing"
)

// sample returns a packet of the opcode, with every field that it carries set
// and a zero ICRC. The payload is n bytes, or none if the opcode has none.
func sample(o Opcode, n int) (Header, []byte) {
	i := o.Info()
	if !i.Payload {
		n = 0
	}
	h := Header{
		Opcode: o, Solicited: true, MigReq: true, Pad: PadFor(n), PKey: DefaultPKey,
		FECN: true, BECN: true, DestQP: 0xabcdef, AckReq: true, Hints: HintOurs | HintAlone, PSN: 0x123456,
	}
	if i.Headers&HasDETH != 0 {
		h.DETH = DETH{QKey: 0x80010000, SrcQP: 0x765432}
	}
	if i.Headers&HasXRCETH != 0 {
		h.XRCSRQ = 0x246813
	}
	if i.Headers&HasRETH != 0 {
		h.RETH = RETH{VA: 0x0123456789abcdef, RKey: 0xdeadbeef, Len: 0x7fffffff}
	}
	if i.Headers&HasFETH != 0 {
		h.RETH.Flush = FETH{Placement: PlacePersistent | PlaceGlobal, Selectivity: SelectRegion}
	}
	if i.Headers&HasAtomicETH != 0 {
		h.Atomic = AtomicETH{VA: 0xfedcba9876543210, RKey: 0xfeedf00d, SwapAdd: 1 << 63, Compare: 0x1122334455667788}
	}
	if i.Headers&HasAETH != 0 {
		h.AETH = AETH{Syndrome: NakRemoteAccess, MSN: 0xc0ffee}
	}
	if i.Headers&HasAtomicAckETH != 0 {
		h.Orig = 0x8877665544332211
	}
	if i.Headers&(HasImm|HasIETH) != 0 {
		h.Imm = 0xcafe1234
	}
	b := h.Append(nil)
	for k := range n {
		b = append(b, byte(k*7+1))
	}
	return h, append(b, make([]byte, int(h.Pad)+ICRCLen)...)
}

// TestHeaderFields parses what Append wrote, for every opcode and padding.
func TestHeaderFields(t *testing.T) {
	for o := range 256 {
		if !Opcode(o).Info().Valid {
			continue
		}
		for _, n := range []int{0, 1, 2, 3, 4, 255, MaxPayload} {
			want, b := sample(Opcode(o), n)
			got := Header{Imm: 1, RETH: RETH{VA: 1}, Orig: 1} // what an earlier packet left
			payload, err := got.Parse(b)
			if err != nil {
				t.Fatalf("%v, %d bytes: %v", want.Opcode, n, err)
			}
			if got != want {
				t.Errorf("%v:\n got %+v\nwant %+v", want.Opcode, got, want)
			}
			if want.Opcode.Info().Payload && len(payload) != n || !bytes.Equal(payload, b[got.Len():got.Len()+len(payload)]) {
				t.Errorf("%v: payload of %d bytes, want %d", want.Opcode, len(payload), n)
			}
			if cap(payload) != len(payload) {
				t.Errorf("%v: an append to the payload would run into the packet", want.Opcode)
			}
		}
	}
}

// TestHeaderLayout pins the bytes of one packet with all the odd fields.
func TestHeaderLayout(t *testing.T) {
	h, _ := sample(0xab, 1) // XRC RDMA WRITE Only with immediate
	want := []byte{
		0xab, 0xf0, 0xff, 0xff, 0xc0, 0xab, 0xcd, 0xef, 0xd9, 0x12, 0x34, 0x56,
		0x00, 0x24, 0x68, 0x13,
		0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0xde, 0xad, 0xbe, 0xef, 0x7f, 0xff, 0xff, 0xff,
		0xca, 0xfe, 0x12, 0x34,
	}
	if b := h.Append(nil); !bytes.Equal(b, want) {
		t.Errorf("\n got %x\nwant %x", b, want)
	}
	h, _ = sample(0x1c, 0) // RC FLUSH: the FETH stands in front of the RETH
	want = []byte{
		0x1c, 0xc0, 0xff, 0xff, 0xc0, 0xab, 0xcd, 0xef, 0xd9, 0x12, 0x34, 0x56,
		0x00, 0x00, 0x00, 0x13,
		0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0xde, 0xad, 0xbe, 0xef, 0x7f, 0xff, 0xff, 0xff,
	}
	if b := h.Append(nil); !bytes.Equal(b, want) {
		t.Errorf("\n got %x\nwant %x", b, want)
	}
	// fields are cut to their width and do not spill into their neighbours
	wide := Header{Opcode: 0x64, Pad: 0xff, Version: 0xf0, DestQP: 0xff000001, PSN: 0xff000002, DETH: DETH{SrcQP: 0xff000003}}
	want = []byte{0x64, 0x30, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3}
	if b := wide.Append(nil); !bytes.Equal(b, want) {
		t.Errorf("\n got %x\nwant %x", b, want)
	}
}

func TestParseErrors(t *testing.T) {
	packet := func(o Opcode, rest int, edit func(b []byte)) []byte {
		h := Header{Opcode: o, PKey: DefaultPKey}
		b := append(h.Append(nil), make([]byte, rest+ICRCLen)...)
		if edit != nil {
			edit(b)
		}
		return b
	}
	for _, c := range []struct {
		name string
		b    []byte
		want error
	}{
		{"nothing", nil, ErrShort},
		{"no room for an ICRC", make([]byte, BTHLen+ICRCLen-1), ErrShort},
		{"BTH alone", packet(0x04, 0, nil), nil},
		{"version 1", packet(0x04, 0, func(b []byte) { b[1] |= 1 }), ErrVersion},
		{"version 8, opcode unknown", packet(0x1f, 0, func(b []byte) { b[1] |= 8 }), ErrVersion},
		{"opcode unknown", packet(0x15, 0, nil), ErrOpcode},
		{"reliable datagram", packet(0x44, 64, nil), ErrOpcode},
		{"RETH cut", packet(0x0c, -1, nil), ErrShort},
		{"AETH cut to nothing", packet(0x11, -4, nil), ErrShort},
		{"atomic without its last byte", packet(0x13, -1, nil), ErrShort},
		{"payload after an ACK", packet(0x11, 4, nil), ErrPayload},
		{"payload after a READ request", packet(0x0c, 1, nil), ErrPayload},
		{"padding without payload", packet(0x04, 0, func(b []byte) { b[1] |= 0x10 }), ErrPad},
		{"padding of an ACK", packet(0x11, 0, func(b []byte) { b[1] |= 0x30 }), ErrPad},
		{"not a multiple of four", packet(0x04, 5, nil), ErrPad},
		{"padding makes it no multiple of four", packet(0x04, 5, func(b []byte) { b[1] |= 0x30 }), ErrPad},
		{"padding of three", packet(0x04, 4, func(b []byte) { b[1] |= 0x30 }), nil},
		{"largest MTU", packet(0x04, MaxPayload, nil), nil},
		{"beyond the largest MTU", packet(0x04, MaxPayload+4, nil), ErrLong},
		{"a jumbo datagram", packet(0x04, 65000, nil), ErrLong},
		{"CNP", packet(OpCNP, 16, nil), nil},
	} {
		before := Header{Opcode: 0x77, PSN: 99}
		h := before
		payload, err := h.Parse(c.b)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if err != nil && (payload != nil || h != before) {
			t.Errorf("%s: refused, and yet %d bytes of payload and %+v", c.name, len(payload), h)
		}
	}
}

// TestHeaderAllocs: neither reading, writing nor refusing a packet allocates.
func TestHeaderAllocs(t *testing.T) {
	buf := make([]byte, 0, MaxPacket)
	var h Header
	for o := range 256 {
		want, b := sample(Opcode(o), 64)
		if n := testing.AllocsPerRun(10, func() { _, _ = h.Parse(b) }); n != 0 {
			t.Errorf("%v: Parse allocates %v times", want.Opcode, n)
		}
		if n := testing.AllocsPerRun(10, func() { _, _ = h.Parse(b[:len(b)-ICRCLen-1]) }); n != 0 {
			t.Errorf("%v: Parse of a short packet allocates %v times", want.Opcode, n)
		}
		if n := testing.AllocsPerRun(10, func() { buf = want.Append(buf[:0]) }); n != 0 {
			t.Errorf("%v: Append allocates %v times", want.Opcode, n)
		}
	}
}

// FuzzHeader: no input makes Parse panic; what it accepts, Append writes again,
// but for reserved bits; and reading that gives the same header.
func FuzzHeader(f *testing.F) {
	for o := range 256 {
		_, b := sample(Opcode(o), o%9)
		f.Add(b)
		f.Add(b[:len(b)-o%5])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		in := bytes.Clone(b)
		var h Header
		payload, err := h.Parse(b)
		if !bytes.Equal(b, in) {
			t.Fatal("Parse wrote to its input")
		}
		if err != nil {
			return
		}
		n := h.Len()
		if n+len(payload)+int(h.Pad)+ICRCLen != len(b) {
			t.Fatalf("%d of headers, %d of payload, %d of padding in %d bytes", n, len(payload), h.Pad, len(b))
		}
		if !bytes.Equal(payload, b[n:n+len(payload)]) {
			t.Fatal("payload is not what follows the headers")
		}
		want := bytes.Clone(b[:n])
		want[4] &= 0xc0 // reserved bits beside FECN and BECN
		switch set := h.Opcode.Info().Headers; {
		case set&HasDETH != 0:
			want[BTHLen+4] = 0
		case set&HasXRCETH != 0:
			want[BTHLen] = 0
		}
		if set := h.Opcode.Info().Headers; set&HasFETH != 0 {
			at := BTHLen + (set & HasXRCETH).Len()
			want[at], want[at+1], want[at+2] = 0, 0, 0
			want[at+3] &= 0x3f
		}
		got := h.Append(nil)
		if !bytes.Equal(got, want) {
			t.Fatalf("read  %x\nwrote %x", want, got)
		}
		var again Header
		if _, err := again.Parse(append(got, b[n:]...)); err != nil || again != h {
			t.Fatalf("%v: %+v, then %+v", err, h, again)
		}
	})
}

func BenchmarkParse(b *testing.B) {
	for _, o := range []Opcode{0x01, 0x06, 0x11} {
		_, p := sample(o, MaxPayload)
		b.Run(o.String(), func(b *testing.B) {
			b.ReportAllocs()
			var h Header
			for b.Loop() {
				if _, err := h.Parse(p); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkAppend(b *testing.B) {
	for _, o := range []Opcode{0x01, 0x06, 0x11} {
		h, _ := sample(o, MaxPayload)
		b.Run(o.String(), func(b *testing.B) {
			b.ReportAllocs()
			buf := make([]byte, 0, MaxPacket)
			for b.Loop() {
				buf = h.Append(buf[:0])
			}
		})
	}
}
