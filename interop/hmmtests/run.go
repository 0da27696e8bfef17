package hmmtests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// Verdict is how a case ends.
type Verdict string

// The verdicts.
const (
	Pass Verdict = "pass"
	Fail Verdict = "fail"
	Skip Verdict = "skip"
)

// Result is what a case has said.
type Result struct {
	Case    string // fixture.variant.test
	Verdict Verdict
	Reason  string // in the test's words; empty if it passed
	Took    time.Duration
}

// Cases lists the tests' cases, in their order.
func (b *Built) Cases(ctx context.Context) ([]string, error) {
	cmd := exec.CommandContext(ctx, b.Tests, "-l")
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState.ExitCode() != 4 { // "skipped": it has run nothing
		return nil, fmt.Errorf("hmm-tests -l: %w\n%s", err, out)
	}
	return parseList(string(out))
}

// parseList reads a table of fixtures, and for each of them of its variants, and its tests, in three columns.
func parseList(text string) ([]string, error) {
	var cases, variants, tests []string
	var fixture string
	variant, test := -1, -1
	end := func() {
		for _, v := range variants {
			for _, t := range tests {
				cases = append(cases, fixture+"."+v+"."+t)
			}
		}
		variants, tests = nil, nil
	}
	column := func(line string, from, to int) string {
		if from > len(line) {
			return ""
		}
		return strings.TrimSpace(line[from:min(to, len(line))])
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "# FIXTURE "):
			variant, test = strings.Index(line, "VARIANT"), strings.Index(line, "TEST")
			continue
		case variant < 0 || test < variant || strings.HasPrefix(line, "#") || strings.HasPrefix(line, "---"):
			continue
		}
		if name := column(line, 0, variant); name != "" {
			end()
			fixture = name
		}
		if name := column(line, variant, test); name != "" {
			variants = append(variants, name)
		}
		if name := column(line, test, len(line)); name != "" {
			tests = append(tests, name)
		}
	}
	end()
	if len(cases) == 0 {
		return nil, fmt.Errorf("hmm-tests -l lists no cases:\n%s", text)
	}
	return cases, nil
}

// ends keeps the beginning and the end of what is written: a case that fails may say half a million lines.
type ends struct{ head, tail []byte }

func (e *ends) Write(p []byte) (int, error) {
	const most = 64 << 10
	n := min(len(p), most-len(e.head))
	e.head = append(e.head, p[:n]...)
	e.tail = append(e.tail, p[n:]...)
	if len(e.tail) > 2*most {
		e.tail = append(e.tail[:0], e.tail[len(e.tail)-most:]...)
	}
	return len(p), nil
}

func (e *ends) String() string { return string(e.head) + string(e.tail) }

var (
	verdictLine = regexp.MustCompile(`(?m)^(ok|not ok) 1 (\S+)(?: # SKIP (.*))?$`)
	// What the case says first, and what the harness says of it. A case is killed by the assertion that fails.
	said   = regexp.MustCompile(`(?m)^# .*hmm-tests\.c:\d+:\w+:(.*)$`)
	killed = regexp.MustCompile(`(?m)^# \w+: (Test .*)$`)
	ours   = regexp.MustCompile(`(?m)^(hmm_dmirror: .*)$`)
)

// Run runs one case.
func (b *Built) Run(ctx context.Context, name string) Result {
	start := time.Now()
	before, noFile := os.ReadFile(hugePages)
	out, err := b.preloaded(ctx, b.Tests, "-r", name)
	// A case sets up huge pages, and leaves them behind if it is killed.
	if now, e := os.ReadFile(hugePages); noFile == nil && e == nil && !bytes.Equal(now, before) {
		err = errors.Join(err, os.WriteFile(hugePages, before, 0))
	}
	return judge(name, out, err, time.Since(start))
}

const hugePages = "/proc/sys/vm/nr_hugepages"

// judge reads what a case has said. err is how its process has ended.
func judge(name, out string, err error, took time.Duration) Result {
	r := Result{Case: name, Verdict: Fail, Took: took}
	line := verdictLine.FindStringSubmatch(out)
	switch {
	case line == nil || line[2] != name:
		r.Reason = fmt.Sprintf("it has not said how it ended: %v", err)
	case line[1] == "ok" && line[3] != "":
		r.Verdict, r.Reason = Skip, line[3]
	case line[1] == "ok" && err == nil:
		r.Verdict = Pass
	case line[1] == "ok":
		r.Reason = err.Error()
	default:
		r.Reason = "it has not said why"
		for _, pattern := range []*regexp.Regexp{ours, said, killed} {
			if found := pattern.FindStringSubmatch(out); found != nil {
				r.Reason = found[1]
				break
			}
		}
	}
	return r
}

// RunCheck runs the program that looks at what hmm-tests do not look at.
func (b *Built) RunCheck(ctx context.Context) error {
	out, err := b.preloaded(ctx, b.Check)
	if err != nil || !strings.HasSuffix(out, "ok\n") {
		return fmt.Errorf("%w\n%s", errors.Join(err, errors.New("check.c has not said ok")), out)
	}
	return nil
}

// preloaded runs a program with the library, for five minutes at most: the harness has a limit of its own. timeout(1) ends the
// program's children with it.
func (b *Built) preloaded(ctx context.Context, program string, args ...string) (string, error) {
	var out ends
	cmd := exec.CommandContext(ctx, "timeout", append([]string{"--kill-after=10", "300", "env", "LD_PRELOAD=" + b.Library, program}, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	err := cmd.Run()
	return out.String(), err
}
