package sys

import (
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"
)

// The counts of locked pages against a model that counts every page by itself,
// over several buckets, with locks that fail.
func TestLockCounts(t *testing.T) {
	const pages = 120
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	base := uintptr(3*lockBucket) - pages/2*pageSize // the middle is a bucket's end
	locked, counts := make(map[uintptr]bool), make(map[uintptr]int)
	fail := 0 // the mlock that fails, after so many pages
	each := func(start, end uintptr, f func(page uintptr)) {
		if start%pageSize != 0 || end%pageSize != 0 || start >= end {
			t.Fatalf("system call on %#x to %#x", start, end)
		}
		for p := start; p < end; p += pageSize {
			f(p)
		}
	}
	c := lockCounts{
		mlock: func(start, end uintptr) error {
			n := 0
			each(start, end, func(p uintptr) {
				if n++; fail == 0 || n < fail {
					locked[p] = true
				}
			})
			if fail > 0 && n >= fail {
				return unix.ENOMEM
			}
			return nil
		},
		munlock: func(start, end uintptr) error {
			each(start, end, func(p uintptr) { delete(locked, p) })
			return nil
		},
	}
	type held struct{ start, end uintptr }
	var ranges []held
	for step := range 5000 {
		if len(ranges) == 0 || rng.IntN(2) == 0 && len(ranges) < 40 {
			first := rng.UintN(pages)
			r := held{base + uintptr(first)*pageSize, base + uintptr(first+1+rng.UintN(pages-first))*pageSize}
			if fail = 0; rng.IntN(4) == 0 {
				fail = 1 + rng.IntN(10)
			}
			if c.lock(r.start, r.end) == nil {
				ranges = append(ranges, r)
				each(r.start, r.end, func(p uintptr) { counts[p]++ })
			}
		} else {
			k := rng.IntN(len(ranges))
			r := ranges[k]
			ranges[k] = ranges[len(ranges)-1]
			ranges = ranges[:len(ranges)-1]
			c.unlock(r.start, r.end)
			each(r.start, r.end, func(p uintptr) {
				if counts[p]--; counts[p] == 0 {
					delete(counts, p)
				}
			})
		}
		if len(locked) != len(counts) {
			t.Fatalf("step %d: %d pages are locked, should be %d", step, len(locked), len(counts))
		}
		for p := range counts {
			if !locked[p] {
				t.Fatalf("step %d: page %#x should be locked", step, p)
			}
		}
		for number, runs := range c.buckets {
			for i, r := range runs {
				if r.start >= r.end || r.count <= 0 || r.start/lockBucket != number || (r.end-1)/lockBucket != number {
					t.Fatalf("step %d: run %+v in bucket %d", step, r, number)
				}
				if i > 0 && (runs[i-1].end > r.start || runs[i-1].end == r.start && runs[i-1].count == r.count) {
					t.Fatalf("step %d: runs %+v and %+v", step, runs[i-1], r)
				}
			}
		}
	}
	for _, r := range ranges {
		c.unlock(r.start, r.end)
	}
	if len(c.buckets) != 0 || len(locked) != 0 {
		t.Errorf("%d buckets and %d pages are left", len(c.buckets), len(locked))
	}
}

func TestPageAlign(t *testing.T) {
	p := pageSize
	for _, c := range []struct{ addr, n, start, end uintptr }{
		{0, 1, 0, p}, {0, p, 0, p}, {0, p + 1, 0, 2 * p}, {p - 1, 1, 0, p}, {p - 1, 2, 0, 2 * p}, {p, 1, p, 2 * p}, {5*p + 3, p - 3, 5 * p, 6 * p},
	} {
		if start, end := PageAlign(c.addr, c.n); start != c.start || end != c.end {
			t.Errorf("%d bytes at %d: %d to %d, should be %d to %d", c.n, c.addr, start, end, c.start, c.end)
		}
	}
}

func TestMemlockLimit(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old)
	for _, limit := range []uint64{0, 4096, min(64<<10, old.Max)} {
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: limit, Max: old.Max}); err != nil {
			t.Fatal(err)
		}
		if got := MemlockLimit(); got != limit {
			t.Errorf("%d, should be %d", got, limit)
		}
	}
}
