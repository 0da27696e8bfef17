package nvme

import (
	"errors"
	"strings"
	"testing"
)

// The layout, byte by byte, from the figures of the specification.
func TestCommandLayout(t *testing.T) {
	var b [64]byte
	for i := range b {
		b[i] = byte(i)
	}
	c := ParseCommand(&b)
	want := Command{Opcode: 0, Flags: 1, CID: 0x0302, NSID: 0x07060504, CDW2: 0x0b0a0908, CDW3: 0x0f0e0d0c,
		MPTR:  0x1716151413121110,
		DPTR:  [16]byte{24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39},
		CDW10: 0x2b2a2928, CDW11: 0x2f2e2d2c, CDW12: 0x33323130, CDW13: 0x37363534, CDW14: 0x3b3a3938, CDW15: 0x3f3e3d3c}
	if c != want {
		t.Errorf("%+v, should be %+v", c, want)
	}
	var back [64]byte
	c.Put(&back)
	if back != b {
		t.Errorf("written %x", back)
	}
}

func TestCompletionLayout(t *testing.T) {
	c := Completion{Result: 0x1122334455667788, SQHead: 0x0102, SQID: 0x0304, CID: 0x0506, Phase: true,
		Status: StatusLBAOutOfRange | StatusDNR}
	var b [16]byte
	c.Put(&b)
	want := [16]byte{0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 2, 1, 4, 3, 6, 5, 0x01, 0x81}
	if b != want {
		t.Errorf("% x, should be % x", b, want)
	}
	if got := ParseCompletion(&b); got != c {
		t.Errorf("%+v, should be %+v", got, c)
	}
	var published [16]byte
	c.Publish(&published)
	if published != want {
		t.Errorf("published % x, should be % x", published, want)
	}
	if got, ok := PollCompletion(&b, true); !ok || got != c {
		t.Errorf("polled %+v, %v", got, ok)
	}
	if _, ok := PollCompletion(&b, false); ok {
		t.Error("polled with the wrong phase")
	}
	odd := make([]byte, 32)
	for i := range 4 { // also where the memory is misaligned
		at := (*[16]byte)(odd[i:])
		c.Publish(at)
		if got, ok := PollCompletion(at, true); !ok || got != c {
			t.Errorf("at %d: polled %+v, %v", i, got, ok)
		}
	}
}

func TestSGLLayout(t *testing.T) {
	keyed := SGL{Addr: 0x1122334455667788, Length: 0x010203, Key: 0xaabbccdd, Type: SGLKeyed, Sub: SGLInvalidate}
	var b [16]byte
	keyed.Put(&b)
	want := [16]byte{0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 3, 2, 1, 0xdd, 0xcc, 0xbb, 0xaa, 0x4f}
	if b != want {
		t.Errorf("% x, should be % x", b, want)
	}
	if got := ParseSGL(&b); got != keyed {
		t.Errorf("%+v", got)
	}
	plain := SGL{Addr: 5, Length: 0xdeadbeef, Type: SGLLastSegment}
	plain.Put(&b)
	if got := ParseSGL(&b); got != plain || b[15] != 0x30 {
		t.Errorf("%+v, type byte %#x", got, b[15])
	}
}

func TestConnectData(t *testing.T) {
	d := ConnectData{HostID: [16]byte{1, 15: 9}, CNTLID: CNTLIDDynamic, SubNQN: testNQN, HostNQN: "nqn.host"}
	var b [ConnectDataSize]byte
	d.Put(&b)
	if b[16] != 0xff || b[17] != 0xff || string(b[256:260]) != "nqn." || string(b[512:520]) != "nqn.host" {
		t.Errorf("% x", b[:600])
	}
	got, _, ok := ParseConnectData(&b)
	if !ok || got != d {
		t.Errorf("%+v, %v", got, ok)
	}
	for off, name := range map[uint16]string{ConnectSubNQNOffset: "subsystem", ConnectHostNQNOffset: "host"} {
		bad := b
		for i := range 256 {
			bad[int(off)+i] = 'x'
		}
		if _, at, ok := ParseConnectData(&bad); ok || at != off {
			t.Errorf("name of %s without end: offset %d, %v", name, at, ok)
		}
		bad[off] = 0
		if _, at, ok := ParseConnectData(&bad); ok || at != off {
			t.Errorf("empty name of %s: offset %d, %v", name, at, ok)
		}
	}
	p := Connect{QID: 3, SQSize: 127, Attributes: 4, KATO: 5000}
	c := ConnectCommand(p)
	if got := c.ConnectParameters(); got != p || c.FabricsType() != FabricsConnect {
		t.Errorf("%+v", got)
	}
	var raw [64]byte
	c.Put(&raw)
	if raw[0] != 0x7f || raw[4] != 1 || raw[ConnectQIDOffset] != 3 || raw[ConnectSQSizeOffset] != 127 || raw[46] != 4 || le.Uint32(raw[ConnectKATOOffset:]) != 5000 {
		t.Errorf("% x", raw)
	}
	for _, want := range []Property{{Offset: RegCC, Value: 0x460001}, {Offset: RegCAP, Wide: true, Value: 1 << 40}} {
		c := PropertyCommand(FabricsPropertySet, want)
		if got := c.Property(); got != want {
			t.Errorf("%+v, should be %+v", got, want)
		}
	}
}

func TestStatus(t *testing.T) {
	st := StatusLBAOutOfRange | StatusDNR
	if got := st.String(); got != "LBA out of range, do not retry" {
		t.Error(got)
	}
	if !errors.Is(st.Err(), StatusLBAOutOfRange) || errors.Is(st.Err(), StatusInvalidField) || StatusSuccess.Err() != nil {
		t.Error("errors.Is")
	}
	if got := Status(0x7ab).String(); !strings.Contains(got, "type 7") || !strings.Contains(got, "0xab") {
		t.Error(got)
	}
}

func TestRegisters(t *testing.T) {
	sz, ok := MakeCMBSZ(64<<20, CMBSZSQ|CMBSZLists|CMBSZRead|CMBSZWrite)
	if !ok || sz.Size() != 64<<20 {
		t.Errorf("%#x, %v", uint32(sz), ok)
	}
	// What a virtual machine's controller was seen to have.
	qemu := CMBSZ(0x0004021d)
	if qemu.Size() != 64<<20 || qemu.Unit() != 1<<20 || CMBLOC(0x62).BAR() != 2 || CMBLOC(0x62).Offset(qemu) != 0 {
		t.Errorf("%d, %d, BAR %d", qemu.Size(), qemu.Unit(), CMBLOC(0x62).BAR())
	}
	if _, ok := MakeCMBSZ(4097, 0); ok {
		t.Error("4097 bytes")
	}
	c := MakeCAP(1024, 20, CAPNVM|CAPContiguous)
	if c.MaxEntries() != 1024 || c.Timeout() != 20 || c.Stride() != 4 || c.MinPage() != 12 {
		t.Errorf("%#x", uint64(c))
	}
	if cc := MakeCC(12); cc != 0x460001 || cc.SQEntry() != 6 || cc.CQEntry() != 4 {
		t.Errorf("%#x", uint32(cc))
	}
}
