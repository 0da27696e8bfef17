package p2p

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Names, drivers, kinds of links and the CPU's vendor are words that people get to see: in a terminal, in a picture, in the
// files of a dump. They have printable characters only, so that none of these means something else by them.

// escaped returns a word with \xNN for each byte of what is not printable. A word of printable characters stays as it is,
// and so does one that was escaped before.
func escaped(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if r == utf8.RuneError && n == 1 || !unicode.IsPrint(r) {
			for _, c := range []byte(s[:n]) {
				fmt.Fprintf(&b, `\x%02x`, c)
			}
		} else {
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

// checkWord refuses what is not printable.
func checkWord(of, what, s string) error {
	if escaped(s) != s {
		return refuse("%s: %s %q has characters that cannot be printed", of, what, s)
	}
	return nil
}

// checkFileName also refuses what cannot be the name of a file in a dump. There may be no word.
func checkFileName(of, what, s string) error {
	if strings.Contains(s, "/") || s == "." || s == ".." {
		return refuse("%s: %s %q cannot be the name of a file", of, what, s)
	}
	return checkWord(of, what, s)
}

// checkVendor refuses a vendor that /proc/cpuinfo cannot have: spaces around it would be lost there.
func checkVendor(s string) error {
	if strings.TrimSpace(s) != s || strings.Contains(s, "/") {
		return refuse("the CPU: the vendor %q has a slash, or spaces around it", s)
	}
	return checkWord("the CPU", "the vendor", s)
}
