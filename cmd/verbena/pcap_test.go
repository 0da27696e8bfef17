package main

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	conn, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// tshark runs tshark on a capture. It is a test dependency: its absence fails.
func tshark(t *testing.T, file string, args ...string) string {
	t.Helper()
	var stderr strings.Builder
	cmd := exec.CommandContext(t.Context(), "tshark", append([]string{"-r", file, "-n"}, args...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tshark (Debian package tshark): %v\n%s", err, stderr.String())
	}
	return string(out)
}

// checkCapture wants tshark to decode every packet as RoCE v2 without complaint,
// and every checksum to be right. It returns the opcodes.
func checkCapture(t *testing.T, file string) []string {
	t.Helper()
	// Payload is random: tshark must not guess a protocol in it.
	const plain = "infiniband.try_heuristic_first:FALSE"
	bad := "_ws.malformed || _ws.expert.severity >= \"Warning\" || !infiniband.bth"
	if out := tshark(t, file, "-o", plain, "-Y", bad); out != "" {
		t.Errorf("tshark complains about\n%s", out)
	}
	out := tshark(t, file, "-o", plain, "-T", "fields", "-e", "frame.number", "-e", "infiniband.bth.opcode")
	var opcodes []string
	for _, line := range strings.Split(strings.TrimSpace(out), "\n") {
		_, opcode, ok := strings.Cut(line, "\t")
		if !ok || opcode == "" {
			t.Fatalf("no opcode in %q", line)
		}
		opcodes = append(opcodes, opcode)
	}

	// tshark shows the checksum and does not check it.
	var packets []struct {
		Source struct {
			Layers struct {
				Frame []any `json:"frame_raw"`
			} `json:"layers"`
		} `json:"_source"`
	}
	if err := json.Unmarshal([]byte(tshark(t, file, "-T", "jsonraw", "-J", "frame")), &packets); err != nil {
		t.Fatal(err)
	}
	if len(packets) != len(opcodes) {
		t.Fatalf("%d packets, %d opcodes", len(packets), len(opcodes))
	}
	for i, p := range packets {
		frame, err := hex.DecodeString(p.Source.Layers.Frame[0].(string))
		if err != nil {
			t.Fatal(err)
		}
		if err := checkICRC(frame); err != nil {
			t.Fatalf("packet %d, opcode %s: %v", i+1, opcodes[i], err)
		}
	}
	return opcodes
}

// checkICRC checks the last four bytes of an IPv4 packet against IBA annex
// A17.3.3: a CRC-32 over the packet, with everything that routers may change
// taken as ones, and eight bytes of ones in front.
func checkICRC(ip []byte) error {
	if len(ip) < 20+8+12+4 || ip[0] != 0x45 || ip[9] != 17 {
		return fmt.Errorf("not UDP over IPv4 without options: %x", ip[:min(len(ip), 28)])
	}
	if total := int(binary.BigEndian.Uint16(ip[2:])); total != len(ip) {
		return fmt.Errorf("%d bytes, the header says %d", len(ip), total)
	}
	if port := binary.BigEndian.Uint16(ip[22:]); port != 4791 {
		return fmt.Errorf("to UDP port %d", port)
	}
	b := slices.Concat(slices.Repeat([]byte{0xff}, 8), ip)
	masked := b[8:]
	for _, i := range []int{1, 8, 10, 11, 26, 27, 32} { // TOS, TTL, header checksum, UDP checksum, FECN and BECN
		masked[i] = 0xff
	}
	end := len(b) - 4
	if got, want := binary.LittleEndian.Uint32(b[end:]), crc32.ChecksumIEEE(b[:end]); got != want {
		return fmt.Errorf("ICRC %#08x, want %#08x", got, want)
	}
	return nil
}

// The capture of the demo holds every kind of packet there is.
func TestDemoCapture(t *testing.T) {
	file := filepath.Join(t.TempDir(), "demo.pcapng")
	if o := succeed(t, "demo", "--quick", "--pcap", file); !strings.Contains(o.stdout, file) {
		t.Errorf("the demo does not say where the packets are:\n%s", o.stdout)
	}
	opcodes := checkCapture(t, file)
	for _, want := range []struct{ opcode, name string }{
		{"0", "RC SEND first"}, {"1", "RC SEND middle"}, {"2", "RC SEND last"}, {"3", "RC SEND last with immediate"},
		{"4", "RC SEND only"}, {"23", "RC SEND only with invalidate"},
		{"6", "RC WRITE first"}, {"7", "RC WRITE middle"}, {"8", "RC WRITE last"}, {"9", "RC WRITE last with immediate"}, {"10", "RC WRITE only"},
		{"12", "RC READ request"}, {"13", "RC READ response first"}, {"14", "RC READ response middle"}, {"15", "RC READ response last"},
		{"17", "RC acknowledge"}, {"18", "RC atomic acknowledge"}, {"19", "RC compare and swap"}, {"20", "RC fetch and add"},
		{"32", "UC SEND first"}, {"34", "UC SEND last"}, {"36", "UC SEND only"}, {"38", "UC WRITE first"}, {"40", "UC WRITE last"},
		{"100", "UD SEND only"},
	} {
		if !slices.Contains(opcodes, want.opcode) {
			t.Errorf("no %s", want.name)
		}
	}
}

// A capture of a measurement holds what was measured: so many requests.
func TestPerfCapture(t *testing.T) {
	file := filepath.Join(t.TempDir(), "perf.pcapng")
	o := succeed(t, "perf", "--link", "udp", "--op", "write-imm", "--size", "8", "--iters", "100", "--pcap", file, "--json")
	parseResult(t, o.stdout)
	if !strings.Contains(o.stderr, file) {
		t.Errorf("it does not say where the packets are: %q", o.stderr)
	}
	requests := 0
	for _, opcode := range checkCapture(t, file) {
		switch opcode {
		case "11": // WRITE only with immediate
			requests++
		case "17": // acknowledge
		default:
			t.Errorf("a packet with opcode %s", opcode)
		}
	}
	// The warm-up comes first: a tenth, in whole batches of 16. A retransmission
	// adds to that.
	if requests < 116 {
		t.Errorf("%d requests, want 116 or more", requests)
	}
}
