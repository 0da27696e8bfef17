// Command runner runs Linux's selftests of HMM on the engine of package hmm, from the repository's root, and prints
// a table. It fails if a case does not pass that passes in docs/hmm-tests.md.
//
//	go run ./interop/hmmtests/runner
//	go run ./interop/hmmtests/runner -run 'migrate_' -v
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/interop/hmmtests"
)

func main() {
	pattern := flag.String("run", "", "a regular expression for the names of cases")
	write := flag.Bool("write", false, "put the table into the document; then no case has to pass")
	verbose := flag.Bool("v", false, "print each case when it has ended")
	doc := flag.String("doc", "docs/hmm-tests.md", "the document")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *doc, *pattern, *write, *verbose)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "hmm-tests:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, doc, pattern string, write, verbose bool) error {
	choose, err := regexp.Compile(pattern)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(doc)
	if err != nil {
		return err
	}
	expected, err := hmmtests.ParseTable(string(text))
	if err != nil {
		return err
	}
	if err := hmmtests.Check(); err != nil {
		return err
	}
	source, err := hmmtests.FindSource(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "hmm-tests.")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }() // of temporary files
	built, err := source.Build(ctx, ".", dir)
	if err != nil {
		return err
	}
	cases, err := built.Cases(ctx)
	if err != nil {
		return err
	}
	var table hmmtests.Table
	var worse []string
	for _, name := range cases {
		if !choose.MatchString(name) {
			continue
		}
		r := built.Run(ctx, name)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if verbose {
			fmt.Printf("%-55s %s %6.1f s %s\n", name, r.Verdict, r.Took.Round(100*time.Millisecond).Seconds(), r.Reason)
		}
		if err := table.Add(r, expected); err != nil {
			return err
		}
		if expected.Verdict(name) == hmmtests.Pass && r.Verdict != hmmtests.Pass {
			worse = append(worse, fmt.Sprintf("%s: %s: %s", name, r.Verdict, r.Reason))
		}
	}
	fmt.Printf("%s\nhmm-tests of %s: %d pass, %d fail, %d skip; %s has %d that pass\n", table.String(), source.Name,
		table.Count(hmmtests.Pass), table.Count(hmmtests.Fail), table.Count(hmmtests.Skip), doc, expected.Count(hmmtests.Pass))
	if write {
		text, err := table.Replace(string(text))
		if err != nil {
			return err
		}
		return os.WriteFile(doc, []byte(text), 0o644)
	}
	if len(worse) > 0 {
		return fmt.Errorf("cases that pass in %s:\n  %s", doc, strings.Join(worse, "\n  "))
	}
	return nil
}
