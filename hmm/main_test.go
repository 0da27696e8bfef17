package hmm

import (
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/gpu"
)

func TestMain(m *testing.M) {
	dmabuf.CheckLocks(true)
	goleak.VerifyTestMain(m)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		check(t, err)
		return v
	}
}

func wantErr(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, should be %v", what, err, want)
	}
}

const mib = 1 << 20

// open opens a space, or skips the test where the kernel does not allow it.
func open(t testing.TB) *Space {
	t.Helper()
	s, err := Open(nil)
	if err != nil {
		if haveEngine && !errors.Is(err, syscall.ENOSYS) && !errors.Is(err, syscall.EPERM) && !errors.Is(err, syscall.EOPNOTSUPP) {
			t.Fatal(err)
		}
		t.Skip("kernel:", err)
	}
	t.Cleanup(func() { check(t, s.Close()) })
	return s
}

// addGPU adds a small GPU to a space.
func addGPU(t testing.TB, s *Space, name string, vram uint64) *Device {
	t.Helper()
	return must[*Device](t)(s.AddGPU(name, &GPUConfig{GPU: &gpu.Config{VRAM: vram}}))
}

func seed(t testing.TB) uint64 {
	s := uint64(1)
	if v, err := strconv.ParseUint(os.Getenv("VERBENA_SEED"), 10, 64); err == nil {
		s = v
	}
	t.Logf("VERBENA_SEED=%d", s)
	return s
}

func fill(b []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 11))
	for i := 0; i+8 <= len(b); i += 8 {
		v := r.Uint64()
		for j := range 8 {
			b[i+j] = byte(v >> (8 * j))
		}
	}
}

func random(n int, seed uint64) []byte {
	b := make([]byte, n)
	fill(b, seed)
	return b
}

// same wants two byte slices to be equal. It reads got page by page, as a program does.
func same(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d bytes, should be %d", what, len(got), len(want))
	}
	for i := range got {
		if g := got[i]; g != want[i] {
			t.Fatalf("%s: byte %d is %#x, should be %#x", what, i, g, want[i])
		}
	}
}

// moves wants all pages of b to move.
func moves(t testing.TB, s *Space, b []byte, to *Device) {
	t.Helper()
	n, err := s.Migrate(b, to)
	check(t, err)
	if _, size := around(b); uint64(n) != size/page {
		t.Fatalf("%d pages have moved, should be %d", n, size/page)
	}
}
