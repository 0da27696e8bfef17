package main

import (
	"context"
	"os"
	"slices"
	"strings"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/tour"
)

type demoCmd struct {
	Topic string `arg:"" optional:"" help:"Show one thing instead of everything. dm: device memory and its uses. dmabuf: buffers of other devices, which move while peers access them. gpu: memory of software GPUs, their streams and fences. mw: memory windows, re-registration and shared regions. p2p: memory that one device gives to others, NVMe over RDMA through it. umr: indirect keys, made of other regions. odp: on-demand paging, and what its counters are good for. unified: a disk, a GPU and an RDMA device that use each other's memory."`
	PCAP  string `name:"pcap" type:"path" placeholder:"FILE" help:"Write the packets of the udp part to FILE, for tshark and Wireshark."`
	Quick bool   `help:"Only the operations, no measurements."`
}

// Help is shown below the flags.
func (demoCmd) Help() string {
	return `Two devices are opened in this process, on two loopback addresses, and do everything that RDMA can do to each other: first over the loop link, which copies from memory to memory, then over the udp link, with RoCE v2 packets. It takes a few seconds, needs no privileges and leaves nothing behind.

"verbena demo odp" shows four uses of the counters of on-demand paging, with memory that Linux really pages: warm-up against steady state, the efficiency of paging, thrashing, the effect of prefetch. The counters are compared with what must have happened, and so is all data.

"verbena demo unified" has a disk read into the memory of a GPU, and a remote host fetch that by RDMA: while the GPU evicts the buffer and brings it back, with a pinned buffer, and through system memory. It shows what the devices have counted, and the machine with the bytes on its links.

With --pcap the first device's packets are captured; it sees both directions. tshark guesses at what messages carry, and may call that malformed (docs/errors.md).

Examples:

    verbena demo
    verbena demo dm
    verbena demo dmabuf
    verbena demo gpu
    verbena demo p2p
    verbena demo mw
    verbena demo umr
    verbena demo odp
    verbena demo unified
    verbena demo --pcap demo.pcapng && tshark -r demo.pcapng`
}

func (c *demoCmd) Run(ctx context.Context) error {
	if c.Topic != "" && !slices.Contains(tour.Topics(), c.Topic) {
		return usagef("%q: there is a demo of %s, and without a name one of everything", c.Topic, strings.Join(tour.Topics(), ", "))
	}
	if own := map[string]func(context.Context, *term.Printer) error{tour.TopicODP: tour.RunODP, tour.TopicUnified: tour.RunUnified}[c.Topic]; own != nil {
		if c.PCAP != "" || c.Quick {
			return usagef("%s: goes without --pcap and --quick", c.Topic)
		}
		return own(ctx, term.New(os.Stdout))
	}
	return tour.Run(ctx, term.New(os.Stdout), tour.Options{PCAP: c.PCAP, Quick: c.Quick, Topic: c.Topic})
}
