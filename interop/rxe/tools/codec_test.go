package tools

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

var (
	gid4 = verbs.GID{10: 0xff, 11: 0xff, 12: 10, 15: 1} // 10.0.0.1
	gid6 = verbs.GID{0: 0xfd, 15: 0xab}                 // fd00::ab
)

func TestAddress(t *testing.T) {
	for _, c := range []struct {
		line string
		want Address
	}{
		// Sent by ibv_rc_pingpong 44.0 on Linux's rxe, for QPN 0x0001e0, PSN 0x82f944, GID ::ffff:10.0.0.1.
		{"0000:0001e0:82f944:00000000000000000000ffff0a000001\x00", Address{QPN: 0x1e0, PSN: 0x82f944, GID: gid4}},
		{"ffff:ffffff:ffffff:fd0000000000000000000000000000ab\x00", Address{LID: 0xffff, QPN: 0xffffff, PSN: 0xffffff, GID: gid6}},
		{"0000:000000:000000:00000000000000000000000000000000\x00", Address{}},
	} {
		if len(c.line) != addressLen {
			t.Fatalf("%q has %d bytes, want %d", c.line, len(c.line), addressLen)
		}
		got, err := ParseAddress([]byte(c.line))
		if err != nil || got != c.want {
			t.Errorf("%q is %+v, %v; want %+v", c.line, got, err, c.want)
		}
		if back := string(got.Append(nil)); back != c.line {
			t.Errorf("%+v is written as %q, want %q", got, back, c.line)
		}
	}
}

func TestAddressRefused(t *testing.T) {
	good := "0000:0001e0:82f944:00000000000000000000ffff0a000001\x00"
	for name, line := range map[string]string{
		"empty":              "",
		"no end":             good[:len(good)-1],
		"cut in the GID":     good[:30],
		"too long":           good + "\x00",
		"newline for zero":   good[:len(good)-1] + "\n",
		"space for a digit":  strings.Replace(good, "0001e0", " 001e0", 1),
		"sign":               strings.Replace(good, "0001e0", "+001e0", 1),
		"0x":                 strings.Replace(good, "0001e0", "0x01e0", 1),
		"no digit":           strings.Replace(good, "0001e0", "0001g0", 1),
		"missing colon":      strings.Replace(good, "0:0001e0", "00001e0:", 1),
		"no digit in GID":    strings.Replace(good, "ffff", "ffxf", 1),
		"zero byte inside":   strings.Replace(good, "82f944", "82f9\x004", 1),
		"decimal separators": strings.ReplaceAll(good, ":", "."),
	} {
		if a, err := ParseAddress([]byte(line)); err == nil {
			t.Errorf("%s: %q is accepted as %+v", name, line, a)
		}
	}
}

func TestKeys(t *testing.T) {
	for _, c := range []struct {
		line string
		want Keys
	}{
		// Sent by ib_write_bw 6.06 (Debian 12) on Linux's rxe.
		{"0000:0001:000011:fe827b:00000241:0000555954e05000:00:00:00:00:00:00:00:00:00:00:ff:ff:0a:00:00:01:00000000:\x00",
			Keys{OutReads: 1, QPN: 0x11, PSN: 0xfe827b, RKey: 0x241, VAddr: 0x555954e05000, GID: gid4}},
		{"0001:0001:ffffff:ffffff:ffffffff:ffffffffffffffff:fd:00:00:00:00:00:00:00:00:00:00:00:00:00:00:ab:00000007:\x00",
			Keys{LID: 1, OutReads: 1, QPN: 0xffffff, PSN: 0xffffff, RKey: 0xffffffff, VAddr: 1<<64 - 1, GID: gid6, SRQN: 7}},
	} {
		if len(c.line) != keysLen || keysLen != 108 {
			t.Fatalf("%q has %d bytes, want %d", c.line, len(c.line), keysLen)
		}
		got, err := ParseKeys([]byte(c.line))
		if err != nil || got != c.want {
			t.Errorf("%q is %+v, %v; want %+v", c.line, got, err, c.want)
		}
		if back := string(got.Append(nil)); back != c.line {
			t.Errorf("%+v is written as %q, want %q", got, back, c.line)
		}
	}
}

func TestKeysRefused(t *testing.T) {
	good := string(Keys{OutReads: 16, QPN: 0x123456, PSN: 0xabcdef, RKey: 9, VAddr: 0x7f0000000000, GID: gid4}.Append(nil))
	for name, line := range map[string]string{
		"empty":           "",
		"no end":          good[:len(good)-1],
		"cut":             good[:50],
		"too long":        good + "0",
		"without GID":     "0000:0001:000011:000001:00000001:0000000000000001:00000000\x00",
		"negative":        strings.Replace(good, "123456", "-23456", 1),
		"comma":           strings.Replace(good, "123456:", "123456,", 1),
		"no digit in GID": strings.Replace(good, ":ff:ff:", ":ff:fg:", 1),
		"other end":       good[:len(good)-1] + "x",
	} {
		if k, err := ParseKeys([]byte(line)); err == nil {
			t.Errorf("%s: %q is accepted as %+v", name, line, k)
		}
	}
}

