package mem

import (
	"bytes"
	"errors"
	"testing"
)

// faultError is what the runtime panics with when memory is gone.
type faultError uintptr

func (e faultError) Addr() uintptr { return uintptr(e) }

// faultBuf is a global variable, because what is on the stack moves.
var faultBuf [400]byte

// Only faults in the memory that is being moved are caught; any other panic is
// a bug, and goes on.
func TestFaultAddr(t *testing.T) {
	d, s := faultBuf[8:108], faultBuf[200:300]
	caught := func(e any) (ok bool) {
		defer func() { recover() }()
		faultAddr(e, d, s)
		return true
	}
	for _, c := range []struct {
		name string
		e    any
		want bool
	}{
		{"first byte of the target", faultError(addrOf(d)), true},
		{"last byte of the target", faultError(addrOf(d) + 99), true},
		{"first byte of the source", faultError(addrOf(s)), true},
		{"behind the source", faultError(addrOf(s) + 100), false},
		{"before the target", faultError(addrOf(d) - 8), false},
		{"nil", faultError(0), false},
		{"another error", errors.New("bug"), false},
		{"a string", "bug", false},
	} {
		if got := caught(c.e); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// Every byte, and no other, wherever source and target lie in their lines; also where they
// overlap, though nobody may rely on it.
func TestCopyBytesAlignment(t *testing.T) {
	src := make([]byte, 3*longest)
	for i := range src {
		src[i] = byte(1 + i%251)
	}
	for from := range 18 {
		for to := range 18 {
			for _, n := range []int{1, 15, 16, 2047, 2048, 2049, 2056, longest} {
				dst, want := make([]byte, 3*longest), make([]byte, 3*longest)
				copyBytes(dst[to:to+n], src[from:from+n])
				copy(want[to:], src[from:from+n])
				if !bytes.Equal(dst, want) {
					t.Fatalf("%d bytes from %d to %d", n, from, to)
				}
				if RaceEnabled { // there it copies upwards
					continue
				}
				copy(dst, src)
				copy(want, src)
				copyBytes(dst[to:to+n], dst[from:from+n])
				copy(want[to:to+n], want[from:from+n])
				if !bytes.Equal(dst, want) {
					t.Fatalf("%d bytes from %d to %d of the same", n, from, to)
				}
			}
		}
	}
}

const longest = 4096
