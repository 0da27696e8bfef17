package cuda

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/clibtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a program may take.
const patience = 5 * time.Minute

// A mode is how the library serves libcuda of software GPUs, and by what processes reach each other. Those that are long
// are for "make check-full".
type mode struct {
	name string
	long bool
	env  []string
}

// modes are those in which the programs run: with "driver" the library serves the libcuda of software GPUs as it would any
// other, by copies on streams of its own; with few queues to the GPU these are made otherwise.
var modes = []mode{
	{"software", false, nil},
	{"software, packets", true, []string{"VERBENA_LINK=udp"}},
	{"driver", false, []string{"VERBENA_CUDA=driver"}},
	{"driver, packets", true, []string{"VERBENA_CUDA=driver", "VERBENA_LINK=udp"}},
	{"driver, few queues", false, []string{"VERBENA_CUDA=driver", "CUDA_DEVICE_MAX_CONNECTIONS=1"}},
}

// faultModes are the modes of faults: software GPUs take memory that its owner frees away from other processes, which the
// driver does not, so that copies on streams of the library's may fail there.
var faultModes = []mode{
	{"software", false, nil},
	{"software, packets", true, []string{"VERBENA_LINK=udp"}},
	{"driver, few queues", true, []string{"VERBENA_CUDA=driver", "CUDA_DEVICE_MAX_CONNECTIONS=1"}},
}

// missing has patterns of the cases that may be skipped on software GPUs: they have no virtual memory management, an
// address does not come again while a region of it is registered, and a window is not bound to their memory.
var missing = []string{"move/*/vmm*/*", "move/*/*/vmm*", "add/vmm-*/*", "unmapped/*/*/*", "reused/*/*", "window/gpu/*"}

// compile builds a program of testdata.
func compile(t *testing.T, name string) string {
	t.Helper()
	sources := []string{"testdata/" + name + ".c", "testdata/runner.c", "testdata/kinds.c", "testdata/node.c", "testdata/pattern.c"}
	return clibtest.Compile(t, sources, append([]string{"-Wextra", "-O2"}, append(clibtest.CUDA(t), "-lmlx5")...)...)
}

// run runs a program on a software GPU and returns what it prints.
func run(t *testing.T, env []string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, clibtest.Built(t)+"/verbena", append([]string{"exec", "--gpu=soft", "--"}, args...)...)
	cmd.Env = append(append(os.Environ(), "VERBENA_ADDR="+clibtest.Address(), "VERBENA_GPU=count=1,vram=256M"), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// seed returns the arguments that give a program its seed.
func seed() []string {
	s := os.Getenv("VERBENA_SEED")
	if s == "" {
		s = strconv.FormatUint(rand.Uint64(), 10)
	}
	return []string{"--seed", s}
}

// results returns what a program printed for each case, and the reason behind it.
func results(out string) (map[string]string, error) {
	got := make(map[string]string)
	for _, line := range strings.Split(out, "\n") {
		verdict, rest, _ := strings.Cut(line, " ") // of other lines it is something else
		if verdict != "PASS" && verdict != "FAIL" && verdict != "SKIP" {
			continue
		}
		name, why, _ := strings.Cut(rest, ": ")
		if got[name] != "" {
			return nil, fmt.Errorf("%s has two results", name)
		}
		got[name] = verdict + " " + why
	}
	return got, nil
}

// judge runs all cases of a program, each of which must pass, or may be skipped.
func judge(t *testing.T, modes []mode, exe string, options ...string) {
	t.Helper()
	list, err := run(t, nil, exe, "--list")
	if err != nil {
		t.Fatalf("%v\n%s", err, list)
	}
	names := strings.Fields(list)
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			m.mayRun(t)
			t.Parallel()
			out, failure := run(t, m.env, append(append([]string{exe}, seed()...), options...)...)
			got, err := results(out)
			if err != nil || failure != nil {
				t.Errorf("%v, %v; it prints\n%s", err, failure, out)
			}
			passed := 0
			for _, n := range names {
				verdict, why, _ := strings.Cut(got[n], " ")
				switch {
				case verdict == "PASS":
					passed++
				case verdict == "SKIP" && skippable(n):
				default:
					t.Errorf("%s: %q, %s", n, verdict, why)
				}
			}
			if passed < len(names)/2 {
				t.Errorf("of %d cases %d passed", len(names), passed)
			}
		})
	}
}

// mayRun skips a test of a long mode, but for "make check-full".
func (m *mode) mayRun(t *testing.T) {
	t.Helper()
	if m.long && !clibtest.Full {
		t.Skip("full: " + m.name)
	}
}

// skippable reports whether a case may be skipped.
func skippable(name string) bool {
	return slices.ContainsFunc(missing, func(pattern string) bool {
		ok, err := path.Match(pattern, name)
		return ok && err == nil
	})
}

// Every operation, between memory of all kinds, registered in all ways, in one process and between two. The largest
// messages are moved where the memory is of the usual kinds, and by "make check-full" everywhere.
func TestMemory(t *testing.T) {
	exe := compile(t, "memory")
	if clibtest.Full {
		judge(t, modes, exe)
		return
	}
	judge(t, modes, exe, "--max", "70000")
	for _, m := range modes {
		t.Run(m.name+", large", func(t *testing.T) {
			m.mayRun(t)
			t.Parallel()
			out, err := run(t, m.env, append([]string{exe, "move/*/malloc-address/gpu-address", "move/*/gpu-dmabuf/gpu-dmabuf"}, seed()...)...)
			if err != nil || strings.Count(out, "PASS") != 4 {
				t.Errorf("%v; it prints\n%s", err, out)
			}
		})
	}
}

// Bad arguments, memory that goes away under traffic, and processes that go away.
func TestFaults(t *testing.T) { judge(t, faultModes, compile(t, "faults")) }

// The program that compares speeds, in small: what it moves is compared, and no figure is judged.
func TestSpeedQuick(t *testing.T) { judge(t, modes, compile(t, "speed"), "--quick") }

// The program that finds out which calls of the driver wait for a kernel, with a function of the host's in the kernel's place:
// it works, and on software GPUs nothing waits.
func TestLocks(t *testing.T) {
	cxx, err := exec.LookPath("g++")
	clibtest.Need(t, err == nil, "install g++: %v", err)
	exe := t.TempDir() + "/locks"
	flags := clibtest.CUDA(t)
	args := append([]string{"-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-x", "c++", "judges/locks.cu", "-o", exe}, append(flags, "-Wl,--allow-shlib-undefined", "-lpthread")...)
	if out, err := exec.Command(cxx, args...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, failure := run(t, nil, exe, "--quick")
	got, err := results(out)
	if failure != nil || err != nil || len(got) != 30 || strings.Count(out, "PASS") != 30 || strings.Count(out, "NOTE") != 42 {
		t.Errorf("%v, %v: %d results\n%s", failure, err, len(got), out)
	}
}
