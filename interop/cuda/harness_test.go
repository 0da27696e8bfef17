package cuda

// The harness of "make cuda-test", on programs that pass, fail, hang and crash: what it says of each, and of all.

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// stage is a directory of programs that the harness runs, and one for its logs.
type stage struct{ programs, out string }

// newStage makes a directory with a shell script of each name.
func newStage(t *testing.T, scripts map[string]string) stage {
	t.Helper()
	s := stage{t.TempDir(), t.TempDir()}
	for name, script := range scripts {
		if err := os.WriteFile(filepath.Join(s.programs, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	return s
}

// run runs the harness. It returns whether the harness says that all is well, and what it prints.
func (s stage) run(t *testing.T, args ...string) (well bool, out string) {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Fatal("python3 is missing: apt-get install python3")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	b, err := exec.CommandContext(ctx, python, append([]string{"run.py", "--programs", s.programs, "--out", s.out}, args...)...).CombinedOutput()
	exit := new(exec.ExitError)
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
		t.Fatalf("%v\n%s", err, b)
	}
	return err == nil, string(b)
}

// wantTableRow looks for a row in the harness's table, whose fields a regular expression describes.
func wantTableRow(t *testing.T, out string, fields ...string) {
	t.Helper()
	_, table, _ := strings.Cut(out, "\nstep ")
	if !regexp.MustCompile(`(?m)^` + strings.Join(fields, ` +`)).MatchString(table) {
		t.Errorf("no row %q:\n%s", fields, out)
	}
}

func TestHarnessAllPass(t *testing.T) {
	s := newStage(t, map[string]string{"a": "echo PASS one; echo PASS two: 5.03 GB/s; echo other words", "b": "echo PASS three; echo 'PASS four: 7 GB/s [goal >= 5]'"})
	well, out := s.run(t)
	if !well || !strings.Contains(out, "PASS: 4 PASS, 0 FAIL, 0 SKIP") {
		t.Errorf("not all is well:\n%s", out)
	}
	wantTableRow(t, out, "a", "one", "PASS")
	wantTableRow(t, out, "a", "two", "PASS", "5.03 GB/s")
	wantTableRow(t, out, "b", "three", "PASS")
	wantTableRow(t, out, "b", "four", "PASS", "7 GB/s", ">= 5")
	for _, name := range []string{"summary.txt", "summary.md", "a.log", "b.log", "harness.log", "logs.tar.gz"} {
		if b, err := os.ReadFile(filepath.Join(s.out, name)); err != nil || len(b) == 0 {
			t.Errorf("%s: %d bytes, %v", name, len(b), err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(s.out, "summary.md")); err != nil || !strings.Contains(string(b), "| a | two | PASS | 5.03 GB/s |  |") {
		t.Errorf("summary.md: %v\n%s", err, b)
	}
}

// notWell is a program that does not pass, and its row in the table.
type notWell struct {
	script string
	row    []string
}

// limit returns the seconds for each program. They are all used up by one that hangs; the others should never need them.
func (c notWell) limit() string {
	if strings.Contains(c.script, "sleep") {
		return "5"
	}
	return "60"
}

// What is not well, each beside a program that passes: the verdict is that of the worst.
func TestHarnessNotWell(t *testing.T) {
	for name, c := range map[string]notWell{
		"fail":       {"echo FAIL one: 3 bytes differ", []string{"x", "one", "FAIL", "3 bytes differ"}},
		"skip":       {"echo SKIP one: no such library", []string{"x", "one", "SKIP", "no such library"}},
		"crash":      {"echo PASS one; echo last words; kill -SEGV $$", []string{"x", "the program", "FAIL", "ended by SIGSEGV: last words"}},
		"exit":       {"echo PASS one; exit 3", []string{"x", "the program", "FAIL", "exit 3"}},
		"silent":     {"echo nothing of note", []string{"x", "the program", "FAIL", "it printed no result"}},
		"hang":       {"echo PASS one; sleep 1000", []string{"x", "the program", "FAIL", `ended after \d+ s`}},
		"not passed": {"echo PASSED one", []string{"x", "the program", "FAIL"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			well, out := newStage(t, map[string]string{"w": "echo PASS well", "x": c.script, "y": "echo PASS later"}).run(t, "--program-limit", c.limit())
			if well {
				t.Errorf("all is well:\n%s", out)
			}
			wantTableRow(t, out, c.row...)
			wantTableRow(t, out, "w", "well", "PASS")
			wantTableRow(t, out, "y", "later", "PASS")
		})
	}
}

// A program that hangs is ended with all processes of its group, also one that does not heed SIGTERM.
func TestHarnessEndsGroups(t *testing.T) {
	s := newStage(t, map[string]string{"x": `trap '' TERM; echo $$ >"$PIDS/parent"; sh -c 'trap "" TERM; echo $$ >"$PIDS/child"; while :; do sleep 1; done'`})
	pids := t.TempDir()
	t.Setenv("PIDS", pids)
	_, out := s.run(t, "--program-limit", "5")
	wantTableRow(t, out, "x", "the program", "FAIL", "ended after")
	for _, name := range []string{"parent", "child"} {
		b, err := os.ReadFile(filepath.Join(pids, name))
		if err != nil {
			t.Fatal(err)
		}
		stat, err := os.ReadFile(filepath.Join("/proc", strings.TrimSpace(string(b)), "stat"))
		if err == nil && !strings.Contains(string(stat), ") Z ") {
			t.Errorf("the %s lives: %s", name, stat)
		}
	}
}

// What the harness makes of NCCL's results and logs.
func TestJudges(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "python3", "-B", "selftest.py").CombinedOutput()
	if err != nil || !regexp.MustCompile(`Ran [1-9]\d* tests`).Match(out) {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestHarnessNoTimeLeft(t *testing.T) {
	well, out := newStage(t, map[string]string{"a": "echo PASS one; exec sleep 1000", "b": "echo PASS two"}).run(t, "--limit", "1")
	if well {
		t.Errorf("all is well:\n%s", out)
	}
	wantTableRow(t, out, "b", "b", "SKIP", "no time left")
}

func TestHarnessOnly(t *testing.T) {
	s := newStage(t, map[string]string{"bad": "echo FAIL one", "good": "echo PASS two"})
	if well, out := s.run(t, "--only", "^good$"); !well || strings.Contains(out, "bad") {
		t.Errorf("well: %v\n%s", well, out)
	}
	if well, out := s.run(t, "--list"); !well || !regexp.MustCompile(`(?s)^bad .*\ngood `).MatchString(out) {
		t.Errorf("well: %v\n%s", well, out)
	}
	if well, out := s.run(t, "--only", "neither"); well {
		t.Errorf("nothing was run, and all is well:\n%s", out)
	}
}
