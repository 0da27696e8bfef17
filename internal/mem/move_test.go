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
// overlap, though no caller may rely on that.
func TestCopyAlignment(t *testing.T) {
	src := make([]byte, 3*longest)
	for i := range src {
		src[i] = byte(1 + i%251)
	}
	dst, want := make([]byte, 3*longest), make([]byte, 3*longest)
	for from := range 18 {
		for to := range 18 {
			for _, n := range []int{1, 15, 16, 2047, 2048, 2049, 2056, longest} {
				for i, in := range [][]byte{src, dst} {
					if RaceEnabled && i == 1 {
						continue // there it copies upwards
					}
					copy(dst, src)
					copy(want, src)
					f, _ := Copy(&List{Raw: [][]byte{dst[to : to+n]}}, &List{Raw: [][]byte{in[from : from+n]}}, uint64(n), i == 0)
					copy(want[to:to+n], want[from:from+n])
					if !f.OK() || !bytes.Equal(dst, want) {
						t.Fatalf("%d bytes from %d to %d: %v", n, from, to, f)
					}
				}
			}
		}
	}
}

const longest = 4096
