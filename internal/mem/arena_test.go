package mem

import (
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
)

// arenaSeed returns a seed and prints it.
func arenaSeed(t *testing.T) uint64 {
	seed := rand.Uint64()
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 0, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("VERBENA_SEED=%#x", seed)
	return seed
}

// checkArena looks for overlaps, gaps, neighbours that should be one, and ranges
// in a wrong bin.
func checkArena(t *testing.T, a *arena) {
	t.Helper()
	var first *extent
	holes := 0
	for row := range a.bins {
		for col, e := range a.bins[row] {
			if (e != nil) != (a.cols[row]&(1<<col) != 0) || (a.cols[row] != 0) != (a.rows&(1<<row) != 0) {
				t.Fatalf("the bits of bin %d, %d are wrong", row, col)
			}
			for ; e != nil; e = e.next {
				holes++
				if r, c := binOf(e.n); e.used || r != row || c != col {
					t.Fatalf("%d bytes at %d, used %v, are in bin %d, %d", e.n, e.off, e.used, row, col)
				}
				first = e
			}
		}
	}
	if first == nil || holes != a.holes {
		t.Fatalf("%d free ranges, counted as %d", holes, a.holes)
	}
	for first.before != nil {
		first = first.before
	}
	at, used := uint64(0), uint64(0)
	for e := first; e != nil; e = e.after {
		if e.off != at || e.n == 0 || e.after != nil && (e.after.before != e || !e.used && !e.after.used) {
			t.Fatalf("the range of %d bytes at %d does not fit what comes before or behind", e.n, e.off)
		}
		if at += e.n; e.used {
			used += e.n
		}
	}
	if at != a.size || used != a.inUse {
		t.Fatalf("%d bytes of %d, %d in use of %d", at, a.size, used, a.inUse)
	}
}

// What is handed out is as long and as aligned as asked for, overlaps nothing, and
// is there as long as any free range can hold it.
func TestArena(t *testing.T) {
	rng := rand.New(rand.NewPCG(arenaSeed(t), 0))
	const size = 1 << 16
	var a arena
	a.init(size)
	var live []*extent
	for range 20_000 {
		if len(live) > 0 && rng.IntN(2) == 0 {
			i := rng.IntN(len(live))
			a.release(live[i])
			live = slices.Delete(live, i, i+1)
			continue
		}
		n, align := 1+rng.Uint64N(1<<rng.IntN(15)), uint64(1)<<rng.IntN(13)
		e := a.alloc(n, align)
		if e != nil {
			if e.n != n || e.off%align != 0 || !e.used {
				t.Fatalf("%d bytes at %d for %d with alignment %d", e.n, e.off, n, align)
			}
			live = append(live, e)
		} else if hole := a.search(n, align); hole != nil {
			t.Fatalf("refused %d bytes with alignment %d, though %d are free at %d", n, align, hole.n, hole.off)
		}
		if rng.IntN(50) == 0 && a.holes > 0 {
			checkArena(t, &a)
		}
	}
	for _, e := range live {
		a.release(e)
	}
	checkArena(t, &a)
	if a.holes != 1 || a.inUse != 0 {
		t.Fatalf("%d free ranges and %d bytes in use when all is free", a.holes, a.inUse)
	}
}

// Every byte can be had: by one, one by one, and what is left to the byte.
func TestArenaToTheByte(t *testing.T) {
	for _, size := range []uint64{1, 15, 16, 17, 1000, 4096, 1<<20 + 1} {
		var a arena
		a.init(size)
		for range 2 {
			e := a.alloc(size, 1)
			if e == nil || a.alloc(1, 1) != nil {
				t.Fatalf("%d bytes: %v, and one more", size, e)
			}
			a.release(e)
		}
		if a.alloc(size+1, 1) != nil || a.alloc(1, 2*size) != nil || a.alloc(^uint64(0), 1<<62) != nil {
			t.Errorf("more than %d bytes were had", size)
		}
		n := min(size, 5000)
		for range n {
			if a.alloc(1, 1) == nil {
				t.Fatal("one byte was refused")
			}
		}
		if size > n && a.alloc(size-n, 1) == nil {
			t.Errorf("the last %d of %d bytes were refused", size-n, size)
		}
		if a.alloc(1, 1) != nil {
			t.Error("a byte too many")
		}
	}
}

// A million buffers come and go, of all sizes, with three quarters of the pool in
// use: the free space does not fall into ever smaller pieces, and none is refused.
func TestSoakArenaFragmentation(t *testing.T) {
	rounds := 1_000_000
	if os.Getenv("VERBENA_SOAK") == "" && (testing.Short() || RaceEnabled) {
		rounds = 100_000
	}
	rng := rand.New(rand.NewPCG(arenaSeed(t), 0))
	const size = 64 << 20
	var a arena
	a.init(size)
	var live []*extent
	var most [4]int // free ranges, by quarter
	for round := range rounds {
		for a.inUse > size/4*3 {
			i := rng.IntN(len(live))
			a.release(live[i])
			live[i] = live[len(live)-1]
			live = live[:len(live)-1]
		}
		n := 1 + rng.Uint64N(1<<(3+rng.IntN(15))) // up to 128 KiB, small ones as often as large
		e := a.alloc(n, 1<<rng.IntN(8))
		if e == nil {
			t.Fatalf("round %d: %d bytes refused with %d of %d in use, in %d free ranges", round, n, a.inUse, uint64(size), a.holes)
		}
		live = append(live, e)
		q := round * 4 / rounds
		most[q] = max(most[q], a.holes)
	}
	t.Logf("free ranges at most, by quarter: %v; %d buffers live", most, len(live))
	if most[3] > most[1]+most[1]/4 {
		t.Errorf("the free space falls into ever more pieces: %v", most)
	}
	for _, e := range live {
		a.release(e)
	}
	if a.holes != 1 {
		t.Errorf("%d free ranges when all is free", a.holes)
	}
}
