package perf

import (
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/hist"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/units"
)

// Result is what a measurement found: the JSON object of verbena perf --json.
type Result struct {
	Op     Op     `json:"op"`
	Mode   string `json:"mode"` // "bandwidth" or "latency"
	Size   int    `json:"size"` // bytes of a message
	Link   string `json:"link"` // "loop", "local" or "udp"
	Mem    string `json:"mem"`
	QPs    int    `json:"qps"`
	Depth  int    `json:"depth"`
	Batch  int    `json:"batch"`
	MTU    int    `json:"mtu"`
	Poll   Poll   `json:"poll"`
	Inline bool   `json:"inline"`

	// Iters counts messages of the initiator: for a ping-pong they are round
	// trips, each of which is two messages in the rates.
	Iters      uint64  `json:"iters"`
	Seconds    float64 `json:"seconds"`
	GBytesPerS float64 `json:"gbytes_per_s"` // 10^9 bytes of payload, both directions
	MsgsPerS   float64 `json:"msgs_per_s"`

	Lat        Latency    `json:"lat_us"`
	LatKind    string     `json:"lat_kind"` // see the Lat constants
	CPUSeconds CPUSeconds `json:"cpu_seconds"`
	Checked    bool       `json:"checked"` // the data was compared, and is as it must be

	Initiator string `json:"initiator"` // address
	Target    string `json:"target"`    // address
}

// What the latencies are.
const (
	// LatHalf is half of a round trip of two messages.
	LatHalf = "half-round-trip"
	// LatCompletion is the time from posting one request to its completion.
	LatCompletion = "completion"
	// LatLoaded is the same with Depth requests under way, for whole batches.
	LatLoaded = "completion-under-load"
)

// Latency is a distribution of times in microseconds.
type Latency struct {
	Min  float64 `json:"min"`
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
	Mean float64 `json:"mean"`
}

// CPUSeconds is the CPU time, in user and kernel mode, that each side's process
// took for the measurement. With both sides in one process (link "loop") all of
// it is the initiator's, and the target's is 0.
type CPUSeconds struct {
	Initiator float64 `json:"initiator"`
	Target    float64 `json:"target"`
}

func newResult(p Params, s span, h *hist.Histogram) *Result {
	messages := float64(s.messages)
	if p.pingPong() {
		messages *= 2
	}
	seconds := max(s.elapsed, time.Nanosecond).Seconds()
	r := &Result{
		Op: p.Op, Mode: "bandwidth", Size: p.Size, Link: p.Link, Mem: p.Mem, QPs: p.QPs, Depth: p.Depth,
		Batch: p.Batch, Poll: p.Poll, Inline: p.Inline, Checked: p.Check,
		Iters: s.messages, Seconds: s.elapsed.Seconds(),
		GBytesPerS: messages * float64(p.Size) / seconds / 1e9,
		MsgsPerS:   messages / seconds,
		Lat: Latency{
			Min:  units.Micros(h.Min()),
			P50:  units.Micros(h.Quantile(0.5)),
			P99:  units.Micros(h.Quantile(0.99)),
			P999: units.Micros(h.Quantile(0.999)),
			Max:  units.Micros(h.Max()),
			Mean: units.Micros(h.Mean()),
		},
		LatKind: LatLoaded,
	}
	if p.Lat {
		r.Mode, r.LatKind = "latency", LatCompletion
		if p.pingPong() {
			r.LatKind = LatHalf
		}
	}
	return r
}
