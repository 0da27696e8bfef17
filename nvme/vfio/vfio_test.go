package vfio

import (
	"errors"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Real controllers are driven in interop/nvme. Here is none.
func TestNone(t *testing.T) {
	for _, address := range []string{"", "ffff:ff:1f.7", "../../../../dev"} {
		if _, err := Open(address); !errors.Is(err, syscall.ENOENT) {
			t.Errorf("%q: %v", address, err)
		}
	}
}
