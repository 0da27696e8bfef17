// Package clibtest builds the drop-in libibverbs, the command and C programs, for tests in packages two directories
// below the repository's root.
package clibtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// Root is the repository's root, as a package of tests sees it.
const Root = "../.."

// Full is whether to run all cases, and for longer.
var Full = os.Getenv("VERBENA_FULL") != ""

// Prebuilt is a directory with the command, the library in lib, and in testdata compiled programs, for a machine
// without compilers. It is empty if the tests build them.
var Prebuilt = os.Getenv("VERBENA_BUILT")

// build makes the library and the command, once.
var build = sync.OnceValues(func() (string, error) {
	if Prebuilt != "" {
		return Prebuilt, nil
	}
	for _, args := range [][]string{{"scripts/clib.sh"}, {"go", "build", "-o", "bin/verbena", "./cmd/verbena"}} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = Root
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return filepath.Abs(filepath.Join(Root, "bin"))
})

// Built returns the directory that contains the command, and the library in lib.
func Built(t testing.TB) string {
	t.Helper()
	dir, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// Need skips a test if something is missing. In CI the test fails.
func Need(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if ok {
		return
	}
	if ci := os.Getenv("CI"); ci == "true" || ci == "1" {
		t.Fatalf("missing in CI: "+format, args...)
	}
	t.Skipf(format, args...)
}

// Compile builds a program, which is named as the first of its sources. The flags come behind the sources.
func Compile(t testing.TB, sources []string, flags ...string) string {
	t.Helper()
	name := strings.TrimSuffix(filepath.Base(sources[0]), ".c")
	if Prebuilt != "" {
		return filepath.Join(Prebuilt, "testdata", name)
	}
	out := filepath.Join(t.TempDir(), name)
	if err := os.Chmod(filepath.Dir(out), 0o755); err != nil { // for programs of another user
		t.Fatal(err)
	}
	args := []string{"-std=gnu11", "-Wall", "-Werror", "-Wno-unused-function", "-O1", "-I", Root + "/clib/include", "-o", out}
	args = append(append(append(args, sources...), flags...), "-lpthread")
	if msg, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, msg)
	}
	return out
}

// CUDA returns the flags by which a program is compiled and linked with libcuda of software GPUs, and with libibverbs.
func CUDA(t testing.TB) []string {
	t.Helper()
	lib := Built(t) + "/lib"
	return []string{"-I", Root + "/clib/gpu/include", "-L", lib + "/gpu", "-lcuda", "-L", lib, "-libverbs", "-ldl"}
}

var lastAddr atomic.Uint32

// Address returns a loopback address that no other test, and no other program on this
// machine, uses.
func Address() string {
	n := lastAddr.Add(1)
	return fmt.Sprintf("127.78.%d.%d", os.Getpid()&0xff, n&0xff)
}
