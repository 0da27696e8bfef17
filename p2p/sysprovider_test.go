package p2p

import (
	"errors"
	"syscall"
	"testing"
)

// A device that is not there, and one without memory, are no providers. What providers do is tested in a virtual machine
// (interop/p2p).
func TestNoSysProvider(t *testing.T) {
	for _, at := range []Address{{Domain: 0xffff, Bus: 0xff, Device: 31, Function: 7}, {}} {
		if p, err := OpenSysProvider(at); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("%v: %v, %v", at, p, err)
		}
	}
}
