package main

// A measurement, top-down: Run checks the flags and chooses where the other side is: in
// this process (inProcess), in a child process (withChild), on a host that listens
// (connect), or on a host that connects (listen). Package perf measures; report prints.

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/perf"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/units"
	"github.com/verbena-rdma/verbena/verbs"
)

type perfCmd struct {
	Op       string        `default:"write" help:"What to measure: write, write-imm, read, send or atomic. Default: ${default}."`
	Size     sizeFlag      `placeholder:"BYTES" help:"Bytes of a message; K, M and G are powers of 1024. Default: 64K; 8 with --lat, and for atomic, which has no other."`
	Iters    int           `placeholder:"N" help:"How many messages, with --lat round trips. Default: as many as --duration allows."`
	Duration time.Duration `default:"2s" help:"How long to measure. Default: ${default}."`
	Depth    int           `placeholder:"N" help:"Requests under way on each queue pair. Default: 64."`
	Batch    int           `placeholder:"N" help:"Requests of one post, a power of two. Default: as many as 64K hold, at most 16."`
	Threads  int           `placeholder:"N" help:"Posting threads, each with its own completion queue, memory and share of the queue pairs. Default: 1."`
	QPs      int           `name:"qps" placeholder:"N" help:"Queue pairs of all threads together. Default: one for each thread."`
	MTU      int           `name:"mtu" placeholder:"BYTES" help:"Payload of a packet: 256, 512, 1024, 2048 or 4096. Default: the largest that both ports carry."`
	Link     string        `placeholder:"LINK" help:"loop: both sides in this process. local: the other side in a process of its own that shares the address, and shared memory between them. udp: the same with RoCE v2 packets, on another address. Default: loop; udp with --connect and --listen, which take local on both sides, too."`
	Mem      string        `default:"pinned" help:"Kind of memory; available: ${mem_kinds}. odp: on demand; implicit: on demand, with a key for the whole address space; mw: pinned, and the peer reaches it through memory windows; shared: allocated by the library; umr-list, umr-strided: indirect keys, made of pieces or of a pattern; dm: device memory; dmabuf: dma-bufs, of this program, which do not move."`
	Lat      bool          `help:"Latency: one message at a time, half a round trip."`
	Poll     string        `placeholder:"HOW" help:"How a receiver notices a message, with --lat: cq polls the completion queue, memory watches the last byte of the buffer, which only write has. Default: memory for write, cq otherwise."`
	Inline   bool          `help:"Copy the data into the request."`
	Check    bool          `help:"Compare the data at the end."`
	Busy     bool          `help:"Have the target poll all the time though the operation is one-sided."`
	JSON     bool          `name:"json" help:"Print one JSON object and nothing else."`
	PCAP     string        `name:"pcap" type:"path" placeholder:"FILE" help:"Write the packets of this side's device to FILE. Use --iters: it grows as fast as you measure."`
	Device   string        `placeholder:"NAME" help:"This side's device: a name, an interface or an address. Default: the address that reaches the peer; a free loopback address on one host."`
	Listen   optFlag       `help:"Wait for one measurement by a --connect, on TCP port ${perf_port} or --listen=ADDR[:PORT]."`
	Connect  string        `placeholder:"ADDR[:PORT]" help:"Measure against a --listen on ADDR, TCP port ${perf_port}."`
}

