package iser

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/interop/clibtest"
	"github.com/verbena-rdma/verbena/interop/vm"
	"github.com/verbena-rdma/verbena/interop/vm/vmtest"
)

// TestKernel runs the cases of the virtual machine, on the kernels of two releases. VERBENA_CASES is a regular expression
// that chooses cases.
func TestKernel(t *testing.T) {
	if !clibtest.Full {
		t.Skip("full: the kernel's iSER, in a virtual machine")
	}
	vmtest.Need(t, Check())
	disk := compileDisk(t)
	for _, suite := range []string{"stable", "sid"} {
		t.Run(suite, func(t *testing.T) {
			o := Options{Suite: suite, Dir: t.TempDir(), Disk: disk, Cases: os.Getenv("VERBENA_CASES"), Limit: 20 * time.Minute}
			cases := 0
			err := Run(t.Context(), o, filepath.Join(clibtest.Built(t), "lib"), func(l Line) {
				cases++
				t.Run(l.Case, func(t *testing.T) {
					t.Log(l.Figure)
					if l.Error != "" {
						t.Error(l.Error)
					}
				})
			})
			if err != nil {
				t.Error(err)
			}
			if cases == 0 {
				t.Error("there were no cases")
			}
			if t.Failed() {
				keep(t, o)
			}
		})
	}
}

// keep copies what a run has left.
func keep(t *testing.T, o Options) {
	t.Helper()
	kept := filepath.Join(clibtest.Root, ".logs", "interop", "iser", o.Suite)
	if err := os.MkdirAll(kept, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{vm.ConsoleLog, vm.Results} {
		b, err := os.ReadFile(filepath.Join(o.Dir, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(kept, name), b, 0o644)
		}
		if err != nil {
			t.Error(err)
		}
	}
	t.Logf("the console is in %s", kept)
}
