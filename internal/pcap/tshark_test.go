package pcap

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/verbena-rdma/verbena/internal/wire"
)

// The tests of this file have tshark, an implementation that nobody here wrote,
// decode what we write, and compare every field of every header.
//
// tshark shows the ICRC but does not check it (its infiniband dissector has no
// status field for it; seen in 4.0). So the ICRC is checked here,
// against the IP header that the file holds, and then against what tshark shows.

// written is a packet of the capture, with what tshark must say about it.
type written struct {
	what     string
	src, dst netip.AddrPort
	id       uint16
	udp      []byte // payload of UDP
	h        wire.Header
	mad      bool // tshark dissects the payload further
}

func TestTsharkOpcodes(t *testing.T) {
	var all []written
	for o := range 256 {
		op := wire.Opcode(o)
		if !op.Info().Valid || op.Info().Kind == wire.KindFlush || op.Info().Kind == wire.KindAtomicWrite || op.Info().Transport == wire.Own {
			continue // the first two are younger than tshark's table (seen in 4.0: "Unknown OpCode"), the others our own
		}
		for i, n := range []int{64, 61, 0} {
			if !op.Info().Payload {
				n = 0
			}
			h := wire.Header{
				Opcode: op, Solicited: i == 0, MigReq: i != 0, Pad: wire.PadFor(n), PKey: wire.DefaultPKey, DestQP: 0xabcde0 + uint32(i),
				AckReq: i != 1, PSN: wire.PSN(0xfffff0 + i),
				DETH: wire.DETH{QKey: 0x80010001, SrcQP: 0x765432}, XRCSRQ: 0x13579b,
				RETH:   wire.RETH{VA: 0xfedcba9876543210, RKey: 0xdeadbeef, Len: 0x7fffffff},
				Atomic: wire.AtomicETH{VA: 0x0123456789abcdef, RKey: 0xfeedf00d, SwapAdd: 1 << 63, Compare: 0x1122334455667788},
				AETH:   wire.AETH{Syndrome: []wire.Syndrome{wire.AckNoCredits, wire.RNRNak(14), wire.NakRemoteAccess}[i], MSN: 0xc0ffee},
				Orig:   0x8877665544332211, Imm: 0xcafe1234,
			}
			payload := bytes.Repeat([]byte{0xa5}, n)
			all = append(all, build("", src4, dst4, uint16(o*257+i), h, payload), build("", src6, dst6, 0, h, payload))
		}
	}
	compare(t, all)
}

func TestTsharkGolden(t *testing.T) {
	var all []written
	files, err := filepath.Glob("../wire/testdata/golden/*.pcap")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		for i, frame := range readClassic(t, name) {
			p := gopacket.NewPacket(frame, layers.LinkTypeEthernet, gopacket.Default)
			udp, ok := p.Layer(layers.LayerTypeUDP).(*layers.UDP)
			if !ok {
				t.Fatalf("%s %d: no UDP", name, i+1)
			}
			w := written{what: fmt.Sprintf("%s %d", filepath.Base(name), i+1), udp: udp.Payload}
			switch ip := p.NetworkLayer().(type) {
			case *layers.IPv4:
				w.id = ip.Id
			case *layers.IPv6:
			default:
				t.Fatalf("%s: no IP", w.what)
			}
			s, d := p.NetworkLayer().NetworkFlow().Endpoints()
			w.src = netip.AddrPortFrom(netip.MustParseAddr(s.String()), uint16(udp.SrcPort))
			w.dst = netip.AddrPortFrom(netip.MustParseAddr(d.String()), uint16(udp.DstPort))
			payload, err := w.h.Parse(w.udp)
			if err != nil {
				t.Fatalf("%s: %v", w.what, err)
			}
			w.mad = w.h.DestQP == 1
			all = append(all, w)

			// the same over the other family
			src, dst := src6, dst6
			if w.src.Addr().Is6() {
				src, dst = src4, dst4
			}
			other := build(w.what, src, dst, uint16(i), w.h, payload)
			other.mad = w.mad
			all = append(all, other)
		}
	}
	if want := 2 * goldenPackets; len(all) != want {
		t.Fatalf("%d golden packets, want %d", len(all), want)
	}
	compare(t, all)
}