// Help is shown below the flags.
func (perfCmd) Help() string {
	return `Without --lat messages follow each other as closely as the depth allows, and the figures are bandwidth (GB are 10^9 bytes) and messages per second. The latencies are then those of requests under load.

With --lat a message is sent when the answer to the one before has come, and the latencies are half of that round trip; for read, atomic, and write with --poll cq they are the time from posting to completion. The rates count the messages of both directions.

Both sides' CPU time (user and kernel) is reported, and what both together take for each GB. With --link loop there is one process, and its time counts for both.

With --threads N the initiator has N threads that post and poll by themselves. One-sided operations need no thread of the target; for send and write-imm the target receives with N threads, too. The figures are those of all threads together, from their common start to the end of the last; "threads" has the slowest and the fastest one, and --json each of them.

--mem says what the buffers of both sides are. All are outside the Go heap, and their pages are there when the measurement begins.

tshark takes SENDs of up to 12 bytes in a --pcap file for RPC over RDMA, and calls them malformed, unless it is told --disable-protocol rpcordma.

--listen takes everything but --device, --link, --pcap and --json from the side that connects. The TCP connection only coordinates; the data goes by UDP port 4791, or with --link local on both sides by shared memory.

Examples:

    verbena perf --size 1M
    verbena perf --link udp --op send --size 4K --qps 4 --check
    verbena perf --size 8 --threads 4 --qps 16
    verbena perf --link udp --lat
    verbena perf --mem odp --op read --check
    verbena perf --link udp --iters 100 --pcap write.pcapng

On two hosts:

    host1$ verbena perf --listen
    host2$ verbena perf --connect host1 --op read --size 64K --json`
}

// sizeFlag is a number of bytes on the command line.
type sizeFlag int

// UnmarshalText reads "64K".
func (s *sizeFlag) UnmarshalText(b []byte) error {
	n, err := units.ParseSize(string(b))
	if err == nil && n == 0 {
		err = errors.New("want at least 1 byte")
	}
	*s = sizeFlag(n)
	return err
}

func (c *perfCmd) Run(ctx context.Context, parsed *kong.Context) error {
	p := perf.Params{
		Op: perf.Op(c.Op), Size: int(c.Size), Iters: c.Iters, Duration: c.Duration,
		Depth: c.Depth, Batch: c.Batch, Threads: c.Threads, QPs: c.QPs, MTU: c.MTU, Mem: c.Mem,
		Lat: c.Lat, Poll: perf.Poll(c.Poll), Inline: c.Inline, Check: c.Check, BusyTarget: c.Busy,
	}
	if err := c.validate(parsed); err != nil {
		return err
	}
	p.Link = c.Link
	if err := p.Complete(); err != nil {
		return usagef("--%w", err) // it begins with the name of a field, which is that of the flag
	}
	show := newStages(c.JSON)
	var res *perf.Result
	var err error
	switch {
	case c.Listen.on:
		res, err = c.listen(ctx, show)
	case c.Connect != "":
		res, err = c.connect(ctx, p, show)
	case c.Link != string(verbs.LinkLoop):
		res, err = c.withChild(ctx, p, show)
	default:
		res, err = c.inProcess(ctx, p, show)
	}
	show.end()
	if err != nil {
		return err
	}
	return c.report(res)
}

// validate checks flags that depend on each other, and sets the default of Link.
func (c *perfCmd) validate(parsed *kong.Context) error {
	remote := c.Listen.on || c.Connect != ""
	if c.Link == "" {
		c.Link = string(verbs.LinkLoop)
		if remote {
			c.Link = string(verbs.LinkUDP)
		}
	}
	switch {
	case c.Listen.on && c.Connect != "":
		return usagef("--listen and --connect are the two sides, on two hosts")
	case !slices.Contains([]verbs.LinkMode{verbs.LinkLoop, verbs.LinkLocal, verbs.LinkUDP}, verbs.LinkMode(c.Link)):
		return usagef("--link %s: want loop, local or udp", c.Link)
	case remote && c.Link == string(verbs.LinkLoop):
		return usagef("--link loop: it does not leave the process, so there is nothing to connect to")
	}
	for _, f := range []struct {
		name  string
		value int
	}{{"iters", c.Iters}, {"depth", c.Depth}, {"batch", c.Batch}, {"threads", c.Threads}, {"qps", c.QPs}} {
		if f.value == 0 && given(parsed, f.name) {
			return usagef("--%s 0: want at least 1", f.name)
		}
	}
	if !c.Listen.on {
		return nil
	}
	// The listening side refuses flags that it would ignore.
	for _, step := range parsed.Path {
		if step.Flag != nil && !slices.Contains([]string{"listen", "device", "pcap", "json", "link"}, step.Flag.Name) {
			return usagef("--%s: is decided by the side that connects", step.Flag.Name)
		}
	}
	return nil
}

