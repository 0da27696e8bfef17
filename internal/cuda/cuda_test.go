package cuda

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Where there is no libcuda the program has not loaded one: that is said, and nothing else happens.
func TestNone(t *testing.T) {
	d, err := Open(false)
	if err == nil {
		d.Close()
		t.Fatal("a test has a libcuda that it has not loaded")
	}
	if !errors.Is(err, ErrNone) || !errors.Is(err, syscall.ENODEV) {
		t.Fatalf("Open: %v", err)
	}
}

func TestRoom(t *testing.T) {
	mps := t.TempDir()
	if err := os.WriteFile(filepath.Join(mps, "control"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	none := filepath.Join(mps, "none")
	for _, c := range []struct {
		connections, pipe string
		want              bool
	}{
		{"", none, true}, // 8 queues
		{"", mps, false}, // 2 of them
		{"32", mps, true},
		{"32", none, true},
		{"8", mps, true},
		{"7", none, false},
		{"1", none, false},
		{"nonsense", mps, false}, // the driver takes its default
		{"nonsense", none, true},
	} {
		got := hasRoom(func(name string) string {
			return map[string]string{"CUDA_DEVICE_MAX_CONNECTIONS": c.connections, "CUDA_MPS_PIPE_DIRECTORY": c.pipe}[name]
		})
		if got != c.want {
			t.Errorf("CUDA_DEVICE_MAX_CONNECTIONS=%q, MPS %v: room %v, should be %v", c.connections, c.pipe == mps, got, c.want)
		}
	}
}

// What one process says of its memory, another one reads.
func TestPassport(t *testing.T) {
	p := passport{way: byIPC, off: 4096, n: 100, size: 1 << 20, fd: -1}
	for i := range p.gpu {
		p.gpu[i] = byte(i + 1)
	}
	for i := range p.handle {
		p.handle[i] = byte(i * 3)
	}
	got, ok := unpack(p.pack())
	got.fd = -1
	if !ok || got != p {
		t.Fatalf("%v: %+v, should be %+v", ok, got, p)
	}
	for _, bad := range []func(*passport){
		func(p *passport) { p.way = 0 },
		func(p *passport) { p.way = byDescriptor + 1 },
		func(p *passport) { p.n = 0 },
		func(p *passport) { p.off = p.size + 1 },
		func(p *passport) { p.n = p.size },
		func(p *passport) { p.off = ^uint64(0) },
		func(p *passport) { p.n = ^uint64(0) },
	} {
		q := p
		bad(&q)
		if _, ok := unpack(q.pack()); ok {
			t.Errorf("%+v was taken", q)
		}
	}
}

// A process may send anything: what is taken lies inside the allocation.
func TestPassportNonsense(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 10000 {
		b := make([]byte, r.IntN(2*passportBytes))
		if r.IntN(2) == 0 {
			b = make([]byte, passportBytes)
		}
		for i := range b {
			b[i] = byte(r.Uint32() >> r.IntN(32))
		}
		if p, ok := unpack(b); ok && (p.n == 0 || p.off > p.size || p.n > p.size-p.off || len(b) != passportBytes) {
			t.Fatalf("%x was taken as %+v", b, p)
		}
	}
}
