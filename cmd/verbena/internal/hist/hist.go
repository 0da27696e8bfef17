// Package hist counts latencies in a fixed set of log-linear buckets, so that
// a measuring loop records one with an increment and no allocation, and a
// percentile read afterwards is exact to less than half a percent.
//
// Record finds the bucket of a value (bucketOf) and counts it; Quantile walks the counts
// and returns the middle of the bucket it ends in (middleOf). Minimum, maximum and mean
// are kept exactly: hdrhistogram-go, which counts in such buckets too, returns
// approximations of all three.
package hist

import (
	"math/bits"
	"time"
)

// Every power of two is divided into 1<<subBits buckets of equal width: a
// bucket is 1/128 of its value wide, and its middle at most 1/256 away from any
// value in it. Values below 1<<subBits have a bucket each.
const (
	subBits = 7
	sub     = 1 << subBits
	// maxBits bounds the range: 2^40 ns are 18 minutes. Larger values count
	// in the last bucket; Max is still exact.
	maxBits = 40
	buckets = (maxBits - subBits + 1) * sub
)

// Histogram counts durations. The zero value is empty and ready. It is not
// safe for concurrent use.
type Histogram struct {
	counts   [buckets]uint64
	n        uint64
	sum      uint64
	min, max uint64
}

// Record counts one duration. A negative one, which only a broken clock yields,
// counts as zero.
func (h *Histogram) Record(d time.Duration) {
	v := uint64(max(d, 0))
	if h.n == 0 || v < h.min {
		h.min = v
	}
	if v > h.max {
		h.max = v
	}
	h.n++
	h.sum += v
	h.counts[bucketOf(v)]++
}

// Add counts everything that another histogram has counted.
func (h *Histogram) Add(o *Histogram) {
	if o.n == 0 {
		return
	}
	if h.n == 0 || o.min < h.min {
		h.min = o.min
	}
	h.max = max(h.max, o.max)
	h.n += o.n
	h.sum += o.sum
	for i, c := range o.counts {
		h.counts[i] += c
	}
}

// Reset empties the histogram.
func (h *Histogram) Reset() { *h = Histogram{} }

// Min returns the smallest duration recorded, 0 if there is none.
func (h *Histogram) Min() time.Duration { return time.Duration(h.min) }

// Max returns the largest duration recorded, 0 if there is none.
func (h *Histogram) Max() time.Duration { return time.Duration(h.max) }

// Mean returns the average of the durations recorded, 0 if there is none.
func (h *Histogram) Mean() time.Duration {
	if h.n == 0 {
		return 0
	}
	return time.Duration(h.sum / h.n)
}

// Quantile returns the duration that a fraction q of the recorded ones does not
// exceed (0.5 is the median), 0 if there is none.
func (h *Histogram) Quantile(q float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	rank := uint64(q * float64(h.n)) // how many values lie below the one we look for
	rank = min(rank, h.n-1)
	var seen uint64
	for i, c := range h.counts {
		seen += c
		if seen > rank {
			// The exact minimum and maximum are known: the result lies between them.
			return time.Duration(min(max(middleOf(i), h.min), h.max))
		}
	}
	return time.Duration(h.max)
}

// bucketOf returns the bucket that v belongs to. Exponent 0 are the values
// below sub; exponent e above it are those whose highest bit is subBits+e-1,
// and the subBits bits after the highest one choose among its buckets.
func bucketOf(v uint64) int {
	if v < sub {
		return int(v)
	}
	e := bits.Len64(v) - subBits
	if e > maxBits-subBits {
		return buckets - 1
	}
	return e*sub + int(v>>(e-1)) - sub
}

// middleOf returns the value in the middle of a bucket.
func middleOf(i int) uint64 {
	if i < sub {
		return uint64(i)
	}
	e, m := i/sub, i%sub
	width := uint64(1) << (e - 1)
	return (sub+uint64(m))*width + width/2
}
