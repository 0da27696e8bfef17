// Command runner runs the kernel tests and prints a table of cases by kernel. It
// ends with status 1 if a case failed.
//
//	go run ./interop/rxe/runner                          everything, on both kernels
//	go run ./interop/rxe/runner -kernels sid -run '^rc/read/'
//
// `make interop` runs the first of these; docs/interop.md explains the flags.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe"
	"github.com/verbena-rdma/verbena/interop/rxe/result"
)

func main() {
	kernels := flag.String("kernels", strings.Join(rxe.Suites, ","), "Debian suites whose kernels are used")
	run := flag.String("run", "", "a regular expression for the names of cases, or of what -bench compares: bandwidth, latency, udp, send latency, connect")
	short := flag.Bool("short", false, "only the cases of the short form")
	soak := flag.Bool("soak", false, "only the long cases")
	peers := flag.Bool("peers", false, "only the cases with memory of a PCI device, on the kernel of sid")
	keep := flag.Bool("keep", false, "keep the packets of cases that passed too")
	record := flag.Bool("record", false, "also record the frames of every case, as they are on the network")
	bench := flag.Int("bench", 0, "compare speeds instead, in this many rounds")
	dir := flag.String("dir", ".logs/interop", "where results, consoles and captures go, by kernel")
	limit := flag.Duration("limit", 6*time.Hour, "for each kernel; a busy host takes several times as long as an idle one")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	order := result.Order{Run: *run, Short: *short, Soak: *soak, Peers: *peers, Keep: *keep, Record: *record, Bench: *bench}
	mem := 0
	if *soak {
		mem = rxe.GiantMemMB
	}
	t := newTable()
	var err error
	for _, suite := range strings.Split(*kernels, ",") {
		t.begin(suite)
		o := rxe.Options{Suite: suite, Order: order, Dir: filepath.Join(*dir, suite), Limit: *limit, MemMB: mem}
		if e := rxe.Run(ctx, o, t.add); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", suite, e))
			t.broken(suite)
		}
		if ctx.Err() != nil {
			break
		}
	}
	t.print(os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
	}
	if *bench == 0 {
		fmt.Printf("%d passed, %d failed\n", t.passed, t.failed)
	}
	if err != nil || t.failed > 0 {
		stop()
		os.Exit(1)
	}
}

// printSpeed prints the comparison as one JSON object.
func printSpeed(suite string, s *result.Speed) {
	b, err := json.Marshal(struct {
		Kernel string
		*result.Speed
	}{suite, s})
	if err == nil {
		fmt.Printf("%s\n", b)
	}
}
