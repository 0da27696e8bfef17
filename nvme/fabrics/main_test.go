package fabrics

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/verbs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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

// longTime bounds waits for what must happen.
func longTime(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

var lastAddr atomic.Uint32

// address returns an address that no other test uses.
func address() netip.Addr {
	n := lastAddr.Add(1)
	return netip.AddrFrom4([4]byte{127, 81, byte(os.Getpid()), byte(n)})
}

// device opens a device for a test.
func device(t testing.TB, link verbs.LinkMode) *verbs.Device {
	t.Helper()
	d := must[*verbs.Device](t)(verbs.Open("", &verbs.Config{Addrs: []netip.Addr{address()}, Link: link}))
	t.Cleanup(func() { check(t, d.Close()) })
	return d
}

const nqn = "nqn.2026-01.io.verbena:test"

// disk returns a subsystem with a disk in memory as namespace 1.
func disk(t testing.TB, size int64, block int) *nvme.Subsystem {
	t.Helper()
	s := must[*nvme.Subsystem](t)(nvme.NewSubsystem(nvme.SubsystemConfig{NQN: nqn}))
	m, err := nvme.NewMemory(size, block)
	check(t, err)
	check(t, s.AddNamespace(1, m))
	return s
}

// serve starts a target.
func serve(t testing.TB, cfg TargetConfig, link verbs.LinkMode) *Target {
	t.Helper()
	cfg.Config.Device = device(t, link)
	tgt := must[*Target](t)(Listen(longTime(t), netip.AddrPortFrom(cfg.Config.Device.Addr(), 4420).String(), cfg))
	t.Cleanup(func() { check(t, tgt.Close()) })
	return tgt
}

// dial connects a host.
func dial(t testing.TB, tgt *Target, cfg HostConfig, link verbs.LinkMode) *Host {
	t.Helper()
	cfg.Config.Device = device(t, link)
	if cfg.KeepAlive == 0 {
		cfg.KeepAlive = -1 // a busy machine may not let it say that it is there in time
	}
	if cfg.NQN == "" {
		cfg.NQN = nqn
	}
	h := must[*Host](t)(Dial(longTime(t), tgt.Addr().String(), cfg))
	t.Cleanup(func() { check(t, h.Close()) })
	return h
}

func seeded(t testing.TB) *rand.Rand {
	seed := rand.Uint64()
	if v, err := strconv.ParseUint(os.Getenv("VERBENA_SEED"), 10, 64); err == nil {
		seed = v
	}
	t.Logf("VERBENA_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func fill(r *rand.Rand, b []byte) {
	for i := 0; i < len(b); i += 8 {
		v := r.Uint64()
		for j := i; j < min(len(b), i+8); j++ {
			b[j] = byte(v)
			v >>= 8
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
