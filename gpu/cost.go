package gpu

import (
	"runtime"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Cost is what a way of bytes costs at least.
type Cost struct {
	Latency   time.Duration // of each operation
	Bandwidth uint64        // bytes per second; 0: no limit
}

// Costs are what operations cost at least. An operation that the host has executed earlier takes
// up its engine until that time is over. The zero value adds nothing.
type Costs struct {
	ToDevice   Cost // from the host's memory to VRAM
	FromDevice Cost // from VRAM to the host's memory
	Within     Cost // within VRAM
	BAR        Cost // loads and stores of the CPU: Buffer.ReadAt, Buffer.WriteAt
}

// H200 are the costs of NVIDIA's H200, as they were measured with page-locked memory and one
// stream: the latencies of copies that are queued one behind the other, the bandwidths of long ones.
// The latencies of the BAR are those of a copy of 8 bytes and of waiting for it.
var H200 = Costs{
	ToDevice:   Cost{2300 * time.Nanosecond, 54_600_000_000},
	FromDevice: Cost{2300 * time.Nanosecond, 55_000_000_000},
	Within:     Cost{5500 * time.Nanosecond, 1_914_000_000_000},
	BAR:        Cost{6400 * time.Nanosecond, 54_600_000_000},
}

func (c *Costs) check(op string) error {
	for _, way := range []Cost{c.ToDevice, c.FromDevice, c.Within, c.BAR} {
		if way.Latency < 0 || way.Latency > time.Hour {
			return ib.Errorf(op, syscall.EINVAL, "a latency of %v", way.Latency)
		}
	}
	return nil
}

// longest is what bytes take at most.
const longest = 1000 * time.Hour

// of returns what n bytes take.
func (c Cost) of(n uint64) time.Duration {
	if c.Bandwidth == 0 {
		return c.Latency
	}
	return c.Latency + time.Duration(min(float64(n)/float64(c.Bandwidth)*float64(time.Second), float64(longest)))
}

// spend waits until what n bytes cost has passed since start.
func (c Cost) spend(start time.Time, n uint64) {
	if c == (Cost{}) {
		return
	}
	end := start.Add(c.of(n))
	for {
		left := time.Until(end)
		switch {
		case left <= 0:
			return
		case left > 200*time.Microsecond: // sleeping is not more exact than this
			sys.Sleep(left - 100*time.Microsecond)
		default:
			runtime.Gosched()
		}
	}
}
