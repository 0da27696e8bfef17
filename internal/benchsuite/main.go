// Benchsuite measures Verbena's speed, beside other software on the same
// machine, and compares it with the project's goals.
//
// A machine's figures vary with the minute, so nothing here is compared with a
// figure from another run: both sides of a comparison are measured alternately, in
// several short rounds, and the ratio is the median of the rounds' ratios.
//
//	main.go       flags; a process is either the suite or a peer of it
//	suite.go      rounds, ratios, verdicts; stats.go, medians and quantiles
//	report.go     the table, and JSON
//	groups.go     what is compared with what
//	side.go       one side of a connection
//	rig.go        two sides, in one process or in two
//	pump.go       bandwidth and message rate
//	pingpong.go   latency
//	peer.go       what a peer process does; child.go, how processes start and end
//	local.go      two processes of one host
//	threads.go    many threads that post
//	regions.go    registration, memory windows
//	indirect.go   indirect keys, device memory
//	scatter.go    inline receive
//	staged.go     memory that an engine moves
//	paging.go     on-demand memory; manyregions.go, many regions, in a peer process
//	dmabuf.go     dma-bufs: copies, moves, registration
//	hmm.go        one address space for the CPU and GPUs
//	gpu.go        software GPUs: WRITEs into their memory, copies, eviction; gpupipeline.go, with the costs of a real one
//	footprint.go  memory and CPU time of idle queue pairs
//	clib.go       programs that are linked with the drop-in libibverbs
//	iperf.go, tcp.go, ucx.go   other software to compare with
package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"
)

func main() {
	if isPeer(os.Args) {
		os.Exit(peerMain())
	}
	os.Exit(suiteMain(os.Args[1:]))
}

func suiteMain(args []string) int {
	s := defaults()
	fs := flag.NewFlagSet("benchsuite", flag.ContinueOnError)
	fs.IntVar(&s.rounds, "rounds", s.rounds, "how often each figure is taken")
	fs.DurationVar(&s.duration, "duration", s.duration, "how long each measurement takes")
	only := fs.String("only", "", "run only groups whose names match this regular expression")
	list := fs.Bool("list", false, "list the groups and do nothing")
	asJSON := fs.Bool("json", false, "print one JSON object instead of a table")
	strict := fs.Bool("strict", false, "fail when a goal is not reached")
	fs.StringVar(&s.profiles, "cpuprofile", "", "write CPU profiles, one for each measurement and side, into this directory")
	if err := fs.Parse(args); err != nil {
		if err == flag.ErrHelp {
			return 0
		}
		return 2
	}
	if err := check(&s, fs.Args(), *only); err != nil {
		fmt.Fprintln(os.Stderr, "benchsuite:", err)
		return 2
	}
	if *list {
		for _, g := range groups {
			fmt.Printf("%-16s %s\n", g.name, g.title)
		}
		return 0
	}

	r := &report{}
	if !*asJSON {
		r.table = os.Stdout
	}
	if st, err := os.Stderr.Stat(); err == nil && st.Mode()&os.ModeCharDevice != 0 {
		r.status = os.Stderr
	}
	runSuite(&s, r)
	if err := r.end(); err != nil {
		fmt.Fprintln(os.Stderr, "benchsuite:", err)
		return 1
	}
	return exitCode(r, *strict, os.Getenv("CI") == "true" || os.Getenv("CI") == "1")
}

func check(s *settings, args []string, only string) error {
	switch {
	case len(args) > 0:
		return fmt.Errorf("unexpected argument %q", args[0])
	case s.rounds < 1:
		return fmt.Errorf("--rounds %d: at least 1", s.rounds)
	case s.duration <= 0:
		return fmt.Errorf("--duration %v: more than 0", s.duration)
	}
	if only != "" {
		re, err := regexp.Compile(only)
		if err != nil {
			return fmt.Errorf("--only: %w", err)
		}
		s.only = re
		if len(selected(s)) == 0 {
			return fmt.Errorf("--only %s: no group has such a name; --list shows them", only)
		}
	}
	if s.profiles != "" {
		return os.MkdirAll(s.profiles, 0o777)
	}
	return nil
}

func selected(s *settings) []*group {
	var gs []*group
	for i := range groups {
		if s.only == nil || s.only.MatchString(groups[i].name) {
			gs = append(gs, &groups[i])
		}
	}
	return gs
}

func runSuite(s *settings, r *report) {
	r.begin(*s)
	b := &bench{settings: *s, report: r}
	for _, g := range selected(s) {
		b.run(g)
	}
}

// exitCode returns 1 if a group failed; with strict, also if a goal was not reached; in
// CI, also if something could not be measured, since everything must be installed there.
func exitCode(r *report, strict, ci bool) int {
	if r.Failed > 0 || strict && r.Below > 0 || ci && r.NotRun > 0 {
		return 1
	}
	return 0
}
