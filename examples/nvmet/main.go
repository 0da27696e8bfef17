// Command nvmet is an NVMe over Fabrics target: it serves a disk, in memory or in a file, to hosts that connect by RDMA, such as
// Linux's nvme-rdma:
//
//	nvmet -listen 192.0.2.1:4420 -file disk.img
//	nvme connect -t rdma -a 192.0.2.1 -n nqn.2026-01.io.verbena:disk      (on the host)
//
// It ends when it is interrupted. At SIGUSR1 the queue pair of a host's first I/O queue fails, so that one can see how the
// host recovers. Without -listen it serves a disk in memory to itself, and shows what a host does with it. A flag that
// would have no effect is refused.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/fabrics"
	"github.com/verbena-rdma/verbena/p2p"
	"github.com/verbena-rdma/verbena/verbs"
)

var (
	listen  = flag.String("listen", "", "address and port to serve at; empty: show a host and a target in this process")
	nqn     = flag.String("nqn", "nqn.2026-01.io.verbena:disk", "name of the subsystem")
	file    = flag.String("file", "", "file with the disk; empty: memory")
	size    = flag.Int64("size", 64<<20, "size of a disk in memory, in bytes")
	direct  = flag.Bool("direct", false, "pass the kernel's cache of the file by")
	peer    = flag.String("p2pmem", "", "PCI address of a device with memory for others, as 0000:01:00.0: data passes through it to the file, by -direct, and not through memory of the system")
	block   = flag.Int("block", 4096, "size of a block, in bytes")
	inline  = flag.Int("in-capsule", 4096, "bytes of a write that a command may bring along")
	depth   = flag.Int("queue-size", 0, "commands of a host's queue that are under way at most, 2 to 256; 0: 128. A queue has 4 KiB of memory for each of them, and twice -max-transfer")
	most    = flag.Int("max-transfer", 0, "bytes that a command may move at most: a power of two from 8 KiB to 8 MiB; 0: 1 MiB")
	workers = flag.Int("workers", 0, "commands of a queue that are executed at a time; 0: one for memory, 8 for a file")
	verbose = flag.Bool("v", false, "tell of hosts that come and go")
)

func main() {
	flag.Parse()
	if flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	flag.Visit(func(f *flag.Flag) {
		if why := ignored(f.Name); why != "" {
			fmt.Fprintf(os.Stderr, "nvmet: -%s has no effect %s\n", f.Name, why)
			os.Exit(2)
		}
	})
	run := serve
	if *listen == "" {
		run = show
	}
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

// ignored returns why a flag has no effect beside the others; "" if it has one.
func ignored(name string) string {
	switch name {
	case "file", "direct", "p2pmem", "in-capsule", "queue-size", "max-transfer", "workers", "v":
		if *listen == "" {
			return "without -listen"
		}
	}
	switch name {
	case "direct", "p2pmem":
		if *file == "" {
			return "without -file"
		}
	case "size":
		if *file != "" {
			return "with -file"
		}
	}
	return ""
}

// disk returns the subsystem, with its disk as namespace 1.
func disk() (*nvme.Subsystem, io.Closer, error) {
	s, err := nvme.NewSubsystem(nvme.SubsystemConfig{NQN: *nqn})
	if err != nil {
		return nil, nil, err
	}
	if *file == "" {
		m, err := nvme.NewMemory(*size, *block)
		if err != nil {
			return nil, nil, err
		}
		return s, io.NopCloser(nil), s.AddNamespace(1, m)
	}
	f, err := nvme.OpenFile(*file, nvme.FileConfig{BlockSize: *block, Direct: *direct || *peer != ""})
	if err != nil {
		return nil, nil, err
	}
	return s, f, s.AddNamespace(1, f)
}

// serve serves the disk until the program is interrupted.
func serve() error {
	sub, closer, err := disk()
	if err != nil {
		return err
	}
	cfg := fabrics.TargetConfig{Subsystems: []*nvme.Subsystem{sub}, InCapsule: *inline, Workers: *workers,
		QueueSize: *depth, MaxTransfer: *most}
	if *inline == 0 {
		cfg.InCapsule = -1
	}
	if *file != "" && *workers == 0 {
		cfg.Workers = 8
	}
	if *peer != "" {
		if cfg.Buffers, err = peerMemory(*peer); err != nil {
			return err
		}
	}
	if *verbose {
		cfg.Log = slog.Default()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	t, err := fabrics.Listen(ctx, *listen, cfg)
	if err != nil {
		return err
	}
	fmt.Printf("serving %s at %v\n", *nqn, t.Addr())
	fail := make(chan os.Signal, 1)
	signal.Notify(fail, syscall.SIGUSR1)
	defer signal.Stop(fail)
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-fail:
			failQueue(t)
		}
	}
	s := t.Stats()
	if err := t.Close(); err != nil {
		return err
	}
	fmt.Printf("%d queues, %d commands; %d bytes read from hosts, %d written to them, %d came with commands\n", s.Connections, s.Commands, s.Read, s.Written, s.InCapsule)
	if f, ok := closer.(*nvme.File); ok && (*direct || *peer != "") {
		moved := f.Stats()
		fmt.Printf("the disk has moved %d bytes itself, %d were copied; %d queues had no memory of a peer\n", moved.Direct, moved.Copied, s.OwnBuffers)
	}
	return closer.Close()
}

