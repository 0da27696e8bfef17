// Netbench measures Verbena on real paths: between two network namespaces, over links that lose, delay and mark
// packets, with other traffic beside it. It needs root.
//
// As in benchsuite, nothing is compared with a figure of another run: what is compared is measured in turns, in
// several short rounds, and a ratio is the median of the rounds' ratios.
//
//	main.go       flags; a process is either the judge or one end of a path
//	path.go       two namespaces, the link between them, loss
//	child.go      processes in namespaces
//	peer.go       what such a process does when it is asked
//	pump.go       its queue pairs and the messages on them; stream.go, its TCP connections
//	loss.go       WRITE, SEND and READ beside TCP on a path that loses packets
//	bottleneck.go a rate, a delay, a buffer and an ECN threshold; box.go, between two TUN interfaces
//	crossing.go   our flows and TCP through the box
//	steady.go     UCX's benchmark on a busy machine
//	share.go      queue pairs side by side
//	rig.go        a path with a process at each end
//	report.go     tables; plot.go, a plot
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"time"
)

// settings are what the flags set.
type settings struct {
	rounds   int
	duration time.Duration // of one measurement
	crossing time.Duration // of one measurement through the box
	frame    int           // MTU of the link
	depth    int           // messages under way
	size     int           // of a message
	runs     int           // of the steady part
	busy     int           // loops beside them
	bin      string        // where the command and the library are built
	poll     bool          // the initiator polls instead of sleeping
	only     *regexp.Regexp
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == peerArg {
		os.Exit(peerMain())
	}
	if len(os.Args) == 3 && os.Args[1] == busyArg {
		loops, _ := strconv.Atoi(os.Args[2]) // the judge has written it
		os.Exit(busyMain(loops))
	}
	if err := judge(os.Args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		fmt.Fprintln(os.Stderr, "netbench:", err)
		os.Exit(1)
	}
}

// part is one kind of measurement. It returns a table.
type part struct {
	name, title string
	run         func(s *settings) (*table, error)
}

var parts = []part{
	{"loss-packets", "Loss of single packets", func(s *settings) (*table, error) { return lossy(s, single) }},
	{"loss-trains", "Loss of segmented sends, of up to 64 KiB", func(s *settings) (*table, error) { return lossy(s, segmented) }},
	{"box", "A bottleneck with delay, a buffer and ECN", throughBox},
	{"steady", "Steady while the processors are busy", steady},
	{"share", "Queue pairs side by side", sharing},
}

func judge(args []string) (err error) {
	s := &settings{}
	fs := flag.NewFlagSet("netbench", flag.ContinueOnError)
	fs.IntVar(&s.rounds, "rounds", 5, "how often each figure is taken")
	fs.DurationVar(&s.duration, "duration", time.Second, "how long each measurement takes")
	fs.DurationVar(&s.crossing, "crossing", 4*time.Second, "how long a measurement through the box takes")
	fs.IntVar(&s.frame, "frame", 9000, "MTU of the link")
	fs.IntVar(&s.depth, "depth", 32, "messages under way on a queue pair")
	fs.IntVar(&s.size, "size", 64<<10, "bytes of a message")
	fs.BoolVar(&s.poll, "poll", false, "the initiator polls, instead of sleeping until something has completed")
	fs.IntVar(&s.runs, "runs", 10, "runs of ucx_perftest beside a busy process, over each transport")
	fs.IntVar(&s.busy, "busy", 2, "loops of that process; 0: none")
	fs.StringVar(&s.bin, "bin", "bin", "the directory of the built command, and of the library in lib")
	only := fs.String("only", "", "run only parts whose names match this regular expression")
	write := fs.String("write", "", "renew the tables of this document, docs/network.md, and the plot beside it")
	list := fs.Bool("list", false, "list the parts and do nothing")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	if s.rounds < 1 || s.duration <= 0 || s.depth < 1 || s.size < 1 || s.runs < 1 {
		return errors.New("-rounds, -duration, -depth, -size and -runs must be more than 0")
	}
	if s.only, err = regexp.Compile(*only); err != nil {
		return fmt.Errorf("-only: %w", err)
	}
	if *list {
		for _, p := range parts {
			fmt.Printf("%-14s %s\n", p.name, p.title)
		}
		return nil
	}
	if os.Getuid() != 0 {
		return errors.New("network namespaces need root")
	}
	tables := map[string]*table{}
	now := conditions(s)
	fmt.Println(now)
	for _, p := range parts {
		if !s.only.MatchString(p.name) {
			continue
		}
		t, e := p.run(s)
		if t != nil {
			fmt.Printf("\n### %s (%s)\n\n", p.title, p.name)
			t.print(os.Stdout)
		}
		if e == nil {
			tables[p.name] = t
		}
		if e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", p.name, e))
		}
	}
	if *write != "" {
		err = errors.Join(err, renew(*write, tables, now))
	}
	return err
}
