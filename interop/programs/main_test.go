package programs

import (
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/clibtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What all packages that run C programs share, by the names that it has in this one.
const root = clibtest.Root

var (
	full     = clibtest.Full
	prebuilt = clibtest.Prebuilt
	address  = clibtest.Address
)

// built returns the directory that contains the command, and the library in lib.
func built(t testing.TB) string {
	t.Helper()
	return clibtest.Built(t)
}

// need skips a test if something is missing. In CI the test fails.
func need(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	clibtest.Need(t, ok, format, args...)
}

// program finds a program, or skips the test.
func program(t testing.TB, name, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	need(t, err == nil, "%s is missing: apt-get install %s", name, pkg)
	return path
}

// compileWith builds a program of testdata.
func compileWith(t testing.TB, name string, libs ...string) string {
	t.Helper()
	return compileFile(t, filepath.Join("testdata", name+".c"), libs...)
}

// compileFile builds a program of one file.
func compileFile(t testing.TB, source string, libs ...string) string {
	t.Helper()
	return clibtest.Compile(t, []string{source}, libs...)
}
