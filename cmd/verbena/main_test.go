package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// program is the command, built once for all tests.
var program string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "verbena-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	program = filepath.Join(dir, "verbena")
	args := []string{"build", "-o", program}
	if raceEnabled {
		args = append(args, "-race")
		// A program under the race detector lingers for a second at its end.
		if err := os.Setenv("GORACE", os.Getenv("GORACE")+" atexit_sleep_ms=10"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	if out, err := exec.Command("go", append(args, ".")...).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "building the command: %v\n%s", err, out)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	}))
}

// outcome is how a run of the command ended.
type outcome struct {
	stdout, stderr string
	code           int
	took           time.Duration
}

// verbena runs the command to its end.
func verbena(t *testing.T, args ...string) outcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 10 * time.Second
	began := time.Now()
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("verbena %s: %v", strings.Join(args, " "), err)
	}
	return outcome{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode(), time.Since(began)}
}

// succeed runs the command and wants it to go well.
func succeed(t *testing.T, args ...string) outcome {
	t.Helper()
	o := verbena(t, args...)
	if o.code != exitOK {
		t.Fatalf("verbena %s: exit status %d\n%s%s", strings.Join(args, " "), o.code, o.stdout, o.stderr)
	}
	return o
}

// A wrong command line ends with status 2, nothing on standard output, and a
// message that names what is wrong and where help is.
func TestUsageErrors(t *testing.T) {
	tests := []struct{ args, message string }{
		{"", `expected one of`},
		{"frobnicate", `unexpected argument frobnicate`},
		{"demo --frob", `unknown flag --frob`},
		{"demo extra", `verbena demo: "extra": there is a demo of dm, dmabuf, gpu, mw, odp, p2p, umr`}, {"demo mw extra", "unexpected argument extra"},
		{"demo odp --quick", `odp: goes without --pcap and --quick`},
		{"perf --size 64X", `--size: size "64X": want a number of bytes such as 8, 64K or 1M`},
		{"perf --size 0", `--size: want at least 1 byte`},
		{"perf --depth 0", `--depth 0: want at least 1`},
		{"perf --iters 0", `--iters 0: want at least 1`},
		{"devinfo --pcap x", `--pcap: which device?`},
		{"perf --size 2G", `--size 2147483648: want 1 to 1G`},
		{"perf --size 1G --qps 8", `--size 1073741824: with 8 queue pairs the buffers take more than 4G`},
		{"perf --op swap", `--op "swap": want one of write, write-imm, read, send, atomic`},
		{"perf --op atomic --size 64", `--size 64: an atomic is 8 bytes`},
		{"perf --mem tape", `--mem "tape": want one of pinned, odp, implicit, mw, shared`},
		{"perf --link tcp", `--link tcp: want loop, local or udp`},
		{"perf --mtu 1500", `--mtu 1500: want 256, 512, 1024, 2048 or 4096`},
		{"perf --iters=-1", `--iters -1: want 0 or more`},
		{"perf --duration 0s --iters=-5", `--iters -5: want 0 or more`},
		{"perf --duration=-1s", `--duration -1s: want more than 0`},
		{"perf --duration soon", `--duration: expected duration but got "soon"`},
		{"perf --depth 100000", `--depth 100000: want 1 to`},
		{"perf --batch 3", `--batch 3: want a power of two`},
		{"perf --depth 4 --batch 8", `--batch 8: want 1 to the depth, 4`},
		{"perf --qps 5000", `--qps 5000: want 1 to`},
		{"perf --threads 0", `--threads 0: want at least 1`},
		{"perf --threads=-2", `--threads -2: want 1 to 256`},
		{"perf --threads 257", `--threads 257: want 1 to 256`},
		{"perf --threads many", `--threads`},
		{"perf --threads 4 --qps 3", `--qps 3: want at least one for each of the 4 threads`},
		{"perf --threads 4 --iters 3", `--iters 3: want at least one for each of the 4 threads`},
		{"perf --threads 2 --lat", `--threads 2: latency is measured by one thread`},
		{"perf --listen --threads 2", `--threads: is decided by the side that connects`},
		{"perf --lat --qps 2", `--qps 2: latency is measured on one queue pair`},
		{"perf --lat --depth 2", `--depth 2: latency is measured with one message under way`},
		{"perf --poll ears", `--poll "ears": want cq or memory`},
		{"perf --poll memory", `--poll memory: needs op write and lat`},
		{"perf --lat --op send --poll memory", `--poll memory: needs op write and lat`},
		{"perf --op read --inline", `--inline: read carries no data of the initiator`},
		{"perf --link loop --connect 127.0.0.1", `--link loop: it does not leave the process`},
		{"perf --listen --connect 127.0.0.1", `--listen and --connect are the two sides`},
		{"perf --listen --size 8", `--size: is decided by the side that connects`},
		{"perf --listen=[::1 ", `--listen=[::1: want ADDR or ADDR:PORT`},
		{"perf --connect 127.0.0.1:99999", `port "99999": want 0 to 65535`},
		{"stat --count 2", `--count: without --watch`},
		{"stat --watch=soon", `want a time such as 500ms or 2s`},
		{"stat --watch=1ms", `want at least 10ms`},
		{"stat --files --json", `--files: goes with --watch and --count alone`},
		{"stat --files=", `want a value after =`},
		{"stat a b", `unexpected argument b`},
		{"devinfo a b", `unexpected argument b`},
		{"topo --kernel 5.4", `--kernel 5.4: want 6.12 or 7.2`},
		{"topo --from ../../p2p/testdata/server nvme7", `there is no device "nvme7"`},
		{"topo --from ../../p2p/testdata/server 0000:99:00.0", `there is no device "0000:99:00.0"`},
	}
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			o := verbena(t, strings.Fields(tt.args)...)
			if o.code != exitUsage || !strings.Contains(o.stderr, tt.message) || !strings.Contains(o.stderr, "--help") {
				t.Errorf("exit status %d, message %q; want 2 and %q", o.code, o.stderr, tt.message)
			}
			if o.stdout != "" {
				t.Errorf("standard output is %q", o.stdout)
			}
		})
	}
}

