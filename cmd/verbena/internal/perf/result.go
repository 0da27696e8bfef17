package perf

import (
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/hist"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/units"
)

// Result is what a measurement found: the JSON object of verbena perf --json.
type Result struct {
	Op      Op     `json:"op"`
	Mode    string `json:"mode"` // "bandwidth" or "latency"
	Size    int    `json:"size"` // bytes of a message
	Link    string `json:"link"` // "loop", "local" or "udp"
	Mem     string `json:"mem"`
	Threads int    `json:"threads"`
	QPs     int    `json:"qps"`
	Depth   int    `json:"depth"`
	Batch   int    `json:"batch"`
	MTU     int    `json:"mtu"`
	Poll    Poll   `json:"poll"`
	Inline  bool   `json:"inline"`

	// Iters counts messages of the initiator: for a ping-pong they are round
	// trips, each of which is two messages in the rates.
	Iters      uint64  `json:"iters"`
	Seconds    float64 `json:"seconds"`
	GBytesPerS float64 `json:"gbytes_per_s"` // 10^9 bytes of payload, both directions
	MsgsPerS   float64 `json:"msgs_per_s"`

	PerThread []ThreadResult `json:"per_thread"`

	Lat        Latency    `json:"lat_us"`
	LatKind    string     `json:"lat_kind"` // see the Lat constants
	CPUSeconds CPUSeconds `json:"cpu_seconds"`
	CPUPerGB   float64    `json:"cpu_seconds_per_gb"` // of both sides together, for 10^9 bytes of payload
	Checked    bool       `json:"checked"`            // the data was compared, and is as it must be

	Initiator string `json:"initiator"` // address
	Target    string `json:"target"`    // address
}

// ThreadResult is what one posting thread did. Its time counts from the beginning of the
// measurement to its own last completion.
type ThreadResult struct {
	QPs        int     `json:"qps"`
	Iters      uint64  `json:"iters"`
	Seconds    float64 `json:"seconds"`
	GBytesPerS float64 `json:"gbytes_per_s"`
	MsgsPerS   float64 `json:"msgs_per_s"`
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

// rates returns payload in GB/s and messages a second.
func (p *Params) rates(s span) (gbs, msgs float64) {
	msgs = float64(s.messages) / max(s.elapsed, time.Nanosecond).Seconds()
	if p.pingPong() {
		msgs *= 2
	}
	return msgs * float64(p.Size) / 1e9, msgs
}

// newResult returns the result of what the threads did. The measurement ends when the last
// thread does.
func newResult(p Params, spans []span, h *hist.Histogram, cpu CPUSeconds) *Result {
	var all span
	var threads []ThreadResult
	for i, s := range spans {
		all.messages += s.messages
		all.elapsed = max(all.elapsed, s.elapsed)
		t := ThreadResult{Iters: s.messages, Seconds: s.elapsed.Seconds()}
		t.QPs, _ = p.share(p.QPs, i)
		t.GBytesPerS, t.MsgsPerS = p.rates(s)
		threads = append(threads, t)
	}
	gbs, msgs := p.rates(all)
	r := &Result{
		Op: p.Op, Mode: "bandwidth", Size: p.Size, Link: p.Link, Mem: p.Mem, Threads: p.Threads, QPs: p.QPs, Depth: p.Depth,
		Batch: p.Batch, Poll: p.Poll, Inline: p.Inline, Checked: p.Check,
		Iters: all.messages, Seconds: all.elapsed.Seconds(), GBytesPerS: gbs, MsgsPerS: msgs, PerThread: threads,
		CPUSeconds: cpu, CPUPerGB: (cpu.Initiator + cpu.Target) / (gbs * max(all.elapsed, time.Nanosecond).Seconds()),
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

// fits returns an error unless a result that the initiator has sent has what the target
// shows of it.
func (r *Result) fits(p *Params) error {
	switch {
	case r == nil:
		return errors.New("side channel: a result without content")
	case r.Threads != p.Threads || len(r.PerThread) != p.Threads:
		return fmt.Errorf("side channel: a result of %d threads with figures of %d, after a measurement with %d", r.Threads, len(r.PerThread), p.Threads)
	}
	return nil
}
