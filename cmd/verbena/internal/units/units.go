// Package units parses and formats the quantities of the command line: sizes in
// bytes with binary suffixes, and figures with the right number of digits.
package units

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// suffixes are the accepted units of a size, by their number of binary digits.
// As in perftest and iperf, K is 1024.
var suffixes = []struct {
	name  string
	shift uint
}{
	{"kib", 10}, {"mib", 20}, {"gib", 30},
	{"kb", 10}, {"mb", 20}, {"gb", 30},
	{"k", 10}, {"m", 20}, {"g", 30},
	{"b", 0}, {"", 0},
}

// ParseSize reads a number of bytes: "4096", "64K", "64KiB", "1M", "1.5M".
// Suffixes are powers of 1024, in any case.
func ParseSize(s string) (int, error) {
	text := strings.ToLower(strings.TrimSpace(s))
	for _, u := range suffixes {
		num, found := strings.CutSuffix(text, u.name)
		if !found {
			continue
		}
		n, err := parseScaled(strings.TrimSpace(num), u.shift)
		if err != nil {
			return 0, fmt.Errorf("size %q: %w", s, err)
		}
		return n, nil
	}
	panic("unreachable: every text has the empty suffix")
}

func parseScaled(num string, shift uint) (int, error) {
	for _, c := range num {
		if (c < '0' || c > '9') && c != '.' {
			return 0, fmt.Errorf("want a number of bytes such as 8, 64K or 1M")
		}
	}
	if n, err := strconv.ParseUint(num, 10, 63); err == nil {
		if n > math.MaxInt>>shift {
			return 0, fmt.Errorf("too large")
		}
		return int(n) << shift, nil
	}
	f, err := strconv.ParseFloat(num, 64)
	if err != nil {
		return 0, fmt.Errorf("want a number of bytes such as 8, 64K or 1M")
	}
	f *= float64(uint64(1) << shift)
	// 1<<62 is half of the first float64 that does not fit an int.
	if f > 1<<62 {
		return 0, fmt.Errorf("too large")
	}
	if f != math.Trunc(f) {
		return 0, fmt.Errorf("not a whole number of bytes")
	}
	return int(f), nil
}

// FormatSize writes a number of bytes for people: "8 B", "4 KiB", "1.5 MiB".
func FormatSize(n int) string {
	for _, u := range []struct {
		name  string
		shift uint
	}{{"GiB", 30}, {"MiB", 20}, {"KiB", 10}} {
		if n >= 1<<u.shift && n%(1<<u.shift/4) == 0 {
			return strconv.FormatFloat(float64(n)/float64(int(1)<<u.shift), 'f', -1, 64) + " " + u.name
		}
	}
	return strconv.Itoa(n) + " B"
}

// FormatFigure writes a measured figure with three significant digits, without
// an exponent.
func FormatFigure(v float64) string {
	switch {
	case v >= 100 || v == 0:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case v >= 1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	default:
		return strconv.FormatFloat(v, 'f', 3, 64)
	}
}

// FormatCount writes a large number with thousands separated.
func FormatCount(n uint64) string {
	s := strconv.FormatUint(n, 10)
	var b strings.Builder
	for i, c := range s {
		if i > 0 && (len(s)-i)%3 == 0 {
			b.WriteByte(',')
		}
		b.WriteRune(c)
	}
	return b.String()
}

// Micros converts a duration to microseconds.
func Micros(d time.Duration) float64 { return float64(d) / 1e3 }