const goldenPackets = 193 + 60 // IPv4, IPv6

func build(what string, src, dst netip.AddrPort, id uint16, h wire.Header, payload []byte) written {
	b := append(h.Append(nil), payload...)
	b = append(b, make([]byte, h.Pad)...)
	ps := wire.NewPseudo(src.Addr(), dst.Addr(), src.Port(), dst.Port())
	b = ps.Start(id, len(b)+wire.ICRCLen).Header(b).Append(b)
	return written{what: strings.TrimSpace(what + " " + h.Opcode.String()), src: src, dst: dst, id: id, udp: b, h: h}
}

func readClassic(t *testing.T, name string) (frames [][]byte) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := pcapgo.NewReader(f)
	if err != nil {
		t.Fatal(name, err)
	}
	for {
		b, _, err := r.ReadPacketData()
		if errors.Is(err, io.EOF) {
			return frames
		}
		if err != nil {
			t.Fatal(name, err)
		}
		frames = append(frames, b)
	}
}

// compare writes the packets, has tshark decode them and holds every field
// against what was meant.
func compare(t *testing.T, all []written) {
	path := filepath.Join(t.TempDir(), "c.pcapng")
	w, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range all {
		w.Packet(time.Unix(1_700_000_000, int64(i)), p.src, p.dst, 0, 64, p.id, p.udp)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	frames := read(t, f)
	rows := tshark(t, path)
	if len(rows) != len(all) || len(frames) != len(all) {
		t.Fatalf("wrote %d packets, gopacket reads %d, tshark %d", len(all), len(frames), len(rows))
	}
	for i, p := range all {
		c := checker{t: t, what: fmt.Sprintf("packet %d (%s, %v)", i+1, p.what, p.src.Addr()), row: rows[i]}
		c.network(p)
		c.icrc(p, frames[i].data)
		c.transport(p)
		if t.Failed() {
			t.Fatalf("tshark's row: %.2000v", rows[i])
		}
	}
}

var columns = []string{
	"frame.protocols", "_ws.malformed", "_ws.expert.severity", "_ws.expert.message", "_ws.col.Info",
	"ip.id", "ip.flags", "ip.checksum.status", "udp.checksum.status", "udp.payload",
	"infiniband.bth.opcode", "infiniband.bth.se", "infiniband.bth.m", "infiniband.bth.padcnt", "infiniband.bth.tver",
	"infiniband.bth.p_key", "infiniband.bth.destqp", "infiniband.bth.a", "infiniband.bth.psn",
	"infiniband.deth.q_key", "infiniband.deth.srcqp",
	"infiniband.reth.va", "infiniband.reth.r_key", "infiniband.reth.dmalen",
	"infiniband.atomiceth.swapdt", "infiniband.atomiceth.cmpdt",
	"infiniband.aeth.syndrome", "infiniband.aeth.msn", "infiniband.atomicacketh.origremdt",
	"infiniband.immdt", "infiniband.ieth", "data.data", "infiniband.vendor", "infiniband.invariant.crc",
}

// tshark returns a row of columns by name for every packet of a file.
func tshark(t *testing.T, path string) []map[string]string {
	t.Helper()
	bin, err := exec.LookPath("tshark")
	if err != nil {
		const how = "tshark is not installed: apt-get install tshark (Debian package tshark)"
		if os.Getenv("CI") == "true" {
			t.Fatal(how)
		}
		t.Skip(how)
	}
	args := []string{
		"-r", path, "-n", "-T", "fields", "-E", "separator=/t", "-E", "occurrence=f",
		"-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE",
	}
	// what a message carries is an application's; no guesses at it
	for _, p := range []string{"smc", "smb_direct", "rpcordma", "nvme-rdma", "lnet", "iser", "infiniband_sdp", "infiniband.eoib", "fcoib"} {
		args = append(args, "--disable-protocol", p)
	}
	for _, c := range columns {
		args = append(args, "-e", c)
	}
	cmd := exec.Command(bin, args...)
	cmd.Env = append(os.Environ(), "WIRESHARK_CONFIG_DIR="+t.TempDir(), "LC_ALL=C") // nobody's own preferences
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tshark: %v\n%s", err, &stderr)
	}
	var rows []map[string]string
	for line := range strings.Lines(string(out)) {
		v := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(v) != len(columns) {
			t.Fatalf("tshark printed %d columns, want %d: %q", len(v), len(columns), line)
		}
		row := map[string]string{}
		for i, c := range columns {
			if v[i] != "" {
				row[c] = v[i]
			}
		}
		rows = append(rows, row)
	}
	return rows
}