// What fails for other reasons ends with status 1.
func TestFailures(t *testing.T) {
	tests := []struct{ args, message string }{
		{"perf --device 203.0.113.9", "203.0.113.9"},
		{"perf --connect 127.0.0.1:1", "refused"},
		{"perf --inline --size 1M", "inline: 1048576 bytes"},
		{"perf --link udp --inline --size 1M", "inline: 1048576 bytes"},
		{"perf --link udp --pcap /nonexistent/dir/file", "/nonexistent/dir/file"},
		{"devinfo nosuchdevice", "nosuchdevice"},
		{"topo --from /nonexistent", "/nonexistent"},
		{"topo --from main_test.go", "main_test.go: p2p_topology: JSON: invalid character"},
		{"topo --from .", "there is no directory sys"},
		{"topo --from ../../p2p/testdata/server --dump .", ". is not empty"},
		{"topo --from ../../p2p/testdata/server --svg /nonexistent/x.svg", "/nonexistent/x.svg"},
	}
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			o := verbena(t, strings.Fields(tt.args)...)
			if o.code != exitFailed || !strings.Contains(o.stderr, tt.message) {
				t.Errorf("exit status %d, message %q; want 1 and %q", o.code, o.stderr, tt.message)
			}
		})
	}
}

func TestHelpAndVersion(t *testing.T) {
	for _, command := range []string{"demo", "devinfo", "stat", "topo", "perf"} {
		o := succeed(t, command, "--help")
		for _, want := range []string{"Usage: verbena " + command, "Examples:", "verbena " + command} {
			if !strings.Contains(o.stdout, want) {
				t.Errorf("the help of %s lacks %q:\n%s", command, want, o.stdout)
			}
		}
	}
	if o := succeed(t, "--help"); !strings.Contains(o.stdout, "Exit status: 0") || strings.Contains(o.stdout, "perf-peer") {
		t.Errorf("the help is:\n%s", o.stdout)
	}
	if o := succeed(t, "perf", "--help"); !strings.Contains(o.stdout, "18791") || !strings.Contains(strings.Join(strings.Fields(o.stdout), " "), "available: pinned, odp, implicit, mw, shared") {
		t.Errorf("the help of perf names neither the port nor the kinds of memory:\n%s", o.stdout)
	}
	if o := succeed(t, "version"); !strings.HasPrefix(o.stdout, "verbena ") || strings.Count(o.stdout, "\n") != 1 {
		t.Errorf("the version is %q", o.stdout)
	}
}
