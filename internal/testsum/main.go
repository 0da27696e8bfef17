// Command testsum reads the output of `go test -json` and prints a summary: one line
// for each package, the whole output of tests that failed, every skipped test with its
// reason, and a total.
//
//	go test -json ./... | testsum [-strict]
//
// It ends with status 1 if a test failed, if nothing was tested at all, or, with
// -strict, if a test was skipped because the machine lacks something that could be
// installed. (gotestsum prints such a summary too, but cannot fail for skipped tests
// by their reasons.)
//
// Stages, in the order of this file: events come in (read), are collected by
// package and test (add), and each package is reported when it ends (report);
// the total comes last (finish).
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
)

func main() {
	strict := flag.Bool("strict", false, "fail when a test was skipped for want of something that could be there")
	flag.Parse()
	s := newSummary(os.Stdout, *strict)
	if err := s.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(1)
	}
	if !s.finish() {
		os.Exit(1)
	}
}

// excused are the beginnings of skip messages that -strict allows: a test of the long
// matrices, a test whose result the race detector would falsify, and a test of
// something that this kernel does not have.
var excused = []string{"full:", "race:", "kernel:"}

// event is a line of `go test -json`; see `go doc test2json`.
type event struct {
	Action      string
	Package     string
	ImportPath  string // build-output and build-fail
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

type summary struct {
	out    io.Writer
	strict bool

	pkgs   map[string]*pkg
	builds map[string]*strings.Builder // compiler output by import path

	tested, empty, passed, failed int
	skips                         []skip
	broken                        []string // packages that failed
}

type pkg struct {
	output map[string]*strings.Builder // by test; "" is the package's own
	order  []string                    // failed tests, in the order they ended
	passed int
}

type skip struct{ pkg, test, reason string }

func newSummary(out io.Writer, strict bool) *summary {
	return &summary{out: out, strict: strict, pkgs: map[string]*pkg{}, builds: map[string]*strings.Builder{}}
}

// read adds the events of all lines. It prints a line that is no event as it is: the go
// command writes some messages in plain text.
func (s *summary) read(r io.Reader) error {
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) == nil && e.Action != "" {
				s.add(e)
			} else {
				fmt.Fprintln(s.out, strings.TrimSuffix(line, "\n"))
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *summary) add(e event) {
	switch e.Action {
	case "build-output":
		if s.builds[e.ImportPath] == nil {
			s.builds[e.ImportPath] = &strings.Builder{}
		}
		s.builds[e.ImportPath].WriteString(e.Output)
		return
	case "build-fail":
		return
	}
	p := s.pkgs[e.Package]
	if p == nil {
		p = &pkg{output: map[string]*strings.Builder{}}
		s.pkgs[e.Package] = p
	}
	switch e.Action {
	case "output":
		if p.output[e.Test] == nil {
			p.output[e.Test] = &strings.Builder{}
		}
		p.output[e.Test].WriteString(e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.report(e, p)
		} else {
			s.endTest(e, p)
		}
	}
}

func (s *summary) endTest(e event, p *pkg) {
	switch e.Action {
	case "pass":
		s.passed++
		p.passed++
		delete(p.output, e.Test)
	case "fail":
		s.failed++
		p.order = append(p.order, e.Test)
	case "skip":
		s.skips = append(s.skips, skip{e.Package, e.Test, reason(p.output[e.Test])})
		delete(p.output, e.Test)
	}
}

// report prints a package's line and, if it failed, everything that its failed
// tests and the package itself wrote. The package's own output comes last: it
// holds panics, leaked goroutines and the seed of the order of tests.
func (s *summary) report(e event, p *pkg) {
	delete(s.pkgs, e.Package)
	name := short(e.Package)
	switch e.Action {
	case "skip":
		s.empty++
		return
	case "pass":
		s.tested++
		if p.passed > 0 { // -run may have picked none of its tests
			fmt.Fprintf(s.out, "ok    %-32s %7.2fs %5d tests\n", name, e.Elapsed, p.passed)
		}
		return
	}
	s.tested++
	s.broken = append(s.broken, name)
	fmt.Fprintf(s.out, "FAIL  %-32s %7.2fs\n", name, e.Elapsed)
	if b := s.builds[e.FailedBuild]; b != nil {
		fmt.Fprint(s.out, b.String())
	}
	for _, test := range p.order {
		s.print(p.output[test])
		delete(p.output, test)
	}
	own := p.output[""]
	delete(p.output, "")
	// A test that neither passed nor failed was running when the process died.
	for _, b := range p.output {
		s.print(b)
	}
	s.print(own)
}

func (s *summary) print(b *strings.Builder) {
	if b == nil {
		return
	}
	for line := range strings.Lines(b.String()) {
		if !noise.MatchString(line) {
			fmt.Fprint(s.out, "      ", line)
		}
	}
}

// noise are the lines that the testing package writes for programs, not for people.
var noise = regexp.MustCompile(`^(=== (RUN|PAUSE|CONT|NAME)|PASS$)`)

// finish prints the total and reports whether the run succeeded.
func (s *summary) finish() bool {
	good := true
	unexcused := 0
	for _, k := range s.skips {
		mark := ""
		if s.strict && !k.excused() {
			mark, unexcused = " (a failure here)", unexcused+1
		}
		fmt.Fprintf(s.out, "skip  %s %s%s: %s\n", short(k.pkg), k.test, mark, k.reason)
	}
	for name := range s.pkgs {
		s.broken = append(s.broken, short(name)+" (did not end)")
	}
	if len(s.broken) > 0 {
		fmt.Fprintf(s.out, "failed: %s\n", strings.Join(s.broken, ", "))
		good = false
	}
	if unexcused > 0 {
		fmt.Fprintf(s.out, "%d tests were skipped that this machine should run\n", unexcused)
		good = false
	}
	if s.passed+s.failed+len(s.skips) == 0 {
		fmt.Fprintln(s.out, "nothing was tested")
		good = false
	}
	fmt.Fprintf(s.out, "%d packages, %d tests passed, %d failed, %d skipped (%d packages without tests)\n",
		s.tested, s.passed, s.failed, len(s.skips), s.empty)
	return good
}

func (k skip) excused() bool {
	for _, prefix := range excused {
		if strings.HasPrefix(k.reason, prefix) {
			return true
		}
	}
	return false
}

// reason finds the message of t.Skip in a test's output: the last line that the
// testing package marked with a file and a line number.
func reason(b *strings.Builder) string {
	if b == nil {
		return "no reason given"
	}
	last := "no reason given"
	for line := range strings.Lines(b.String()) {
		if m := logged.FindStringSubmatch(line); m != nil {
			last = m[1]
		}
	}
	return last
}

var logged = regexp.MustCompile(`^\s+\S+\.go:\d+: (.*)\n?$`)

// short is a package's path without the module's.
func short(path string) string {
	return strings.TrimPrefix(path, "github.com/verbena-rdma/verbena/")
}
