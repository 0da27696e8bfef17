package hist

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Every value falls into a bucket whose middle is less than half a percent
// away, and buckets are in the order of their values.
func TestBucketsAreTightAndOrdered(t *testing.T) {
	last := -1
	for v := uint64(0); v < 1<<maxBits; v += 1 + v/1000 {
		i := bucketOf(v)
		if i < last || i >= buckets {
			t.Fatalf("value %d is in bucket %d, after %d of %d", v, i, last, buckets)
		}
		last = i
		if diff := math.Abs(float64(middleOf(i)) - float64(v)); diff > 0.005*float64(v) {
			t.Fatalf("value %d is in bucket %d with the middle %d", v, i, middleOf(i))
		}
	}
	if last != buckets-1 {
		t.Errorf("the largest value is in bucket %d, not in the last one, %d", last, buckets-1)
	}
	for _, v := range []uint64{1 << maxBits, 1<<63 - 1, math.MaxUint64} {
		if i := bucketOf(v); i != buckets-1 {
			t.Errorf("value %d beyond the range is in bucket %d", v, i)
		}
	}
}

// Percentiles agree with those of the sorted values within one percent.
func TestQuantileAccuracy(t *testing.T) {
	const seed = 20261115
	t.Logf("seed %d", seed)
	shapes := []struct {
		name string
		draw func(r *rand.Rand) float64 // nanoseconds
	}{
		{"uniform", func(r *rand.Rand) float64 { return 100 + 1e6*r.Float64() }},
		{"exponential", func(r *rand.Rand) float64 { return 2000 * r.ExpFloat64() }},
		{"log-normal", func(r *rand.Rand) float64 { return math.Exp(8 + 2*r.NormFloat64()) }},
		{"two humps", func(r *rand.Rand) float64 {
			if r.IntN(100) == 0 {
				return 4e6 + 1e5*r.Float64()
			}
			return 2800 + 300*r.Float64()
		}},
		{"small", func(r *rand.Rand) float64 { return 200 * r.Float64() }},
	}
	for _, shape := range shapes {
		t.Run(shape.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			var h Histogram
			values := make([]time.Duration, 200_000)
			var sum time.Duration
			for i := range values {
				values[i] = time.Duration(shape.draw(r))
				h.Record(values[i])
				sum += values[i]
			}
			slices.Sort(values)
			for _, q := range []float64{0, 0.01, 0.5, 0.9, 0.99, 0.999, 0.9999, 1} {
				exact := values[min(int(q*float64(len(values))), len(values)-1)]
				got := h.Quantile(q)
				if diff := math.Abs(float64(got - exact)); diff > 0.01*float64(exact) {
					t.Errorf("quantile %v is %v, exactly it is %v", q, got, exact)
				}
			}
			if h.Min() != values[0] || h.Max() != values[len(values)-1] {
				t.Errorf("min and max are %v and %v, want %v and %v", h.Min(), h.Max(), values[0], values[len(values)-1])
			}
			if want := sum / time.Duration(len(values)); h.Mean() != want || h.n != uint64(len(values)) {
				t.Errorf("mean of %d is %v, want %v of %d", h.n, h.Mean(), want, len(values))
			}
		})
	}
}

func TestEmptyResetAndClockGoingBack(t *testing.T) {
	var h Histogram
	if h.Quantile(0.5) != 0 || h.Mean() != 0 || h.Min() != 0 || h.Max() != 0 {
		t.Error("an empty histogram is not all zero")
	}
	h.Record(-time.Second)
	h.Record(10 * time.Microsecond)
	if h.Min() != 0 || h.Max() != 10*time.Microsecond || h.Quantile(1) != 10*time.Microsecond {
		t.Errorf("min %v, max %v, last %v", h.Min(), h.Max(), h.Quantile(1))
	}
	h.Reset()
	h.Record(time.Second)
	if h.n != 1 || h.Min() != time.Second || h.Quantile(0.5) != time.Second {
		t.Errorf("after Reset: count %d, min %v, median %v", h.n, h.Min(), h.Quantile(0.5))
	}
}

// Two histograms that are added are as one that has counted everything.
func TestAdd(t *testing.T) {
	var even, odd, all, empty Histogram
	for v := range 1000 {
		d := time.Duration(v*v + 3)
		all.Record(d)
		if v%2 == 0 {
			even.Record(d)
		} else {
			odd.Record(d)
		}
	}
	odd.Add(&empty)
	empty.Add(&odd)
	if empty != odd {
		t.Errorf("added to nothing: min %v, max %v, mean %v", empty.Min(), empty.Max(), empty.Mean())
	}
	odd.Add(&even)
	if odd != all {
		t.Errorf("odd and even: min %v, max %v, mean %v", odd.Min(), odd.Max(), odd.Mean())
	}
}

func TestRecordAllocatesNothing(t *testing.T) {
	h := new(Histogram)
	d := time.Duration(0)
	if n := testing.AllocsPerRun(1000, func() { d += 997; h.Record(d) }); n != 0 {
		t.Errorf("Record allocates %v times", n)
	}
}

func BenchmarkRecord(b *testing.B) {
	h := new(Histogram)
	b.ReportAllocs()
	for i := range b.N {
		h.Record(time.Duration(2800 + i&1023))
	}
}
