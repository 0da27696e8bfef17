package mem_test

import (
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
)

// onEngine makes memory of an engine.
func onEngine(e *enginetest.Engine) func(testing.TB, uint64, ib.Access) memtest.Memory {
	return func(_ testing.TB, n uint64, _ ib.Access) memtest.Memory {
		m := e.Alloc(n)
		see := func(f func(b []byte)) {
			m.Lock()
			defer m.Unlock()
			f(m.Bytes)
		}
		return memtest.Memory{
			Backing: m,
			Read:    func(off uint64, b []byte) { see(func(all []byte) { copy(b, all[off:]) }) },
			Write:   func(off uint64, b []byte) { see(func(all []byte) { copy(all[off:], b) }) },
			Free:    m.Free,
			Move: func(poison byte) {
				see(func(all []byte) {
					m.Bytes = append([]byte(nil), all...)
					for i := range all {
						all[i] = poison
					}
				})
			},
		}
	}
}

// Memory that the CPU does not address passes the suite, by its own keys, through windows
// and under indirect keys.
func TestConformanceOfEngine(t *testing.T) {
	slow := enginetest.Config{Latency: 7 * time.Microsecond, Bandwidth: 50e9, Width: 4}
	for _, c := range []memtest.Constructor{
		{Name: "fast", New: onEngine(enginetest.New(enginetest.Config{}))},
		{Name: "slow", New: onEngine(enginetest.New(slow))},
		{Name: "reaching", New: onEngine(enginetest.New(enginetest.Config{Reaches: true}))},
		{Name: "window1", New: onEngine(enginetest.New(enginetest.Config{})), Window: ib.MWType1},
		{Name: "window2", New: onEngine(enginetest.New(enginetest.Config{})), Window: ib.MWType2},
		{Name: "list", New: onEngine(enginetest.New(slow)), Shape: memtest.List},
		{Name: "nested", New: onEngine(enginetest.New(enginetest.Config{})), Shape: memtest.Nested},
	} {
		memtest.Run(t, c)
	}
}
