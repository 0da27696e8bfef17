package wire

import (
	"math/rand/v2"
	"testing"
)

func TestPSNDistance(t *testing.T) {
	const top = 1<<24 - 1
	for _, c := range []struct {
		p, q PSN
		d    int // p - q
	}{
		{0, 0, 0},
		{1, 0, 1},
		{0, 1, -1},
		{0, top, 1},
		{top, 0, -1},
		{5, top - 4, 10},
		{0x7fffff, 0, 0x7fffff},
		{0x800000, 0, -0x800000}, // half way round counts as earlier, from both sides
		{0, 0x800000, -0x800000},
		{0x800001, 0, -0x7fffff},
		{0x7fffff, top, -0x800000},
		{0x7ffffe, top, 0x7fffff},
	} {
		if d := c.p.Sub(c.q); d != c.d {
			t.Errorf("%#x.Sub(%#x) = %d, want %d", c.p, c.q, d, c.d)
		}
		if c.p.Less(c.q) != (c.d < 0) {
			t.Errorf("%#x.Less(%#x) with distance %d", c.p, c.q, c.d)
		}
		if got := c.q.Add(c.d); got != c.p {
			t.Errorf("%#x.Add(%d) = %#x, want %#x", c.q, c.d, got, c.p)
		}
	}
}

// TestPSNLaws checks what the order must keep for any two PSNs: adding and
// taking away undo each other across the wrap, and of two PSNs less than half
// the space apart exactly one comes first.
func TestPSNLaws(t *testing.T) {
	r, seed := seeded(t)
	for range 200_000 {
		p, n := MakePSN(r.Uint32()), int(r.Uint32N(2*maxOutstanding))-maxOutstanding
		q := p.Add(n)
		if q > psnMask {
			t.Fatalf("seed %d: %#x.Add(%d) = %#x has more than 24 bits", seed, p, n, q)
		}
		if q.Sub(p) != n || q.Add(-n) != p {
			t.Fatalf("seed %d: %#x + %d = %#x, back %d and %#x", seed, p, n, q, q.Sub(p), q.Add(-n))
		}
		if n == -maxOutstanding {
			continue // its own opposite
		}
		if p.Sub(q) != -n || (n != 0) != (p.Less(q) != q.Less(p)) || p.Less(q) != (n > 0) {
			t.Fatalf("seed %d: order of %#x and %#x is not antisymmetric", seed, p, q)
		}
	}
}

func TestMakePSN(t *testing.T) {
	if p := MakePSN(0xff123456); p != 0x123456 {
		t.Errorf("MakePSN kept %#x", p)
	}
}

// seeded returns a generator whose seed is printed when the test fails.
func seeded(t testing.TB) (*rand.Rand, uint64) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d (repeat with -seed=%d)", seed, seed)
	return rand.New(rand.NewPCG(seed, 0)), seed
}

// maxOutstanding is half of the number space.
const maxOutstanding = 1 << 23
