package units

import (
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseSize(t *testing.T) {
	good := []struct {
		in   string
		want int
	}{
		{"0", 0}, {"1", 1}, {"8", 8}, {"8B", 8}, {"4096", 4096},
		{"64K", 64 << 10}, {"64k", 64 << 10}, {"64KB", 64 << 10}, {"64KiB", 64 << 10}, {"64 KiB", 64 << 10},
		{"1M", 1 << 20}, {"1MiB", 1 << 20}, {"2g", 2 << 30}, {"1.5M", 3 << 19}, {".5k", 512}, {" 7 ", 7},
	}
	for _, c := range good {
		if got, err := ParseSize(c.in); err != nil || got != c.want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", c.in, got, err, c.want)
		}
	}
	bad := []struct{ in, message string }{
		{"", "want a number"}, {"K", "want a number"}, {"-1", "want a number"}, {"+1", "want a number"},
		{"1e3", "want a number"}, {"0x10", "want a number"}, {"inf", "want a number"}, {"NaN", "want a number"},
		{"1.2.3", "want a number"}, {".", "want a number"}, {"64X", "want a number"}, {"1KK", "want a number"},
		{"0.3K", "whole number"}, {"1.5", "whole number"},
		{"9223372036854775808", "too large"}, {"9999999999G", "too large"}, {"99999999999999999999999999999.5", "too large"},
	}
	for _, c := range bad {
		if got, err := ParseSize(c.in); err == nil || !strings.Contains(err.Error(), c.message) {
			t.Errorf("ParseSize(%q) = %d, %v; want an error with %q", c.in, got, err, c.message)
		}
	}
}

func TestFormat(t *testing.T) {
	for n, want := range map[int]string{0: "0 B", 8: "8 B", 1000: "1000 B", 1024: "1 KiB", 1536: "1.5 KiB",
		4096: "4 KiB", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 3 << 19: "1.5 MiB", 1<<20 + 1: "1048577 B", 1 << 30: "1 GiB"} {
		if got := FormatSize(n); got != want {
			t.Errorf("FormatSize(%d) = %q, want %q", n, got, want)
		}
		if back, err := ParseSize(want); err != nil || back != n {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", want, back, err, n)
		}
	}
	for v, want := range map[float64]string{0: "0", 0.27: "0.270", 2.834: "2.83", 28.34: "28.3", 283.4: "283", 12345.6: "12346"} {
		if got := FormatFigure(v); got != want {
			t.Errorf("FormatFigure(%v) = %q, want %q", v, got, want)
		}
	}
	for n, want := range map[uint64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"} {
		if got := FormatCount(n); got != want {
			t.Errorf("FormatCount(%d) = %q, want %q", n, got, want)
		}
	}
}
