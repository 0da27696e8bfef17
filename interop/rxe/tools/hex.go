package tools

import (
	"errors"
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

// fields reads the parts of an address line, and keeps the first error. Parts have fixed
// numbers of hexadecimal digits, with colons between them. The programs print leading zeros,
// so nothing else is accepted.
type fields struct {
	rest []byte
	err  error
}

var errShortLine = errors.New("line is too short")

// take returns the next n bytes.
func (f *fields) take(n int) []byte {
	if f.err == nil && len(f.rest) < n {
		f.err = errShortLine
	}
	if f.err != nil {
		return nil
	}
	b := f.rest[:n]
	f.rest = f.rest[n:]
	return b
}

// hex reads a number of the given number of digits, at most 16.
func (f *fields) hex(digits int) uint64 {
	var v uint64
	for _, c := range f.take(digits) {
		d, ok := digit(c)
		if !ok {
			f.err = fmt.Errorf("%q is no hexadecimal digit", c)
			return 0
		}
		v = v<<4 | uint64(d)
	}
	return v
}

func digit(c byte) (byte, bool) {
	switch {
	case '0' <= c && c <= '9':
		return c - '0', true
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10, true
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}

// want skips one byte, which must be c.
func (f *fields) want(c byte) {
	if b := f.take(1); b != nil && b[0] != c {
		f.err = fmt.Errorf("%q where %q belongs", b[0], c)
	}
}

// gid reads 16 bytes, with a separator between them unless it is 0.
func (f *fields) gid(separator byte) (g verbs.GID) {
	for i := range g {
		if i > 0 && separator != 0 {
			f.want(separator)
		}
		g[i] = byte(f.hex(2))
	}
	return g
}

// end returns the first error. Bytes that are left are an error too.
func (f *fields) end() error {
	if f.err == nil && len(f.rest) > 0 {
		f.err = fmt.Errorf("%d bytes too many", len(f.rest))
	}
	return f.err
}
