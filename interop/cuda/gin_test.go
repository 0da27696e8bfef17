package cuda

// Programs of judges/ that need nothing but CUDA's driver interface, on software GPUs: so that what the card is to
// judge is not the programs themselves.

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// softBin builds the command and the drop-in library, and returns where they are.
var softBin = sync.OnceValues(func() (string, error) {
	for _, args := range [][]string{{"scripts/clib.sh"}, {"go", "build", "-o", "bin/verbena", "./cmd/verbena"}} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = "../.."
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return filepath.Abs("../../bin")
})

// softJudge compiles a program of judges/ for software GPUs.
func softJudge(t *testing.T, bin, source string, flags ...string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	args := append([]string{"-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-I", "../../clib/gpu/include", "-o", program, "judges/" + source}, flags...)
	args = append(args, "-L", bin+"/lib/gpu", "-lcuda", "-L", bin+"/lib", "-libverbs")
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", source, err, out)
	}
	return program
}

// Two ranks put with signals and add to one counter: as packets and by shared memory, on memory that is registered by
// address and as dma-bufs.
func TestGINOnSoftwareGPUs(t *testing.T) {
	bin, err := softBin()
	if err != nil {
		t.Fatal(err)
	}
	program := softJudge(t, bin, "gin.c")
	for place, addrs := range map[string][2]string{"one address": {"127.78.23.1", "127.78.23.1"}, "two addresses": {"127.78.23.2", "127.78.23.3"}} {
		for _, way := range []string{"address", "dmabuf"} {
			t.Run(place+", "+way, func(t *testing.T) {
				for rank, out := range ginRanks(t, bin, program, way, addrs) {
					for _, want := range []string{"PASS put with signal, rank %d:", "PASS additions of two ranks, rank %d:"} {
						if want = fmt.Sprintf(want, rank); !strings.Contains(out, want) {
							t.Errorf("no %q:\n%s", want, out)
						}
					}
				}
			})
		}
	}
}

// ginRanks runs both ranks and returns what they print.
func ginRanks(t *testing.T, bin, program, way string, addrs [2]string) [2]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	files := t.TempDir()
	var outs [2]string
	var errs [2]error
	var wg sync.WaitGroup
	for rank, addr := range addrs {
		cmd := exec.CommandContext(ctx, bin+"/verbena", "exec", "--gpu=soft", "--", program, fmt.Sprint(rank), files, way)
		cmd.Env = append(os.Environ(), "VERBENA_ADDR="+addr, "VERBENA_GPU=count=1,vram=64M")
		wg.Go(func() {
			b, err := cmd.CombinedOutput()
			outs[rank], errs[rank] = string(b), err
		})
	}
	wg.Wait()
	for rank, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v\n%s", rank, err, outs[rank])
		}
	}
	return outs
}

// The shared object that torch_register.py calls moves bytes of memory that it has not allocated itself.
func TestReachOnSoftwareGPUs(t *testing.T) {
	bin, err := softBin()
	if err != nil {
		t.Fatal(err)
	}
	reach := softJudge(t, bin, "reach.c", "-shared", "-fPIC")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin+"/verbena", "exec", "--gpu=soft", "--", "python3", "-B", "judges/reach.py", reach)
	cmd.Env = append(os.Environ(), "VERBENA_ADDR=127.78.23.4", "VERBENA_GPU=count=1,vram=64M")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasSuffix(string(out), "PASS address\nPASS dma-buf\n") {
		t.Errorf("%v\n%s", err, out)
	}
}
