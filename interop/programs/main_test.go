package programs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// full is whether to run all cases, and for longer.
var full = os.Getenv("VERBENA_FULL") != ""

const root = "../.."

// prebuilt, if set, is a directory with the command, the library in lib, and in testdata compiled programs:
// for a machine without compilers.
var prebuilt = os.Getenv("VERBENA_BUILT")

// build makes the library and the command, once.
var build = sync.OnceValues(func() (string, error) {
	if prebuilt != "" {
		return prebuilt, nil
	}
	for _, args := range [][]string{{"scripts/clib.sh"}, {"go", "build", "-o", "bin/verbena", "./cmd/verbena"}} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return filepath.Abs(filepath.Join(root, "bin"))
})

// built returns the directory that contains the command, and the library in lib.
func built(t testing.TB) string {
	t.Helper()
	dir, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// need skips a test if something is missing. In CI the test fails.
func need(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if ok {
		return
	}
	if ci := os.Getenv("CI"); ci == "true" || ci == "1" {
		t.Fatalf("missing in CI: "+format, args...)
	}
	t.Skipf(format, args...)
}

// program finds a program, or skips the test.
func program(t testing.TB, name, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	need(t, err == nil, "%s is missing: apt-get install %s", name, pkg)
	return path
}
