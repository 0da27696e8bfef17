package programs

import (
	"strconv"
	"strings"
	"testing"
)

// BenchmarkCalls measures the cost of the library itself: the first list of devices, and a
// WRITE of 8 bytes within the process from post to poll, one by one and in lists of 16.
func BenchmarkCalls(b *testing.B) {
	for _, c := range []struct{ unit, name, arg string }{
		{"ms-first-list", "first", ""}, {"ns-post-poll", "speed", "1"}, {"ns-in-lists-of-16", "speed", "16"},
	} {
		b.Run(c.unit, func(b *testing.B) {
			args := append([]string{compile(b, c.name)}, strings.Fields(c.arg)...)
			best := 0.0
			for b.Loop() {
				out := strings.TrimSpace(run(b, side{args: args, env: []string{"VERBENA_ADDR=" + address()}}))
				v, err := strconv.ParseFloat(out, 64)
				if err != nil {
					b.Fatalf("%v: %s", err, out)
				}
				if best == 0 || v < best {
					best = v
				}
			}
			b.ReportMetric(best, c.unit)
		})
	}
}
