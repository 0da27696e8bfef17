package wire

import "testing"

// TestOpcodeNumbers holds some rows of the table against the numbers of the
// specification; the golden packets and tshark (internal/pcap) do the rest.
func TestOpcodeNumbers(t *testing.T) {
	for _, c := range []struct {
		op      Opcode
		t       Transport
		k       Kind
		p       Pos
		x       Extra
		headers Headers
		length  int
		payload bool
		name    string
	}{
		{0x00, RC, KindSend, First, NoExtra, 0, 0, true, "RC Send First"},
		{0x05, RC, KindSend, Only, WithImm, HasImm, 4, true, "RC Send Only Immediate"},
		{0x06, RC, KindWrite, First, NoExtra, HasRETH, 16, true, "RC RDMA Write First"},
		{0x0b, RC, KindWrite, Only, WithImm, HasRETH | HasImm, 20, true, "RC RDMA Write Only Immediate"},
		{0x0c, RC, KindReadRequest, Only, NoExtra, HasRETH, 16, false, "RC RDMA Read Request"},
		{0x0e, RC, KindReadResponse, Middle, NoExtra, 0, 0, true, "RC RDMA Read Response Middle"},
		{0x0f, RC, KindReadResponse, Last, NoExtra, HasAETH, 4, true, "RC RDMA Read Response Last"},
		{0x11, RC, KindAck, Only, NoExtra, HasAETH, 4, false, "RC Acknowledge"},
		{0x12, RC, KindAtomicAck, Only, NoExtra, HasAETH | HasAtomicAckETH, 12, false, "RC Atomic Acknowledge"},
		{0x13, RC, KindCmpSwap, Only, NoExtra, HasAtomicETH, 28, false, "RC Compare Swap"},
		{0x14, RC, KindFetchAdd, Only, NoExtra, HasAtomicETH, 28, false, "RC Fetch Add"},
		{0x17, RC, KindSend, Only, WithInv, HasIETH, 4, true, "RC Send Only Invalidate"},
		{0x1c, RC, KindFlush, Only, NoExtra, HasFETH | HasRETH, 20, false, "RC Flush"},
		{0x1d, RC, KindAtomicWrite, Only, NoExtra, HasRETH, 16, true, "RC Atomic Write"},
		{0x2b, UC, KindWrite, Only, WithImm, HasRETH | HasImm, 20, true, "UC RDMA Write Only Immediate"},
		{0x64, UD, KindSend, Only, NoExtra, HasDETH, 8, true, "UD Send Only"},
		{0x65, UD, KindSend, Only, WithImm, HasDETH | HasImm, 12, true, "UD Send Only Immediate"},
		{0x81, CNP, KindCNP, Only, NoExtra, 0, 0, true, "CNP"},
		{0xa1, XRC, KindSend, Middle, NoExtra, HasXRCETH, 4, true, "XRC Send Middle"},
		{0xab, XRC, KindWrite, Only, WithImm, HasXRCETH | HasRETH | HasImm, 24, true, "XRC RDMA Write Only Immediate"},
		{0xb1, XRC, KindAck, Only, NoExtra, HasAETH, 4, false, "XRC Acknowledge"},
		{0xb4, XRC, KindFetchAdd, Only, NoExtra, HasXRCETH | HasAtomicETH, 32, false, "XRC Fetch Add"},
		{0xbc, XRC, KindFlush, Only, NoExtra, HasXRCETH | HasFETH | HasRETH, 24, false, "XRC Flush"},
	} {
		want := OpInfo{true, c.name, c.t, c.k, c.p, c.x, c.headers, c.length, c.payload}
		if got := *c.op.Info(); got != want {
			t.Errorf("%#02x: %+v, want %+v", uint8(c.op), got, want)
		}
		if c.op.String() != c.name {
			t.Errorf("%#02x is called %q", uint8(c.op), c.op)
		}
	}
	for _, o := range []Opcode{0x15, 0x18, 0x1b, 0x1e, 0x1f, 0x2c, 0x36, 0x3c, 0x3d, 0x40, 0x44, 0x60, 0x66, 0x80, 0x82, 0xb5, 0xb8, 0xc0, 0xff} {
		if i := o.Info(); i.Valid || i.Transport != Transport(o>>5) || i.Name != "" {
			t.Errorf("%#02x: %+v", uint8(o), *i)
		}
	}
	if s := Opcode(0x1f).String(); s != "opcode 0x1F" {
		t.Errorf("unknown opcode prints as %q", s)
	}
	if OpCNP.Info().Kind != KindCNP {
		t.Error("OpCNP is not the CNP")
	}
}

// TestOpIsInverse checks that Op and Info are each other's inverse over all
// opcodes and over all arguments, those out of range included.
func TestOpIsInverse(t *testing.T) {
	valid := 0
	for o := range 256 {
		i := Opcode(o).Info()
		if !i.Valid {
			continue
		}
		valid++
		if got, ok := Op(i.Transport, i.Kind, i.Pos, i.Extra); !ok || got != Opcode(o) {
			t.Errorf("%v: Op gives %#02x, %v", i.Name, got, ok)
		}
		if i.Transport != Transport(o>>5) {
			t.Errorf("%v has transport %v", i.Name, i.Transport)
		}
		if i.Extra != NoExtra && !i.Pos.Ends() {
			t.Errorf("%v has an extra header before the message's end", i.Name)
		}
		if i.HeaderLen != i.Headers.Len() || i.HeaderLen%4 != 0 {
			t.Errorf("%v: header length %d", i.Name, i.HeaderLen)
		}
		if n := BTHLen + i.HeaderLen + ICRCLen; i.Payload && n+MaxPayload > MaxPacket || n > MaxPacket {
			t.Errorf("%v can be longer than MaxPacket", i.Name)
		}
	}
	if want := 25 + 12 + 2 + 1 + 25 + 1; valid != want {
		t.Errorf("%d opcodes, want %d", valid, want)
	}
	found := 0
	for tr := range 256 {
		for k := range 256 {
			for p := range Pos(6) {
				for x := range Extra(5) {
					o, ok := Op(Transport(tr), Kind(k), p, x)
					if !ok {
						continue
					}
					found++
					if i := o.Info(); !i.Valid || i.Transport != Transport(tr) || i.Kind != Kind(k) || i.Pos != p || i.Extra != x {
						t.Errorf("Op(%d,%d,%d,%d) = %v", tr, k, p, x, o)
					}
				}
			}
		}
	}
	if found != valid {
		t.Errorf("Op knows %d opcodes, the table %d", found, valid)
	}
}

func TestTransportString(t *testing.T) {
	for tr, want := range map[Transport]string{RC: "RC", XRC: "XRC", Own: "Verbena", 7: "reserved transport", 200: "reserved transport"} {
		if got := tr.String(); got != want {
			t.Errorf("Transport(%d) = %q", tr, got)
		}
	}
}