// given reports whether a flag is on the command line.
func given(parsed *kong.Context, name string) bool {
	return slices.ContainsFunc(parsed.Path, func(p *kong.Path) bool { return p.Flag != nil && p.Flag.Name == name })
}

// inProcess measures between two devices of this process.
func (c *perfCmd) inProcess(ctx context.Context, p perf.Params, show *stages) (res *perf.Result, err error) {
	a, err := verbs.Open(c.Device, &verbs.Config{Link: verbs.LinkLoop, PCAP: c.PCAP})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	c.captureNote(a)
	b, err := verbs.Open("", &verbs.Config{Link: verbs.LinkLoop})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	return perf.Local(ctx, a, b, p, show.notify(p))
}

// report prints the result.
func (c *perfCmd) report(r *perf.Result) error {
	if c.JSON {
		b, err := json.Marshal(r)
		if err != nil {
			return err
		}
		_, err = fmt.Printf("%s\n", b)
		return err
	}
	what := []string{units.FormatSize(r.Size), r.Mem + " memory"}
	if r.Inline {
		what = append(what, "inline")
	}
	if r.Mode == "bandwidth" {
		what = append(what, fmt.Sprintf("%d outstanding", r.Depth), fmt.Sprintf("%d QP", r.QPs))
		if r.Threads > 1 {
			what = append(what, fmt.Sprintf("%d threads", r.Threads))
		}
	} else {
		what = append(what, "polling "+string(r.Poll))
	}
	what = append(what, fmt.Sprintf("MTU %d", r.MTU))
	fmt.Printf("%s %s over %s, %s → %s\n", r.Op, r.Mode, r.Link, r.Initiator, r.Target)
	fmt.Printf("  %s\n", strings.Join(what, ", "))
	messages := "messages"
	if r.LatKind == perf.LatHalf {
		messages = "round trips"
	}
	compared := ""
	if r.Checked {
		compared = ", data compared"
	}
	line := func(key, format string, args ...any) { fmt.Printf("  %-11s %s\n", key, fmt.Sprintf(format, args...)) }
	line("done", "%s %s in %.2f s%s", units.FormatCount(r.Iters), messages, r.Seconds, compared)
	f := units.FormatFigure
	line("bandwidth", "%s GB/s", f(r.GBytesPerS))
	line("rate", "%s messages/s", units.FormatCount(uint64(r.MsgsPerS)))
	if r.Threads > 1 {
		slow, fast := slices.MinFunc(r.PerThread, byRate), slices.MaxFunc(r.PerThread, byRate)
		line("threads", "%s to %s GB/s, %s to %s messages/s each", f(slow.GBytesPerS), f(fast.GBytesPerS),
			units.FormatCount(uint64(slow.MsgsPerS)), units.FormatCount(uint64(fast.MsgsPerS)))
	}
	line("latency", "µs: min %s, median %s, 99%% %s, 99.9%% %s, max %s (%s)",
		f(r.Lat.Min), f(r.Lat.P50), f(r.Lat.P99), f(r.Lat.P999), f(r.Lat.Max), latKinds[r.LatKind])
	if r.Link == string(verbs.LinkLoop) {
		line("CPU time", "%.2f s, both sides: %s s/GB", r.CPUSeconds.Initiator, f(r.CPUPerGB))
	} else {
		line("CPU time", "initiator %.2f s, target %.2f s: %s s/GB", r.CPUSeconds.Initiator, r.CPUSeconds.Target, f(r.CPUPerGB))
	}
	return nil
}

// byRate orders threads by their rates.
func byRate(a, b perf.ThreadResult) int { return cmp.Compare(a.MsgsPerS, b.MsgsPerS) }

var latKinds = map[string]string{
	perf.LatHalf:       "half a round trip",
	perf.LatCompletion: "post to completion",
	perf.LatLoaded:     "post to completion, under load",
}

// captureNote prints what a capture will hold.
func (c *perfCmd) captureNote(dev *verbs.Device) {
	if c.PCAP != "" {
		fmt.Fprintf(os.Stderr, "verbena perf: capturing the packets of %v, both directions, to %s\n", dev.Addr(), c.PCAP)
	}
}
