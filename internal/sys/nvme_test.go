package sys

import (
	"errors"
	"os"
	"syscall"
	"testing"
)

// What is no controller is refused. A real one is asked in the virtual machines of interop/nvmeof.
func TestNVMeLogPage(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := NVMeLogPage(int(f.Fd()), 0x70, make([]byte, 4096)); !errors.Is(err, syscall.ENOTTY) {
		t.Errorf("/dev/null: %v", err)
	}
	for _, n := range []int{0, 3, 1 << 20} {
		if err := NVMeLogPage(int(f.Fd()), 0x70, make([]byte, n)); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	if err := NVMeLogPage(-1, 0x70, make([]byte, 4096)); !errors.Is(err, syscall.EBADF) {
		t.Errorf("no descriptor: %v", err)
	}
}
