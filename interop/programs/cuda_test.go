package programs

// Programs that were written for CUDA, on software GPUs: libcuda.so.1 of clib/gpu, which "verbena exec --gpu" shows.

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/interop/clibtest"
	"github.com/verbena-rdma/verbena/interop/vm"
)

// onGPU returns a program's command with software GPUs, also where there are real ones.
func onGPU(t testing.TB, args ...string) []string {
	t.Helper()
	return append([]string{built(t) + "/verbena", "exec", "--gpu=soft", "--"}, args...)
}

// compileCUDA builds a program of testdata with libcuda.
func compileCUDA(t testing.TB, name string, libs ...string) string {
	t.Helper()
	return compileWith(t, name, append(clibtest.CUDA(t), libs...)...)
}

// Memory, contexts, streams, other processes and RDMA, and what CUDA's driver returns for wrong arguments.
func TestCUDA(t *testing.T) {
	for _, more := range []string{"", "VERBENA_LINK=udp", "VERBENA_GPU=count=2,vram=64M,bar=1M"} {
		t.Run(more, func(t *testing.T) {
			env := []string{"VERBENA_ADDR=" + address(), "VERBENA_GPU=count=2,vram=64M", more} // of two values the last one counts
			if out := run(t, side{args: onGPU(t, append([]string{compileCUDA(t, "cuda")}, badArgs()...)...), env: env}); !strings.HasSuffix(out, "ok\n") {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}

// perftestCUDA builds perftest of Debian's newest source with CUDA, and returns its directory.
func perftestCUDA(t *testing.T, tools ...string) string {
	t.Helper()
	if !full {
		t.Skip("full: perftest is fetched, and built from its source")
	}
	need(t, runtime.GOARCH == "amd64" && prebuilt == "", "it is built for this machine")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	source, err := vm.FindSource(ctx, "sid", "perftest")
	need(t, err == nil, "%v", err)
	dir, lib := t.TempDir(), built(t)
	header := lib + "/../clib/gpu/include/cuda.h"
	for _, args := range [][]string{
		{"cp", "-r", source + "/.", "."},
		// The program is linked with the host's libibverbs: what libcuda needs of another one is there when it runs.
		{"./configure", "-q", "CUDA_H_PATH=" + header, "LDFLAGS=-L" + lib + "/lib/gpu -Wl,--allow-shlib-undefined"},
		append([]string{"make", "-s", "-j2"}, tools...),
	} {
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	return dir
}

// checksums returns those that cudadata.c prints.
func checksums(out, when string) []string {
	line := regexp.MustCompile(`(?m)^cudadata ` + when + `( .*)$`).FindStringSubmatch(out)
	if line == nil {
		return nil
	}
	return strings.Fields(line[1])
}

// Perftest, built with CUDA, moves data between memory of software GPUs, which is registered by its address and as
// dma-bufs. It does not look at the data: a library that is preloaded does.
func TestPerftestCUDA(t *testing.T) {
	tools := []string{"ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_read_lat", "ib_send_lat"}
	dir := perftestCUDA(t, tools...)
	check := compileWith(t, "cudadata", "-I", root+"/clib/gpu/include", "-shared", "-fPIC", "-ldl")
	ns := newNetwork(t)
	type place struct {
		name   string
		env    [2]string // the server's, and the client's
		wrap   [2][]string
		server string
	}
	one := "VERBENA_ADDR=" + address()
	places := []place{
		{name: "one address", env: [2]string{one, one}, server: "localhost"},
		{name: "two addresses", env: [2]string{"VERBENA_ADDR=" + address(), "VERBENA_ADDR=" + address()}, server: "localhost"},
		{name: "namespaces", env: [2]string{"VERBENA_ADDR=10.79.0.1", "VERBENA_ADDR=10.79.0.2"}, server: "10.79.0.1",
			wrap: [2][]string{{"ip", "netns", "exec", ns[0]}, {"ip", "netns", "exec", ns[1]}}},
	}
	options := []string{"-s 65536", "-s 65536 --use_cuda_dmabuf", "-s 1048576 -q 3 --use_cuda_dmabuf", "-s 4096 --use_cuda_dmabuf"}
	for _, p := range places {
		for _, tool := range tools {
			for _, o := range options {
				if strings.Contains(o, "-q") && strings.Contains(tool, "lat") {
					continue // they have one queue pair
				}
				t.Run(p.name+"/"+tool+" "+o, func(t *testing.T) {
					tcp := port()
					command := func(i int, more ...string) side {
						preload := []string{"sh", "-c", `LD_PRELOAD="$LD_PRELOAD:$0" exec "$@"`, check}
						args := append(preload, dir+"/"+tool, "-n", "200", "-p", tcp, "-F", fmt.Sprintf("--use_cuda=%d", i))
						args = append(args, strings.Fields(o)...)
						return side{args: onGPU(t, append(args, more...)...), wrap: p.wrap[i],
							env: []string{p.env[i], "VERBENA_GPU=count=2,vram=64M", fmt.Sprintf("CUDADATA_SEED=%d", i+1)}}
					}
					server, client := pair(t, command(0), command(1, p.server), tcp)
					from, to := client, server
					if strings.Contains(tool, "read") {
						from, to = server, client
					}
					sent, had, has := checksums(from, "before"), checksums(to, "before"), checksums(to, "after")
					arrived := 0
					for _, sum := range has {
						if slices.Contains(sent, sum) {
							arrived++
						}
					}
					var size int
					if _, err := fmt.Sscanf(o, "-s %d", &size); err != nil {
						t.Fatal(err)
					}
					if want := size / 4096; len(sent) == 0 || arrived < want || slices.Contains(had, sent[0]) {
						t.Errorf("%d blocks of %d arrived, want %d at least; the server says\n%s\nthe client says\n%s", arrived, len(sent), want, server, client)
					}
					if dmabuf := strings.Contains(client, "using DMA-BUF for GPU buffer"); dmabuf != strings.Contains(o, "dmabuf") {
						t.Errorf("dma-bufs: %v; the client says\n%s", dmabuf, client)
					}
				})
			}
		}
	}
}

// Python calls libcuda by what cuGetProcAddress returns, as its bindings of CUDA do.
func TestCUDAPython(t *testing.T) {
	need(t, prebuilt == "", "the guest has no Python")
	python := program(t, "python3", "python3")
	for _, version := range []string{"12000", "13000"} {
		t.Run(version, func(t *testing.T) {
			out := run(t, side{args: onGPU(t, python, "testdata/cudacalls.py", version), env: []string{"VERBENA_ADDR=" + address(), "VERBENA_GPU=count=2,vram=64M"}})
			if !strings.Contains(out, "Ran 5 tests") {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}
