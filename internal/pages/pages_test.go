package pages

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// The pool against a plain list of pages.
func TestByChance(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	const all = 64
	p := New(all*Size + 100)
	var taken [all]bool
	var live []Range
	for range 5000 {
		if len(live) > 0 && r.IntN(2) == 0 {
			i := r.IntN(len(live))
			e := live[i]
			live = slices.Delete(live, i, i+1)
			p.Free(e)
			for k := e.Off / Size; k < (e.Off+e.N)/Size; k++ {
				taken[k] = false
			}
		} else {
			n := 1 + r.Uint64N(12*Size)
			need := int(RoundUp(n) / Size)
			first := -1
			for i := 0; i+need <= all && first < 0; i++ {
				if !slices.Contains(taken[i:i+need], true) {
					first = i
				}
			}
			got, ok := p.Alloc(n)
			if ok != (first >= 0) || ok && got != (Range{uint64(first) * Size, uint64(need) * Size}) {
				t.Fatalf("%d pages: %d, %v; want page %d", need, got.Off/Size, ok, first)
			}
			if ok {
				live = append(live, got)
				for i := range need {
					taken[first+i] = true
				}
			}
		}
		free := 0
		for _, b := range taken {
			if !b {
				free++
			}
		}
		if p.Available() != uint64(free)*Size || p.Size() != all*Size {
			t.Fatalf("%d bytes are free, want %d pages", p.Available(), free)
		}
	}
}

func TestRefuses(t *testing.T) {
	p := New(3 * Size)
	for _, n := range []uint64{0, 3*Size + 1, ^uint64(0), ^uint64(0) - Size} {
		if r, ok := p.Alloc(n); ok {
			t.Errorf("%d bytes: %+v", n, r)
		}
	}
	if none := New(Size - 1); none.Size() != 0 || none.Available() != 0 {
		t.Errorf("less than a page: %+v", none)
	}
}
