package p2p

import (
	"errors"
	"path/filepath"
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

// A device whose memory was there when the provider was opened, and has gone since.
func TestSysProviderGone(t *testing.T) {
	p := &SysProvider{at: Address{Bus: 1}, dir: filepath.Join(t.TempDir(), "p2pmem")}
	_, _, err := p.Alloc(4096)
	wantErr(t, "memory that has gone", err, syscall.ENODEV, "the memory of 0000:01:00.0 has gone")
}
