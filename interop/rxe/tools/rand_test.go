package tools

import (
	"slices"
	"testing"
	"time"
)

// These are the numbers of rand in GNU libc 2.36 for these seeds.
func TestRandStream(t *testing.T) {
	for _, c := range []struct {
		seed uint32
		want []uint32
	}{
		{1, []uint32{1804289383, 846930886, 1681692777, 1714636915, 1957747793}},
		{1700000000, []uint32{280491303, 626398474, 65378190, 821524244, 1465218044}},
		{4000000000, []uint32{1111130805, 1380198982, 1306113867}},
		{0, []uint32{1804289383, 846930886, 1681692777, 1714636915, 1957747793}},
	} {
		s := newRandStream(c.seed)
		for i, want := range c.want {
			if got := s.next(); got != want {
				t.Errorf("seed %d: number %d is %d, want %d", c.seed, i, got, want)
			}
		}
	}
}

func TestSeeds(t *testing.T) {
	at := time.Unix(1000, 0)
	if got, want := seeds(at, at.Add(1500*time.Millisecond)), []uint32{999, 1000, 1001, 1002}; !slices.Equal(got, want) {
		t.Errorf("seeds %v, want %v", got, want)
	}
	if n := len(seeds(at, at.Add(24*time.Hour))); n > 600 {
		t.Errorf("%d seeds for a day", n)
	}
}