// peerMemory returns the memory of a device.
func peerMemory(at string) (fabrics.Buffers, error) {
	a, err := p2p.ParseAddress(at)
	if err != nil {
		return nil, err
	}
	p, err := p2p.OpenSysProvider(a)
	if err != nil {
		return nil, err
	}
	_, release, err := p.Alloc(os.Getpagesize()) // whether this process may; a target without such memory uses its own
	if err != nil {
		return nil, err
	}
	release()
	return p, nil
}

// failQueue has the queue pair of a host's first I/O queue fail.
func failQueue(t *fabrics.Target) {
	for _, q := range t.Queues() {
		if q.ID == 1 {
			fmt.Printf("queue %d of controller %d fails: %v\n", q.ID, q.Controller, q.Fail())
			return
		}
	}
	fmt.Println("there is no I/O queue to fail")
}

// show has a host write to the disk, and read it.
func show() error {
	ctx := context.Background()
	sub, closer, err := disk()
	if err != nil {
		return err
	}
	defer func() { _ = closer.Close() }()
	here, there := netip.MustParseAddr("127.0.80.1"), netip.MustParseAddr("127.0.80.2")
	t, err := fabrics.Listen(ctx, netip.AddrPortFrom(there, 4420).String(), fabrics.TargetConfig{Subsystems: []*nvme.Subsystem{sub}})
	if err != nil {
		return err
	}
	defer func() { _ = t.Close() }()
	dev, err := verbs.Open("", &verbs.Config{Addrs: []netip.Addr{here}})
	if err != nil {
		return err
	}
	defer func() { _ = dev.Close() }()
	h, err := fabrics.Dial(ctx, t.Addr().String(), fabrics.HostConfig{NQN: *nqn, Config: cm.Config{Device: dev}})
	if err != nil {
		return err
	}
	defer func() { _ = h.Close() }()
	d, err := h.Namespace(ctx, 1)
	if err != nil {
		return err
	}
	fmt.Printf("controller %d has a disk of %d MiB, in blocks of %d bytes\n", h.Controller(), d.Size()>>20, d.BlockSize())
	want := bytes.Repeat([]byte("verbena "), 1<<16)
	if _, err := d.WriteAt(want, 1<<20); err != nil {
		return err
	}
	got := make([]byte, len(want))
	if _, err := d.ReadAt(got, 1<<20); err != nil {
		return err
	}
	fmt.Printf("wrote %d bytes and read them: equal is %t\n", len(want), bytes.Equal(got, want))
	s := t.Stats()
	fmt.Printf("the target has moved %d bytes by READ and %d by WRITE\n", s.Read, s.Written)
	return nil
}
