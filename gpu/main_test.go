package gpu

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/dmabuf"
)

func TestMain(m *testing.M) {
	dmabuf.CheckLocks(true)
	switch os.Getenv("VERBENA_GPU_CHILD") {
	case "1":
		child()
		return
	case "mover":
		mover()
		return
	}
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

func must2[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		check(t, err)
		return v
	}
}

func context30() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	_ = cancel // the process ends first
	return ctx
}

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, should be %v", what, err, want)
	}
}

// open opens a GPU for a test.
func open(t testing.TB, name string, cfg Config) *Device {
	t.Helper()
	d := must[*Device](t)(Open(name, &cfg))
	t.Cleanup(func() { check(t, d.Close()) })
	return d
}

func alloc(t testing.TB, d *Device, n uint64) *Buffer {
	t.Helper()
	return must[*Buffer](t)(d.Alloc(n))
}

// longTime bounds waits for what must happen.
func longTime(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func seed(t testing.TB) uint64 {
	s := uint64(1)
	if v, err := strconv.ParseUint(os.Getenv("VERBENA_SEED"), 10, 64); err == nil {
		s = v
	}
	t.Logf("VERBENA_SEED=%d", s)
	return s
}

func random(n int, seed uint64) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 7))
	for i := 0; i < n; i += 8 {
		v := r.Uint64()
		for j := i; j < min(n, i+8); j++ {
			b[j] = byte(v)
			v >>= 8
		}
	}
	return b
}

// holds wants a buffer to have bytes.
func holds(t testing.TB, what string, b *Buffer, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := b.ReadAt(got, 0); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if !bytes.Equal(got, want) {
		for i := range got {
			if got[i] != want[i] {
				t.Fatalf("%s: byte %d is %#x, should be %#x", what, i, got[i], want[i])
			}
		}
	}
}

// eventually waits for a condition, for very long.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not: %s", what)
		}
	}
}
