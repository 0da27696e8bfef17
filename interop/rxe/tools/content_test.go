package tools

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// header4 and header6 return the 40 bytes in front of a UD message, by IPv4 and IPv6.
func header4(src, dst string, length int) []byte {
	h := make([]byte, 40)
	ip := h[20:]
	ip[0], ip[8], ip[9] = 0x45, 64, 17
	binary.BigEndian.PutUint16(ip[2:], uint16(length))
	s, d := netip.MustParseAddr(src).As4(), netip.MustParseAddr(dst).As4()
	copy(ip[12:], s[:])
	copy(ip[16:], d[:])
	return h
}

func header6(src, dst string, length int) []byte {
	h := make([]byte, 40)
	h[0], h[6], h[7] = 0x60, 17, 64
	binary.BigEndian.PutUint16(h[4:], uint16(length))
	s, d := netip.MustParseAddr(src).As16(), netip.MustParseAddr(dst).As16()
	copy(h[8:], s[:])
	copy(h[24:], d[:])
	return h
}

func TestCheckGRH(t *testing.T) {
	gid := func(s string) verbs.GID { return verbs.GIDFromAddr(netip.MustParseAddr(s)) }
	change := func(h []byte, at int, v byte) []byte { h[at] = v; return h }
	// A message of 5 bytes is padded to 8: UDP 8, BTH 12, DETH 8, payload 8, ICRC 4.
	v4 := func() []byte { return header4("10.0.0.1", "10.0.0.2", 20+40) }
	v6 := func() []byte { return header6("fd00::1", "fd00::2", 40) }
	for _, c := range []struct {
		name     string
		grh      []byte
		src, dst string
		length   int
		want     string // of the error
	}{
		{"IPv4", v4(), "10.0.0.1", "10.0.0.2", 5, ""},
		{"IPv4, first bytes undefined", change(v4(), 3, 0xee), "10.0.0.1", "10.0.0.2", 5, ""},
		{"IPv4, right checksum", change(change(v4(), 30, 0x66), 31, 0xaf), "10.0.0.1", "10.0.0.2", 5, ""},
		{"IPv4, wrong checksum", change(v4(), 31, 1), "10.0.0.1", "10.0.0.2", 5, "checksum"},
		{"IPv4, no version", change(v4(), 20, 0), "10.0.0.1", "10.0.0.2", 5, "starts with"},
		{"IPv4, other length", v4(), "10.0.0.1", "10.0.0.2", 9, "length"},
		{"IPv4, TCP", change(v4(), 29, 6), "10.0.0.1", "10.0.0.2", 5, "protocol"},
		{"IPv4, other source", v4(), "10.0.0.3", "10.0.0.2", 5, "source"},
		{"IPv4, other destination", v4(), "10.0.0.1", "10.0.0.3", 5, "destination"},
		{"IPv6", v6(), "fd00::1", "fd00::2", 5, ""},
		{"IPv6, IBA's next header", change(v6(), 6, 0x1b), "fd00::1", "fd00::2", 5, ""},
		{"IPv6, version 4", change(v6(), 0, 0x45), "fd00::1", "fd00::2", 5, "starts with"},
		{"IPv6, other length", v6(), "fd00::1", "fd00::2", 0, "length"},
		{"IPv6, TCP", change(v6(), 6, 6), "fd00::1", "fd00::2", 5, "next header"},
		{"IPv6, other source", v6(), "fd00::3", "fd00::2", 5, "source"},
		{"IPv6, other destination", v6(), "fd00::1", "fd00::3", 5, "destination"},
		{"short", v4()[:39], "10.0.0.1", "10.0.0.2", 5, "39 bytes"},
	} {
		err := CheckGRH(c.grh, gid(c.src), gid(c.dst), c.length)
		if c.want == "" && err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want an error about %q", c.name, err, c.want)
		}
	}
}

// A server that sends back what it has received, as the programs do.
func TestContents(t *testing.T) {
	cfg := PingpongConfig{Peer: Peer{Role: Client}, Program: RCPingpong, Size: 10000, QPs: 1, Check: true}
	c := newContents(&cfg)
	first, second := make([]byte, cfg.Size), make([]byte, cfg.Size)
	c.next(first, 0)
	for i := 0; i < cfg.Size; i += 4096 {
		if first[i] != 0 {
			t.Errorf("byte %d is %#x: the program's option -c would complain", i, first[i])
		}
	}
	if err := c.check(first, 0); err != nil {
		t.Errorf("echo refused: %v", err)
	}
	c.next(second, 1)
	if err := c.check(first, 1); err == nil {
		t.Error("an old message is taken for the echo")
	}
	for _, at := range []int{0, 1, 4095, 9999} {
		second[at] ^= 1
		if err := c.check(second, 1); err == nil {
			t.Errorf("a wrong byte %d is not noticed", at)
		}
		second[at] ^= 1
	}
	if err := c.check(second, 1); err != nil {
		t.Errorf("echo refused: %v", err)
	}
}

