// Command verbena shows, measures and inspects RDMA devices in software.
//
//	verbena demo      every operation between two devices, with the data compared
//	verbena devinfo   what the devices of this host can do
//	verbena ps        which processes have devices open, and what they have on them
//	verbena stat      what on-demand paging does in those processes
//	verbena topo      which PCI devices reach each other's memory, and why
//	verbena perf      bandwidth and latency, in one process, in two, on two hosts
//	verbena exec      run a program that was built for libibverbs
//	verbena env       how to do that by hand
//	verbena version
//
// It is an ordinary user of package verbs: what it does, any program can do.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/perf"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/tour"
)

// Exit statuses; the help text documents them.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

const description = `RDMA devices in software: no hardware, no kernel module, no root.

Start with "verbena demo".

Exit status: 0 if all went well, 1 if something failed (a verification, an open, a peer), 2 if the command line is wrong.`

type cli struct {
	Demo    demoCmd    `cmd:"" help:"Show every operation between two devices, with the data compared."`
	Devinfo devinfoCmd `cmd:"" help:"Show what the devices of this host can do."`
	PS      psCmd      `cmd:"" name:"ps" help:"Show the processes that have devices open, and what they have."`
	Stat    statCmd    `cmd:"" help:"Show what on-demand paging does, in every process that has a device open."`
	Exec    execCmd    `cmd:"" help:"Run a program that was built for libibverbs."`
	Env     envCmd     `cmd:"" help:"Show how to run such programs by hand, and the variables that configure them."`
	Topo    topoCmd    `cmd:"" help:"Show which PCI devices reach each other's memory, and why."`
	Perf    perfCmd    `cmd:"" help:"Measure bandwidth and latency."`
	Version versionCmd `cmd:"" help:"Show the version."`

	PerfPeer perfPeerCmd `cmd:"" hidden:"" help:"The other side of perf, on standard input and output."`
}

// usageError is the error of a command line that parses but is wrong.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

func (e usageError) Unwrap() error { return e.error }

var errInterrupted = errors.New("interrupted")

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	var c cli
	parser, err := kong.New(&c,
		kong.Name("verbena"),
		kong.Description(description),
		kong.Vars{"mem_kinds": strings.Join(perf.MemKinds(), ", "), "perf_port": strconv.Itoa(defaultPerfPort)},
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}),
	)
	if err != nil {
		panic(err) // the tags above are wrong: no user can cause it
	}
	parsed, err := parser.Parse(args)
	if err != nil {
		fmt.Fprintf(os.Stderr, "verbena: %v\nTry %s.\n", err, hint(err))
		return exitUsage
	}
	ctx, stop := interruptible()
	defer stop()
	parsed.BindTo(ctx, (*context.Context)(nil))
	switch err := parsed.Run(); {
	case err == nil:
		return exitOK
	case errors.As(err, new(usageError)):
		name := parsed.Selected().Name
		fmt.Fprintf(os.Stderr, "verbena %s: %v\nTry \"verbena %s --help\".\n", name, err, name)
		return exitUsage
	case errors.Is(err, tour.ErrFailed):
		return exitFailed // tour.Run has printed what failed
	default:
		fmt.Fprintf(os.Stderr, "verbena %s: %v\n", parsed.Selected().Name, err)
		return exitFailed
	}
}

// hint returns the command whose help explains what was wrong with a command line.
func hint(err error) string {
	var p *kong.ParseError
	if errors.As(err, &p) && p.Context != nil && p.Context.Selected() != nil {
		return fmt.Sprintf("%q", "verbena "+p.Context.Selected().Name+" --help")
	}
	return `"verbena --help"`
}

// interruptible returns a context that ends with the first interrupt. The second
// interrupt ends the process.
func interruptible() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-signals:
			signal.Stop(signals)
			cancel(errInterrupted)
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
		<-done
	}
}
