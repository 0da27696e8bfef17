//go:build cgo

package hmm

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// The engine in a program in C: a signal handler that touches pages that are away, forks of both kinds, copy on write, a
// device that fails before a fork. As root it runs once more as an ordinary user.
func TestEngine(t *testing.T) {
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	dir := t.TempDir()
	check(t, os.Chmod(filepath.Dir(dir), 0o755)) // for the ordinary user
	check(t, os.Chmod(dir, 0o755))
	program := filepath.Join(dir, "engine")
	sources := must[[]string](t)(filepath.Glob("*.c"))
	args := append([]string{"-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", program, "testdata/engine.c"}, sources...)
	if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cc, err, out)
	}
	for _, uid := range []uint32{0, 65534} {
		cmd := exec.Command(program)
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
