package programs

// Programs that were written for CUDA, on software GPUs: libcuda.so.1 of clib/gpu, which "verbena exec --gpu" shows.

import (
	"strings"
	"testing"
)

// onGPU returns a program's command with software GPUs, also where there are real ones.
func onGPU(t testing.TB, args ...string) []string {
	t.Helper()
	return append([]string{built(t) + "/verbena", "exec", "--gpu=soft", "--"}, args...)
}

// compileCUDA builds a program of testdata with libcuda.
func compileCUDA(t testing.TB, name string, libs ...string) string {
	t.Helper()
	lib := built(t) + "/lib"
	return compileWith(t, name, append([]string{"-I", root + "/clib/gpu/include", "-L", lib + "/gpu", "-lcuda", "-L", lib, "-libverbs", "-ldl"}, libs...)...)
}

// Memory, contexts, streams, other processes and RDMA, and what CUDA's driver returns for wrong arguments.
func TestCUDA(t *testing.T) {
	for _, link := range []string{"", "VERBENA_LINK=udp"} {
		t.Run(link, func(t *testing.T) {
			env := []string{"VERBENA_ADDR=" + address(), "VERBENA_GPU=count=2,vram=64M", link}
			if out := run(t, side{args: onGPU(t, compileCUDA(t, "cuda")), env: env}); !strings.HasSuffix(out, "ok\n") {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}
