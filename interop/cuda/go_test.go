package cuda

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/interop/clibtest"
)

// TestGo runs the tests of package gpu/cuda on software GPUs: with their libcuda, which is a Go program itself, in a
// Go program.
func TestGo(t *testing.T) {
	for _, c := range []struct {
		name string
		long bool
		env  string
		args []string
	}{
		{"cgo", false, "CGO_ENABLED=1", nil},
		{"no cgo", true, "CGO_ENABLED=0", nil},
		{"race", true, "CGO_ENABLED=1", []string{"-race"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			(&mode{name: c.name, long: c.long}).mayRun(t)
			exe := filepath.Join(t.TempDir(), "gpucuda.test")
			build := exec.Command("go", append(append([]string{"test", "-tags", "cuda", "-c", "-o", exe}, c.args...), "./gpu/cuda")...)
			build.Dir, build.Env = clibtest.Root, append(os.Environ(), c.env)
			if out, err := build.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			lib := clibtest.Built(t) + "/lib"
			cmd := exec.CommandContext(ctx, exe, "-test.v", "-test.timeout", "4m")
			cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+lib+"/gpu:"+lib, "VERBENA_TEST_CUDA=software", "VERBENA_ADDR="+clibtest.Address())
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			cmd.WaitDelay = 5 * time.Second
			out, err := cmd.CombinedOutput()
			if err != nil || strings.Count(string(out), "\n--- PASS: ") < 10 {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
