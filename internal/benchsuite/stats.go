package main

import (
	"math"
	"slices"
	"time"
)

// median returns the middle value, the mean of the two in the middle for an even
// number, and NaN for none.
func median(values []float64) float64 {
	n := len(values)
	if n == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(values))
	if n%2 == 1 {
		return s[n/2]
	}
	return (s[n/2-1] + s[n/2]) / 2
}

// ratios divides round by round: the two values of a round were measured within
// seconds of each other, so what slowed the machine down slowed both.
func ratios(values, reference []float64) []float64 {
	n := min(len(values), len(reference))
	r := make([]float64, 0, n)
	for i := range n {
		if reference[i] != 0 {
			r = append(r, values[i]/reference[i])
		}
	}
	return r
}

// sampler keeps durations. It never grows: a measurement ends when it is full.
type sampler struct{ ns []int64 }

func newSampler(n int) *sampler { return &sampler{make([]int64, 0, n)} }

func (s *sampler) reset() { s.ns = s.ns[:0] }

// add keeps a duration and reports whether there is room for more.
func (s *sampler) add(d time.Duration) bool {
	s.ns = append(s.ns, int64(d))
	return len(s.ns) < cap(s.ns)
}

// quantiles returns the durations, in nanoseconds, below which the given parts
// of all lie: the nearest rank, so each is one that was measured. It sorts.
func (s *sampler) quantiles(parts ...float64) []float64 {
	slices.Sort(s.ns)
	q := make([]float64, len(parts))
	for i, p := range parts {
		q[i] = math.NaN()
		if n := len(s.ns); n > 0 {
			rank := int(math.Ceil(p * float64(n)))
			q[i] = float64(s.ns[min(max(rank, 1), n)-1])
		}
	}
	return q
}