func TestVersion(t *testing.T) {
	field := appendVersion(nil, ourVersion)
	if want := "6.06" + strings.Repeat("\x00", 12); string(field) != want {
		t.Errorf("our version is sent as %q, want %q", field, want)
	}
	for _, c := range []struct {
		in   string
		want string
		old  bool
	}{
		{"6.06" + strings.Repeat("\x00", 12), "6.06", false},
		{"6.24\x00" + strings.Repeat("x", 11), "6.24", false}, // bytes behind the zero are ignored
		{"5.70" + strings.Repeat("\x00", 12), "5.70", false},
		{"5.60" + strings.Repeat("\x00", 12), "", true},
		{"NaN" + strings.Repeat("\x00", 13), "", true},
		{strings.Repeat("6", 16), "", false},
		{"six" + strings.Repeat("\x00", 13), "", false},
		{"6.06\x00", "", false},
		{"", "", false},
	} {
		got, err := parseVersion([]byte(c.in))
		if got != c.want || (err == nil) != (c.want != "") || errors.Is(err, ErrUnsupported) != c.old {
			t.Errorf("%q is %q, %v", c.in, got, err)
		}
	}
}

func TestMTU(t *testing.T) {
	for m := verbs.MTU256; m <= verbs.MTU4096; m++ {
		if got, err := parseMTU(appendMTU(nil, m)); err != nil || got != m {
			t.Errorf("%v comes back as %v, %v", m, got, err)
		}
	}
	for _, bad := range []string{"", "5", "0\x00", "6\x00", "\x00\x00", "55", "a\x00"} {
		if m, err := parseMTU([]byte(bad)); err == nil {
			t.Errorf("%q is accepted as %v", bad, m)
		}
	}
}

func TestParam(t *testing.T) {
	for in, want := range map[string]int{
		"\x00\x00\x10\x00": 4096, "\x00\x00\x00\x40": 64, "\x00\x01\x00\x00": 65536,
		"\x00\x00\x00\x00": 0, "\xff\xff\xff\xff": 0, "\x00\x00\x10\x01": 0, "\x7f\xff\xff\xff": 0, "\x00\x20\x00\x00": 0,
	} {
		if got, err := parseParam([]byte(in)); got != want || (err == nil) != (want != 0) {
			t.Errorf("%q is %d, %v; want %d", in, got, err, want)
		}
	}
}

func TestReportFields(t *testing.T) {
	r := Report{Size: 65536, Iters: 1000, Peak: 12.5, Average: 11.25, MsgRate: 0.5}
	var back Report
	for i := range reportFields {
		back.setField(i, r.field(i))
	}
	if back != r {
		t.Errorf("%+v comes back as %+v", r, back)
	}
}

// What is parsed is written as it was, but for the case of its digits.
func FuzzParseAddress(f *testing.F) {
	f.Add(Address{QPN: 0x11, PSN: 0xffffff, GID: gid4}.Append(nil))
	f.Add([]byte("0000:000011:82F944:00000000000000000000FFFF0A000001\x00"))
	f.Add([]byte("::::"))
	f.Fuzz(func(t *testing.T, line []byte) {
		a, err := ParseAddress(line)
		if err != nil {
			if a != (Address{}) {
				t.Errorf("%q is refused, but the result is %+v", line, a)
			}
			return
		}
		if back := a.Append(nil); !bytes.Equal(back, bytes.ToLower(line)) {
			t.Errorf("%q is written as %q", line, back)
		}
	})
}

func FuzzParseKeys(f *testing.F) {
	f.Add(Keys{OutReads: 16, QPN: 0x123456, PSN: 0xabcdef, RKey: 9, VAddr: 0x7f0000000000, GID: gid4}.Append(nil))
	f.Add(bytes.ToUpper(Keys{QPN: 0xffffff, GID: gid6}.Append(nil)))
	f.Add([]byte(":"))
	f.Fuzz(func(t *testing.T, line []byte) {
		k, err := ParseKeys(line)
		if err != nil {
			if k != (Keys{}) {
				t.Errorf("%q is refused, but the result is %+v", line, k)
			}
			return
		}
		if back := k.Append(nil); !bytes.Equal(back, bytes.ToLower(line)) {
			t.Errorf("%q is written as %q", line, back)
		}
	})
}
