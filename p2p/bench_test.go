package p2p

import (
	"testing"
	"time"
)

// large builds a machine of 256 devices: 4 host bridges, 2 root ports each, switches of 8 ports
// with 4 functions below each.
func large(t testing.TB) *Topology {
	b := NewBuilder(intelMax)
	for range 4 {
		h := b.HostBridge(skylake)
		for range 2 {
			for _, port := range h.RootPort(redirect).Switch(8, nil) {
				d := port.Endpoint("", idNVMe, ClassNVMe, cmb(1<<20))
				for range 3 {
					d.Another("")
				}
			}
		}
	}
	return must(b.Build())(t)
}

func BenchmarkMatrix256(b *testing.B) {
	top := large(b)
	all := top.Devices()
	if len(all) != 256 {
		b.Fatalf("%d devices", len(all))
	}
	for b.Loop() {
		top.Matrix(all, all)
	}
}

func BenchmarkVerdict(b *testing.B) {
	top := large(b)
	all := top.Devices()
	for b.Loop() {
		top.Verdict(all[0], all[255])
	}
}

// The matrix of 256 devices takes at most 50 ms, the best of several, since others may have the CPU;
// and it allocates its cells at once.
func TestMatrixTimeAndAllocs(t *testing.T) {
	if raceEnabled {
		t.Skip("race: the race detector takes most of the time")
	}
	top := large(t)
	all := top.Devices()
	best := time.Hour
	for range 5 {
		began := time.Now()
		top.Matrix(all, all)
		best = min(best, time.Since(began))
	}
	t.Logf("the matrix of %d devices takes %v", len(all), best)
	if best > 50*time.Millisecond {
		t.Errorf("%v, want at most 50 ms", best)
	}
	if n := testing.AllocsPerRun(5, func() { top.Matrix(all, all) }); n > 3 {
		t.Errorf("%v allocations", n)
	}
}