// The first message of a client is what the program has filled its buffer with.
func TestContentsFirst(t *testing.T) {
	fill := func(v byte, zeros bool) []byte {
		b := []byte(strings.Repeat(string(rune(v)), 9000))
		for i := 0; zeros && i < len(b); i += 4096 {
			b[i] = 0
		}
		return b
	}
	spoilt := fill(0x7b, false)
	spoilt[8999] = 0
	for _, c := range []struct {
		name    string
		program PingpongProgram
		check   bool
		first   []byte
		ok      bool
	}{
		{"ibv_rc_pingpong", RCPingpong, false, fill(0x7b, false), true},
		{"ibv_rc_pingpong -c", RCPingpong, true, fill(0x7b, true), true},
		{"-c only here", RCPingpong, true, fill(0x7b, false), true},
		{"one wrong byte", RCPingpong, false, spoilt, false},
		{"zeros", RCPingpong, false, fill(0, false), false},
		{"ibv_srq_pingpong", SRQPingpong, false, fill(0, false), true},
		{"ibv_srq_pingpong with RC's bytes", SRQPingpong, false, fill(0x7b, false), false},
	} {
		cfg := PingpongConfig{Peer: Peer{Role: Server}, Program: c.program, Size: 9000, QPs: 1, Check: c.check}
		s := newContents(&cfg)
		if err := s.check(c.first, 0); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// The right seed is found, and bytes that no seed gives are noticed.
func TestExpectation(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	buf := make([]byte, 1<<14)
	newRandStream(uint32(now.Unix())).fill(buf)
	e := newExpectation(&PerftestConfig{}, now.Add(-2*time.Second), now.Add(2*time.Second))
	if n := len(e.peers); n != 7 {
		t.Errorf("%d seeds, want 7", n)
	}
	if v := e.compare(buf[5000:9000], 5000); v != right || len(e.peers) != 1 {
		t.Errorf("right bytes are %v with %d seeds left", v, len(e.peers))
	}
	if v := e.compare(buf[:4000], 1); v != wrong || len(e.peers) != 1 {
		t.Errorf("bytes from another place are %v with %d seeds left", v, len(e.peers))
	}
	buf[100]++
	if v := e.compare(buf[:101], 0); v != wrong {
		t.Errorf("a wrong byte is %v", v)
	}
	if v := e.compare(buf[:8], maxPeerBuffer-7); v != unknown {
		t.Errorf("what is too far away is %v", v)
	}
	if v := newExpectation(&PerftestConfig{NoVerify: true}, now, now).compare(buf, 0); v != unknown {
		t.Errorf("without verification: %v", v)
	}
}

// The program ends when it has received the last message. If that is not acknowledged, the
// result says so, and the run has not failed. All other errors are failures.
func TestLastUnacknowledged(t *testing.T) {
	const iters = 10
	for _, c := range []struct {
		name           string
		recv           bool
		status         verbs.WCStatus
		sent, received uint64
		pairs          int
		over           bool
	}{
		{"the last SEND", false, verbs.WCRetryExcErr, 9, 10, 1, true},
		{"an earlier one", false, verbs.WCRetryExcErr, 8, 10, 1, false},
		{"before all is received", false, verbs.WCRetryExcErr, 9, 9, 1, false},
		{"refused", false, verbs.WCRemOpErr, 9, 10, 1, false},
		{"a receive", true, verbs.WCWRFlushErr, 9, 10, 1, false},
		{"one of many", false, verbs.WCRetryExcErr, 9, 10, 2, false},
	} {
		g := &game{rig: &rig{result: &Result{Sent: c.sent, Received: c.received}}, pairs: make([]*pair, c.pairs)}
		wc := verbs.WC{Status: c.status}
		if c.recv {
			wc.ID = recvID
		}
		over, err := g.completed(&wc, iters)
		if over != c.over || (err == nil) != c.over || g.result.LastUnacknowledged != c.over {
			t.Errorf("%s: over %v, %v", c.name, over, err)
		}
	}
}
