//go:build cgo

package hmm

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// compile builds a program in C with the engine, which every user may run.
func compile(t *testing.T, source string) string {
	t.Helper()
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	dir := t.TempDir()
	check(t, os.Chmod(filepath.Dir(dir), 0o755)) // for the ordinary user
	check(t, os.Chmod(dir, 0o755))
	program := filepath.Join(dir, "program")
	sources := must[[]string](t)(filepath.Glob("*.c"))
	args := append([]string{"-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", program, source}, sources...)
	if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cc, err, out)
	}
	return program
}

// runAs runs a program as it is, and once more as an ordinary user if this is root. A program that hangs is killed: it may have
// all signals blocked.
func runAs(t *testing.T, program string, args ...string) {
	t.Helper()
	for _, uid := range []uint32{0, 65534} {
		ctx, stop := context.WithTimeout(t.Context(), 3*time.Minute)
		defer stop()
		cmd := exec.CommandContext(ctx, program, args...)
		if uid != 0 {
			if os.Getuid() != 0 {
				continue
			}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		}
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.ExitCode() == 77 {
			t.Skipf("kernel: %s", out)
		}
		if err != nil {
			t.Errorf("user %d: %v\n%s", uid, err, out)
		}
	}
}

// The engine in a program in C: a signal handler that touches pages that are away, forks of both kinds, copy on write, a
// device that fails before a fork.
func TestEngine(t *testing.T) { runAs(t, compile(t, "testdata/engine.c")) }

// Programs in C at the edge of what the kernel allows: no descriptors, no mappings, locked memory, changes by several threads.
func TestEdges(t *testing.T) {
	program := compile(t, "testdata/edges.c")
	cases := strings.Fields(string(must[[]byte](t)(exec.Command(program).Output())))
	if len(cases) < 10 {
		t.Fatalf("cases: %q", cases)
	}
	seed := strconv.FormatUint(seed(t)%1e9, 10)
	for _, name := range cases {
		t.Run(name, func(t *testing.T) { runAs(t, program, name, seed) })
	}
}