// checker compares one packet with tshark's row for it.
type checker struct {
	t    *testing.T
	what string
	row  map[string]string
}

func (c *checker) num(col string, want uint64) {
	c.t.Helper()
	s := c.row[col]
	switch s { // booleans, as newer versions print them
	case "True":
		s = "1"
	case "False":
		s = "0"
	}
	if got, err := strconv.ParseUint(s, 0, 64); err != nil || got != want {
		c.t.Errorf("%s: %s is %q, want %#x", c.what, col, c.row[col], want)
	}
}

func (c *checker) flag(col string, want bool) {
	c.t.Helper()
	c.num(col, map[bool]uint64{true: 1}[want])
}

func (c *checker) bytes(col string, want []byte) {
	c.t.Helper()
	got, err := hex.DecodeString(strings.ReplaceAll(c.row[col], ":", ""))
	if err != nil || !bytes.Equal(got, want) {
		c.t.Errorf("%s: %s is %.100q (%d bytes), want %.100x (%d bytes)", c.what, col, c.row[col], len(got), want, len(want))
	}
}

func (c *checker) absent(cols ...string) {
	c.t.Helper()
	for _, col := range cols {
		if v, ok := c.row[col]; ok {
			c.t.Errorf("%s: %s is there: %q", c.what, col, v)
		}
	}
}

// tshark's values for the state of a checksum.
const (
	checksumGood       = 1
	checksumNotPresent = 3
)

func (c *checker) network(p written) {
	c.t.Helper()
	if !strings.Contains(c.row["frame.protocols"], ":udp:infiniband") {
		c.t.Errorf("%s: dissected as %s", c.what, c.row["frame.protocols"])
	}
	c.absent("_ws.malformed", "_ws.expert.severity", "_ws.expert.message")
	if p.src.Addr().Is4() {
		c.num("ip.id", uint64(p.id))
		c.num("ip.checksum.status", checksumGood)
		c.num("udp.checksum.status", checksumNotPresent)
	} else {
		c.absent("ip.id")
		c.num("udp.checksum.status", checksumGood)
	}
	c.bytes("udp.payload", p.udp)
}

// icrc computes the ICRC as the rule says, from the packet in the file.
func (c *checker) icrc(p written, frame []byte) {
	c.t.Helper()
	b := append(bytes.Repeat([]byte{0xff}, 8), frame[:len(frame)-4]...)
	ip, udp := b[8:], b[8+40:]
	if ip[0]>>4 == 4 {
		udp = b[8+20:]
		ip[1], ip[8], ip[10], ip[11] = 0xff, 0xff, 0xff, 0xff
	} else {
		ip[0], ip[1], ip[2], ip[3], ip[7] = 0x6f, 0xff, 0xff, 0xff, 0xff
	}
	udp[6], udp[7], udp[8+4] = 0xff, 0xff, 0xff
	want := binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(b))
	if got := frame[len(frame)-4:]; !bytes.Equal(got, want) {
		c.t.Errorf("%s: the file's ICRC is %x, should be %x", c.what, got, want)
	}
	if c.dissected(p) {
		c.num("infiniband.invariant.crc", uint64(binary.BigEndian.Uint32(want)))
	}
}

