//go:build !cuda

package cuda_test

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/gpu/cuda"
)

// Where there is no driver, that is said. Tests of what works have the build tag "cuda": they need a libcuda,
// NVIDIA's or that of software GPUs (interop/cuda runs them).
func TestNone(t *testing.T) {
	if strings.Contains(os.Getenv("LD_LIBRARY_PATH"), "gpu") {
		t.Fatal("LD_LIBRARY_PATH has a libcuda")
	}
	if n, err := cuda.Count(); err == nil {
		t.Logf("there are %d GPUs", n)
		return
	} else if !errors.Is(err, cuda.ErrNone) || !errors.Is(err, syscall.ENODEV) || !strings.Contains(err.Error(), "no CUDA here: ") {
		t.Errorf("Count: %v", err)
	}
	if d, err := cuda.Open(0); !errors.Is(err, cuda.ErrNone) || d != nil {
		t.Errorf("Open: %v, %v", d, err)
	}
}
