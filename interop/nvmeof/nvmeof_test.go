package nvmeof

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/vm"
	"github.com/verbena-rdma/verbena/interop/vm/vmtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var full = os.Getenv("VERBENA_FULL") != ""

// TestKernel runs the cases with the kernel of the newest release; in the full form also with that of the release before, and all cases.
// VERBENA_CASES is a regular expression that chooses cases, long ones among them: 'host/(killed|fio)'.
func TestKernel(t *testing.T) {
	vmtest.Need(t, Check())
	suites, limit := []string{"sid"}, 10*time.Minute
	if full {
		suites, limit = []string{"stable", "sid"}, 40*time.Minute
	}
	for _, suite := range suites {
		t.Run(suite, func(t *testing.T) {
			run(t, Options{Suite: suite, Full: full, Cases: os.Getenv("VERBENA_CASES"), Limit: limit})
		})
	}
}

// TestSpeed compares the speed of our target with that of the kernel's.
func TestSpeed(t *testing.T) {
	if !full {
		t.Skip("full: it takes some minutes")
	}
	vmtest.Need(t, Check())
	for _, suite := range []string{"stable", "sid"} {
		t.Run(suite, func(t *testing.T) {
			run(t, Options{Suite: suite, Cases: "^speed$", Counted: true, Limit: 20 * time.Minute})
		})
	}
}

// run runs cases, each as a test of its own. If one fails, it keeps the console's output.
func run(t *testing.T, o Options) {
	o.Dir = t.TempDir()
	cases, peers := 0, false
	err := Run(t.Context(), o, func(l Line) {
		cases++
		t.Run(l.Case, func(t *testing.T) {
			if l.Figure != "" {
				t.Log(l.Figure)
			}
			if l.Error != "" {
				t.Error(l.Error)
			}
			if l.Skip != "" {
				t.Skip(l.Skip)
			}
			peers = peers || l.Case == "offload/peer memory"
		})
	})
	if err != nil {
		t.Error(err)
	}
	if cases == 0 {
		t.Error("there were no cases")
	}
	if peers {
		usedMemory(t, o.Dir)
	}
	if !t.Failed() {
		return
	}
	kept := filepath.Join("../..", ".logs", "interop", "nvmeof", o.Suite)
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

// usedMemory compares what the emulator has noted with what the offload cases should have done: the data of the one disk
// was in the memory of a controller, and nowhere else, that of the other in memory of the system.
func usedMemory(t *testing.T, dir string) {
	t.Helper()
	used, err := vm.PeerUses(dir)
	if err != nil {
		t.Fatal(err)
	}
	near, far := used[vm.PeerNear], used[vm.PeerFar]
	t.Logf("through the controller's memory: %+v; through the system's: %+v", *near, *far)
	const least = 4 << 20 // what fio writes, and reads to verify it
	if near.Memory < least || near.After != 0 {
		t.Errorf("offload: %d bytes were in the controller's memory, and then %d elsewhere", near.Memory, near.After)
	}
	if far.Before < least || far.Memory != 0 {
		t.Errorf("no offload: %d bytes were in the controller's memory, %d elsewhere", far.Memory, far.Before)
	}
}