// dissected reports whether tshark knows what follows the BTH. It does not for
// XRC and CNP, and shows that as "vendor" bytes.
func (c *checker) dissected(p written) bool {
	t := p.h.Opcode.Info().Transport
	return t != wire.XRC && t != wire.CNP
}

func (c *checker) transport(p written) {
	c.t.Helper()
	h, info := &p.h, p.h.Opcode.Info()
	c.num("infiniband.bth.opcode", uint64(h.Opcode))
	c.flag("infiniband.bth.se", h.Solicited)
	c.flag("infiniband.bth.m", h.MigReq)
	c.num("infiniband.bth.padcnt", uint64(h.Pad))
	c.num("infiniband.bth.tver", uint64(h.Version))
	c.num("infiniband.bth.p_key", uint64(h.PKey))
	c.num("infiniband.bth.destqp", uint64(h.DestQP))
	c.flag("infiniband.bth.a", h.AckReq)
	c.num("infiniband.bth.psn", uint64(h.PSN))
	if !c.dissected(p) {
		return
	}
	c.absent("infiniband.vendor")
	if info := c.row["_ws.col.Info"]; !p.mad && !strings.HasPrefix(info, h.Opcode.String()) {
		c.t.Errorf("%s: tshark calls it %q", c.what, info)
	}

	if info.Headers&wire.HasDETH != 0 {
		c.num("infiniband.deth.q_key", uint64(h.DETH.QKey))
		c.num("infiniband.deth.srcqp", uint64(h.DETH.SrcQP))
	} else {
		c.absent("infiniband.deth.q_key", "infiniband.deth.srcqp")
	}
	switch { // tshark shows the first fields of an AtomicETH as those of a RETH
	case info.Headers&wire.HasRETH != 0:
		c.num("infiniband.reth.va", h.RETH.VA)
		c.num("infiniband.reth.r_key", uint64(h.RETH.RKey))
		c.num("infiniband.reth.dmalen", uint64(h.RETH.Len))
	case info.Headers&wire.HasAtomicETH != 0:
		c.num("infiniband.reth.va", h.Atomic.VA)
		c.num("infiniband.reth.r_key", uint64(h.Atomic.RKey))
		c.num("infiniband.atomiceth.swapdt", h.Atomic.SwapAdd)
		c.num("infiniband.atomiceth.cmpdt", h.Atomic.Compare)
	default:
		c.absent("infiniband.reth.va", "infiniband.reth.r_key", "infiniband.reth.dmalen",
			"infiniband.atomiceth.swapdt", "infiniband.atomiceth.cmpdt")
	}
	if info.Headers&wire.HasAETH != 0 {
		c.num("infiniband.aeth.syndrome", uint64(h.AETH.Syndrome))
		c.num("infiniband.aeth.msn", uint64(h.AETH.MSN))
	} else {
		c.absent("infiniband.aeth.syndrome", "infiniband.aeth.msn")
	}
	if info.Headers&wire.HasAtomicAckETH != 0 {
		c.num("infiniband.atomicacketh.origremdt", h.Orig)
	} else {
		c.absent("infiniband.atomicacketh.origremdt")
	}
	imm := binary.BigEndian.AppendUint32(nil, h.Imm)
	if info.Headers&wire.HasImm != 0 {
		c.bytes("infiniband.immdt", imm)
	} else {
		c.absent("infiniband.immdt")
	}
	if info.Headers&wire.HasIETH != 0 {
		c.bytes("infiniband.ieth", imm)
	} else {
		c.absent("infiniband.ieth")
	}
	if !p.mad { // tshark leaves the padding with the payload
		c.bytes("data.data", p.udp[h.Len():len(p.udp)-wire.ICRCLen])
	}
}
