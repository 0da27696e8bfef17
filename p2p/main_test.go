package p2p

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/dmabuf"
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

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		check(t, err)
		return v
	}
}

// seeds returns a source of random numbers that repeats with VERBENA_SEED, and logs the seed.
func seeds(t testing.TB) (*rand.Rand, uint64) {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		seed = must(strconv.ParseUint(s, 10, 64))(t)
	}
	t.Logf("VERBENA_SEED=%d repeats this", seed)
	return rand.New(rand.NewPCG(seed, 1)), seed
}

func addr(t testing.TB, s string) Address {
	t.Helper()
	return must(ParseAddress(s))(t)
}

var (
	intelMax = CPU{Vendor: "GenuineIntel", Family: 6, Model: 85}
	zen      = CPU{Vendor: "AuthenticAMD", Family: 0x17, Model: 1}
	redirect = &ACS{Capability: allACS &^ EgressControl, Control: RequestRedirect | CompletionRedirect | UpstreamForwarding | SourceValidation}

	idNVMe    = ID{0x1b36, 0x0010}
	idGPU     = ID{0x10de, 0x2335}
	idVerbena = ID{0x1af4, 0x10f0}
)

func cmb(size Hex) BAR { return BAR{Index: 2, Size: size, Is64: true, Prefetchable: true} }

func regs() BAR { return BAR{Index: 0, Size: 16 << 10, Is64: true} }
